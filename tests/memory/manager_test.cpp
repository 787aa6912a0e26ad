// The memory manager: each of its settings does what it says, and no more.
#include "oxytorch/memory/manager.h"

#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "oxytorch/error.h"
#include "oxytorch/memory.h"

namespace oxytorch {
namespace {

using testing::HasSubstr;

constexpr std::int64_t kMiB = std::int64_t{1} << 20;

/// So that resident memory is `part` of what is allowed, whatever the machine has.
std::string limit_at(double part) {
  give_back_host_memory();
  return std::to_string(static_cast<std::uint64_t>(static_cast<double>(memory::resident_bytes()) / part));
}

MemoryConfig quiet() { return MemoryConfig().warn_at(10).critical_at(10).clean_at(10); }

TEST(MemoryManagerTest, FiguresAreTheKernels) {
  const MemoryManager manager;
  const auto before = manager.use();
  EXPECT_GT(before.resident, 0U);
  EXPECT_GE(before.peak, before.resident);
  EXPECT_GT(before.allowed, before.resident);
  torch::ones({64 * kMiB / 4});  // torch's threads begin with the first of this size
  const auto resident = manager.use().resident;
  const auto held = torch::ones({64 * kMiB / 4});
  const auto after = manager.use();
  EXPECT_NEAR(static_cast<double>(after.resident - resident), 64.0 * kMiB, 4.0 * kMiB);
  EXPECT_THAT(after.text(), HasSubstr(" resident of "));
}

TEST(MemoryManagerTest, ItsLimitHoldsUntilItsEnd) {
  {
    MemoryManager manager(quiet().limit(limit_at(0.5)));
    EXPECT_TRUE(memory::limit());
    EXPECT_THROW(torch::empty({std::int64_t{1} << 40}), c10::OutOfMemoryError);
    MemoryManager moved = std::move(manager);
    EXPECT_TRUE(memory::limit());
    moved.revert();
    EXPECT_FALSE(memory::limit());
    moved.revert();
  }
  { const MemoryManager manager(quiet().limit(limit_at(0.5))); }
  EXPECT_FALSE(memory::limit());
}

TEST(MemoryManagerTest, CallbacksComeOnceAsALevelIsReached) {
  MemoryManager manager(MemoryConfig().limit(limit_at(0.6)).warn_at(0.7).critical_at(0.9).clean_at(10).check_every(1));
  std::vector<std::string> called;
  manager.on(MemoryLevel::Warning, [&](const MemoryUse& use) {
    EXPECT_GE(use.share(), 0.7);
    called.emplace_back("warning");
  });
  manager.on(MemoryLevel::Critical, [&](const MemoryUse&) { called.emplace_back("critical"); });
  const auto allowed = static_cast<double>(*memory::limit());
  const auto with = [&](double part) { return torch::ones({static_cast<std::int64_t>(part * allowed) / 4}); };
  manager.step();
  EXPECT_EQ(manager.level(), MemoryLevel::Normal);
  {
    const auto held = with(0.15);
    manager.step();
    manager.step();
    EXPECT_EQ(manager.level(), MemoryLevel::Warning);
    EXPECT_EQ(called, std::vector<std::string>({"warning"}));
    const auto more = with(0.18);
    manager.step();
    EXPECT_EQ(manager.level(), MemoryLevel::Critical);
  }
  give_back_host_memory();
  manager.step();
  EXPECT_EQ(manager.level(), MemoryLevel::Normal);
  const auto again = with(0.15);
  manager.step();
  EXPECT_EQ(called, std::vector<std::string>({"warning", "critical", "warning"}));
  EXPECT_EQ(manager.events().size(), 3U);
}

TEST(MemoryManagerTest, CheckEveryIsTheNumberOfStepsBetweenChecks) {
  MemoryManager manager(MemoryConfig().warn_at(1e-6).critical_at(2).clean_at(10).check_every(4));
  for (int i = 0; i < 3; ++i) manager.step();
  EXPECT_EQ(manager.level(), MemoryLevel::Normal);
  manager.step();
  EXPECT_EQ(manager.level(), MemoryLevel::Warning);
  EXPECT_EQ(manager.steps(), 4);
}

TEST(MemoryManagerTest, ACleanUpComesByUseByStepsAndByWhatIsKept) {
  std::vector<at::Tensor> cache;
  const auto fill = [&] { cache.push_back(torch::ones({64 * kMiB / 4})); };
  const auto managed = [&](const MemoryConfig& config) {
    MemoryManager manager(config);
    manager.on_clean([&] { cache.clear(); });
    return manager;
  };
  {
    auto manager = managed(quiet().clean_at(1e-6).check_every(1));
    fill();
    manager.step();
    EXPECT_TRUE(cache.empty());
    EXPECT_GT(manager.bytes_cleaned(), static_cast<std::uint64_t>(60 * kMiB));
    EXPECT_THAT(manager.report(), HasSubstr("above clean_at"));
  }
  {
    auto manager = managed(quiet().clean_every(3));
    for (int i = 0; i < 7; ++i) manager.step();
    EXPECT_EQ(manager.clean_ups(), 2);
  }
  {
    auto manager = managed(quiet().check_every(1));
    fill();
    for (int i = 0; i < 20; ++i) manager.step();
    EXPECT_EQ(manager.clean_ups(), 0);
    cache.clear();
  }
  {
    auto kept = use_host_pool(std::uint64_t{1} << 30);
    if (!kept.is_applied()) GTEST_SKIP() << kept.reason();
    fill();
    cache.clear();
    auto manager = managed(quiet().cache_limit("16MiB").check_every(1));
    EXPECT_GT(manager.use().kept, static_cast<std::uint64_t>(60 * kMiB));
    manager.step();
    EXPECT_EQ(manager.clean_ups(), 1);
    EXPECT_LT(manager.use().kept, static_cast<std::uint64_t>(16 * kMiB));
    manager.step();
    EXPECT_EQ(manager.clean_ups(), 1);
    kept.revert();
  }
}

TEST(MemoryManagerTest, WhatACallbackThrowsPassesThrough) {
  MemoryManager manager(MemoryConfig().warn_at(1e-6).critical_at(2).clean_at(10).check_every(1));
  manager.on(MemoryLevel::Warning, [](const MemoryUse&) { throw std::runtime_error("stop"); });
  EXPECT_THROW(manager.step(), std::runtime_error);
  EXPECT_EQ(manager.steps(), 1);
  manager.step();  // once
}

TEST(MemoryManagerTest, NonsenseIsRefused) {
  const auto refused = [](const MemoryConfig& config, const char* part) {
    try {
      const MemoryManager manager(config);
      ADD_FAILURE() << "was taken, and was to say: " << part;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::InvalidArgument);
      EXPECT_THAT(error.what(), HasSubstr(part));
    }
    EXPECT_FALSE(memory::limit());
  };
  refused(MemoryConfig().warn_at(0), "warn_at is 0");
  refused(MemoryConfig().critical_at(-1), "critical_at is -1");
  refused(MemoryConfig().warn_at(0.9).critical_at(0.5), "above critical_at");
  refused(MemoryConfig().clean_every(-2), "clean_every is -2");
  refused(MemoryConfig().check_every(0), "check_every is 0");
  refused(MemoryConfig().limit("1KB"), "below what this process has in memory");
  refused(MemoryConfig().limit("much"), "much");
  refused(MemoryConfig().cache_limit("lots"), "lots");
  MemoryManager manager;
  EXPECT_THROW(manager.on(MemoryLevel::Warning, {}), Error);
  EXPECT_THROW(manager.on_clean({}), Error);
}

}  // namespace
}  // namespace oxytorch
