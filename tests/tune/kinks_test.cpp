// A rounding across a kink is no fault, and an error of its size elsewhere is.
#include "oxytorch/tune/kinks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "oxytorch/error.h"
#include "oxytorch/tune/run.h"
#include "oxytorch/tune/snapshot.h"
#include "oxytorch/tune/strategy.h"
#include "oxytorch/tune/verify.h"

namespace oxytorch::tune {
namespace {

namespace nn = torch::nn;

using Tensors = std::vector<at::Tensor>;

/// What is left of an error of one gradient, by the errors of states apart and the jumps to them.
at::Tensor rest(const at::Tensor& exact, const at::Tensor& error, const Tensors& jumps, const Tensors& errors = {}) {
  Kinks kinks({exact + error}, {exact});
  for (std::size_t i = 0; i < jumps.size(); ++i) {
    const auto here = exact + jumps[i];
    kinks.add({errors.empty() ? here : here + errors[i]}, {here});
  }
  return kinks.unexplained()[0] - exact;
}

double left(const at::Tensor& exact, const at::Tensor& error, const Tensors& jumps, const Tensors& errors = {}) {
  return rest(exact, error, jumps, errors).norm().item<double>();
}

TEST(KinksTest, WhereFewUnitsAreNearAKinkJumpsSayWhich) {
  torch::manual_seed(0);
  const auto exact = torch::randn(40, at::kDouble);
  auto unit = torch::zeros(40, at::kDouble), other = torch::zeros(40, at::kDouble);
  unit.narrow(0, 0, 4).copy_(torch::randn(4, at::kDouble));
  other.narrow(0, 8, 4).copy_(torch::randn(4, at::kDouble));
  Tensors jumps;
  for (int i = 0; i < 8; ++i) jumps.push_back((i % 2) * unit + 1e-6 * torch::randn(40, at::kDouble));
  EXPECT_EQ(left(exact, unit, jumps), 0);
  EXPECT_GT(left(exact, 1e-3 * other, jumps), 0.9e-3 * other.norm().item<double>()) << "an error elsewhere";
  EXPECT_GT(left(exact, 0.019 * exact, jumps), 0.018 * exact.norm().item<double>());
  EXPECT_GT(left(exact, 1.5 * unit, jumps), 1.4 * unit.norm().item<double>()) << "no jump goes so far";
  EXPECT_GT(left(exact, 10 * unit, jumps), 9 * unit.norm().item<double>()) << "an error of many jumps is none";
}

TEST(KinksTest, AnErrorThatIsTheJumpIsExplained) {
  torch::manual_seed(0);
  // Powers of two, so that the error of the step is the jump to the bit.
  auto exact = torch::zeros(40, at::kDouble), jump = torch::zeros(40, at::kDouble);
  exact.fill_(1);
  jump.narrow(0, 3, 4).fill_(0.125);
  EXPECT_EQ(left(exact, jump, {jump}), 0);
  KnownKinks known;
  for (int step = 0; step < 64 && !known.speak(); ++step) {
    Kinks kinks({exact + jump}, {exact});
    kinks.add({exact + jump}, {exact + jump});
    known.learn(kinks);
  }
  ASSERT_TRUE(known.speak());
  EXPECT_TRUE(known.unexplained({exact + jump}, {exact})[0].equal(exact));
  EXPECT_FALSE(known.unexplained({exact + 1.01 * jump}, {exact})[0].equal(exact));
}

struct ManyUnits {
  at::Tensor exact = torch::randn(400, at::kDouble), units = torch::randn({60, 400}, at::kDouble) / 20;
  Tensors jumps;

  ManyUnits() {
    for (int i = 0; i < 8; ++i) jumps.push_back(crossed(0.5));
  }
  [[nodiscard]] at::Tensor crossed(double share) const {
    const auto side = 1 - 2 * (torch::rand(60, at::kDouble) < 0.5).to(at::kDouble);
    return (side * (torch::rand(60, at::kDouble) < share).to(at::kDouble)).matmul(units);
  }
  [[nodiscard]] Tensors errors(double share) const {
    Tensors found;
    for (int i = 0; i < 8; ++i) found.push_back(crossed(share));
    return found;
  }
};

TEST(KinksTest, OfManyUnitsAnErrorMayBeAsLargeAsAJump) {
  torch::manual_seed(1);
  const ManyUnits many;
  for (int i = 0; i < 40; ++i) EXPECT_EQ(left(many.exact, many.crossed(0.1), many.jumps, many.errors(0.1)), 0) << i;
  EXPECT_GT(left(many.exact, 1.5 * many.exact, many.jumps), many.exact.norm().item<double>());
  const double along = 0.8 * many.jumps[0].norm().item<double>() / many.exact.norm().item<double>();
  EXPECT_GT(left(many.exact, along * many.exact, many.jumps), 0)
      << "smaller than a jump, and yet jumps of single units do not scale a gradient";
}

TEST(KinksTest, AnErrorOfAllStatesIsAFaultHoweverSmall) {
  torch::manual_seed(2);
  const ManyUnits many;
  const auto fault = 0.15 * many.crossed(0.5);
  for (int i = 0; i < 40; ++i) {
    auto errors = many.errors(0.01);
    for (auto& error : errors) error += fault;
    const auto found = rest(many.exact, many.crossed(0.01) + fault, many.jumps, errors);
    EXPECT_LT((found - fault).norm().item<double>(), 0.5 * fault.norm().item<double>()) << i;
  }
}

TEST(KinksTest, OfALargeTensorSomeElementsSpeakForAll) {
  torch::manual_seed(3);
  const auto exact = torch::randn(300000, at::kDouble);
  Tensors jumps, errors;
  for (int i = 0; i < 8; ++i) {
    jumps.push_back(1e-2 * torch::randn(300000, at::kDouble));
    errors.push_back(1e-3 * torch::randn(300000, at::kDouble));
  }
  EXPECT_EQ(left(exact, 1e-3 * torch::randn(300000, at::kDouble), jumps, errors), 0);
  const auto fault = 1e-3 * torch::randn(300000, at::kDouble);
  for (auto& error : errors) error += fault;
  EXPECT_LT((rest(exact, fault, jumps, errors) - fault).norm().item<double>(), 0.5 * fault.norm().item<double>());
}

/// An examined step of many units, by its own gradient.
Kinks examined(const ManyUnits& many, double scale, double error) {
  Kinks kinks({scale * (many.exact + many.crossed(error))}, {scale * many.exact});
  for (const auto& jump : many.jumps) {
    const auto here = scale * (many.exact + jump);
    kinks.add({here + scale * many.crossed(error)}, {here});
  }
  return kinks;
}

TEST(KinksTest, KnownStepsSpeakForAnother) {
  torch::manual_seed(5);
  const ManyUnits many;
  const auto none = at::Tensor();
  KnownKinks known;
  const auto left_of = [&](const at::Tensor& error) {
    return (known.unexplained({many.exact + error}, {many.exact})[0] - many.exact).norm().item<double>();
  };
  const auto small = many.crossed(0.1);
  for (const double scale : {1.0, 100.0}) {  // gradients of other steps are of another size
    EXPECT_FALSE(known.speak());
    EXPECT_NEAR(left_of(small), small.norm().item<double>(), 1e-9) << "too few are known";
    known.learn(examined(many, scale, 0.1));
  }
  EXPECT_TRUE(known.speak());
  for (int i = 0; i < 40; ++i) EXPECT_EQ(left_of(many.crossed(0.1)), 0) << i;
  EXPECT_GT(left_of(many.exact), 0) << "larger than a jump";
  const double along = 0.8 * many.jumps[0].norm().item<double>() / many.exact.norm().item<double>();
  EXPECT_GT(left_of(along * many.exact), 0) << "as large as a jump, and it scales the gradient";
  EXPECT_TRUE(std::isnan(left_of(torch::full(400, NAN, at::kDouble))));
  EXPECT_FALSE(known.unexplained({none}, {many.exact})[0].defined());
  EXPECT_THROW(static_cast<void>(known.unexplained({none, none}, {none, none})), Error);
}

TEST(KinksTest, WhatOneStepDoesNotExplainIsExcusedInNone) {
  torch::manual_seed(6);
  const ManyUnits many;
  for (const int without : {0, 1}) {
    KnownKinks known;
    for (const int step : {0, 1, 2}) known.learn(examined(many, 1, step == without ? 2.0 : 0.1));
    const auto given = many.exact + many.crossed(0.1);
    EXPECT_TRUE(known.unexplained({given}, {many.exact})[0].is_same(given)) << without;
  }
}

TEST(KinksTest, WhatIsNotThereStaysAsItIs) {
  const auto exact = torch::randn({3, 2}, at::kDouble);
  const auto given = exact.to(at::kFloat);
  Kinks kinks({at::Tensor(), given}, {at::Tensor(), exact});
  EXPECT_TRUE(kinks.unexplained()[1].is_same(given)) << "no state apart";
  for (int i = 0; i < 2; ++i) kinks.add({at::Tensor(), given}, {at::Tensor(), exact});
  EXPECT_FALSE(kinks.unexplained()[0].defined());
  EXPECT_TRUE(kinks.unexplained()[1].is_same(given)) << "no jump, nothing to explain";
  // A gradient of another shape, or where the reference has none, is for the verdict to name.
  const auto other = torch::randn({2, 2});
  Kinks unlike({other, given}, {exact, at::Tensor()});
  for (int i = 0; i < 3; ++i) unlike.add({other, given}, {exact, at::Tensor()});
  EXPECT_TRUE(unlike.unexplained()[0].is_same(other));
  EXPECT_TRUE(unlike.unexplained()[1].is_same(given));
  EXPECT_THROW(kinks.add({given}, {exact, exact}), Error);
  EXPECT_THROW(Kinks({given}, {exact, exact}), Error);
}

TEST(KinksTest, WhatIsNoNumberIsNotExplained) {
  torch::manual_seed(4);
  const auto exact = torch::randn(300000, at::kDouble);
  Tensors jumps;
  for (int i = 0; i < 8; ++i) jumps.push_back(torch::randn(300000, at::kDouble));
  for (int i = 0; i < 20; ++i) {  // some of these elements are no sample
    auto error = 1e-3 * torch::randn(300000, at::kDouble);
    error[i] = NAN;
    EXPECT_TRUE(std::isnan(left(exact, error, jumps))) << i;
  }
}

TEST(KinksTest, ANudgeIsNoSmallerThanADtypeHolds) {
  const auto size = [](const Tensors& parameters, bool reduced) { return Nudge(parameters, reduced, 0, 0).size(); };
  EXPECT_EQ(size({torch::zeros(2)}, false), 0x1p-14);
  EXPECT_EQ(size({torch::zeros(2)}, true), 0x1p-7);
  EXPECT_EQ(size({torch::zeros(2), torch::zeros(2, at::kBFloat16)}, false), 0x1p-7);
}

TEST(KinksTest, ANudgeMovesParametersByNoMoreAndEachTimeAlike) {
  const Tensors parameters{torch::ones({50, 4}), torch::ones({4, 50}, at::kBFloat16).t(), torch::ones(3, at::kLong)};
  std::map<std::pair<int, int>, Tensors> seen;
  for (const auto& [step, state] : {std::pair{0, 0}, {0, 1}, {1, 0}, {0, 0}}) {
    Nudge nudge(parameters, false, step, state);
    Tensors moved;
    for (const auto& p : parameters) moved.push_back(nudge.moved(p));
    for (int i : {0, 1}) {
      EXPECT_EQ(moved[i].scalar_type(), parameters[i].scalar_type());
      EXPECT_LE((moved[i] - 1).abs().max().item<double>(), nudge.size());
      EXPECT_GT((moved[i] - 1).abs().max().item<double>(), nudge.size() / 2);
    }
    EXPECT_TRUE(moved[2].is_same(parameters[2]));
    for (const auto& [where, other] : seen) {
      EXPECT_EQ(at::equal(moved[0], other[0]), where == std::pair(step, state));
    }
    seen[{step, state}] = moved;
  }
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
    const auto near = (at + shift + row.dot(way - way.detach())).view({1, 1});
    const auto column = torch::cat({near, z.narrow(0, 1, z.size(0) - 1).narrow(1, 3, 1)});
    return last(torch::relu(torch::cat({z.narrow(1, 0, 3), column, z.narrow(1, 4, 8)}, 1)));
  }
  nn::Linear first{nullptr}, last{nullptr};
  at::Tensor edge, row, way;
  double shift = 0;
};
TORCH_MODULE(Near);

/// Rounds otherwise: the unit near its kink is on the other side.
struct Crossing : Strategy {
  void apply(Run& run) override { dynamic_cast<NearImpl&>(run.model()).shift = -5e-6; }
  void revert(Run& run) override { dynamic_cast<NearImpl&>(run.model()).shift = 0; }
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
