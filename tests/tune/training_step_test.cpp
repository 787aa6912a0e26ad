// The engine of the training step: what a step of the run does beside the least, with and without strategies.
#include "oxytorch/tune/training_step.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "oxytorch/error.h"
#include "oxytorch/optim/optimizers.h"
#include "oxytorch/tune/run.h"

namespace oxytorch {
namespace {

namespace nn = torch::nn;
using testing::HasSubstr;

nn::Sequential make_model() {
  torch::manual_seed(0);
  return nn::Sequential(nn::Linear(6, 16), nn::Tanh(), nn::Linear(16, 3));
}

std::vector<Batch> make_batches(int count) {
  torch::manual_seed(3);
  std::vector<Batch> batches;
  for (int i = 0; i < count; ++i) batches.push_back({torch::randn({8, 6}), torch::randint(0, 3, {8})});
  return batches;
}

LossFunction loss_of(const nn::Sequential& model) { return supervised(model, nn::CrossEntropyLoss()); }

std::vector<at::Tensor> weights(const nn::Sequential& model) {
  std::vector<at::Tensor> all;
  for (const auto& p : model->parameters()) all.push_back(p.detach().clone());
  return all;
}

void expect_close(const std::vector<at::Tensor>& found, const std::vector<at::Tensor>& wanted) {
  ASSERT_EQ(found.size(), wanted.size());
  for (std::size_t i = 0; i < found.size(); ++i) {
    EXPECT_TRUE(at::allclose(found[i], wanted[i], 1e-4, 1e-6)) << "tensor " << i;
  }
}

torch::optim::AdamW adamw(const nn::Sequential& model) {
  return torch::optim::AdamW(model->parameters(), torch::optim::AdamWOptions(1e-2));
}

/// What is active while the steps of the run are taken.
class TrainingStepTest : public testing::TestWithParam<std::string> {
 protected:
  static std::vector<std::string> active() {
    return GetParam() == "nothing" ? std::vector<std::string>{} : std::vector<std::string>{GetParam()};
  }
};

TEST_P(TrainingStepTest, WindowsAverageAndClippingAreThoseOfAPlainLoop) {
  const auto batches = make_batches(7);
  auto reference = make_model();
  auto plain = adamw(reference);
  auto wanted_average = weights(reference);
  for (std::size_t first = 0; first < 7; first += 3) {
    const auto size = std::min<std::size_t>(3, 7 - first);
    plain.zero_grad();
    for (std::size_t i = first; i < first + size; ++i) {
      (loss_of(reference)(batches[i]) / static_cast<double>(size)).backward();
    }
    nn::utils::clip_grad_value_(reference->parameters(), 0.02);
    nn::utils::clip_grad_norm_(reference->parameters(), 0.05);
    plain.step();
    const torch::NoGradGuard no_grad;
    for (std::size_t i = 0; i < wanted_average.size(); ++i) {
      wanted_average[i].lerp_(reference->parameters()[i], 1 - 0.75);
    }
  }
  auto model = make_model();
  auto optimizer = adamw(model);
  tune::Run run(*model, optimizer, loss_of(model), batches, 0.05);
  run.accumulation = 3;
  run.clip_value = 0.02;
  run.keep_average(0.75);
  run.set_active(active());
  for (std::size_t i = 0; i < 7; ++i) {
    EXPECT_EQ(run.waiting(), static_cast<std::int64_t>(i % 3));
    const double whole = loss_of(model)(batches[i]).item<double>();
    EXPECT_NEAR(run.take(batches[i]).item<double>(), whole, 1e-5) << "the loss of the batch, not divided";
    if (i == 1) expect_close(weights(model), weights(make_model()));  // only a full window moves them
  }
  EXPECT_EQ(run.taken(), 2);
  EXPECT_TRUE(run.flush());
  EXPECT_FALSE(run.flush());
  EXPECT_EQ(run.taken(), 3);
  run.set_active({});
  expect_close(weights(model), weights(reference));
  expect_close(run.average, wanted_average);
}

TEST(EngineTest, AStepThatIsTriedIsAWindowOfAtMostFour) {
  const auto batches = make_batches(1);
  for (const auto& [accumulation, taken] : {std::pair<std::int64_t, int>{1, 1}, {3, 3}, {16, 4}}) {
    auto model = make_model(), reference = make_model();
    auto optimizer = adamw(model), plain = adamw(reference);
    int losses = 0, updates = 0;
    tune::Run run(
        *model, optimizer,
        [&, inner = loss_of(model)](const Batch& batch) {
          ++losses;
          return inner(batch);
        },
        batches);
    run.accumulation = accumulation;
    const auto loss = run.step_of_window(batches[0], [&](std::size_t part) {
      ++updates;
      run.update(part);
    });
    EXPECT_EQ(losses, taken);
    EXPECT_EQ(updates, 1);
    tune::Run once(*reference, plain, loss_of(reference), batches);
    EXPECT_NEAR(loss.item<double>(), once.step(batches[0]).item<double>(), 1e-5);
    expect_close(weights(model), weights(reference));
  }
}

TEST(EngineTest, AnOptimizerThatStepsInBackwardWaitsForTheWindow) {
  const auto batches = make_batches(6);
  const auto trained = [&](bool in_backward) {
    auto model = make_model();
    optim::AdamW optimizer(
        model->parameters(),
        optim::AdamWOptions(1e-2).nonfinite(optim::NonFinite::Propagate).step_in_backward(in_backward));
    tune::Run run(*model, optimizer, loss_of(model), batches);
    run.accumulation = 3;
    for (const auto& batch : batches) run.take(batch);
    EXPECT_EQ(run.taken(), 2);
    return weights(model);
  };
  const auto plain = trained(false), in_backward = trained(true);
  for (std::size_t i = 0; i < plain.size(); ++i) EXPECT_TRUE(at::equal(in_backward[i], plain[i])) << "tensor " << i;
}

TEST_P(TrainingStepTest, WhatThrowsLeavesNoTraceOfTheWindow) {
  const auto batches = make_batches(3);
  auto model = make_model();
  auto optimizer = adamw(model);
  bool fails = false;
  const auto inner = loss_of(model);
  tune::Run run(
      *model, optimizer,
      [&](const Batch& batch) {
        auto loss = inner(batch);
        if (fails) throw std::domain_error("the user's own");
        return loss;
      },
      batches);
  run.accumulation = 2;
  run.set_active(active());
  run.take(batches[0]);
  fails = true;
  EXPECT_THROW(run.take(batches[1]), std::domain_error);
  EXPECT_EQ(run.waiting(), 0);
  EXPECT_EQ(run.taken(), 0);
  for (const auto& p : model->parameters()) EXPECT_FALSE(p.grad().defined());
  fails = false;
  run.take(batches[1]);
  EXPECT_EQ(run.taken(), 0) << "the window begins anew";
  run.take(batches[2]);
  EXPECT_EQ(run.taken(), 1);
}

TEST_P(TrainingStepTest, AStepThatIsNotFiniteIsLeftOutOfWeightsAndAverage) {
  const auto batches = make_batches(2);
  auto model = make_model();
  auto optimizer = adamw(model);
  tune::Run run(*model, optimizer, loss_of(model), batches);
  run.guard = NonFiniteGuard(optim::NonFinite::Skip);
  run.keep_average(0.5);
  run.set_active(active());
  run.take(batches[0]);
  const auto before = weights(model);
  const auto average = run.average.front().clone();
  run.take({torch::full({8, 6}, std::numeric_limits<float>::quiet_NaN()), batches[1].target});
  expect_close(weights(model), before);
  EXPECT_TRUE(at::equal(run.average.front(), average));
  EXPECT_EQ(run.guard.skipped(), 1);
  EXPECT_EQ(run.taken(), 2);
}

INSTANTIATE_TEST_SUITE_P(Strategies, TrainingStepTest,
                         testing::Values("nothing", "native_step", "step_tail", "split_2"),
                         [](const auto& each) { return each.param; });

TEST(EngineTest, TheScaleTheScheduleAndTheLeastStepKeepTheirOrder) {
  const auto batches = make_batches(2);
  auto reference = make_model(), model = make_model();
  auto plain = adamw(reference);
  auto optimizer = adamw(model);
  plain.zero_grad();
  loss_of(reference)(batches[0]).backward();
  nn::utils::clip_grad_norm_(reference->parameters(), 0.05);
  plain.step();

  tune::TrainingStep engine(*model, optimizer, loss_of(model), 0.05);
  engine.scaler = std::make_unique<amp::GradScaler>(amp::GradScalerOptions{.init_scale = 1024});
  engine.schedule = std::make_unique<optim::CosineAnnealing>(optimizer, 4, 0.0);
  engine.keeps_gradients = false;
  engine.take(batches[0]);
  expect_close(weights(model), weights(reference));
  for (const auto& p : model->parameters()) EXPECT_FALSE(p.grad().defined());
  EXPECT_EQ(engine.schedule->last_epoch(), 1);
  EXPECT_LT(optimizer.param_groups()[0].options().get_lr(), 1e-2);

  // What the tuner tries things on knows nothing of the run's window, scale and schedule.
  engine.accumulation = 2;
  engine.step(batches[1]);
  EXPECT_EQ(engine.taken(), 1);
  EXPECT_EQ(engine.waiting(), 0);
  EXPECT_EQ(engine.schedule->last_epoch(), 1);
  EXPECT_FALSE(at::equal(weights(model).front(), weights(reference).front()));
}

TEST(EngineTest, WithoutALossFunctionClosuresAreTakenUnderTheScopes) {
  auto model = make_model();
  auto optimizer = adamw(model);
  tune::TrainingStep engine(*model, optimizer, nullptr);
  const auto batches = make_batches(1);
  try {
    engine.take(batches[0]);
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::InvalidState);
    EXPECT_THAT(error.what(), HasSubstr("no loss function"));
  }
  int depth = 0;
  bool inside = false;
  engine.scope("counted", [&] {
    ++depth;
    return std::shared_ptr<void>(nullptr, [&](void*) { --depth; });
  });
  engine.take([&] {
    inside = depth == 1;
    return loss_of(model)(batches[0]);
  });
  EXPECT_TRUE(inside);
  EXPECT_EQ(depth, 0);
  EXPECT_EQ(engine.taken(), 1);
}

}  // namespace
}  // namespace oxytorch
