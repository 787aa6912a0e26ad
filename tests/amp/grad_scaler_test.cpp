#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <limits>

#include "oxytorch/amp.h"
#include "oxytorch/error.h"
#include "oxytorch/optim.h"

namespace oxytorch::amp {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

/// One training step with gradient 1, or with a gradient that is not finite.
template <class Optimizer>
void train(GradScaler& scaler, Optimizer& optimizer, at::Tensor& weight, float factor) {
  scaler.scale((weight * factor).sum()).backward();
  scaler.step(optimizer);
  scaler.update();
  optimizer.zero_grad();
}

at::Tensor make_weight() { return at::ones({4}).requires_grad_(); }

TEST(GradScalerTest, PlainOptimizerGetsUnscaledGradients) {
  auto weight = make_weight();
  torch::optim::SGD optimizer({weight}, torch::optim::SGDOptions(0.5));
  GradScaler scaler;
  train(scaler, optimizer, weight, 1.0F);
  EXPECT_TRUE(at::equal(weight, at::full({4}, 0.5F)));
}

TEST(GradScalerTest, SkipsBacksOffAndGrowsAsTorchDoes) {
  auto weight = make_weight();
  torch::optim::SGD optimizer({weight}, torch::optim::SGDOptions(0.125));
  GradScaler scaler({.init_scale = 1024, .growth_interval = 2});
  const std::vector<float> factors{1, kInf, 1, 1, std::nanf(""), 1};
  const std::vector<double> scales{1024, 512, 512, 1024, 512, 512};
  const std::vector<float> weights{0.875F, 0.875F, 0.75F, 0.625F, 0.625F, 0.5F};
  for (size_t i = 0; i < factors.size(); ++i) {
    train(scaler, optimizer, weight, factors[i]);
    EXPECT_EQ(scaler.get_scale(), scales[i]) << "after step " << i;
    EXPECT_TRUE(at::equal(weight, at::full({4}, weights[i]))) << "after step " << i << ": " << weight;
    EXPECT_EQ(scaler.found_inf(optimizer).item<float>() > 0, !std::isfinite(factors[i]));
  }
}

TEST(GradScalerTest, TailOptimizerSkipsTheSameSteps) {
  auto ours = make_weight();
  auto theirs = make_weight();
  optim::AdamW tail({ours}, optim::AdamWOptions(0.1));
  torch::optim::AdamW plain({theirs}, torch::optim::AdamWOptions(0.1));
  GradScaler tail_scaler({.init_scale = 1024, .growth_interval = 3});
  GradScaler plain_scaler({.init_scale = 1024, .growth_interval = 3});
  torch::manual_seed(1);
  for (int i = 0; i < 40; ++i) {
    const float factor = i % 7 == 3 ? kInf : i % 11 == 5 ? std::nanf("") : 0.5F + 0.01F * static_cast<float>(i);
    train(tail_scaler, tail, ours, factor);
    train(plain_scaler, plain, theirs, factor);
    ASSERT_EQ(tail_scaler.get_scale(), plain_scaler.get_scale()) << "after step " << i;
    ASSERT_EQ(tail_scaler.found_inf(tail).item<float>() > 0, plain_scaler.found_inf(plain).item<float>() > 0);
    ASSERT_TRUE(at::allclose(ours, theirs, 1e-5, 1e-6)) << "after step " << i << "\n" << ours << theirs;
  }
}

TEST(GradScalerTest, TailAfterUnscaleDoesNotUnscaleTwice) {
  auto ours = make_weight();
  auto theirs = make_weight();
  optim::SGD tail({ours}, optim::SGDOptions(0.5));
  torch::optim::SGD plain({theirs}, torch::optim::SGDOptions(0.5));
  GradScaler scaler({.init_scale = 256});
  scaler.scale(ours.sum()).backward();
  scaler.unscale_(tail);
  EXPECT_TRUE(at::equal(ours.grad(), at::ones({4})));
  scaler.step(tail);
  scaler.update();
  theirs.sum().backward();
  plain.step();
  EXPECT_TRUE(at::equal(ours, theirs));
}

TEST(GradScalerTest, ScaleStaysWithinItsBounds) {
  auto weight = make_weight();
  torch::optim::SGD optimizer({weight}, torch::optim::SGDOptions(0.1));
  GradScaler scaler({.init_scale = 8, .growth_interval = 1, .min_scale = 4.0, .max_scale = 16.0});
  for (int i = 0; i < 3; ++i) train(scaler, optimizer, weight, kInf);
  EXPECT_EQ(scaler.get_scale(), 4);
  for (int i = 0; i < 5; ++i) train(scaler, optimizer, weight, 1.0F);
  EXPECT_EQ(scaler.get_scale(), 16);
}

TEST(GradScalerTest, StateRoundTrip) {
  auto weight = make_weight();
  torch::optim::SGD optimizer({weight}, torch::optim::SGDOptions(0.1));
  GradScaler scaler({.init_scale = 64, .growth_factor = 3, .backoff_factor = 0.25, .growth_interval = 5});
  for (int i = 0; i < 3; ++i) train(scaler, optimizer, weight, 1.0F);
  const auto state = scaler.state_dict();
  EXPECT_EQ(state.at("_growth_tracker"), 3);
  EXPECT_EQ(state.at("scale"), 64);
  GradScaler other;
  other.load_state_dict(state);
  EXPECT_EQ(other.state_dict(), state);
  EXPECT_THROW(other.load_state_dict({{"scale", 1.0}}), Error);
  EXPECT_EQ(other.state_dict(), state) << "a refused state was half loaded";
}

TEST(GradScalerTest, WrongOrderIsRefused) {
  auto weight = make_weight();
  torch::optim::SGD optimizer({weight}, torch::optim::SGDOptions(0.1));
  GradScaler scaler;
  EXPECT_THROW(scaler.update(), Error);
  scaler.scale(weight.sum()).backward();
  scaler.unscale_(optimizer);
  EXPECT_THROW(scaler.unscale_(optimizer), Error);
  scaler.step(optimizer);
  EXPECT_THROW(scaler.step(optimizer), Error);
  EXPECT_THROW(scaler.unscale_(optimizer), Error);
  EXPECT_THROW(GradScaler({.growth_factor = 1.0}), Error);
  EXPECT_THROW(GradScaler({.min_scale = 2.0, .max_scale = 1.0}), Error);
}

TEST(GradScalerTest, SettersStopGrowthAndBackoffAndRefuseTheRest) {
  auto weight = make_weight();
  torch::optim::SGD optimizer({weight}, torch::optim::SGDOptions(0.1));
  GradScaler scaler({.init_scale = 8, .growth_interval = 1});
  scaler.set_growth_factor(4);
  scaler.set_backoff_factor(0.125);
  train(scaler, optimizer, weight, 1.0F);
  EXPECT_EQ(scaler.get_scale(), 32);
  train(scaler, optimizer, weight, kInf);
  EXPECT_EQ(scaler.get_scale(), 4);
  scaler.set_growth_factor(1);
  scaler.set_backoff_factor(1);
  scaler.set_growth_interval(3);
  train(scaler, optimizer, weight, kInf);
  for (int i = 0; i < 4; ++i) train(scaler, optimizer, weight, 1.0F);
  EXPECT_EQ(scaler.get_scale(), 4);
  EXPECT_EQ(scaler.get_growth_factor(), 1);
  EXPECT_EQ(scaler.get_backoff_factor(), 1);
  EXPECT_EQ(scaler.get_growth_interval(), 3);
  EXPECT_THROW(scaler.set_growth_factor(0.5), Error);
  EXPECT_THROW(scaler.set_backoff_factor(0), Error);
  EXPECT_THROW(scaler.set_growth_interval(0), Error);
}

TEST(GradScalerTest, ANewScaleIsTakenIntoTheBounds) {
  GradScaler scaler({.init_scale = 8, .min_scale = 4.0, .max_scale = 16.0, .device = at::kCPU});
  scaler.update(2.0);
  EXPECT_EQ(scaler.get_scale(), 4);
  const auto given = at::full({1}, 64.0F);
  scaler.update(given);
  EXPECT_EQ(scaler.get_scale(), 16);
  scaler.update(at::full({}, 8.0, at::kDouble));
  EXPECT_EQ(scaler.get_scale(), 8);
  EXPECT_EQ(given.item<float>(), 64.0F);
  EXPECT_THROW(scaler.update(0.0), Error);
  EXPECT_THROW(scaler.update(at::ones({2})), Error);
  EXPECT_THROW(scaler.update(at::Tensor()), Error);
  scaler.load_state_dict({{"scale", 1024.0},
                          {"growth_factor", 2.0},
                          {"backoff_factor", 0.5},
                          {"growth_interval", 10.0},
                          {"_growth_tracker", 7.0}});
  EXPECT_EQ(scaler.get_scale(), 16);
  EXPECT_EQ(scaler.state_dict().at("_growth_tracker"), 7);
}

TEST(GradScalerTest, ItsScaleIsPlacedWithTheFirstLoss) {
  auto weight = make_weight();
  torch::optim::SGD optimizer({weight}, torch::optim::SGDOptions(0.1));
  GradScaler scaler({.init_scale = 64});
  EXPECT_FALSE(scaler.scale_tensor().defined());
  EXPECT_EQ(scaler.get_scale(), 64);
  EXPECT_THROW(scaler.unscale_(optimizer), Error);
  EXPECT_THROW(scaler.step(optimizer), Error);
  auto state = scaler.state_dict();
  state["scale"] = 32;
  state["_growth_tracker"] = 5;
  scaler.load_state_dict(state);
  const auto losses = scaler.scale(std::vector<at::Tensor>{weight.sum(), weight.mean()});
  EXPECT_EQ(losses[0].item<float>(), 128);
  EXPECT_EQ(losses[1].item<float>(), 32);
  EXPECT_EQ(scaler.state_dict(), state);
  const auto held = scaler.scale_tensor();
  state["scale"] = 16;
  scaler.load_state_dict(state);
  EXPECT_EQ(held.item<float>(), 16) << "a state is loaded in place";
}

TEST(GradScalerTest, OneOverflowBacksOffForAllAndSkipsOne) {
  auto a = make_weight(), b = make_weight();
  optim::SGD first({a}, optim::SGDOptions(0.5));
  torch::optim::SGD second({b}, torch::optim::SGDOptions(0.5));
  GradScaler scaler({.init_scale = 64});
  scaler.scale(a.sum()).backward();
  scaler.scale((b * kInf).sum()).backward();
  scaler.step(first);
  scaler.step(second);
  scaler.update();
  EXPECT_TRUE(at::equal(a, at::full({4}, 0.5F)));
  EXPECT_TRUE(at::equal(b, at::ones({4})));
  EXPECT_EQ(scaler.get_scale(), 32);
}

TEST(GradScalerTest, AStepGivenUpCanBeTakenAgain) {
  auto weight = make_weight();
  optim::SGD optimizer({weight}, optim::SGDOptions(0.5));
  GradScaler scaler;
  scaler.scale(weight.sum()).backward();
  scaler.unscale_(optimizer);
  scaler.abandon();
  optimizer.zero_grad();
  train(scaler, optimizer, weight, 1.0F);
  EXPECT_TRUE(at::equal(weight, at::full({4}, 0.5F)));
}

TEST(GradScalerTest, TheTailServesHalfGradients) {
  auto weight = at::ones({4}, at::kHalf).requires_grad_();
  optim::SGD optimizer({weight}, optim::SGDOptions(0.5));
  GradScaler scaler({.init_scale = 8});
  scaler.scale(weight.sum()).backward();
  scaler.step(optimizer);
  scaler.update();
  EXPECT_TRUE(at::equal(weight, at::full({4}, 0.5, at::kHalf)));
  optimizer.zero_grad();
  scaler.scale((weight * 6e4).sum()).backward();
  scaler.step(optimizer);
  scaler.update();
  EXPECT_TRUE(at::equal(weight, at::full({4}, 0.5, at::kHalf)));
  EXPECT_EQ(scaler.get_scale(), 4);
}

TEST(GradScalerTest, DisabledScalerOnlySteps) {
  auto weight = make_weight();
  torch::optim::SGD optimizer({weight}, torch::optim::SGDOptions(0.5));
  GradScaler scaler({.enabled = false});
  train(scaler, optimizer, weight, 1.0F);
  EXPECT_TRUE(at::equal(weight, at::full({4}, 0.5F)));
  EXPECT_TRUE(scaler.state_dict().empty());
}

TEST(GradScalerTest, HalfGradientsAreRefused) {
  auto weight = at::ones({4}, at::kHalf).requires_grad_();
  torch::optim::SGD optimizer({weight}, torch::optim::SGDOptions(0.5));
  GradScaler scaler;
  scaler.scale(weight.sum()).backward();
  EXPECT_THROW(scaler.unscale_(optimizer), Error);
}

}  // namespace
}  // namespace oxytorch::amp
