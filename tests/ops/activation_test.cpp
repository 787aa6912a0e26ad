#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "oxytorch/error.h"
#include "oxytorch/ops.h"

namespace oxytorch {
namespace {

using at::Tensor;

TEST(ActivationTest, AgreesWithTorchs) {
  torch::manual_seed(0);
  const Tensor gate = torch::randn({5, 70}).requires_grad_(), up = torch::randn({5, 70}).requires_grad_();
  const auto agree = [&](const Tensor& ours, const Tensor& theirs, const std::vector<Tensor>& inputs) {
    EXPECT_TRUE(at::allclose(ours, theirs, 1e-5, 1e-6));
    const auto of_ours = torch::autograd::grad({ours.square().sum()}, inputs);
    const auto of_theirs = torch::autograd::grad({theirs.square().sum()}, inputs);
    for (std::size_t i = 0; i < inputs.size(); ++i)
      EXPECT_TRUE(at::allclose(of_ours[i], of_theirs[i], 1e-4, 1e-5)) << i;
  };
  agree(ops::gelu(gate), at::gelu(gate), {gate});
  agree(ops::gelu(gate, "tanh"), at::gelu(gate, "tanh"), {gate});
  agree(ops::swiglu(gate, up), at::silu(gate) * up, {gate, up});
  agree(ops::geglu(gate, up), at::gelu(gate) * up, {gate, up});
  const auto halves = gate.chunk(2, 1);
  agree(ops::swiglu(gate), at::silu(halves[0]) * halves[1], {gate});
}

TEST(ActivationTest, RefusesWhatDoesNotFit) {
  const auto error_of = [](const auto& call) {
    try {
      static_cast<void>(call());
    } catch (const Error& error) {
      return error.code();
    }
    return ErrorCode::Internal;
  };
  const Tensor x = torch::randn({2, 3});
  EXPECT_EQ(error_of([&] { return ops::gelu(x, "exact"); }), ErrorCode::InvalidArgument);
  EXPECT_EQ(error_of([&] { return ops::swiglu(x); }), ErrorCode::InvalidArgument);
  EXPECT_EQ(error_of([&] { return ops::geglu(x, x.to(at::kDouble)); }), ErrorCode::InvalidType);
}

}  // namespace
}  // namespace oxytorch
