#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "oxytorch/error.h"
#include "oxytorch/ops.h"

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
