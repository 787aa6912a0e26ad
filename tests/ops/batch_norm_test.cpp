#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "oxytorch/error.h"
#include "oxytorch/ops.h"
#include "oxytorch/tune/deferred_norms.h"

namespace oxytorch {
namespace {

using at::Tensor;

Tensor image(at::ScalarType type = at::kFloat) {
  torch::manual_seed(0);
  return torch::randn({4, 20, 6, 8}).to(type).contiguous(at::MemoryFormat::ChannelsLast).requires_grad_();
}

TEST(BatchNormTest, AgreesWithTorchs) {
  for (const bool pools : {false, true}) {
    const Tensor x = image(), weight = torch::rand({20}).requires_grad_(), bias = torch::randn({20}).requires_grad_();
    const Tensor added = torch::randn_like(x).requires_grad_();
    const Tensor mean = torch::zeros({20}), var = torch::ones({20}), kept_mean = mean.clone(), kept_var = var.clone();
    ops::BatchNormOptions options{
        .weight = weight, .bias = bias, .running_mean = mean, .running_var = var, .relu = true};
    if (pools) {
      options.pool = {2, 4};
    } else {
      options.added = added;
    }
    const Tensor ours = ops::batch_norm(x, options);
    Tensor theirs = at::batch_norm(x, weight, bias, kept_mean, kept_var, true, 0.1, 1e-5, false);
    theirs = at::relu(pools ? theirs : theirs + added);
    if (pools) theirs = at::max_pool2d(theirs, {2, 4}, {2, 4});
    EXPECT_TRUE(at::allclose(ours, theirs, 1e-5, 1e-5)) << pools;
    EXPECT_TRUE(at::allclose(mean, kept_mean, 1e-5, 1e-6) && at::allclose(var, kept_var, 1e-5, 1e-6));
    std::vector<Tensor> inputs{x, weight, bias};
    if (!pools) inputs.push_back(added);
    const auto of_ours = torch::autograd::grad({ours.square().sum()}, inputs);
    const auto of_theirs = torch::autograd::grad({theirs.square().sum()}, inputs);
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      EXPECT_TRUE(at::allclose(of_ours[i], of_theirs[i], 1e-4, 1e-4)) << pools << i;
    }
  }
}

TEST(BatchNormTest, RefusesAnAdditionOfAnotherSize) {
  try {
    static_cast<void>(ops::batch_norm(image(), {.added = torch::randn({20})}));
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::InvalidArgument);
    EXPECT_THAT(error.what(), testing::HasSubstr("adds a tensor of the sizes of its input"));
  }
}

TEST(DeferredNormsTest, WhatFollowsALayerJoinsIt) {
  torch::nn::BatchNorm2d first(20), second(20);
  const Tensor x = image();
  const auto features = [&] {
    const Tensor y = torch::relu(second(x) + x);
    return torch::max_pool2d(torch::relu(first(y)), {2, 2});
  };
  const Tensor plain = features();
  const auto grads = torch::autograd::grad({plain.square().sum()}, {x, first->weight, second->bias});
  const tune::DeferredNorms norms;
  const auto layers = tune::DeferredNorms::layers(), joined = tune::DeferredNorms::joined();
  Tensor found;
  {
    const tune::DeferredNorms::Scope scope;
    found = features();
  }
  EXPECT_EQ(tune::DeferredNorms::layers(), layers + 2);
  EXPECT_EQ(tune::DeferredNorms::joined(), joined + 4);
  EXPECT_TRUE(at::allclose(found, plain, 1e-5, 1e-5));
  const auto of_found = torch::autograd::grad({found.square().sum()}, {x, first->weight, second->bias});
  for (std::size_t i = 0; i < grads.size(); ++i) EXPECT_TRUE(at::allclose(of_found[i], grads[i], 1e-4, 1e-4)) << i;
  EXPECT_TRUE(at::equal(features(), plain)) << "outside of the scope it is torch's";
  EXPECT_EQ(tune::DeferredNorms::layers(), layers + 2);
}

}  // namespace
}  // namespace oxytorch
