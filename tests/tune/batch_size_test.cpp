// Batch sizes found by running the program's own step, under a real cap, leaving nothing behind.
#include "oxytorch/tune/batch_size.h"

#include <ATen/Parallel.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "oxytorch/error.h"
#include "oxytorch/memory/meter.h"
#include "oxytorch/system.h"

namespace oxytorch {
namespace {

namespace nn = torch::nn;

class BatchSizeTest : public testing::Test {
 protected:
  void SetUp() override {
    if (!read_memory().resident) GTEST_SKIP() << "the kernel does not tell what is in use";
    step();
  }
  void step() {
    optimizer.zero_grad();
    const auto batch = make(8);
    nn::functional::cross_entropy(model->forward(batch.input), batch.target).backward();
    optimizer.step();
  }
  static Batch make(std::int64_t n) { return {torch::randn({n, 512}), torch::randint(10, {n})}; }
  [[nodiscard]] LossFunction loss() const { return supervised(model, nn::CrossEntropyLoss()); }
  /// All that must be as before.
  [[nodiscard]] std::vector<at::Tensor> state() const {
    std::vector<at::Tensor> all{at::detail::getDefaultCPUGenerator().get_state()};
    for (const auto& p : model->parameters()) {
      const auto& averages =
          static_cast<const torch::optim::AdamWParamState&>(*optimizer.state().at(p.unsafeGetTensorImpl()));
      for (const auto& t :
           {p.detach(), p.grad(), averages.exp_avg(), averages.exp_avg_sq(), torch::tensor(averages.step())}) {
        all.push_back(t.clone());
      }
    }
    for (const auto& b : model->buffers()) all.push_back(b.clone());
    return all;
  }
  void expect_unchanged(const std::vector<at::Tensor>& held) const {
    const auto now = state();
    ASSERT_EQ(now.size(), held.size());
    for (std::size_t i = 0; i < now.size(); ++i) EXPECT_TRUE(at::equal(now[i], held[i])) << "tensor " << i;
  }
  /// Of which a search, that leaves a tenth free, may use so much beside what is resident.
  static std::string limit(std::uint64_t beside) { return std::to_string((*read_memory().resident + beside) / 9 * 10); }

  nn::Sequential model = [] {
    torch::manual_seed(0);
    return nn::Sequential(nn::Linear(512, 2048), nn::ReLU(), nn::BatchNorm1d(2048), nn::Dropout(0.1),
                          nn::Linear(2048, 10));
  }();
  torch::optim::AdamW optimizer{model->parameters(), torch::optim::AdamWOptions(1e-3)};
};

TEST_F(BatchSizeTest, EveryTrialBeginsWithTheMemoryOfTheFirst) {
  // Blocks that glibc takes from its heap, so that it keeps what is freed unless it is told to give it back.
  std::vector<double> resident;
  const auto noting = [&](std::int64_t n) {
    resident.push_back(static_cast<double>(*read_memory().resident) / (1 << 20));
    return make(n);
  };
  const auto options = BatchSizeOptions().limit(limit(1U << 30)).start(64).most(2048).steps(1).multiple(64);
  for (int search = 0; search < 2; ++search) {  // the first also reads code and makes kernels
    resident.clear();
    static_cast<void>(largest_batch(*model, optimizer, loss(), noting, options));
  }
  ASSERT_GT(resident.size(), 3U);
  for (const double each : resident) EXPECT_LT(each, resident.front() + 8) << "MiB";
}

TEST_F(BatchSizeTest, TheLargestIsFoundUnderACapAndLeavesNoTrace) {
  rlimit before{}, after{};
  getrlimit(RLIMIT_DATA, &before);
  const auto held = state();
  const auto plan = largest_batch(
      *model, optimizer, loss(), make,
      BatchSizeOptions().limit(limit(64U << 20)).start(8).most(8192).steps(1).resolution(0.1).current(16));
  getrlimit(RLIMIT_DATA, &after);
  EXPECT_EQ(before.rlim_cur, after.rlim_cur);
  expect_unchanged(held);
  EXPECT_GE(plan.largest, 8);
  EXPECT_LT(plan.largest, 8192);
  for (const auto& trial : plan.trials) {
    if (trial.fits) {
      EXPECT_LE(static_cast<double>(*trial.peak_bytes), 0.9 * static_cast<double>(plan.limit_bytes));
    }
    EXPECT_EQ(trial.fits, trial.reason.empty());
  }
  EXPECT_EQ(plan.current, 16);
}

TEST_F(BatchSizeTest, TheCurveRunsEachSizeAndSaysItsRate) {
  const auto held = state();
  const auto plan = batch_curve(*model, optimizer, loss(), make, BatchSizeOptions().start(8).most(32).steps(2));
  expect_unchanged(held);
  std::vector<std::int64_t> sizes;
  for (const auto& trial : plan.trials) {
    sizes.push_back(trial.size);
    EXPECT_GT(trial.samples_per_second(), 0);
  }
  EXPECT_THAT(sizes, testing::ElementsAre(8, 16, 32));
}

TEST_F(BatchSizeTest, WhatAStepThrowsPassesThroughWithEverythingBack) {
  const auto held = state();
  const auto inner = loss();
  const LossFunction broken = [&](const Batch& batch) {
    auto value = inner(batch);
    if (batch.input.size(0) > 8) throw std::domain_error("the user's own");
    return value;
  };
  EXPECT_THROW(static_cast<void>(largest_batch(*model, optimizer, broken, make, BatchSizeOptions().start(8).most(64))),
               std::domain_error);
  expect_unchanged(held);
  EXPECT_THROW(static_cast<void>(largest_batch(*model, optimizer, loss(), make, BatchSizeOptions().steps(0))), Error);
  EXPECT_THROW(static_cast<void>(largest_batch(*model, optimizer, loss(), nullptr)), Error);
}

TEST_F(BatchSizeTest, WhatABatchWillTakeIsToldBySmallOnes) {
  const auto threads = at::get_num_threads();
  at::set_num_threads(1);
  for (const std::int64_t size : {2, 31, 500, 3001}) {
    memory::Meter meter;  // which sees the gradients that the next step drops
    step();
    const auto held = state();
    std::int64_t most = 0;
    const auto told = will_it_fit(
        *model, optimizer, loss(),
        [&](std::int64_t n) {
          most = std::max(most, n);
          return make(n);
        },
        size);
    EXPECT_LE(most, 64);
    expect_unchanged(held);
    EXPECT_TRUE(told.is_regular);
    const auto before = meter.live_bytes();
    meter.reset_peak();
    optimizer.zero_grad();
    const auto batch = make(size);
    nn::functional::cross_entropy(model->forward(batch.input), batch.target).backward();
    optimizer.step();
    const auto peak = static_cast<double>(meter.peak_bytes() - before);
    EXPECT_NEAR(static_cast<double>(told.bytes), peak, 0.01 * peak) << size;
    EXPECT_TRUE(told);
  }
  at::set_num_threads(threads);
}

TEST_F(BatchSizeTest, ABatchThatDoesNotFitIsToldWithoutBeingRun) {
  const auto held = state();
  const auto told = will_it_fit(*model, optimizer, loss(), make, 1'000'000'000, BatchForecastOptions().limit("1GiB"));
  EXPECT_FALSE(told);
  EXPECT_LE(told.available, 1LL << 30);
  expect_unchanged(held);
  EXPECT_THROW(static_cast<void>(will_it_fit(*model, optimizer, loss(), make, 0)), Error);
  EXPECT_THROW(static_cast<void>(will_it_fit(*model, optimizer, loss(), {}, 8)), Error);
  EXPECT_THROW(static_cast<void>(will_it_fit(*model, optimizer, loss(), make, 8, BatchForecastOptions().limit("much"))),
               Error);
  EXPECT_THROW(
      static_cast<void>(will_it_fit(
          *model, optimizer, [](const Batch&) -> at::Tensor { throw std::runtime_error("planted"); }, make, 8)),
      std::runtime_error);
  expect_unchanged(held);
}

}  // namespace
}  // namespace oxytorch
