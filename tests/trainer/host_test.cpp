#include "oxytorch/tune/host.h"

#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif

#include <cstdlib>
#include <vector>

#include "oxytorch/error.h"
#include "oxytorch/system.h"

namespace oxytorch {
namespace {

/// How many of a million denormal products torch's own kernel, on all its threads, leaves above zero.
int64_t surviving_denormals() { return (at::full({1 << 20}, 1e-39F) * 0.5F > 0).sum().item<int64_t>(); }

TEST(FlushDenormalsTest, ReachesEveryWorkerOfTorchAndGoesBack) {
  ASSERT_EQ(surviving_denormals(), 1 << 20);
  auto setting = flush_denormals();
  ASSERT_TRUE(setting.is_applied()) << setting.reason();
  EXPECT_EQ(surviving_denormals(), 0);
  const auto state = flush_state();
  EXPECT_EQ(state.flushing, state.threads);
  const auto again = flush_denormals();
  EXPECT_FALSE(again.is_applied()) << "a second call has nothing to do";
  EXPECT_TRUE(again.is_in_effect());
  setting.revert();
  EXPECT_EQ(surviving_denormals(), 1 << 20);
  EXPECT_EQ(flush_state().flushing, 0);
}

TEST(FlushDenormalsTest, ThreadsMadeLaterFlushToo) {
  const int before = at::get_num_threads();
  auto setting = flush_denormals();
  at::set_num_threads(before + 2);
  EXPECT_EQ(surviving_denormals(), 0);
  EXPECT_EQ(flush_state().flushing, before + 2);
  at::set_num_threads(before);
  setting.revert();
}

TEST(FlushDenormalsTest, WorkersThatWaitWhileItIsTakenBackFollowToo) {
  const int before = at::get_num_threads();
  at::set_num_threads(before + 1);
  auto setting = flush_denormals();
  at::set_num_threads(1);
  setting.revert();
  EXPECT_EQ(at::get_num_threads(), 1);
  at::set_num_threads(before + 1);
  EXPECT_EQ(flush_state().flushing, 0);
  at::set_num_threads(before);
}

TEST(FlushDenormalsTest, BackwardRunsWhereDenormalsAreFlushed) {
  auto setting = flush_denormals();
  auto x = at::full({1 << 20}, 0.5F).requires_grad_();
  (x * 1e-39F).sum().backward();
  EXPECT_EQ((x.grad() > 0).sum().item<int64_t>(), 0);
  setting.revert();
}

TEST(ResolveVectorMathTest, LeavesNoTraceAndMayBeCalledAgain) {
  const at::Tensor given = at::rand({4096}, at::TensorOptions(at::kDouble));
  const int threads = at::get_num_threads();
  torch::manual_seed(3);
  const at::Tensor drawn = at::rand({4});
  torch::manual_seed(3);
  EXPECT_EQ(resolve_vector_math(), resolve_vector_math());
  EXPECT_TRUE(at::rand({4}).equal(drawn));
  EXPECT_EQ(at::get_num_threads(), threads);
  EXPECT_TRUE(given.sqrt().square().allclose(given));
}

#if defined(__linux__)

/// Where each intra-op thread may run; the caller first.
std::vector<cpu_set_t> masks() {
  std::vector<cpu_set_t> found(static_cast<size_t>(at::get_num_threads()));
  at::parallel_for(0, at::get_num_threads(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      cpu_set_t& mask = found[static_cast<size_t>(i)];
      pthread_getaffinity_np(pthread_self(), sizeof mask, &mask);
    }
  });
  return found;
}

TEST(PinThreadsTest, EachWorkerHasACoreOfItsOwnAndTheCallerStaysFree) {
  const int before = at::get_num_threads();
  const auto cores = static_cast<int>(read_cores().one_a_core.size());
  if (cores < 2) GTEST_SKIP() << "one core";
  at::set_num_threads(cores);
  const auto as_given = masks();
  auto setting = pin_threads();
  ASSERT_TRUE(setting.is_applied()) << setting.reason();
  const auto pinned = masks();
  EXPECT_TRUE(CPU_EQUAL(&pinned[0], &as_given[0]));
  cpu_set_t taken;
  CPU_ZERO(&taken);
  for (size_t i = 1; i < pinned.size(); ++i) {
    EXPECT_EQ(CPU_COUNT(&pinned[i]), 1);
    CPU_OR(&taken, &taken, &pinned[i]);
  }
  EXPECT_EQ(CPU_COUNT(&taken), cores - 1);
  setting.revert();
  const auto after = masks();
  for (size_t i = 0; i < after.size(); ++i) EXPECT_TRUE(CPU_EQUAL(&after[i], &as_given[i])) << i;
  at::set_num_threads(before);
}

TEST(PinThreadsTest, IsRefusedWhereItCannotHelpOrIsDecided) {
  const int before = at::get_num_threads();
  at::set_num_threads(1);
  EXPECT_FALSE(pin_threads().is_applied());
  at::set_num_threads(static_cast<int>(read_cores().one_a_core.size()) + 1);
  EXPECT_FALSE(pin_threads().is_applied());
  at::set_num_threads(2);
  setenv("OMP_PROC_BIND", "true", 1);
  const auto setting = pin_threads();
  unsetenv("OMP_PROC_BIND");
  EXPECT_NE(setting.reason().find("OMP_PROC_BIND=true"), std::string::npos) << setting.reason();
  at::set_num_threads(before);
}

#endif

TEST(SizeThreadsTest, NeverAboveTheCoresOfThisProcess) {
  const int before = at::get_num_threads();
  const int usable = read_cores().usable_physical;
  at::set_num_threads(usable + 3);
  auto setting = size_threads();
  EXPECT_TRUE(setting.is_applied()) << setting.reason();
  EXPECT_EQ(at::get_num_threads(), usable);
  EXPECT_FALSE(size_threads().is_applied());
  EXPECT_FALSE(size_threads(usable + 5).is_applied()) << "a wish above the limit is capped";
  setting.revert();
  EXPECT_EQ(at::get_num_threads(), usable + 3);
  at::set_num_threads(before);
}

TEST(SizeThreadsTest, TheEnvironmentIsObeyed) {
  const int before = at::get_num_threads();
  at::set_num_threads(1);
  setenv("OMP_NUM_THREADS", "1", 1);
  const auto setting = size_threads();
  unsetenv("OMP_NUM_THREADS");
  EXPECT_FALSE(setting.is_applied());
  EXPECT_NE(setting.reason().find("OMP_NUM_THREADS=1"), std::string::npos) << setting.reason();
  EXPECT_EQ(at::get_num_threads(), 1);
  at::set_num_threads(before);
}

TEST(SizeThreadsTest, LessThanOneIsRefused) { EXPECT_THROW(size_threads(0), Error); }

TEST(AllocatorTest, LargeTensorsStopFaultingAndBitsStay) {
  // 64 MiB each: glibc moves its own threshold for mappings up to 32 MiB, and may keep smaller blocks untuned too.
  const auto work = [] {
    at::Tensor sum = at::zeros({});
    for (int i = 0; i < 20; ++i) sum = sum + at::ones({16 << 20}).mul_(0.5F).sum();
    return sum;
  };
  const auto plain = work();
  auto start = page_faults();
  work();
  const auto before = page_faults() - start;
  auto setting = tune_allocator();
  if (!setting.is_applied()) GTEST_SKIP() << setting.reason();
  // Small blocks settle between the large ones: each round may touch the heap at another offset, until none is new.
  for (int round = 0; round < 3; ++round) work();
  start = page_faults();
  const auto tuned = work();
  const auto after = page_faults() - start;
  EXPECT_TRUE(at::equal(plain, tuned));
  EXPECT_LT(after, before / 4) << "faults before " << before << ", after " << after;
  setting.revert();
}

}  // namespace
}  // namespace oxytorch
