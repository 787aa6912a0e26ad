// The C++ side of the step tail on another device than the CPU.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <vector>

#include "device/torch_device.h"
#include "oxytorch/optim.h"

namespace oxytorch::test {
namespace {

using optim::Algorithm;

constexpr Algorithm kAlgorithms[] = {Algorithm::Adam,    Algorithm::SGD,     Algorithm::Lion,
                                     Algorithm::Adagrad, Algorithm::RMSprop, Algorithm::Muon};

std::vector<at::Tensor> matrices(c10::Device device, at::ScalarType type) {
  torch::manual_seed(0);
  std::vector<at::Tensor> made;
  for (const auto& [rows, columns] : {std::pair{33, 20}, {5, 7}}) {
    made.push_back(at::randn({rows, columns}).to(device, type).requires_grad_());
  }
  return made;
}

void give_gradients(const std::vector<at::Tensor>& params, int seed) {
  torch::manual_seed(seed);
  for (const at::Tensor& p : params) p.mutable_grad() = at::randn(p.sizes()).to(p.device(), p.scalar_type());
}

optim::GroupOptions group() {
  optim::GroupOptions options;
  options.lr = 1e-2;
  options.eps = 1e-3;
  options.momentum = 0.9;
  options.weight_decay = 0.1;
  options.decoupled_weight_decay = true;
  return options;
}

// Every tensor that a step may write.
std::vector<at::Tensor> contents(const optim::StepTail& tail) {
  std::vector<at::Tensor> found;
  for (std::size_t i = 0; i < tail.param_count(); ++i) {
    const optim::ParamState& s = tail.state(i);
    for (const at::Tensor& t : {tail.param(i).detach(), s.step, s.moments[0], s.moments[1], s.moments[2], s.scales[0],
                                s.scales[1], s.scales[2], s.master, s.low_bits, s.ema, s.copy}) {
      if (t.defined()) found.push_back(t.cpu().clone());
    }
  }
  return found;
}

struct Tail {
  explicit Tail(Algorithm algorithm, optim::TailOptions options, c10::Device device, at::ScalarType type)
      : params(matrices(device, type)), tail(algorithm, options) {
    tail.add_group(params, {}, group());
  }
  void step(int seed, const optim::StepInputs& inputs = {}) {
    give_gradients(params, seed);
    tail.step(inputs);
  }
  std::vector<at::Tensor> params;
  optim::StepTail tail;
};

TEST(StepTailOnDevice, FollowsTheCpuWithoutReadingTheDevice) {
  if (test_device().is_cpu()) GTEST_SKIP() << "one device";
  for (const Algorithm algorithm : kAlgorithms) {
    optim::TailOptions options;
    options.clip_norm = 1;
    options.ema_decay = 0.9;
    options.collect_stats = true;
    Tail here(algorithm, options, test_device(), at::kFloat), there(algorithm, options, at::kCPU, at::kFloat);
    for (int i = 1; i <= 3; ++i) {
      give_gradients(here.params, i);
      const std::int64_t before = host_reads();
      here.tail.step();
      EXPECT_EQ(host_reads(), before) << "algorithm " << static_cast<int>(algorithm);
      there.step(i);
    }
    if (test_device().type() == at::kHPU) {
      EXPECT_FALSE(here.tail.native()) << "no backend has kernels for it";
    }
    // Newton-Schulz multiplies in bfloat16, which a device may sum in another order: a part of what was trained.
    const double allowed = algorithm == Algorithm::Muon ? 2e-2 : 1e-4;
    const std::vector<at::Tensor> start = matrices(at::kCPU, at::kFloat);
    const auto expect_follows = [&](const at::Tensor& a, const at::Tensor& b, const at::Tensor& from) {
      const auto off = (a.cpu() - b).norm().item<double>(), trained = (b - from).norm().item<double>();
      EXPECT_GT(trained, 0) << "algorithm " << static_cast<int>(algorithm);
      EXPECT_LE(off, allowed * trained) << "algorithm " << static_cast<int>(algorithm);
    };
    for (std::size_t i = 0; i < here.params.size(); ++i) {
      expect_follows(here.params[i].detach(), there.params[i].detach(), start[i].detach());
      expect_follows(here.tail.state(i).ema, there.tail.state(i).ema, start[i].detach());
    }
    EXPECT_EQ(here.tail.stats().grad_norm.device(), test_device());
    EXPECT_NEAR(here.tail.stats().grad_norm.item<float>(), there.tail.stats().grad_norm.item<float>(), 1e-4);
  }
}

TEST(StepTailOnDevice, ASkippedStepChangesNoByte) {
  for (const Algorithm algorithm : kAlgorithms) {
    optim::TailOptions options;
    options.ema_decay = 0.9;
    options.state_dtype = optim::StateFormat::Int8;
    options.master_weights = optim::MasterFormat::Int8;
    options.copy_dtype = at::kHalf;
    options.stochastic_rounding = true;
    Tail here(algorithm, options, test_device(), at::kBFloat16);
    here.step(1);
    const std::vector<at::Tensor> before = contents(here.tail);
    optim::StepInputs told;
    told.found_inf = at::ones({}, at::TensorOptions(test_device()));
    here.step(2, told);
    give_gradients(here.params, 3);
    here.params[0].mutable_grad().fill_(std::numeric_limits<float>::quiet_NaN());
    here.tail.step();
    const std::vector<at::Tensor> after = contents(here.tail);
    ASSERT_EQ(before.size(), after.size());
    for (std::size_t i = 0; i < before.size(); ++i) {
      EXPECT_TRUE(at::equal(before[i], after[i])) << "algorithm " << static_cast<int>(algorithm) << ", tensor " << i;
    }
    EXPECT_EQ(here.tail.stats().skipped.item<std::int64_t>(), 2);
  }
}

TEST(StepTailOnDevice, DecodedStateMakesTheSameBytesAgain) {
  optim::TailOptions options;
  options.state_dtype = optim::StateFormat::Int8;
  Tail here(Algorithm::Adam, options, test_device(), at::kFloat);
  for (int i = 1; i <= 3; ++i) here.step(i);
  Tail other(Algorithm::Adam, options, test_device(), at::kFloat);
  for (std::size_t i = 0; i < here.params.size(); ++i) {
    EXPECT_EQ(here.tail.decoded_state(i).moments[0].scalar_type(), at::kFloat);
    other.tail.set_state(i, here.tail.decoded_state(i));
    for (const std::size_t k : {std::size_t{0}, std::size_t{1}}) {
      EXPECT_TRUE(at::equal(here.tail.state(i).moments[k].cpu(), other.tail.state(i).moments[k].cpu()));
      EXPECT_TRUE(at::equal(here.tail.state(i).scales[k].cpu(), other.tail.state(i).scales[k].cpu()));
    }
  }
}

TEST(OptimizersOnDevice, TrainAModel) {
  // Weights made where they stay: LibTorch's Module::to cannot move to a device of this kind.
  const auto loss_after = [](c10::Device device) {
    torch::manual_seed(0);
    const auto made = [&](at::IntArrayRef sizes) { return at::randn(sizes).to(device); };
    const at::Tensor inputs = made({32, 8}), targets = made({32, 1});
    const at::Tensor first = made({8, 16}).requires_grad_(), second = made({16, 1}).requires_grad_();
    optim::AdamW opt({first, second}, optim::AdamWOptions(1e-2).clip_norm(1.0).ema_decay(0.9));
    at::Tensor loss;
    for (int i = 0; i < 10; ++i) {
      opt.zero_grad();
      loss = torch::mse_loss(inputs.matmul(first).tanh().matmul(second), targets);
      loss.backward();
      opt.step();
    }
    return loss.item<double>();
  };
  EXPECT_NEAR(loss_after(test_device()), loss_after(at::kCPU), 1e-4);
}

}  // namespace
}  // namespace oxytorch::test
