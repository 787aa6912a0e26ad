#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "oxytorch/error.h"
#include "oxytorch/ops.h"
#include "oxytorch/tune/deferred_sums.h"

namespace oxytorch {
namespace {

using at::Tensor;

TEST(RowNormTest, AgreesWithTorchs) {
  torch::manual_seed(0);
  const Tensor x = torch::randn({6, 70}).requires_grad_(), residual = torch::randn({6, 70}).requires_grad_();
  const Tensor weight = torch::rand({70}).requires_grad_(), bias = torch::randn({70}).requires_grad_();
  for (const bool is_centered : {false, true}) {
    ops::RowNormOptions options{.weight = weight, .eps = 1e-5};
    if (is_centered) options.bias = bias;
    const auto [normed, sum] =
        is_centered ? ops::add_layer_norm(x, residual, options) : ops::add_rms_norm(x, residual, options);
    const Tensor total = x + residual;
    const Tensor theirs =
        is_centered ? at::layer_norm(total, {70}, weight, bias) : at::rms_norm(total, {70}, weight, 1e-5);
    EXPECT_TRUE(at::equal(sum, total));
    EXPECT_TRUE(at::allclose(normed, theirs, 1e-5, 1e-5));
    EXPECT_TRUE(at::allclose(is_centered ? ops::layer_norm(total, options) : ops::rms_norm(total, options), theirs,
                             1e-5, 1e-5));
    std::vector<Tensor> inputs{x, residual, weight};
    if (is_centered) inputs.push_back(bias);
    const auto of_ours = torch::autograd::grad({normed.square().sum() + sum.sin().sum()}, inputs);
    const auto of_theirs = torch::autograd::grad({theirs.square().sum() + total.sin().sum()}, inputs);
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      EXPECT_TRUE(at::allclose(of_ours[i], of_theirs[i], 1e-3, 1e-4)) << is_centered << i;
    }
  }
}

TEST(RowNormTest, DropoutBelongsToASum) {
  try {
    static_cast<void>(ops::layer_norm(torch::randn({2, 3}), {.dropout = 0.1}));
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::InvalidArgument);
    EXPECT_THAT(error.what(), testing::HasSubstr("add_layer_norm"));
  }
}

TEST(DeferredSumsTest, ABlockIsComputedInOnePass) {
  torch::manual_seed(0);
  torch::nn::LayerNorm norm(torch::nn::LayerNormOptions({24}));
  torch::nn::Linear layer(24, 24);
  const Tensor x = torch::randn({3, 5, 24}).requires_grad_();
  const auto block = [&] {
    const Tensor sum = x + torch::dropout(layer(x), 0.2, true);
    return (norm(sum) + sum).square().mean();
  };
  torch::manual_seed(7);
  const Tensor plain = block();
  const auto expected = torch::autograd::grad({plain}, {x, layer->weight, norm->weight});
  const tune::DeferredSums sums;
  const auto joined = tune::DeferredSums::joined();
  torch::manual_seed(7);
  Tensor loss;
  {
    const tune::DeferredSums::Scope scope;
    loss = block();
  }
  EXPECT_EQ(tune::DeferredSums::joined(), joined + 1);
  EXPECT_TRUE(at::allclose(loss, plain, 1e-5, 1e-6));
  const auto found = torch::autograd::grad({loss}, {x, layer->weight, norm->weight});
  for (std::size_t i = 0; i < found.size(); ++i) EXPECT_TRUE(at::allclose(found[i], expected[i], 1e-3, 1e-5)) << i;
}

TEST(DeferredSumsTest, ANormThatIsWrittenOutIsOne) {
  torch::manual_seed(0);
  torch::nn::Linear layer(24, 24);
  const Tensor weight = torch::rand({24}).requires_grad_();
  const Tensor x = torch::randn({3, 5, 24}).requires_grad_();
  const auto block = [&] {
    const Tensor sum = x + layer(x);
    return (weight * (sum * torch::rsqrt(sum.pow(2).mean(-1, /*keepdim=*/true) + 1e-5)) + sum).square().mean();
  };
  const Tensor plain = block();
  const auto expected = torch::autograd::grad({plain}, {x, layer->weight, weight});
  const tune::DeferredSums sums;
  const auto joined = tune::DeferredSums::joined(), written = tune::DeferredSums::written();
  Tensor loss;
  {
    const tune::DeferredSums::Scope scope;
    loss = block();
  }
  EXPECT_EQ(tune::DeferredSums::joined(), joined + 1);
  EXPECT_EQ(tune::DeferredSums::written(), written + 1);
  EXPECT_TRUE(at::allclose(loss, plain, 1e-5, 1e-6));
  const auto found = torch::autograd::grad({loss}, {x, layer->weight, weight});
  for (std::size_t i = 0; i < found.size(); ++i) EXPECT_TRUE(at::allclose(found[i], expected[i], 1e-3, 1e-5)) << i;
}

}  // namespace
}  // namespace oxytorch
