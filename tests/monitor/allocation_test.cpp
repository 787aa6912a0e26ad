// The step path takes no memory: every way to get some is counted in this process.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>

#include "oxytorch/monitor.h"

namespace {
std::atomic<bool> counting{false};
std::atomic<int> allocations{0};
void count() {
  if (counting.load(std::memory_order_relaxed)) allocations.fetch_add(1, std::memory_order_relaxed);
}
}  // namespace

// The library's operator new ends here as well: these definitions come first for the whole process.
extern "C" {
void* __libc_malloc(std::size_t);
void* __libc_calloc(std::size_t, std::size_t);
void* __libc_realloc(void*, std::size_t);
void* malloc(std::size_t size) {
  count();
  return __libc_malloc(size);
}
void* calloc(std::size_t number, std::size_t size) {
  count();
  return __libc_calloc(number, size);
}
void* realloc(void* old, std::size_t size) {
  count();
  return __libc_realloc(old, size);
}
}

namespace oxytorch::monitor {
namespace {

TEST(Allocation, CounterSeesTheLibrary) {
  allocations = 0;
  counting = true;
  { const PerformanceMonitor monitor; }
  counting = false;
  EXPECT_GT(allocations.load(), 0) << "the counter is not in the library's way, so the next test would prove nothing";
}

TEST(Allocation, TenThousandStepsTakeNoMemory) {
  const auto path = std::filesystem::temp_directory_path() / "oxytorch_allocation_test.jsonl";
  std::filesystem::remove(path);
  MonitorOptions options;
  options.ring_records = 64;
  PerformanceMonitor monitor(options, {std::make_shared<JsonlSink>(path.string())});
  std::vector<PhaseId> phases;
  std::vector<ScalarId> scalars;
  for (int i = 0; i < 8; ++i) phases.push_back(monitor.phase("phase" + std::to_string(i)));
  for (int i = 0; i < 16; ++i) scalars.push_back(monitor.scalar("scalar" + std::to_string(i)));

  allocations = 0;
  counting = true;
  for (int step = 0; step < 10'000; ++step) {
    const Step guard(monitor, 32);
    const Phase outer(monitor, phases[0]);
    for (std::size_t i = 1; i < phases.size(); ++i) const Phase inner(monitor, phases[i]);
    for (std::size_t i = 0; i < scalars.size(); ++i) monitor.scalar(scalars[i], step + static_cast<double>(i));
  }
  for (int i = 0; i < 100; ++i) monitor.scalar(scalars[0], i);  // outside a step too
  counting = false;
  EXPECT_EQ(allocations.load(), 0);

  const Summary summary = monitor.summary();
  EXPECT_EQ(summary.steps, 10'000u);
  EXPECT_EQ(summary.dropped, 10'100u - 64u);
  monitor.close();
  std::filesystem::remove(path);
}

}  // namespace
}  // namespace oxytorch::monitor
