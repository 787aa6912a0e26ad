#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "oxytorch/host.h"

namespace oxytorch {
namespace {

void touch(size_t bytes) {
  std::unique_ptr<char[]> block(new char[bytes]);
  std::memset(block.get(), 1, bytes);
  // The compiler may not drop the writes.
  asm volatile("" : : "r"(block.get()) : "memory");
}

TEST(HostAllocatorTest, FreedMemoryIsNotFaultedInAgain) {
  constexpr size_t kBytes = 48 << 20;
  auto setting = tune_allocator();
  if (!setting.is_applied()) GTEST_SKIP() << setting.reason();
  EXPECT_FALSE(setting.cost().empty());
  touch(kBytes);
  const auto start = page_faults();
  for (int i = 0; i < 8; ++i) touch(kBytes);
  EXPECT_LT(page_faults() - start, kBytes / 4096) << "eight blocks took the faults of one or more";
  EXPECT_GE(allocator_retained_bytes().value_or(0), kBytes);
  EXPECT_FALSE(tune_allocator().is_applied()) << "a second call has nothing to do";
  setting.revert();
  EXPECT_FALSE(setting.is_applied());
  EXPECT_LT(allocator_retained_bytes().value_or(0), kBytes);
}

TEST(HostAllocatorTest, MemoryAboveTheLimitIsGivenBack) {
  auto setting = tune_allocator(64 << 20);
  if (!setting.is_applied()) GTEST_SKIP() << setting.reason();
  const auto before = allocator_trims();
  touch(256 << 20);
  for (int i = 0; i < 100 && allocator_trims() == before; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT_GT(allocator_trims(), before);
  setting.revert();
}

TEST(HostAllocatorTest, TheEnvironmentIsObeyed) {
  setenv("MALLOC_TOP_PAD_", "1048576", 1);
  const auto setting = tune_allocator();
  unsetenv("MALLOC_TOP_PAD_");
  EXPECT_FALSE(setting.is_applied());
  EXPECT_NE(setting.reason().find("MALLOC_TOP_PAD_"), std::string::npos) << setting.reason();
}

TEST(HostAllocatorTest, PageFaultsAreCounted) {
  const auto start = page_faults();
  std::vector<char> fresh(64 << 20, 1);
  asm volatile("" : : "r"(fresh.data()) : "memory");
  EXPECT_GT(page_faults(), start);
}

}  // namespace
}  // namespace oxytorch
