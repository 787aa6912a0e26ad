#include "oxytorch/amp/precision.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "oxytorch/error.h"
#include "oxytorch/optim.h"

namespace oxytorch::amp {
namespace {

using optim::AdamW;
using optim::AdamWOptions;
using optim::MasterFormat;

CpuFeatures with_everything() {
  CpuFeatures cpu;
  cpu.avx512_bf16 = cpu.avx512_fp16 = true;
  return cpu;
}

PrecisionOptions at_level(PrecisionLevel level, at::ScalarType dtype = at::kBFloat16) {
  PrecisionOptions options;
  options.level = level;
  options.dtype = dtype;
  options.cpu = with_everything();
  return options;
}

torch::nn::Sequential make_model() {
  torch::manual_seed(0);
  return torch::nn::Sequential(torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 8, 3)), torch::nn::BatchNorm2d(8),
                               torch::nn::GroupNorm(2, 8), torch::nn::ReLU(), torch::nn::Flatten(),
                               torch::nn::Linear(8 * 16, 6), torch::nn::LayerNorm(std::vector<int64_t>{6}),
                               torch::nn::Linear(6, 3));
}

at::Tensor loss_of(torch::nn::Sequential& model, Precision& precision, const at::Tensor& x) {
  const auto scope = precision.autocast();
  return precision.output(model->forward(precision.input(x))).square().mean();
}

AdamW with_masters(const torch::nn::Sequential& model, double rate = 1e-2) {
  return AdamW(model->parameters(), AdamWOptions(rate).master_weights(MasterFormat::Float32));
}

std::vector<at::ScalarType> dtypes(const torch::nn::Sequential& model) {
  std::vector<at::ScalarType> all;
  for (const auto& p : model->parameters()) all.push_back(p.scalar_type());
  return all;
}

TEST(PrecisionTest, LevelsSetTheDtypesOfWeightsAndProducts) {
  constexpr auto f = at::kFloat, b = at::kBFloat16;
  const std::vector<std::pair<PrecisionLevel, std::vector<at::ScalarType>>> expected{
      {PrecisionLevel::O0, {f, f, f, f, f, f, f, f, f, f, f, f}},
      {PrecisionLevel::O1, {f, f, f, f, f, f, f, f, f, f, f, f}},
      {PrecisionLevel::O2, {b, b, f, f, f, f, b, b, f, f, b, b}},
      {PrecisionLevel::O3, {b, b, b, b, b, b, b, b, b, b, b, b}}};
  for (const auto& [level, types] : expected) {
    auto model = make_model();
    auto precision = prepare(*model, nullptr, at_level(level));
    EXPECT_EQ(dtypes(model), types) << name(level);
    EXPECT_EQ(model[1]->as<torch::nn::BatchNorm2d>()->running_mean.scalar_type(), types[2]);
    EXPECT_EQ(precision.dtype(), level == PrecisionLevel::O0 ? f : b);
    EXPECT_EQ(precision.autocast().has_value(), level == PrecisionLevel::O1);
    EXPECT_FALSE(precision.scaler().is_enabled());
    const auto loss = loss_of(model, precision, torch::randn({4, 3, 6, 6}));
    EXPECT_EQ(loss.scalar_type(), level == PrecisionLevel::O1 ? b : f);
    loss.backward();
    for (const auto& p : model->parameters()) EXPECT_TRUE(p.grad().isfinite().all().item<bool>());
    EXPECT_THAT(precision.explain(), testing::HasSubstr(name(level)));
  }
}

TEST(PrecisionTest, NormalisationLayersFollowTheSetting) {
  for (const auto level : {PrecisionLevel::O2, PrecisionLevel::O3}) {
    for (const bool keep : {true, false}) {
      auto model = make_model();
      auto options = at_level(level);
      options.keep_norm_fp32 = keep;
      prepare(*model, nullptr, options);
      EXPECT_EQ(dtypes(model)[2], keep ? at::kFloat : at::kBFloat16);
      EXPECT_EQ(dtypes(model)[0], at::kBFloat16);
    }
  }
}

// The oracle: torch's SGD on float32 weights, whose gradients come from a copy of them in bfloat16. (Adam would blow up
// the rounding of the gradient of a bias before BatchNorm, which is zero.)
TEST(PrecisionTest, O2IsFloat32TrainingOnGradientsOfTheRoundedWeights) {
  auto model = make_model();
  optim::SGD optimizer(model->parameters(),
                       optim::SGDOptions(0.05).momentum(0.9).master_weights(MasterFormat::Float32));
  auto precision = prepare(*model, &optimizer, at_level(PrecisionLevel::O2));
  auto rounded = make_model();
  prepare(*rounded, nullptr, at_level(PrecisionLevel::O2));
  std::vector<at::Tensor> masters;
  for (const auto& p : make_model()->parameters()) masters.push_back(p.detach().clone().requires_grad_());
  torch::optim::SGD reference(masters, torch::optim::SGDOptions(0.05).momentum(0.9));
  torch::manual_seed(4);
  for (int step = 0; step < 5; ++step) {
    const auto x = torch::randn({8, 3, 6, 6});
    loss_of(model, precision, x).backward();
    precision.scaler().step(optimizer);
    optimizer.zero_grad();
    loss_of(rounded, precision, x).backward();
    torch::NoGradGuard quiet;
    auto copies = rounded->parameters();
    for (size_t i = 0; i < masters.size(); ++i) masters[i].mutable_grad() = copies[i].grad().to(at::kFloat);
    reference.step();
    for (size_t i = 0; i < masters.size(); ++i) {
      copies[i].copy_(masters[i]);
      copies[i].mutable_grad().reset();
    }
  }
  for (size_t i = 0; i < masters.size(); ++i) {
    const auto& state = optimizer.tail().state(i);
    const at::Tensor kept = state.master.defined() ? state.master : model->parameters()[i];
    EXPECT_TRUE(at::allclose(kept, masters[i], 1e-3, 1e-4)) << "parameter " << i;
  }
}

TEST(PrecisionTest, MastersStartFromTheFloat32Weights) {
  auto model = make_model();
  const auto before = make_model()->parameters();
  auto optimizer = with_masters(model, 0.0);
  std::vector<const c10::TensorImpl*> objects;
  for (const auto& p : model->parameters()) objects.push_back(p.unsafeGetTensorImpl());
  auto precision = prepare(*model, &optimizer, at_level(PrecisionLevel::O2));
  loss_of(model, precision, torch::randn({4, 3, 6, 6})).backward();
  optimizer.step();
  for (size_t i = 0; i < objects.size(); ++i) {
    EXPECT_EQ(model->parameters()[i].unsafeGetTensorImpl(), objects[i]);
    if (model->parameters()[i].scalar_type() == at::kFloat) continue;
    EXPECT_TRUE(at::equal(optimizer.tail().state(i).master, before[i])) << "parameter " << i;
    EXPECT_TRUE(at::equal(model->parameters()[i], before[i].to(at::kBFloat16)));
  }
}

TEST(PrecisionTest, AnOptimizerThatHasSteppedGoesOn) {
  for (const auto level : {PrecisionLevel::O2, PrecisionLevel::O3}) {
    auto model = make_model();
    const bool masters = level == PrecisionLevel::O2;
    AdamW optimizer(model->parameters(), AdamWOptions(1e-2).ema_decay(0.5).master_weights(
                                             masters ? MasterFormat::Float32 : MasterFormat::None));
    const auto x = torch::randn({4, 3, 6, 6});
    for (int i = 0; i < 3; ++i) {
      optimizer.zero_grad();
      model->forward(x).square().mean().backward();
      optimizer.step();
    }
    std::vector<at::Tensor> weights, moments;
    for (size_t i = 0; i < model->parameters().size(); ++i) {
      weights.push_back(model->parameters()[i].detach().clone());
      moments.push_back(optimizer.tail().state(i).moments[0].clone());
    }
    auto precision = prepare(*model, &optimizer, at_level(level));
    EXPECT_FALSE(model->parameters()[0].grad().defined());
    for (size_t i = 0; i < weights.size(); ++i) {
      const auto& state = optimizer.tail().state(i);
      EXPECT_TRUE(at::equal(state.moments[0].to(at::kFloat), moments[i]));
      EXPECT_EQ(state.step.item<float>(), 3);
      if (masters && model->parameters()[i].scalar_type() == at::kBFloat16) {
        EXPECT_TRUE(at::equal(state.master, weights[i]));
      }
    }
    loss_of(model, precision, x).backward();
    optimizer.step();
    EXPECT_EQ(optimizer.tail().state(0).step.item<float>(), 4);
    EXPECT_FALSE(at::equal(model->parameters()[0].to(at::kFloat), weights[0]));
  }
}

TEST(PrecisionTest, Float16ScalesTheLossAndSkipsOverflows) {
  auto model = make_model();
  auto optimizer = with_masters(model);
  auto options = at_level(PrecisionLevel::O2, at::kHalf);
  options.scaler.init_scale = 1024;
  auto precision = prepare(*model, &optimizer, options);
  ASSERT_TRUE(precision.scaler().is_enabled());
  for (const float factor : {1.0F, 1e6F, 1.0F}) {
    const auto before = model->parameters()[0].detach().clone();
    precision.scaler().scale(loss_of(model, precision, torch::randn({4, 3, 6, 6})) * factor).backward();
    EXPECT_EQ(model->parameters()[0].grad().scalar_type(), at::kHalf);
    precision.scaler().step(optimizer);
    precision.scaler().update();
    optimizer.zero_grad();
    EXPECT_EQ(at::equal(model->parameters()[0], before), factor > 1);
  }
  EXPECT_EQ(precision.scaler().get_scale(), 512);
}

TEST(PrecisionTest, OnlyFloatingPointTensorsAreCast) {
  auto model = make_model();
  auto precision = prepare(*model, nullptr, at_level(PrecisionLevel::O3));
  const auto index = torch::arange(3);
  EXPECT_TRUE(precision.input(index).is_same(index));
  EXPECT_TRUE(precision.output(index).is_same(index));
  EXPECT_EQ(precision.input(torch::ones({2}, at::kDouble)).scalar_type(), at::kBFloat16);
  EXPECT_EQ(precision.output(torch::ones({2}, at::kHalf)).scalar_type(), at::kFloat);
}

/// The message of what `prepare` throws; the model must be as it was.
std::string refusal(torch::optim::Optimizer* optimizer, torch::nn::Sequential model, const PrecisionOptions& options) {
  const auto before = dtypes(model);
  try {
    prepare(*model, optimizer, options);
  } catch (const Error& error) {
    EXPECT_EQ(dtypes(model), before);
    return error.what();
  }
  return "";
}

TEST(PrecisionTest, SlowHardwareIsRefusedUnlessInsistedOn) {
  auto options = at_level(PrecisionLevel::O1);
  options.cpu = {};
  EXPECT_THAT(refusal(nullptr, make_model(), options), testing::HasSubstr("neither avx512_bf16 nor amx_bf16"));
  options.dtype = at::kHalf;
  EXPECT_THAT(refusal(nullptr, make_model(), options), testing::HasSubstr("neither avx512_fp16 nor amx_fp16"));
  options.dtype.reset();
  EXPECT_THAT(refusal(nullptr, make_model(), options), testing::HasSubstr("allow_slow"));
  options.allow_slow = true;
  auto model = make_model();
  EXPECT_EQ(prepare(*model, nullptr, options).dtype(), at::kBFloat16);
  options = at_level(PrecisionLevel::O0);
  options.cpu = {};
  EXPECT_EQ(prepare(*model, nullptr, options).dtype(), at::kFloat);
}

TEST(PrecisionTest, WhatCannotBeServedIsRefusedWithTheRemedy) {
  using testing::HasSubstr;
  auto model = make_model();
  torch::optim::SGD plain(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  optim::SGD tail(model->parameters(), optim::SGDOptions(0.1));
  auto masters = with_masters(model);
  EXPECT_THAT(refusal(&plain, model, at_level(PrecisionLevel::O2)), HasSubstr("master_weights(MasterFormat::Float32)"));
  EXPECT_THAT(refusal(&tail, model, at_level(PrecisionLevel::O2)), HasSubstr("master_weights(MasterFormat::Float32)"));
  EXPECT_THAT(refusal(&masters, model, at_level(PrecisionLevel::O3)), HasSubstr("Use level O2"));
  EXPECT_THAT(refusal(&plain, model, at_level(PrecisionLevel::O3, at::kHalf)), HasSubstr("bfloat16"));
  EXPECT_THAT(refusal(nullptr, model, at_level(PrecisionLevel::O1, at::kDouble)), HasSubstr("Double"));
  model->forward(torch::randn({4, 3, 6, 6})).sum().backward();
  plain.step();
  EXPECT_THAT(refusal(&plain, model, at_level(PrecisionLevel::O3)), HasSubstr("before the first step"));
  auto narrow = make_model();
  narrow->to(at::kBFloat16);
  EXPECT_THAT(refusal(nullptr, narrow, at_level(PrecisionLevel::O1)), HasSubstr("Use O2 or O3"));
  EXPECT_THAT(refusal(nullptr, torch::nn::Sequential(torch::nn::ReLU()), at_level(PrecisionLevel::O1)),
              HasSubstr("no parameters"));
  EXPECT_THROW(parse_precision_level("O4"), Error);
  EXPECT_EQ(parse_precision_level("O2"), PrecisionLevel::O2);
}

}  // namespace
}  // namespace oxytorch::amp
