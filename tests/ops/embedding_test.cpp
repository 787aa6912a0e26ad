#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "oxytorch/error.h"
#include "oxytorch/ops.h"

namespace oxytorch {
namespace {

using at::Tensor;

TEST(EmbeddingTest, AgreesWithTorchs) {
  torch::manual_seed(0);
  const Tensor numbers = torch::randint(9, {4, 7}, at::kLong);
  for (const auto type : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble}) {
    const Tensor weight = torch::randn({9, 21}).to(type).detach().requires_grad_();
    const Tensor ours = ops::embedding(numbers, weight, -2), theirs = at::embedding(weight, numbers, 7);
    EXPECT_TRUE(at::equal(ours, theirs)) << type;
    const Tensor from = torch::randn(ours.sizes()).to(type);
    const Tensor made = torch::autograd::grad({ours}, {weight}, {from})[0];
    const Tensor exact = at::embedding_dense_backward(from.to(at::kDouble), numbers, 9, 7, false);
    EXPECT_TRUE(at::allclose(made.to(at::kDouble), exact, 0x1p-8, 0x1p-8)) << type;
    if (type == at::kFloat) {
      EXPECT_TRUE(at::equal(made, at::embedding_dense_backward(from, numbers, 9, 7, false)));
    }
  }
}

TEST(EmbeddingTest, RefusesInWords) {
  const Tensor weight = torch::randn({9, 21}), numbers = torch::zeros({3}, at::kLong);
  const auto refused = [&](const Tensor& input, std::optional<std::int64_t> padding) -> std::string {
    try {
      static_cast<void>(ops::embedding(input, weight, padding));
    } catch (const Error& error) {
      return error.what();
    }
    return {};
  };
  EXPECT_THAT(refused(numbers, 9), testing::HasSubstr("padding_idx is 9 and the weight has 9 rows"));
  EXPECT_THAT(refused(numbers.to(at::kFloat), {}), testing::HasSubstr("int64 or int32"));
}

}  // namespace
}  // namespace oxytorch
