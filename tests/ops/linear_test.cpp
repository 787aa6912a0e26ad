#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "oxytorch/amp.h"
#include "oxytorch/error.h"
#include "oxytorch/ops.h"
#include "oxytorch/tune/operators.h"

namespace oxytorch {
namespace {

using at::Tensor;

TEST(LinearTest, AgreesWithTorchs) {
  for (const auto type : {at::kFloat, at::kBFloat16}) {
    torch::manual_seed(0);
    const Tensor input = torch::randn({3, 40, 24}).to(at::kBFloat16).requires_grad_();
    const Tensor weight = (torch::randn({33, 24}) / 5).to(type).requires_grad_();
    const Tensor bias = torch::randn({33}).to(type).requires_grad_();
    const auto wide = [](const Tensor& t) { return t.detach().to(at::kBFloat16).to(at::kDouble).requires_grad_(); };
    const std::vector<Tensor> exact{wide(input), wide(weight), wide(bias)};
    const Tensor ours = ops::linear(input, weight, bias);
    EXPECT_EQ(ours.scalar_type(), at::kBFloat16);
    const Tensor theirs = at::linear(exact[0], exact[1], exact[2]);
    EXPECT_TRUE(at::allclose(ours.to(at::kDouble), theirs, 2e-2, 2e-2)) << type;
    const auto of_ours = torch::autograd::grad({ours.to(at::kFloat).sum()}, {input, weight, bias});
    const auto of_theirs = torch::autograd::grad({theirs.sum()}, exact);
    for (std::size_t i = 0; i < 3; ++i) {
      EXPECT_TRUE(at::allclose(of_ours[i].to(at::kDouble), of_theirs[i], 2e-2, 2e-2)) << type << i;
    }
  }
}

Tensor gradient_of_three(const Tensor& weight, std::int64_t rows, bool watched) {
  torch::manual_seed(1);
  Tensor leaf = weight.detach().clone().requires_grad_();
  if (watched) leaf.register_hook([](const Tensor& grad) { return grad; });
  for (int batch = 0; batch < 3; ++batch) {
    const Tensor input = torch::randn({rows, weight.size(1)}).to(at::kBFloat16);
    ops::linear(input, leaf).to(at::kFloat).square().sum().backward();
  }
  return leaf.grad();
}

TEST(LinearTest, GradientsOfSeveralBatchesAddUpWithTorchsBits) {
  torch::manual_seed(0);
  const Tensor weight = torch::randn({70, 40});
  for (const std::int64_t rows : {5, 300, 1500}) {
    EXPECT_TRUE(at::equal(gradient_of_three(weight, rows, false), gradient_of_three(weight, rows, true))) << rows;
  }
}

TEST(LinearTest, ReluHasTheBitsOfOneThatFollows) {
  torch::manual_seed(0);
  const Tensor input = torch::randn({3, 40, 24}).to(at::kBFloat16).requires_grad_();
  const Tensor weight = torch::randn({33, 24}).requires_grad_(), bias = torch::randn({33}).requires_grad_();
  const Tensor ours = ops::linear(input, weight, bias, true), expected = at::relu(ops::linear(input, weight, bias));
  EXPECT_TRUE(at::equal(ours, expected));
  const Tensor slope = torch::randn_like(ours);
  const auto found = torch::autograd::grad({ours}, {input, weight, bias}, {slope});
  const auto right = torch::autograd::grad({expected}, {input, weight, bias}, {slope});
  for (std::size_t i = 0; i < 3; ++i) EXPECT_TRUE(at::equal(found[i], right[i])) << i;
}

TEST(LinearTest, ReluUnderAutocastIsComputedWithTheLayerItFollowed) {
  tune::NativeOperators operators;
  const auto reports = operators.install({"linear"});
  if (!reports.front().installed) GTEST_SKIP() << reports.front().reason;
  torch::manual_seed(0);
  torch::nn::Sequential model(torch::nn::Linear(12, 97), torch::nn::ReLU(), torch::nn::Linear(97, 3));
  const Tensor input = torch::randn({6, 12});
  const auto gradients = [&] {
    model->zero_grad();
    {
      const amp::Autocast narrow(at::kCPU, at::kBFloat16);
      model->forward(input).to(at::kFloat).square().sum().backward();
    }
    std::vector<Tensor> made;
    for (const Tensor& parameter : model->parameters()) made.push_back(parameter.grad().clone());
    return made;
  };
  const auto first = gradients();
  const auto before = tune::NativeOperators::joined_relus();
  const auto second = gradients();
  EXPECT_EQ(tune::NativeOperators::joined_relus(), before + 1);
  for (std::size_t i = 0; i < first.size(); ++i) EXPECT_TRUE(at::equal(first[i], second[i])) << i;
}

TEST(LinearTest, PackedWeightsChangeNoBitAndEndWithTheirScope) {
  torch::manual_seed(0);
  const Tensor weight = torch::randn({70, 40});
  const auto expected = gradient_of_three(weight, 20, false);
  {
    const ops::PackedWeights packed;
    EXPECT_TRUE(at::equal(gradient_of_three(weight, 20, false), expected));
    const Tensor input = torch::randn({5, 40}).to(at::kBFloat16);
    Tensor changing = weight.clone();
    for (int step = 0; step < 3; ++step) {
      const auto output = ops::linear(input, changing);
      EXPECT_TRUE(at::equal(output, ops::linear(input, changing.clone()))) << step;
      changing.add_(1);
    }
    ops::PackedWeights::clear();
    EXPECT_EQ(ops::PackedWeights::bytes(), 0);
    static_cast<void>(ops::linear(input, weight));
    // Where torch's operators serve, nothing is packed.
    EXPECT_TRUE(ops::PackedWeights::bytes() == 0 || ops::PackedWeights::bytes() >= 2 * weight.numel());
  }
  EXPECT_EQ(ops::PackedWeights::bytes(), 0);
}

TEST(LinearTest, RefusesAWeightOfAnotherWidth) {
  try {
    static_cast<void>(ops::linear(torch::randn({2, 4}), torch::randn({5, 3})));
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::InvalidArgument);
    EXPECT_THAT(error.what(),
                testing::HasSubstr("an input of any sizes x features and a weight of outputs x features"));
  }
}

}  // namespace
}  // namespace oxytorch
