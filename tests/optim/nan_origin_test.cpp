// Faults planted in forward, backward and in what is given, and passes that are sound.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <limits>
#include <optional>
#include <string>

#include "oxytorch/error.h"
#include "oxytorch/optim/nan_origin.h"
#include "oxytorch/optim/optimizers.h"

namespace {

using oxytorch::optim::NanOrigin;
using oxytorch::optim::NanReport;

constexpr float kInf = std::numeric_limits<float>::infinity();

struct Net : torch::nn::Module {
  Net() {
    torch::manual_seed(0);
    first = register_module("first", torch::nn::Linear(8, 8));
    second = register_module("second", torch::nn::Linear(8, 1));
    offset = register_buffer("offset", torch::zeros({8}));
  }
  torch::nn::Linear first{nullptr}, second{nullptr};
  torch::Tensor offset;
};

std::string op_of(const std::optional<NanReport>& report) { return report ? report->op : "nothing"; }

TEST(NanOrigin, NamesOperatorAndScopeInForward) {
  Net net;
  NanOrigin finder(net);
  auto x = torch::relu(net.first(torch::ones({4, 8})));
  {
    const NanOrigin::Scope outer("encoder");
    const NanOrigin::Scope inner("scale");
    x = x / x.std(0);
  }
  net.second(x).square().mean().backward();
  const auto report = finder.finish();
  ASSERT_TRUE(report);
  EXPECT_EQ(report->phase, "forward");
  EXPECT_EQ(report->kind, "nan");
  EXPECT_EQ(report->op, "aten::div");
  EXPECT_EQ(report->scope, "encoder.scale");
  EXPECT_EQ(report->reached, "the loss");
  ASSERT_EQ(report->inputs.size(), 2);
  EXPECT_TRUE(report->inputs[0].finite());
  EXPECT_EQ(report->inputs[1].min, 0);
  ASSERT_EQ(report->outputs.size(), 1);
  EXPECT_GT(report->outputs[0].nan + report->outputs[0].inf, 0);
  EXPECT_NE(report->text().find("first appeared in forward: aten::div in 'encoder.scale'"), std::string::npos)
      << report->text();
}

TEST(NanOrigin, NamesTheNodeInBackwardAndItsForward) {
  Net net;
  NanOrigin finder(net);
  const auto x = net.first(torch::ones({4, 8}));
  torch::Tensor root;
  {
    const NanOrigin::Scope scope("norm");
    root = (x - x.detach()).square().sum(1).sqrt();  // 0 has a root, but no slope
  }
  (net.second(x).sum() + root.sum()).backward();
  const auto report = finder.finish();
  ASSERT_TRUE(report);
  EXPECT_EQ(report->phase, "backward");
  EXPECT_EQ(report->node, "SqrtBackward0");
  EXPECT_EQ(report->forward_op, "aten::sqrt");
  EXPECT_EQ(report->scope, "norm");
  EXPECT_NE(report->reached.find("the gradient of first."), std::string::npos) << report->reached;
}

TEST(NanOrigin, FollowsAnInfToTheNanThatItBecame) {
  NanOrigin finder;
  const auto x = torch::zeros({3}, torch::requires_grad());
  const auto bad = torch::log(x);
  const auto worse = bad * 0.0;
  worse.sum().backward();
  const auto report = finder.finish();
  ASSERT_TRUE(report);
  EXPECT_EQ(report->op, "aten::log");
  EXPECT_EQ(report->kind, "inf");
  EXPECT_EQ(report->became_nan, "aten::mul");
}

TEST(NanOrigin, TellsInputsOfAnOperatorInPlaceAsTheyWere) {
  NanOrigin finder;
  auto x = torch::full({2}, -4.0F);
  x.log_();
  finder.check(x, "x");
  const auto report = finder.finish();
  ASSERT_TRUE(report);
  EXPECT_EQ(report->op, "aten::log_");
  ASSERT_EQ(report->inputs.size(), 1);
  EXPECT_EQ(report->inputs[0].min, -4);
  EXPECT_TRUE(report->inputs[0].finite());
  EXPECT_EQ(report->reached, "x");
}

TEST(NanOrigin, BlamesWhatWasGiven) {
  {
    Net net;
    torch::NoGradGuard no_grad;
    net.first->weight[2][3] = kInf;
    torch::AutoGradMode grad(true);
    NanOrigin finder(net);
    net.second(net.first(torch::ones({4, 8}))).sum().backward();
    const auto report = finder.finish();
    ASSERT_TRUE(report);
    EXPECT_EQ(report->phase, "given");
    EXPECT_EQ(report->what, "parameter");
    EXPECT_EQ(report->name, "first.weight");
    EXPECT_EQ(report->inputs.at(0).first, (std::vector<std::int64_t>{2, 3}));
  }
  {
    Net net;
    net.offset[1] = NAN;
    NanOrigin finder(net);
    net.second(net.first(torch::ones({4, 8})) + net.offset).sum().backward();
    const auto report = finder.finish();
    ASSERT_TRUE(report);
    EXPECT_EQ(report->what, "buffer");
    EXPECT_EQ(report->name, "offset");
  }
  {
    Net net;
    auto batch = torch::ones({4, 8});
    batch[0][0] = NAN;
    NanOrigin finder(net);
    net.second(net.first(batch)).sum().backward();
    const auto report = finder.finish();
    ASSERT_TRUE(report);
    EXPECT_EQ(report->phase, "given");
    EXPECT_EQ(report->what, "tensor");
  }
}

TEST(NanOrigin, OverflowInHalfPrecision) {
  NanOrigin finder;
  const auto x = torch::full({2}, 60000.0F, torch::kHalf);
  finder.check(x * 2, "the product");
  const auto report = finder.finish();
  EXPECT_EQ(op_of(report), "aten::mul");
  EXPECT_EQ(report->kind, "inf");
  EXPECT_EQ(report->outputs.at(0).dtype, at::kHalf);
}

TEST(NanOrigin, MasksAndMendedRowsAreNoFault) {
  Net net;
  NanOrigin finder(net);
  auto scores = net.first(torch::ones({4, 8}));
  const auto mask = torch::ones({4, 8}, torch::kBool).triu(1);
  const auto weights = torch::softmax(scores.masked_fill(mask, -kInf), -1);
  const auto missing = torch::full({4, 8}, NAN);
  const auto mended = torch::where(torch::isnan(missing), torch::zeros({}), missing);
  (net.second(weights + mended)).sum().backward();
  EXPECT_EQ(op_of(finder.finish()), "nothing");
}

TEST(NanOrigin, ARowThatIsMaskedWholeIsBlamedOnTheSoftmax) {
  Net net;
  NanOrigin finder(net);
  auto scores = net.first(torch::ones({4, 8}));
  const auto weights = torch::softmax(scores.masked_fill(torch::ones({4, 8}, torch::kBool), -kInf), -1);
  net.second(weights).sum().backward();
  const auto report = finder.finish();
  EXPECT_EQ(op_of(report), "aten::_softmax");
}

TEST(NanOrigin, LeavesNothingBehindAndChangesNoResult) {
  const auto train = [](bool watch) {
    Net net;
    oxytorch::optim::AdamW opt(net.parameters(), oxytorch::optim::AdamWOptions(1e-2));
    std::optional<NanOrigin> finder;
    if (watch) finder.emplace(net);
    for (int i = 0; i < 3; ++i) {
      opt.zero_grad();
      net.second(torch::relu(net.first(torch::ones({4, 8})))).square().mean().backward();
      opt.step();
    }
    EXPECT_FALSE(finder && finder->finish());
    return net.first->weight.detach().clone();
  };
  EXPECT_TRUE(torch::equal(train(true), train(false)));
  EXPECT_FALSE(at::hasCallbacks());
}

TEST(NanOrigin, OneAtATimeAndNotAfterTheEnd) {
  NanOrigin finder;
  EXPECT_THROW(NanOrigin(), oxytorch::Error);
  EXPECT_FALSE(finder.finish());
  EXPECT_FALSE(finder.finish());
  EXPECT_THROW(finder.check(torch::ones({1})), oxytorch::Error);
  EXPECT_FALSE(NanOrigin().finish());
}

}  // namespace
