#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>

#include "oxytorch/error.h"
#include "oxytorch/ops.h"
#include "oxytorch/optim.h"

namespace oxytorch {
namespace {

using at::Tensor;

struct Inputs {
  explicit Inputs(at::ScalarType type, std::int64_t key_heads = 4) {
    torch::manual_seed(0);
    const auto make = [&](std::int64_t heads) {
      return torch::randn({2, heads, 70, 24}).to(type).detach().requires_grad_();
    };
    query = make(4);
    key = make(key_heads);
    value = make(key_heads);
  }
  Tensor query, key, value;
};

std::vector<Tensor> grads(const Tensor& output, const Inputs& in) {
  return torch::autograd::grad({output.square().sum()}, {in.query, in.key, in.value});
}

TEST(AttentionTest, AgreesWithTorchs) {
  for (const auto type : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble}) {
    for (const std::int64_t key_heads : {4, 2}) {
      const Inputs in(type, key_heads);
      const Tensor ours = ops::attention(in.query, in.key, in.value, {.causal = true});
      const Tensor theirs =
          at::scaled_dot_product_attention(in.query, in.key, in.value, std::nullopt, 0, true, std::nullopt, true);
      const double tolerance = type == at::kFloat ? 1e-5 : type == at::kDouble ? 1e-12 : 4e-2;
      EXPECT_EQ(ours.scalar_type(), type);
      EXPECT_TRUE(at::allclose(ours, theirs, tolerance, tolerance)) << type;
      const auto of_ours = grads(ours, in), of_theirs = grads(theirs, in);
      for (std::size_t i = 0; i < 3; ++i) {
        EXPECT_TRUE(at::allclose(of_ours[i], of_theirs[i], 4 * tolerance, 4 * tolerance)) << type << i;
      }
    }
  }
}

TEST(AttentionTest, AMaskGetsItsGradient) {
  for (const auto type : {at::kFloat, at::kBFloat16}) {
    const Inputs in(type);
    const auto of = [&](at::ScalarType kind, bool ours) {
      const Tensor q = in.query.to(kind), k = in.key.to(kind), v = in.value.to(kind);
      const Tensor mask = torch::linspace(-2, 2, 4 * 70 * 70).view({1, 4, 70, 70}).to(type).to(kind).requires_grad_();
      const Tensor output = ours ? ops::attention(q, k, v, {.mask = mask})
                                 : at::matmul(at::softmax(at::matmul(q, k.mT()) / std::sqrt(24.0) + mask, -1), v);
      return torch::autograd::grad({output.square().sum()}, {mask})[0].to(at::kDouble);
    };
    const Tensor exact = of(at::kDouble, false), torchs = of(type, false), ours = of(type, true);
    const double rounding = type == at::kFloat ? 1e-6 : 1e-2;
    EXPECT_LE((ours - exact).norm().item<double>(),
              2 * (torchs - exact).norm().item<double>() + rounding * exact.norm().item<double>());
  }
}

TEST(AttentionTest, TakesMasksWindowsAndCaps) {
  const Inputs in(at::kFloat);
  const Inputs exact(at::kDouble);
  const ops::AttentionOptions options{
      .mask = torch::rand({70, 70}) < 0.8, .window_before = 9, .window_after = 4, .soft_cap = 3};
  const Tensor ours = ops::attention(in.query, in.key, in.value, options);
  const Tensor right =
      ops::attention(in.query.to(at::kDouble), in.key.to(at::kDouble), in.value.to(at::kDouble), options);
  EXPECT_TRUE(at::allclose(ours.to(at::kDouble), right, 1e-5, 1e-5));
  EXPECT_FALSE(at::allclose(ours, ops::attention(in.query, in.key, in.value), 1e-2, 1e-2));
}

TEST(AttentionTest, DropsWeightsByTorchsSeed) {
  const Inputs in(at::kFloat);
  const auto drop = [&](double dropout) {
    torch::manual_seed(5);
    return ops::attention(in.query, in.key, in.value, {.dropout = dropout});
  };
  const Tensor whole = ops::attention(in.query, in.key, in.value), some = drop(0.5);
  EXPECT_TRUE(at::equal(some, drop(0.5)));
  EXPECT_FALSE(at::allclose(some, whole, 1e-2, 1e-2));
  EXPECT_FALSE(at::allclose(some, ops::attention(in.query, in.key, in.value, {.dropout = 0.5}), 1e-2, 1e-2));
  Tensor mean = at::zeros_like(whole);
  for (int i = 0; i < 400; ++i) mean += ops::attention(in.query, in.key, in.value, {.dropout = 0.5}) / 400;
  EXPECT_LT((mean - whole).norm().item<double>(), 0.2 * (some - whole).norm().item<double>());
}

TEST(AttentionTest, TrainsABlock) {
  torch::manual_seed(0);
  torch::nn::Linear project(16, 48), out(16, 16);
  auto parameters = project->parameters();
  for (const auto& parameter : out->parameters()) parameters.push_back(parameter);
  optim::AdamW optimizer(parameters, optim::AdamWOptions(1e-2));
  const Tensor x = torch::randn({4, 30, 16}), wanted = x.cumsum(1);
  double first = 0, last = 0;
  for (int step = 0; step < 60; ++step) {
    optimizer.zero_grad();
    const auto qkv = project(x).view({4, 30, 3, 2, 8}).permute({2, 0, 3, 1, 4});
    const Tensor attended = ops::attention(qkv[0], qkv[1], qkv[2], {.causal = true});
    const Tensor loss = torch::mse_loss(out(attended.transpose(1, 2).flatten(2)), wanted);
    loss.backward();
    optimizer.step();
    last = loss.item<double>();
    if (step == 0) first = last;
  }
  EXPECT_LT(last, 0.8 * first);
}

TEST(AttentionTest, RefusesInWords) {
  const Inputs in(at::kFloat);
  const auto message = [&](const Tensor& key, const Tensor& value) -> std::string {
    try {
      static_cast<void>(ops::attention(in.query, key, value));
    } catch (const Error& error) {
      return error.what();
    }
    return {};
  };
  EXPECT_THAT(message(in.key.narrow(1, 0, 3), in.value.narrow(1, 0, 3)), testing::HasSubstr("4 heads and 3 key heads"));
  EXPECT_THAT(message(in.key.to(at::kDouble), in.value), testing::HasSubstr("key Double"));
}

}  // namespace
}  // namespace oxytorch
