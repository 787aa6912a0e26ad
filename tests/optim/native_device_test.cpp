// The step tail through the native kernels of a device's backend.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>
#include <vector>

#include "device/torch_device.h"
#include "optim/played_backend.h"
#include "oxytorch/error.h"
#include "oxytorch/logging.h"
#include "oxytorch/optim.h"

namespace oxytorch::test {
namespace {

using optim::Algorithm;

// `sim` has kernels of its own; other devices get those of played_backend.h.
bool is_played() { return c10::DeviceTypeName(torch_device().type(), true) != "sim"; }

c10::Device device() {
  static const bool registered = [] {
    if (is_played()) register_played(c10::DeviceTypeName(torch_device().type(), true).c_str());
    return true;
  }();
  static_cast<void>(registered);
  return torch_device();
}

at::Tensor here(double value, at::ScalarType type = at::kFloat) {
  return at::full({}, value, at::TensorOptions(type).device(device()));
}

// Parameters laid out in different ways; the last one only where the kernels need not take it.
std::vector<at::Tensor> parameters(c10::Device where, at::ScalarType type, bool with_columns, bool with_others) {
  torch::manual_seed(0);
  std::vector<at::Tensor> made;
  for (const std::vector<std::int64_t>& sizes : std::vector<std::vector<std::int64_t>>{{33, 20}, {}, {3000}}) {
    made.push_back(at::randn(sizes).to(where, type).requires_grad_());
  }
  if (with_columns) made.push_back(at::randn({20, 7}).to(where, type).t().requires_grad_());
  made.push_back(at::zeros({0}).to(where, type).requires_grad_());
  if (with_others) made.push_back(at::randn({5, 5}, at::kDouble).to(where).requires_grad_());
  return made;
}

void give_gradients(const std::vector<at::Tensor>& params, int seed, double factor = 1) {
  torch::manual_seed(seed);
  for (const at::Tensor& p : params)
    p.mutable_grad() = at::randn(p.sizes()).mul(factor).to(p.device(), p.scalar_type());
}

optim::GroupOptions group(Algorithm algorithm) {
  optim::GroupOptions options;
  options.lr = 1e-2;
  options.momentum = 0.9;
  options.dampening = 0.1;
  options.weight_decay = 0.1;
  options.decoupled_weight_decay = true;
  options.amsgrad = algorithm == Algorithm::Adam;
  options.centered = true;
  options.lr_decay = 0.1;
  return options;
}

struct Tail {
  Tail(Algorithm algorithm, const optim::TailOptions& options, c10::Device where, at::ScalarType type,
       bool with_others = false)
      : params(parameters(where, type, options.agc == 0, with_others)), tail(algorithm, options) {
    tail.add_group(params, {}, group(algorithm));
  }
  std::vector<at::Tensor> params;
  optim::StepTail tail;
};

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

std::vector<at::Tensor> with_stats(const optim::StepTail& tail) {
  std::vector<at::Tensor> found = contents(tail);
  const optim::TailStats& s = tail.stats();
  for (const at::Tensor& t :
       {s.grad_norm, s.found_inf, s.applied, s.skipped, s.grad_norms, s.param_norms, s.update_norms}) {
    if (t.defined()) found.push_back(t.cpu().clone());
  }
  return found;
}

void expect_same(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b, const std::string& what) {
  ASSERT_EQ(a.size(), b.size()) << what;
  for (std::size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(at::equal(a[i], b[i])) << what << ", tensor " << i;
}

struct Format {
  const char* name;
  at::ScalarType type;
  optim::TailOptions options;
};

std::vector<Format> formats() {
  optim::TailOptions plain;
  plain.clip_norm = 1;
  plain.ema_decay = 0.9;
  plain.collect_stats = true;
  optim::TailOptions agc;
  agc.agc = 0.1;
  agc.copy_dtype = at::kHalf;
  agc.zero_grads = true;
  optim::TailOptions narrow;
  narrow.state_dtype = optim::StateFormat::Int8;
  narrow.master_weights = optim::MasterFormat::Int8;
  narrow.stochastic_rounding = true;
  narrow.seed = 5;
  narrow.clip_value = 0.5;
  optim::TailOptions masters;
  masters.master_weights = optim::MasterFormat::Float32;
  masters.state_dtype = optim::StateFormat::BFloat16;
  masters.norm_in_backward = true;
  return {{"plain", at::kFloat, plain},
          {"agc", at::kFloat, agc},
          {"narrow", at::kBFloat16, narrow},
          {"masters", at::kHalf, masters}};
}

class NativeDevice : public testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    if (torch_device().is_cpu()) GTEST_SKIP() << "for a fake device";
    if (GetParam() && !is_played()) GTEST_SKIP() << "sim has no streams to wrap";
    played() = {};
    played().wraps = GetParam();
    device();
  }
};
INSTANTIATE_TEST_SUITE_P(Streams, NativeDevice, testing::Bool(),
                         [](const auto& info) { return info.param ? "Wrapped" : "Waited"; });

TEST_P(NativeDevice, GivesTheProcessorsBitsWithoutReadingTheDevice) {
  for (const Algorithm algorithm :
       {Algorithm::Adam, Algorithm::SGD, Algorithm::Lion, Algorithm::Adagrad, Algorithm::RMSprop}) {
    for (const Format& format : formats()) {
      const std::string what = std::string(format.name) + ", algorithm " + std::to_string(static_cast<int>(algorithm));
      Tail mine(algorithm, format.options, device(), format.type),
          cpu(algorithm, format.options, at::kCPU, format.type);
      for (int i = 1; i <= 3; ++i) {
        give_gradients(mine.params, i);
        give_gradients(cpu.params, i);
        if (i == 2) mine.params[1].mutable_grad() = cpu.params[1].mutable_grad() = at::Tensor();
        const std::int64_t before = host_reads();
        mine.tail.step();
        EXPECT_EQ(host_reads(), before) << what;
        cpu.tail.step();
      }
      EXPECT_TRUE(mine.tail.native());
      EXPECT_GT(mine.tail.bytes_per_step(), 0);
      expect_same(with_stats(mine.tail), with_stats(cpu.tail), what);
      for (const at::Tensor& p : mine.params) {
        if (format.options.zero_grads) {
          EXPECT_FALSE(p.grad().cpu().any().item<bool>()) << what;
        }
      }
    }
  }
  EXPECT_EQ(played().live, 0);
}

TEST_P(NativeDevice, SkipsWithoutChangingAByte) {
  for (const Format& format : formats()) {
    Tail mine(Algorithm::SGD, format.options, device(), format.type);
    give_gradients(mine.params, 1);
    mine.tail.step();
    const std::vector<at::Tensor> before = contents(mine.tail);
    optim::StepInputs told;
    told.found_inf = here(1);
    give_gradients(mine.params, 2);
    mine.tail.step(told);
    optim::StepInputs asked;
    asked.skip = here(1, at::kBool);
    mine.tail.step(asked);
    optim::StepInputs limited;
    limited.norm_limit = here(1e-4, at::kDouble);
    give_gradients(mine.params, 2);
    mine.tail.step(limited);
    EXPECT_EQ(mine.tail.stats().found_inf.item<float>(), 0);
    give_gradients(mine.params, 3, std::numeric_limits<double>::infinity());
    optim::StepInputs scaled;
    scaled.grad_scale = here(2, at::kDouble);
    scaled.found_inf = here(0, at::kDouble);
    mine.tail.step(scaled);
    EXPECT_EQ(scaled.found_inf.item<double>(), 1);
    EXPECT_EQ(mine.tail.stats().found_inf.item<float>(), 1);
    EXPECT_EQ(mine.tail.stats().applied.item<float>(), 0);
    EXPECT_EQ(mine.tail.stats().skipped.item<std::int64_t>(), 4);
    expect_same(before, contents(mine.tail), format.name);
  }
}

TEST_P(NativeDevice, WhatIsReducedAreTheSumsThatTheKernelsMeasured) {
  optim::TailOptions options;
  options.clip_norm = 0.5;
  Tail mine(Algorithm::Adam, options, device(), at::kFloat), cpu(Algorithm::Adam, options, at::kCPU, at::kFloat);
  int calls = 0;
  // As of four ranks whose shards are alike.
  for (Tail* each : {&mine, &cpu}) {
    each->tail.set_norm_reducer([&](const at::Tensor& sums) {
      ++calls;
      EXPECT_GT(sums.cpu().sum().item<double>(), 0) << "read before it was measured";
      return sums * 4;
    });
  }
  for (int i = 1; i <= 3; ++i) {
    give_gradients(mine.params, i);
    give_gradients(cpu.params, i);
    mine.tail.step();
    cpu.tail.step();
    EXPECT_EQ(mine.tail.stats().grad_norm.item<float>(), cpu.tail.stats().grad_norm.item<float>());
  }
  EXPECT_EQ(calls, 6);
  expect_same(contents(mine.tail), contents(cpu.tail), "sums of four");
}

TEST_P(NativeDevice, OneVerdictServesThoseThatTheKernelsCannotTake) {
  optim::TailOptions options;
  options.clip_norm = 0.5;
  options.collect_stats = true;
  Tail mine(Algorithm::Adam, options, device(), at::kFloat, true),
      cpu(Algorithm::Adam, options, at::kCPU, at::kFloat, true);
  for (int i = 1; i <= 3; ++i) {
    give_gradients(mine.params, i);
    give_gradients(cpu.params, i);
    if (i == 2) mine.params.back().mutable_grad() = cpu.params.back().mutable_grad() = at::Tensor();
    mine.tail.step();
    cpu.tail.step();
    EXPECT_EQ(mine.tail.stats().grad_norm.item<float>(), cpu.tail.stats().grad_norm.item<float>());
    EXPECT_TRUE(at::allclose(mine.tail.stats().grad_norms.cpu(), cpu.tail.stats().grad_norms));
  }
  EXPECT_FALSE(mine.tail.native());
  EXPECT_EQ(played().rounds, is_played() ? 3 : 0);
  for (std::size_t i = 0; i < mine.params.size(); ++i) {
    EXPECT_TRUE(at::allclose(mine.params[i].cpu(), cpu.params[i], 1e-6, 1e-7)) << i;
  }
  const std::vector<at::Tensor> before = contents(mine.tail);
  give_gradients(mine.params, 4);
  mine.params.back().mutable_grad().fill_(std::numeric_limits<double>::quiet_NaN());
  mine.tail.step();
  expect_same(before, contents(mine.tail), "NaN in one of the others");
}

TEST_P(NativeDevice, ReadsRatesWhereTheyLie) {
  for (const at::ScalarType type : {at::kFloat, at::kDouble, at::kHalf}) {
    for (const bool on_cpu : {false, true}) {
      if (on_cpu && type == at::kHalf) continue;
      Tail mine(Algorithm::Adam, {}, device(), at::kFloat), cpu(Algorithm::Adam, {}, at::kCPU, at::kFloat);
      optim::GroupOptions mine_group = group(Algorithm::Adam), cpu_group = mine_group;
      mine_group.lr_tensor = on_cpu ? at::full({}, 0.5, type) : here(0.5, type);
      cpu_group.lr = 0.5;
      mine.tail.set_group_options(0, mine_group);
      for (int i = 1; i <= 2; ++i) {
        give_gradients(mine.params, i);
        give_gradients(cpu.params, i);
        cpu.tail.set_group_options(0, cpu_group);
        mine.tail.step();
        cpu.tail.step();
        cpu_group.lr = 0.25;
        mine_group.lr_tensor.fill_(0.25);
      }
      expect_same(contents(mine.tail), contents(cpu.tail), "learning rate");
    }
  }
}

TEST_P(NativeDevice, ConfiguresOnlyWhatChanged) {
  if (!is_played()) GTEST_SKIP() << "counts calls";
  Tail mine(Algorithm::SGD, {}, device(), at::kFloat);
  give_gradients(mine.params, 1);
  for (int i = 0; i < 3; ++i) mine.tail.step();
  EXPECT_EQ(played().configured, 1);
  optim::GroupOptions changed = group(Algorithm::SGD);
  changed.lr = 0.5;
  mine.tail.set_group_options(0, changed);
  mine.tail.step();
  EXPECT_EQ(played().configured, 2);
  const at::Tensor kept = mine.params[0].grad();
  give_gradients(mine.params, 2);
  mine.tail.step();
  EXPECT_EQ(played().configured, 3);
  EXPECT_EQ(played().created, 1);
}

TEST_P(NativeDevice, TakesParametersThatComeLater) {
  optim::TailOptions options;
  options.clip_norm = 1;
  options.collect_stats = true;
  Tail mine(Algorithm::Adam, options, device(), at::kFloat), cpu(Algorithm::Adam, options, at::kCPU, at::kFloat);
  for (int i = 1; i <= 4; ++i) {
    for (Tail* one : {&mine, &cpu}) {
      if (i == 3) {
        const auto more = parameters(one == &mine ? device() : at::kCPU, at::kFloat, true, false);
        one->tail.add_group(more, {}, group(Algorithm::Adam));
        one->params.insert(one->params.end(), more.begin(), more.end());
      }
      give_gradients(one->params, i);
      one->tail.step();
    }
  }
  expect_same(with_stats(mine.tail), with_stats(cpu.tail), "with a second group");
}

TEST_P(NativeDevice, StepsAsGradientsArrive) {
  optim::TailOptions options;
  options.step_in_backward = true;
  options.nonfinite = optim::NonFinite::Propagate;
  options.collect_stats = true;
  Tail mine(Algorithm::Adam, options, device(), at::kFloat), cpu(Algorithm::Adam, options, at::kCPU, at::kFloat);
  for (int i = 1; i <= 2; ++i) {
    give_gradients(mine.params, i);
    give_gradients(cpu.params, i);
    for (std::size_t p = 0; p < mine.params.size(); ++p) {
      mine.tail.grad_ready(p, 2);
      cpu.tail.grad_ready(p, 2);
    }
    mine.tail.step();
    cpu.tail.step();
  }
  expect_same(contents(mine.tail), contents(cpu.tail), "in backward");
  EXPECT_TRUE(at::equal(mine.tail.stats().grad_norms.cpu(), cpu.tail.stats().grad_norms));
}

TEST_P(NativeDevice, RaisesBeforeAnythingIsChanged) {
  optim::TailOptions options;
  options.nonfinite = optim::NonFinite::Raise;
  Tail mine(Algorithm::Adam, options, device(), at::kFloat);
  give_gradients(mine.params, 1);
  mine.tail.step();
  const std::vector<at::Tensor> before = contents(mine.tail);
  mine.params[2].mutable_grad().fill_(std::numeric_limits<float>::infinity());
  try {
    mine.tail.step();
    FAIL() << "nothing was raised";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("2 of group 0"), std::string::npos) << error.what();
  }
  expect_same(before, contents(mine.tail), "raised");
  if (!is_played()) return;
  played().fails = true;
  give_gradients(mine.params, 2);
  try {
    mine.tail.step();
    FAIL() << "nothing was raised";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("tail_measure"), std::string::npos) << error.what();
  }
  expect_same(before, contents(mine.tail), "failed");
  played().fails = false;
  mine.tail.step();
  EXPECT_EQ(mine.tail.stats().applied.item<float>(), 1);
}

TEST_P(NativeDevice, SpikesStillOnTheirWayAreDrained) {
  optim::SpikeDetector detector({}, device());
  for (int i = 0; i < 50; ++i) {
    detector.judge(at::full({}, i == 49 ? NAN : 1.0).to(device()));
    detector.record(i, at::ones({}).to(device()));
  }
  auto found = detector.arrived(false);
  const auto rest = detector.drain();
  found.insert(found.end(), rest.begin(), rest.end());
  ASSERT_EQ(found.size(), 1U);
  EXPECT_EQ(found[0].step, 49);
}

TEST_P(NativeDevice, FallsBackOnceAndSaysSo) {
  if (!is_played()) GTEST_SKIP() << "needs a backend that declines";
  played().serves = false;
  reset_log_once();
  std::vector<std::string> said;
  const LogSink old = set_log_sink([&said](const LogRecord& record) { said.emplace_back(record.message); });
  Tail mine(Algorithm::Adam, {}, device(), at::kFloat), cpu(Algorithm::Adam, {}, at::kCPU, at::kFloat);
  optim::TailOptions composed;
  composed.force_composite = true;
  Tail asked(Algorithm::Adam, composed, device(), at::kFloat);
  for (Tail* tail : {&mine, &cpu, &asked}) {
    for (int i = 1; i <= 2; ++i) {
      give_gradients(tail->params, i);
      tail->tail.step();
    }
  }
  set_log_sink(old);
  ASSERT_EQ(said.size(), 1U);
  EXPECT_NE(said[0].find("played"), std::string::npos);
  EXPECT_FALSE(mine.tail.native());
  EXPECT_EQ(played().created, 0);
  for (std::size_t i = 0; i < mine.params.size(); ++i) {
    EXPECT_TRUE(at::allclose(mine.params[i].cpu(), cpu.params[i], 1e-5, 1e-6));
    EXPECT_TRUE(at::equal(mine.params[i].cpu(), asked.params[i].cpu()));
  }
}

}  // namespace
}  // namespace oxytorch::test
