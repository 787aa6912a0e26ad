#include "oxytorch/memory/checkpoint.h"
#include "memory/expect_equal.h"

#include <ATen/CPUGeneratorImpl.h>
#include <gmock/gmock.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "oxytorch/amp.h"
#include "oxytorch/error.h"
#include "oxytorch/memory.h"

namespace oxytorch::memory {
namespace {

using testing::HasSubstr;
namespace nn = torch::nn;
using Tensors = std::vector<at::Tensor>;

nn::Sequential block(std::int64_t width) {
  return nn::Sequential(nn::Linear(width, 4 * width), nn::GELU(), nn::Dropout(0.2), nn::Linear(4 * width, width));
}

/// Blocks one after another, each under a checkpoint or not.
struct NetImpl : nn::Module {
  explicit NetImpl(int count, std::int64_t width, bool checkpoints) : checkpoints(checkpoints) {
    for (int i = 0; i < count; ++i) blocks.push_back(register_module("block" + std::to_string(i), block(width)));
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& each : blocks) {
      auto run = [each](const at::Tensor& in) mutable { return in + each->forward(in); };
      x = checkpoints ? checkpoint(run, x) : run(x);
    }
    return x;
  }
  bool checkpoints;
  std::vector<nn::Sequential> blocks;
};
TORCH_MODULE(Net);

Tensors gradients(const nn::Module& module) {
  Tensors found;
  for (const auto& parameter : module.parameters()) found.push_back(parameter.grad().clone());
  return found;
}

/// Two steps of training: losses, gradients, buffers, and a number drawn at the end.
template <class Model>
Tensors two_steps(Model& model, const at::Tensor& input, bool autocast) {
  torch::manual_seed(1);
  Tensors found;
  for (int step = 0; step < 2; ++step) {
    model->zero_grad();
    at::Tensor out;
    {
      const amp::Autocast scope(at::kCPU, at::kBFloat16, autocast);
      out = model->forward(input);
    }
    auto loss = out.to(at::kFloat).square().mean();
    loss.backward();
    found.push_back(loss.detach());
    for (auto& gradient : gradients(*model)) found.push_back(gradient);
    torch::NoGradGuard no_grad;
    for (auto& parameter : model->parameters()) parameter.sub_(parameter.grad(), 0.1);
  }
  for (const auto& buffer : model->buffers()) found.push_back(buffer.clone());
  found.push_back(torch::rand({4}));
  return found;
}

class CheckpointBits : public testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Autocast, CheckpointBits, testing::Bool());

TEST_P(CheckpointBits, GradientsDropoutAndRandomStateAreThoseOfThePlainModel) {
  torch::manual_seed(0);
  Net plain(4, 32, false), kept(4, 32, true);
  {
    torch::NoGradGuard no_grad;
    for (std::size_t i = 0; i < plain->parameters().size(); ++i) kept->parameters()[i].copy_(plain->parameters()[i]);
  }
  const auto input = torch::randn({16, 32}).requires_grad_();
  expect_equal(two_steps(plain, input, GetParam()), two_steps(kept, input, GetParam()));
}

TEST(CheckpointTest, ActivationsAreNotKept) {
  torch::manual_seed(0);
  const auto input = torch::randn({256, 64});
  const auto peak = [&](bool checkpoints) {
    Net net(8, 64, checkpoints);
    net->forward(input).sum().backward();
    net->zero_grad(false);
    Meter meter;
    net->forward(input).sum().backward();
    return meter.peak_bytes();
  };
  const auto plain = peak(false), kept = peak(true);
  EXPECT_LT(kept, plain * 2 / 5) << plain;
}

TEST(CheckpointTest, RunningStatisticsMoveOnceAStep) {
  const auto train = [](bool checkpoints) {
    torch::manual_seed(0);
    nn::Sequential net(nn::Conv2d(3, 8, 3), nn::BatchNorm2d(8), nn::ReLU(nn::ReLUOptions(true)));
    const auto input = torch::randn({4, 3, 8, 8}).requires_grad_();
    Tensors found;
    for (int step = 0; step < 3; ++step) {
      auto run = [net](const at::Tensor& in) mutable { return net->forward(in); };
      const auto out = checkpoints ? checkpoint(run, input) : run(input);
      out.square().sum().backward();
    }
    for (const auto& buffer : net->buffers()) found.push_back(buffer);
    for (const auto& parameter : net->parameters()) found.push_back(parameter.grad());
    found.push_back(input.grad());
    return found;
  };
  const auto plain = train(false);
  EXPECT_EQ(plain[2].item<std::int64_t>(), 3);
  expect_equal(plain, train(true));
}

TEST(CheckpointTest, SeveralArgumentsAndResults) {
  const auto run = [](const at::Tensor& a, double factor, const std::optional<at::Tensor>& b, const Tensors& c,
                      const std::string& word) {
    const auto sum = a.mul(factor).exp() + (b ? b->sin() : at::zeros({})) + c[0].cos() * c[1].tanh();
    return std::make_tuple(sum, a.sigmoid(), static_cast<std::int64_t>(word.size()));
  };
  const auto leaf = [](int seed) {
    torch::manual_seed(seed);
    return torch::randn({5, 3}).requires_grad_();
  };
  for (const bool has_b : {false, true}) {
    Tensors found[2];
    for (const bool kept : {false, true}) {
      const auto a = leaf(1), c0 = leaf(3), c1 = leaf(4);
      const auto b = has_b ? std::optional<at::Tensor>(leaf(2)) : std::nullopt;
      const auto [one, two, length] = kept ? checkpoint(run, a, 0.5, b, Tensors{c0, c1}, std::string("four"))
                                           : run(a, 0.5, b, Tensors{c0, c1}, "four");
      EXPECT_EQ(length, 4);
      (one.square().sum() + two.sum()).backward();
      found[kept] = {one.detach(), two.detach(), a.grad(), c0.grad(), c1.grad()};
      if (b) found[kept].push_back(b->grad());
    }
    expect_equal(found[0], found[1]);
  }
}

TEST(CheckpointTest, SecondDerivativesAndGraphsThatAreKept) {
  const auto x = torch::tensor({0.3, -0.7, 1.1}, at::kDouble).requires_grad_();
  const auto run = [](const at::Tensor& in) { return in.sin().exp() * in; };
  const auto gradients_of = [&](const at::Tensor& out) {
    const auto first = torch::autograd::grad({out.sum()}, {x}, {}, true, true)[0];
    const auto second = torch::autograd::grad({first.sum()}, {x}, {}, true, true)[0];
    return Tensors{first.detach(), second.detach(), torch::autograd::grad({second.sum()}, {x})[0]};
  };
  expect_equal(gradients_of(run(x)), gradients_of(checkpoint(run, x)));
}

at::Tensor nested(const at::Tensor& x, int depth) {
  if (depth == 0) return x.sin() * x;
  return checkpoint([depth](const at::Tensor& in) { return nested(in.cos() + in, depth - 1); }, x);
}

TEST(CheckpointTest, CheckpointsNest) {
  const auto x = torch::linspace(-1, 1, 7).requires_grad_();
  nested(x, 20).sum().backward();
  auto plain = x.detach().requires_grad_();
  auto y = plain;
  for (int i = 0; i < 20; ++i) y = y.cos() + y;
  (y.sin() * y).sum().backward();
  EXPECT_TRUE(at::equal(x.grad(), plain.grad()));
}

TEST(CheckpointTest, OneFunctionMayBeUsedTwiceAndInPart) {
  const auto x = torch::ones({4}).requires_grad_();
  const auto run = [](const at::Tensor& in) { return std::make_tuple(in.exp(), in.sin()); };
  const auto [exponential, sine] = checkpoint(run, x);
  const auto once = torch::autograd::grad({sine.sum()}, {x}, {}, true)[0];
  const auto again = torch::autograd::grad({sine.sum() + exponential.sum()}, {x})[0];
  EXPECT_TRUE(at::equal(once, x.detach().cos()));
  EXPECT_TRUE(at::allclose(again, x.detach().cos() + x.detach().exp()));
}

TEST(CheckpointTest, NothingIsKeptAfterBackward) {
  Net net(3, 32, true);
  const auto input = torch::randn({64, 32});
  net->forward(input).sum().backward();
  Meter meter;
  {
    const auto out = net->forward(input);
    out.sum().backward({}, /*retain_graph=*/true);
    const auto random_state = at::detail::getDefaultCPUGenerator().get_state().numel();
    EXPECT_LE(meter.live_bytes(), 3 * (64 * 32 * 4 + random_state) + 4) << "an output is the input of the next block";
  }
  EXPECT_EQ(meter.live_bytes(), 0);
}

TEST(CheckpointTest, WithoutGradientsItOnlyCalls) {
  int calls = 0;
  const auto run = [&calls](const at::Tensor& in) {
    ++calls;
    return in * 2;
  };
  torch::NoGradGuard no_grad;
  EXPECT_TRUE(at::equal(checkpoint(run, at::ones({3})), at::full({3}, 2.0)));
  EXPECT_EQ(calls, 1);
}

template <class Function>
void refused(const Function& function, const std::string& part) {
  try {
    function();
    ADD_FAILURE() << "nothing was refused";
  } catch (const std::exception& error) {
    EXPECT_THAT(error.what(), HasSubstr(part));
  }
}

TEST(CheckpointTest, AFunctionThatDoesSomethingElseTheSecondTimeIsRefused) {
  auto calls = std::make_shared<int>(0);
  const auto x = torch::ones({4}).requires_grad_();
  const auto other_shape =
      checkpoint([calls](const at::Tensor& in) { return in.repeat({++*calls, 1}).sin().sum(); }, x);
  refused([&] { other_shape.backward(); }, "did not do the same");
  *calls = 0;
  const auto fewer = checkpoint([calls](const at::Tensor& in) { return ++*calls == 1 ? in.sin().exp() : in.sin(); }, x);
  refused([&] { fewer.sum().backward(); }, "the first forward saved 2 tensors and the second 1");
  *calls = 0;
  const auto fails = checkpoint(
      [calls](const at::Tensor& in) {
        TORCH_CHECK(++*calls == 1, "the second call fails");
        return in.sin();
      },
      x);
  refused([&] { fails.sum().backward(); }, "the second call fails");
}

TEST(CheckpointTest, ChangesInPlaceAreFound) {
  const auto x = torch::ones({4}).requires_grad_();
  auto hidden = x * 2;
  const auto out = checkpoint([](const at::Tensor& in) { return in.sin(); }, hidden);
  hidden.add_(1);
  refused([&] { out.sum().backward(); }, "modified by an inplace operation");
  const auto inside = checkpoint(
      [](const at::Tensor& in) {
        auto exponential = in.exp();  // saves its result
        exponential.mul_(2);
        return exponential.sin();
      },
      x);
  refused([&] { inside.sum().backward(); }, "changes it in place");
}

TEST(CheckpointTest, SequentialInSegments) {
  torch::manual_seed(0);
  nn::Sequential net;
  for (int i = 0; i < 7; ++i) {
    net->push_back(nn::Linear(16, 16));
    net->push_back(nn::Tanh());
  }
  const auto input = torch::randn({8, 16}).requires_grad_();
  net->forward(input).sum().backward();
  auto plain = gradients(*net);
  plain.push_back(input.grad().clone());
  for (const std::int64_t segments : {1, 2, 3, 5, 14}) {
    net->zero_grad();
    input.mutable_grad().zero_();
    checkpoint_sequential(net, segments, input).sum().backward();
    auto kept = gradients(*net);
    kept.push_back(input.grad().clone());
    expect_equal(plain, kept);
  }
  for (const std::int64_t segments : {0, -1, 15}) {
    refused([&] { (void)checkpoint_sequential(net, segments, input); }, "give 1 to 14");
  }
}

}  // namespace
}  // namespace oxytorch::memory
