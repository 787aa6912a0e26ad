// A rounding across a kink is no fault, and an error of its size elsewhere is.
#include "oxytorch/tune/kinks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <vector>

#include "oxytorch/error.h"
#include "oxytorch/tune/run.h"
#include "oxytorch/tune/snapshot.h"
#include "oxytorch/tune/strategy.h"
#include "oxytorch/tune/verify.h"

namespace oxytorch::tune {
namespace {

namespace nn = torch::nn;

TEST(KinksTest, JumpsExplainWhatLiesAlongThemAlone) {
  torch::manual_seed(0);
  const auto exact = torch::randn(40, at::kDouble);
  auto unit = torch::zeros(40, at::kDouble);
  unit.narrow(0, 0, 4).copy_(torch::randn(4, at::kDouble));
  std::vector<std::vector<at::Tensor>> jumps;
  for (int i = 0; i < 6; ++i) jumps.push_back({exact + (i % 2) * unit + 1e-9 * torch::randn(40, at::kDouble)});
  const auto left = [&](const at::Tensor& given) {
    return (unexplained({given}, {exact}, jumps)[0] - exact).norm().item<double>();
  };
  EXPECT_LT(left(exact + unit), 1e-6);
  EXPECT_GT(left(1.019 * exact), 0.9 * 0.019 * exact.narrow(0, 4, 36).norm().item<double>());
  EXPECT_GT(left(exact + 10 * unit), 7 * unit.norm().item<double>()) << "an error of many jumps is none";
}

TEST(KinksTest, OfMoreUnitsThanJumpsAnErrorMayBeAsLargeAsTheyLeaveOfEachOther) {
  torch::manual_seed(1);
  const auto exact = torch::randn(400, at::kDouble);
  const auto units = torch::randn({60, 400}, at::kDouble) / 20;
  const auto crossed = [&](double share) {
    return exact + (torch::rand(60, at::kDouble) < share).to(at::kDouble).matmul(units);
  };
  std::vector<std::vector<at::Tensor>> jumps;
  for (int i = 0; i < 8; ++i) jumps.push_back({crossed(0.5)});
  const auto left = [&](const at::Tensor& given) {
    return (unexplained({given}, {exact}, jumps)[0] - exact).norm().item<double>();
  };
  for (int i = 0; i < 20; ++i) EXPECT_EQ(left(crossed(0.1)), 0) << "a rounding crosses a few of many kinks";
  EXPECT_GT(left(1.5 * exact), 0.4 * exact.norm().item<double>());
  std::vector<std::vector<at::Tensor>> once(8, {exact});
  once[3] = {exact + units[0]};
  jumps = once;
  EXPECT_GT(left(exact + units[1]), 0.9 * units[1].norm().item<double>()) << "one jump alone opens no door";
}

TEST(KinksTest, WhatIsNotThereStaysAsItIs) {
  const auto exact = torch::randn({3, 2}, at::kDouble);
  const auto given = exact.to(at::kFloat);
  const std::vector<std::vector<at::Tensor>> jumps{{at::Tensor(), exact}, {at::Tensor(), exact}};
  const auto left = unexplained({at::Tensor(), given}, {at::Tensor(), exact}, jumps);
  EXPECT_FALSE(left[0].defined());
  EXPECT_TRUE(left[1].is_same(given)) << "no jump, nothing to explain";
  EXPECT_TRUE(unexplained({given}, {exact}, {})[0].is_same(given));
  EXPECT_THROW(static_cast<void>(unexplained({given}, {exact, exact}, {})), Error);
  EXPECT_THROW(static_cast<void>(unexplained({given}, {exact}, {{}})), Error);
}

/// One row of each batch brings a unit within rounding of the kink of ReLU: either side is right.
struct NearImpl : nn::Module {
  NearImpl() {
    first = register_module("first", nn::Linear(8, 12));
    last = register_module("last", nn::Linear(12, 3));
    edge = register_parameter("edge", torch::randn(8), /*requires_grad=*/false);
    const auto along = torch::randn(8);
    row = register_buffer("row", along - edge * (along.dot(edge) / edge.square().sum()));
    way = register_parameter("way", torch::randn(8));
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto z = first(x);
    const auto at = row.dot(edge);  // nothing but a rounding
    const auto near = (side * at + row.dot(way - way.detach())).view({1, 1});
    const auto column = torch::cat({near, z.narrow(0, 1, z.size(0) - 1).narrow(1, 3, 1)});
    return last(torch::relu(torch::cat({z.narrow(1, 0, 3), column, z.narrow(1, 4, 8)}, 1)));
  }
  nn::Linear first{nullptr}, last{nullptr};
  at::Tensor edge, row, way;
  double side = 1;
};
TORCH_MODULE(Near);

double side = 1;  // that Crossing takes

/// Rounds otherwise: the unit near its kink is on the other side.
struct Crossing : Strategy {
  void apply(Run& run) override { dynamic_cast<NearImpl&>(run.model()).side = side; }
  void revert(Run& run) override { dynamic_cast<NearImpl&>(run.model()).side = 1; }
};

/// Scales what backward gives one weight.
struct Scaled : Strategy {
  void apply(Run& run) override {
    held = run.model().named_parameters()["last.weight"];
    hook = held.register_hook([](const at::Tensor& gradient) { return 1.05 * gradient; });
  }
  void revert(Run& /*run*/) override { held.remove_hook(hook); }
  unsigned hook = 0;
  at::Tensor held;
};

Ruling ruled(const std::string& strategy) {
  static const bool registered = [] {
    register_strategy<Crossing>("crossing", Kind::Tolerance);
    register_strategy<Scaled>("scaled", Kind::Tolerance);
    return true;
  }();
  static_cast<void>(registered);
  Near model{nullptr};
  const auto at = [&](at::ScalarType type) { return model->row.to(type).dot(model->edge.to(type)).item<double>(); };
  for (int seed = 0; !model || !(at(at::kFloat) > 0 && at(at::kDouble) > 0); ++seed) {
    torch::manual_seed(seed);
    model = Near();
  }
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(1e-2));
  std::vector<Batch> batches;
  for (int i = 0; i < 4; ++i) batches.push_back({torch::randn({6, 8}), torch::randint(3, {6})});
  Run run(*model, optimizer, supervised(model, nn::CrossEntropyLoss()), batches);
  Snapshot snapshot(run);
  Verifier verifier(run, snapshot);
  run.set_active({strategy});
  const auto ruling = verifier.check(Kind::Tolerance);
  run.set_active({});
  return ruling;
}

TEST(KinksTest, ARoundingAcrossAKinkIsNoFault) {
  side = -1;
  const auto ruling = ruled("crossing");
  EXPECT_TRUE(ruling.held) << ruling.reason;
  EXPECT_EQ(ruling.evidence.count("across_kinks"), 1U) << "the case has no kink";
}

TEST(KinksTest, AnErrorOfItsSizeElsewhereIs) {
  const auto ruling = ruled("scaled");
  EXPECT_FALSE(ruling.held);
  EXPECT_THAT(ruling.reason, testing::HasSubstr("gradient"));
}

}  // namespace
}  // namespace oxytorch::tune
