#include <gmock/gmock.h>
#include <torch/torch.h>

#include <functional>
#include <stdexcept>
#include <vector>

#include "memory/expect_equal.h"
#include "oxytorch/amp.h"
#include "oxytorch/error.h"
#include "oxytorch/memory.h"

namespace oxytorch::memory {
namespace {

using testing::HasSubstr;
namespace nn = torch::nn;
using Tensors = std::vector<at::Tensor>;
using Function = std::function<at::Tensor(const at::Tensor&)>;

constexpr std::int64_t kRows = 512, kWidth = 64;
constexpr std::int64_t kBytes = kRows * kWidth * 4;

/// Two steps of blocks with dropout and batch normalisation: losses, gradients, buffers, and a number drawn at the end.
Tensors two_steps(bool selective, bool autocast) {
  torch::manual_seed(0);
  std::vector<nn::Sequential> blocks;
  for (int i = 0; i < 3; ++i) {
    blocks.emplace_back(nn::Linear(kWidth, 2 * kWidth), nn::BatchNorm1d(2 * kWidth), nn::GELU(), nn::Dropout(0.2),
                        nn::Linear(2 * kWidth, kWidth), nn::LayerNorm(nn::LayerNormOptions({kWidth})));
  }
  Tensors found;
  for (int step = 0; step < 2; ++step) {
    auto x = torch::randn({kRows, kWidth});
    {
      const amp::Autocast scope(at::kCPU, at::kBFloat16, autocast);
      for (auto& block : blocks) {
        const auto run = [&](const at::Tensor& in) { return in + block->forward(in); };
        x = selective ? selective_checkpoint(run, x) : run(x);
      }
    }
    const auto loss = x.to(at::kFloat).square().mean();
    loss.backward();
    found.push_back(loss.detach());
    const torch::NoGradGuard no_grad;
    for (auto& block : blocks) {
      for (auto& parameter : block->parameters()) {
        found.push_back(parameter.grad().clone());
        parameter.sub_(parameter.grad(), 0.1);
        parameter.mutable_grad() = at::Tensor();
      }
      for (const auto& buffer : block->buffers()) found.push_back(buffer.clone());
    }
  }
  found.push_back(torch::rand({4}));
  return found;
}

/// What lives after forward beyond its result.
std::int64_t kept(const Function& function, const at::Tensor& x, bool selective) {
  const Meter meter;
  const auto out = selective ? selective_checkpoint(function, x) : function(x);
  return meter.live_bytes() - static_cast<std::int64_t>(out.storage().nbytes());
}

TEST(SelectiveCheckpointTest, EveryBitIsThatOfThePlainFunction) {
  for (const bool autocast : {false, true}) expect_equal(two_steps(false, autocast), two_steps(true, autocast));
}

TEST(SelectiveCheckpointTest, CheapResultsAreLeftOutAndMasksArePacked) {
  torch::manual_seed(0);
  const auto x = torch::randn({kRows, kWidth}).requires_grad_();
  nn::Linear linear(kWidth, kWidth);
  nn::LayerNorm norm(nn::LayerNormOptions({kWidth}));
  const Function normed = [&](const at::Tensor& in) { return linear(norm(in)); };
  EXPECT_EQ(kept(normed, x, false), kBytes + 2 * kRows * 4);
  EXPECT_EQ(kept(normed, x, true), 2 * kRows * 4);
  const Function dropped = [&](const at::Tensor& in) { return torch::dropout(in.exp(), 0.3, true); };
  EXPECT_EQ(kept(dropped, x, false), 2 * kBytes) << "the mask, and what exp() gave";
  EXPECT_EQ(kept(dropped, x, true), kBytes / 32);
  const Function masked = [&](const at::Tensor& in) { return in * (in > 0); };
  EXPECT_EQ(kept(masked, x, false), kBytes / 4);
  EXPECT_EQ(kept(masked, x, true), 0);
}

TEST(SelectiveCheckpointTest, WhatIsSmallAndWhatOthersHoldIsKept) {
  const auto x = torch::randn({kRows, kWidth}).requires_grad_(), small = torch::randn({8, 8}).requires_grad_();
  EXPECT_EQ(kept([](const at::Tensor& in) { return in.exp().sin(); }, small, true),
            kept([](const at::Tensor& in) { return in.exp().sin(); }, small, false));
  at::Tensor held;
  const Function holds = [&](const at::Tensor& in) {
    held = in.exp();
    return held.sin();
  };
  EXPECT_EQ(kept(holds, x, true), kBytes);
}

TEST(SelectiveCheckpointTest, WhatWasChangedInPlaceIsRefused) {
  const auto x = torch::randn({kRows, kWidth}).requires_grad_();
  auto scale = torch::full({kRows, kWidth}, 2.0);
  nn::Linear linear(kWidth, kWidth);
  const auto out = selective_checkpoint([&](const at::Tensor& in) { return linear((in * scale).exp()); }, x);
  scale.add_(1);
  try {
    out.sum().backward();
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::InvalidState);
    EXPECT_THAT(error.what(), HasSubstr("was changed in place after forward (its version is 1, 0 was saved)"));
  }
}

TEST(SelectiveCheckpointTest, WithoutEndEverythingIsKept) {
  const auto x = torch::randn({kRows, kWidth}).requires_grad_();
  const Meter meter;
  const auto fails = [](const at::Tensor& in) -> at::Tensor {
    in.exp().sin();
    throw std::runtime_error("no");
  };
  EXPECT_THROW(selective_checkpoint(fails, x), std::runtime_error);
  EXPECT_EQ(meter.live_bytes(), 0);
  at::Tensor out;
  {
    const SelectiveCheckpoint open;
    out = x.exp().sin().cos();
  }
  EXPECT_EQ(meter.live_bytes(), 3 * kBytes);
  out.sum().backward();
  EXPECT_TRUE(at::equal(x.grad(), -x.exp().sin().sin() * x.exp().cos() * x.exp()));
}

TEST(SelectiveCheckpointTest, InOtherCheckpointsAndWithoutGradientsItOnlyCallsTheFunction) {
  torch::manual_seed(0);
  nn::Linear linear(kWidth, kWidth);
  const auto x = torch::randn({kRows, kWidth}).requires_grad_();
  const Function function = [linear](const at::Tensor& in) mutable { return linear(in.exp()).tanh(); };
  Tensors found;
  const auto add = [&](const at::Tensor& out) { found.push_back(torch::autograd::grad({out.sum()}, {x})[0]); };
  add(function(x));
  add(selective_checkpoint(function, x));
  add(checkpoint([function](const at::Tensor& in) { return selective_checkpoint(function, in); }, x));
  add(selective_checkpoint([&](const at::Tensor& in) { return checkpoint(function, in); }, x));
  add(selective_checkpoint([&](const at::Tensor& in) { return selective_checkpoint(function, in); }, x));
  for (const auto& each : found) EXPECT_TRUE(at::equal(each, found[0]));
  const torch::NoGradGuard no_grad;
  EXPECT_FALSE(selective_checkpoint(function, x).requires_grad());
}

TEST(SelectiveCheckpointTest, GradientsMayBeAskedForTwiceAndDifferentiated) {
  torch::manual_seed(0);
  const auto x = torch::randn({kRows, kWidth}, torch::kDouble).requires_grad_();
  const auto weight = torch::randn({kWidth, kWidth}, torch::kDouble).requires_grad_();
  const Function function = [&](const at::Tensor& in) { return at::gelu(in).tanh().mm(weight).sigmoid(); };
  std::vector<Tensors> found;
  for (const bool selective : {false, true}) {
    const auto out = (selective ? selective_checkpoint(function, x) : function(x)).sum();
    const auto once = torch::autograd::grad({out}, {x}, {}, /*retain_graph=*/true)[0];
    const auto first = torch::autograd::grad({out}, {x}, {}, true, /*create_graph=*/true)[0];
    EXPECT_TRUE(at::equal(once, first));
    const auto second = torch::autograd::grad({first.square().sum()}, {x, weight});
    found.push_back({once, second[0], second[1]});
  }
  expect_equal(found[0], found[1]);
}

}  // namespace
}  // namespace oxytorch::memory
