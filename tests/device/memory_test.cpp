// What tensors of the device take, from C++: counted, recorded, fitted to a budget, told for larger batches, tuned for.
#include "oxytorch/memory.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <gmock/gmock.h>
#include <torch/torch.h>

#include <algorithm>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "../tune/deep_model.h"
#include "device/torch_device.h"
#include "oxytorch/config.h"
#include "oxytorch/error.h"
#include "oxytorch/tune/accelerate.h"
#include "oxytorch/tune/batch_size.h"
#include "oxytorch/tune/fit.h"

namespace oxytorch::test {
namespace {

namespace nn = torch::nn;
using memory::Meter;

struct Training {
  Training() {
    torch::manual_seed(0);
    model = Deep();
    model->to(test_device());
    optimizer = std::make_unique<torch::optim::AdamW>(model->parameters(), torch::optim::AdamWOptions(1e-2));
  }
  static Batch draw(std::int64_t count) {
    torch::manual_seed(1);
    const auto inputs = torch::randn({count, 32});
    return {inputs.to(test_device()), torch::randint(5, {count}).to(test_device())};
  }
  LossFunction loss() { return supervised(model, nn::CrossEntropyLoss()); }
  void step() {
    optimizer->zero_grad();
    nn::functional::cross_entropy(model->forward(batch.tensors()[0]), batch.tensors()[1]).backward();
    optimizer->step();
  }
  std::vector<at::Tensor> left() {
    torch::manual_seed(5);
    for (int i = 0; i < 3; ++i) step();
    std::vector<at::Tensor> found{at::rand({4}, test_device())};
    for (const auto& tensor : model->parameters()) found.push_back(tensor.detach().clone());
    for (const auto& tensor : model->buffers()) found.push_back(tensor.clone());
    return found;
  }
  Deep model{nullptr};
  std::unique_ptr<torch::optim::AdamW> optimizer;
  Batch batch = draw(256);
};

std::int64_t taken_bytes() {
  auto* const allocator = dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(test_device().type()));
  return allocator->getDeviceStats(0).allocated_bytes[0].current;
}

struct Limited {
  explicit Limited(std::int64_t bytes) { set_memory_limit(bytes); }
  ~Limited() { set_memory_limit(0); }
};

TEST(DeviceMemoryTest, EachMeterHasItsOwnPeak) {
  Meter outer({.device = test_device()});
  const auto kept = at::empty({1000}, test_device());
  at::empty({2000}, test_device());
  const auto peak = outer.peak_bytes();
  EXPECT_GE(peak, 12000);
  {
    const Meter inner({.device = test_device()});
    at::empty({100}, test_device());
    EXPECT_LT(inner.peak_bytes(), 4000);
  }
  EXPECT_EQ(outer.peak_bytes(), peak) << "another began the device's anew";
  outer.reset_peak();
  EXPECT_EQ(outer.peak_bytes(), outer.live_bytes());
}

TEST(DeviceMemoryTest, ATimelineHasEveryBlock) {
  Training training;
  training.step();
  const Meter meter({.device = test_device(), .timeline = true});
  training.step();
  const auto timeline = meter.timeline();
  std::int64_t highest = 0;
  std::set<std::string> backward;
  for (const auto& event : timeline.events) {
    highest = std::max(highest, event.live_bytes);
    if (event.in_backward && event.region >= 0) backward.insert(timeline.names[static_cast<std::size_t>(event.region)]);
  }
  EXPECT_EQ(highest, meter.peak_bytes());
  EXPECT_EQ(timeline.events.back().live_bytes, meter.live_bytes());
  EXPECT_THAT(backward, testing::IsSupersetOf({"deep.layer0", "deep.layer5"}));
}

TEST(DeviceMemoryTest, EveryBudgetIsKeptAndNoBitChanges) {
  const auto left = Training().left();
  Training training;
  const auto fitted = [&](const std::string& budget) {
    return fit(*training.model, *training.optimizer, training.loss(), training.batch, budget);
  };
  const auto loose = fitted("1TiB").figures();
  const auto within = loose.plain_peak() - loose.floor();
  ASSERT_LT(loose.floor(), loose.plain_peak() * 4 / 5);
  for (const int percent : {90, 50, 10}) {
    Training planned;
    const auto budget = loose.floor() + within * percent / 100;
    auto plan = fit(*planned.model, *planned.optimizer, planned.loss(), planned.batch, std::to_string(budget));
    EXPECT_TRUE(plan.is_active());
    EXPECT_LE(plan.figures().measured_peak(), budget);
    EXPECT_EQ(plan.figures().same_bits(), true);
    const auto ends = planned.left();
    for (std::size_t i = 0; i < left.size(); ++i) EXPECT_TRUE(at::equal(left[i], ends[i])) << i;
    plan.revert();
  }
  EXPECT_THROW(fitted(std::to_string(loose.floor() / 2)), Error);
  EXPECT_EQ(fitted("50%").figures().budget(), memory::budget_bytes("50%", test_device()));
}

TEST(DeviceMemoryTest, AStepThatDoesNotFitIsFitted) {
  if (test_device().is_cpu()) GTEST_SKIP() << "the memory of a fake device can be set";
  Training plain;
  plain.batch = Training::draw(2048);
  const auto left = plain.left();
  Meter meter({.device = test_device()});
  plain.step();
  const auto activations = meter.peak_bytes();
  Training training;
  training.batch = plain.batch;
  std::int64_t state = 0;
  for (const auto& p : training.model->parameters()) state += 4 * static_cast<std::int64_t>(p.nbytes());
  const Limited limited(taken_bytes() + state + activations * 6 / 10);
  EXPECT_THROW(training.step(), c10::OutOfMemoryError);
  training.optimizer->zero_grad();
  auto fresh = Training();  // that step left its mark on buffers
  const auto before = fresh.model->buffers();
  for (std::size_t i = 0; i < before.size(); ++i) training.model->buffers()[i].set_data(before[i]);
  const auto plan = fit(*training.model, *training.optimizer, training.loss(), training.batch, "100%");
  EXPECT_THAT(plan.figures().summary(), testing::HasSubstr("does not fit without"));
  EXPECT_LE(plan.figures().measured_peak(), plan.figures().budget());
  const auto ends = training.left();
  for (std::size_t i = 0; i < left.size(); ++i) EXPECT_TRUE(at::equal(left[i], ends[i])) << i;
}

TEST(DeviceMemoryTest, TheLargestBatchIsFound) {
  if (test_device().is_cpu()) GTEST_SKIP() << "the memory of a fake device can be set";
  Training training;
  std::vector<at::Tensor> before;
  for (const auto& p : training.model->parameters()) before.push_back(p.detach().clone());
  const Limited limited(taken_bytes() + (std::int64_t{24} << 20));
  const auto plan = largest_batch(*training.model, *training.optimizer, training.loss(), Training::draw,
                                  BatchSizeOptions().start(8).most(1 << 16).headroom(0.05));
  for (std::size_t i = 0; i < before.size(); ++i) {
    EXPECT_TRUE(at::equal(before[i], training.model->parameters()[i])) << i;
  }
  const auto runs = [&](std::int64_t size) {
    training.optimizer->zero_grad();
    training.batch = {};
    training.batch = Training::draw(size);
    training.step();
    training.step();
  };
  EXPECT_NO_THROW(runs(plan.largest));
  EXPECT_THROW(runs(plan.largest * 5 / 4), c10::OutOfMemoryError);
}

TEST(DeviceMemoryTest, ALargerBatchIsTold) {
  Training training;
  const auto told = will_it_fit(*training.model, *training.optimizer, training.loss(), Training::draw, 1024, {});
  EXPECT_TRUE(told.fits());
  Meter meter({.device = test_device()});
  training.batch = Training::draw(1024);
  training.step();
  meter.reset_peak();
  training.step();
  EXPECT_NEAR(static_cast<double>(told.bytes) / static_cast<double>(meter.peak_bytes()), 1, 0.05);
}

TEST(DeviceMemoryTest, TheGoalMemoryMakesStepsSmaller) {
  Training training;
  PerformanceConfig config("basic");
  config.set("goal", std::string("memory"));
  config.set("max_slowdown", 50.0);
  const auto options = AccelerateOptions().config(config).remember(false).tune_seconds(1);
  const auto plan = accelerate(*training.model, *training.optimizer, training.loss(), {training.batch}, options);
  const auto& made = plan.certificate();
  ASSERT_TRUE(made.given_peak_bytes && made.tuned_peak_bytes);
  EXPECT_GE(made.tuning_peak_bytes, made.given_peak_bytes);
  training.step();
  const Meter meter({.device = test_device()});
  training.step();
  EXPECT_LT(meter.peak_bytes(), *made.given_peak_bytes / 2);
}

}  // namespace
}  // namespace oxytorch::test
