// What is measured of tensors is what float64 says of them at once, whatever their layout, dtype and size.
#include "oxytorch/tune/measure.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <vector>

namespace oxytorch::tune {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

double rms(const at::Tensor& t) {
  return std::sqrt(t.to(at::kDouble).square().sum().item<double>() /
                   static_cast<double>(std::max<std::int64_t>(1, t.numel())));
}

class MeasureTest : public testing::Test {
 protected:
  MeasureTest() { torch::manual_seed(0); }
};

TEST_F(MeasureTest, GradientsAreMeasuredAsAtOnce) {
  const std::vector<at::Tensor> shapes{
      torch::randn({}),           torch::randn({0}),         torch::randn({3, 5}),         torch::randn({7, 4}).t(),
      torch::randn({1, 1 << 20}), torch::randn({1300, 900}), torch::randn({900, 1300}).t()};
  for (const auto type : {at::kFloat, at::kBFloat16, at::kDouble}) {
    for (const auto& given : shapes) {
      const auto mine = given.to(type);
      const auto right = (given + 0.01 * torch::randn_like(given)).to(at::kDouble);
      ValueMeter meter(1.5, 1.0);
      meter.gradient("a", mine, 2, right);
      const auto found = meter.found();
      ASSERT_EQ(found.gradients.size(), 1U);
      const auto off = mine.to(at::kDouble) * 2 - right;
      EXPECT_NEAR(found.gradients[0].error, rms(off), 1e-9 * rms(off));
      EXPECT_NEAR(found.gradients[0].size, rms(right), 1e-9 * rms(right));
      EXPECT_NEAR(found.whole, rms(right), 1e-9 * rms(right));
      EXPECT_EQ(found.gradients[0].count, given.numel());
      if (given.numel() > 0) {
        const double slope = ((off * right).sum() / right.square().sum()).item<double>();
        EXPECT_NEAR(found.slope, slope, 1e-9 * std::abs(slope));
      }
      EXPECT_EQ(found.loss, 0.5);
      EXPECT_THAT(found.wrong, IsEmpty());
    }
  }
}

TEST_F(MeasureTest, WhatIsMissingIsSaid) {
  ValueMeter meter(std::nan(""), 1.0);
  meter.gradient("a", at::Tensor(), 1, torch::ones(3));
  meter.gradient("b", torch::ones(3), 1, at::Tensor());
  meter.gradient("c", torch::ones(3), 1, torch::ones(4));
  meter.gradient("d", torch::full({3}, NAN), 1, torch::ones(3));
  meter.gradient("e", at::Tensor(), 1, at::Tensor());
  meter.buffer("f", at::Tensor(), torch::ones(3), at::Tensor());
  meter.buffer("g", torch::ones(2), torch::ones(3), at::Tensor());
  meter.buffer("h", torch::ones(3, at::kLong), torch::zeros(3, at::kLong), at::Tensor());
  meter.stepped(true, true);
  meter.stepped(true, false);
  meter.stepped(false, true);
  EXPECT_THAT(
      meter.found().wrong,
      ElementsAre("the loss is nan", "a has no gradient", "b has a gradient", "the gradient of c has another shape",
                  "the gradient of d is not finite", "the buffer f is missing", "the buffer g is of another shape",
                  "the buffer h differs", "the optimizer is stepped", "the optimizer is not stepped"));
}

TEST_F(MeasureTest, LossesThatShowAFaultByThemselves) {
  const auto losses = [](std::initializer_list<double> values, at::ScalarType type = at::kFloat) {
    std::vector<at::Tensor> all;
    for (const double value : values) all.push_back(torch::tensor(value, type));
    return all;
  };
  const auto given = losses({2.3001, 2.2003, 2.1007});
  EXPECT_EQ(losses_fault(given, given), "");
  EXPECT_EQ(losses_fault({}, given), "");
  EXPECT_EQ(losses_fault(losses({2.3001, NAN}), given), "step 2: the loss is nan, 2.2 as given");
  EXPECT_EQ(losses_fault(losses({2.3001, 2.2003}, at::kHalf), given), "step 1: the loss is of Half, of Float as given");
  EXPECT_EQ(losses_fault(losses({2.3001, 2.2003}, at::kDouble), given), "") << "a wider one is no fault";
  EXPECT_EQ(losses_fault(losses({2.296875, 2.203125, 2.09375}), given),
            "the loss is computed in BFloat16: every one is a number of that dtype");
  EXPECT_EQ(losses_fault(losses({2.296875, 2.203125}), given), "") << "two may be so by chance";
  EXPECT_EQ(losses_fault(losses({2.296875, 2.203125, 2.09375}), losses({2, 1, 0.5})), "")
      << "those as given are such numbers too";
}

TEST_F(MeasureTest, SparseGradientsAreDense) {
  const auto dense = torch::zeros({6, 2}).index_put_({torch::tensor({1, 4})}, torch::randn({2, 2}));
  ValueMeter meter(1, 1);
  meter.gradient("a", dense.to_sparse(1), 1, dense);
  EXPECT_EQ(meter.found().gradients[0].error, 0);
}

TEST_F(MeasureTest, BuffersAreHeldByTheirChange) {
  const auto before = torch::ones(8, at::kDouble), right = before + 0.5;
  ValueMeter meter(1, 1);
  meter.buffer("mean", (right + 0.25).to(at::kFloat), right, before);
  const auto found = meter.found().buffers[0];
  EXPECT_NEAR(found.error, 0.25 - 64 * 0x1p-23 * 1.5, 1e-6);  // less last places
  EXPECT_NEAR(found.size, 0.5, 1e-9);
}

TEST_F(MeasureTest, ABufferThatHardlyMovesMayBeOffByItsLastPlaces) {
  const auto before = torch::ones(8), right = before + 1e-4;
  const auto error = [&](const at::Tensor& given, const at::Tensor& wanted) {
    ValueMeter meter(1, 1);
    meter.buffer("variance", given, wanted, before);
    return meter.found().buffers[0].error;
  };
  EXPECT_EQ(error(right + 1e-6, right), 0);
  EXPECT_NEAR(error(right + 2e-5, right), 2e-5 - 64 * 0x1p-23, 1e-6);
  EXPECT_NEAR(error((right + 1e-5).to(at::kDouble), right.to(at::kDouble)), 1e-5, 1e-7);
  EXPECT_GT(error((right + 0.1).to(at::kBFloat16), right), 0.08) << "a last place is enough there";
}

TEST_F(MeasureTest, AChangeIsMeasuredAgainstTheWantedOne) {
  for (const auto type : {at::kFloat, at::kDouble, at::kBFloat16}) {
    const auto before = torch::randn({300, 7}).to(type);
    const auto wanted = before.to(at::kDouble) + 0.1;
    const auto found = measured_change("a", before.t(), (wanted + 0.01).to(type).t(), wanted.t(), false);
    EXPECT_EQ(found.count, 2100);
    EXPECT_NEAR(found.change.size, 0.1, 1e-6);
    if (type != at::kBFloat16) {
      EXPECT_NEAR(found.change.error, 0.01, 1e-6);
      EXPECT_NEAR(found.change.slope, 0.1, 1e-5);
    }
  }
  EXPECT_EQ(measured_change("a", at::Tensor(), torch::ones(4), torch::ones(4, at::kDouble), true).change.size, 1);
  EXPECT_EQ(measured_change("a", at::Tensor(), torch::ones(0), torch::ones(0), true).count, 0);
}

TEST_F(MeasureTest, AnElementMayBeOffByWhatItsDtypeRoundsAway) {
  for (const auto type : {at::kFloat, at::kBFloat16, at::kHalf}) {
    const auto moved = 1e-3 * torch::randn({5000}, at::kDouble), before = (-0.999 * moved).to(type);
    const auto wanted = before.to(at::kDouble) + moved;  // next to zero
    const double place = type == at::kFloat ? 0x1p-23 : type == at::kHalf ? 0x1p-10 : 0x1p-7;
    auto after = (before.to(at::kDouble) + moved * (1 + place)).to(type);
    EXPECT_LT(measured_change("a", before, after, wanted, false).change.worst, 1) << type;
    const auto largest = moved.abs().argmax().item<std::int64_t>();
    after[largest] = before[largest];
    EXPECT_GT(measured_change("a", before, after, wanted, false).change.worst, 1) << type;
  }
}

TEST_F(MeasureTest, ClippedGradientsAreNotClippedAgain) {
  const auto large = torch::rand({4'000'000}).pow(8) + 1e-4;
  auto p = torch::zeros({4'000'000}).set_requires_grad(true);
  p.mutable_grad() = large.clone();
  torch::nn::utils::clip_grad_norm_({p}, 0.25);
  const double total = p.grad().to(at::kDouble).norm().item<double>();
  ASSERT_GT(std::abs(total / 0.25 - 1), 1e-5) << "torch's own norm in float32 is off";
  EXPECT_NEAR(norm_error({p.grad()}, 0.25), std::abs(total / 0.25 - 1), 0.5 * std::abs(total / 0.25 - 1));
  EXPECT_EQ(clip_factor({p.grad()}, 0.25), 1);
  const double whole = large.to(at::kDouble).norm().item<double>();
  EXPECT_NEAR(clip_factor({large, at::Tensor()}, 0.25), 0.25 / (whole + 1e-6), 1e-9);
  EXPECT_EQ(clip_factor({large}, 2 * whole), 1);
  EXPECT_EQ(norm_error({large}, 4 * whole), 0);
}

}  // namespace
}  // namespace oxytorch::tune
