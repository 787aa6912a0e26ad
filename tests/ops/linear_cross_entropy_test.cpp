#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "oxytorch/error.h"
#include "oxytorch/ops.h"

namespace oxytorch {
namespace {

using at::Tensor;

TEST(LinearCrossEntropyTest, AgreesWithTorchs) {
  for (const auto type : {at::kFloat, at::kBFloat16, at::kDouble}) {
    torch::manual_seed(0);
    const Tensor input = torch::randn({3, 40, 24}).to(type).requires_grad_();
    const Tensor weight = torch::randn({333, 24}).to(type).requires_grad_();
    const Tensor bias = torch::randn({333}).to(type).requires_grad_();
    Tensor target = torch::randint(333, {3, 40});
    target.index_put_({0}, 7);
    const Tensor ours = ops::linear_cross_entropy(
        input, weight, target,
        {.bias = bias, .ignore_index = 7, .label_smoothing = 0.1, .reduction = ops::LossReduction::Sum});
    const Tensor logits = at::linear(input, weight, bias).flatten(0, 1).to(type == at::kDouble ? type : at::kFloat);
    const Tensor theirs = at::cross_entropy_loss(logits, target.flatten(), {}, at::Reduction::Sum, 7, 0.1);
    const double tolerance = type == at::kBFloat16 ? 3e-2 : 1e-5;
    EXPECT_TRUE(at::allclose(ours.to(at::kDouble), theirs.to(at::kDouble), tolerance, tolerance)) << type;
    const auto of_ours = torch::autograd::grad({ours}, {input, weight, bias});
    const auto of_theirs = torch::autograd::grad({theirs}, {input, weight, bias});
    for (std::size_t i = 0; i < 3; ++i) {
      EXPECT_TRUE(at::allclose(of_ours[i], of_theirs[i], tolerance, 3 * tolerance)) << type << i;
    }
  }
}

TEST(LinearCrossEntropyTest, RefusesATargetThatIsNoClass) {
  try {
    static_cast<void>(ops::linear_cross_entropy(torch::randn({2, 4}), torch::randn({5, 4}), torch::tensor({1, 5})));
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::InvalidArgument);
    EXPECT_THAT(error.what(), testing::HasSubstr("target 5 of token 1 is no class: there are 5"));
  }
}

}  // namespace
}  // namespace oxytorch
