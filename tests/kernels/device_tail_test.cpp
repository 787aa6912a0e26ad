// The native step tail of a device on an emulated grid: the same bits as the processor's engine, for every rule, type
// and option, whatever the order of the threads.
#include "backends/tail/device_tail.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <tuple>
#include <vector>

#include "backends/last_error.h"
#include "emulated_tail.h"
#include "step_tail_cases.h"

namespace oxytorch::kernels {
namespace {

using device::ThreadOrder;

// Around every border: elements of a thread, lanes, sections, chunks; rows within and across chunks.
constexpr Size kDeviceSizes[] = {{0, 1},      {1, 1},     {15, 5},    {31, 1},    {32, 1},
                                 {33, 3},     {100, 1},   {511, 7},   {512, 1},   {1000, 40},
                                 {2500, 500}, {16384, 1}, {16385, 5}, {40007, 1}, {36000, 3}};

oxy_tail_tensor as_device(const TailTensor& t, std::uint32_t stream) {
  oxy_tail_tensor d{};
  d.param = t.param;
  d.grad = t.grad;
  d.master = t.master;
  d.residue = t.residue;
  d.copy = t.copy;
  for (int k = 0; k < 3; ++k) {
    d.state[k] = t.state[k].data;
    d.scale[k] = t.state[k].scale;
  }
  d.ema = t.ema;
  d.step = t.step;
  d.numel = t.numel;
  d.rows = t.rows;
  d.group = t.group;
  d.stream = stream;
  d.type = static_cast<oxy_element>(t.type);
  d.grad_type = static_cast<oxy_element>(t.grad_type);
  d.state_type = static_cast<oxy_element>(t.state_type);
  d.copy_type = static_cast<oxy_element>(t.copy_type);
  d.first = t.first ? 1 : 0;
  return d;
}

oxy_tail_group as_device(const TailGroup& g) {
  oxy_tail_group d{};
  d.lr = g.lr;
  d.beta1 = g.beta1;
  d.beta2 = g.beta2;
  d.eps = g.eps;
  d.weight_decay = g.weight_decay;
  d.momentum = g.momentum;
  d.dampening = g.dampening;
  d.lr_decay = g.lr_decay;
  d.rule = static_cast<oxy_tail_rule>(g.rule);
  d.nesterov = g.nesterov ? 1 : 0;
  d.maximize = g.maximize ? 1 : 0;
  return d;
}

// What both sides learn of a round.
struct Learnt {
  std::vector<double> sums;
  float grad_norm = -1, found_inf = -1, applied = -1;
  std::int64_t skipped = 0;
  std::vector<float> grad_norms, param_norms, update_norms;
  float told = 0;  // what found_inf holds afterwards
  bool operator==(const Learnt&) const = default;
};

// Equal, or both NaN.
MATCHER_P(SameFloats, expected, "") {
  if (arg.size() != expected.size()) return false;
  for (std::size_t i = 0; i < arg.size(); ++i) {
    if (arg[i] != expected[i] && !(std::isnan(arg[i]) && std::isnan(expected[i]))) {
      *result_listener << "place " << i << " is " << arg[i] << ", expected " << expected[i];
      return false;
    }
  }
  return true;
}

struct Round {
  TailSettings settings;
  double clip_norm = 0;
  double grad_divisor = 1;
  bool propagate = false;
  std::optional<float> grad_scale, found_inf, skip, norm_limit;
};

// The processor's engine, with the verdict of oxytorch::optim.
class HostTail {
 public:
  explicit HostTail(const std::vector<TailTensor>& tensors) : plan_(tensors) {
    learnt.grad_norms.resize(tensors.size());
    learnt.param_norms.resize(tensors.size());
    learnt.update_norms.resize(tensors.size());
  }

  void step(const Round& round, std::span<const TailGroup> groups) {
    const double sum = plan_.measure({});
    const double scale = static_cast<double>(round.grad_scale.value_or(1)) * round.grad_divisor;
    const double norm = std::sqrt(sum) / scale;
    const bool finite = std::isfinite(sum) && std::isfinite(1.0 / scale);
    const bool scaled = round.grad_scale || round.found_inf;
    const bool bad = round.found_inf.value_or(0) != 0 || (!finite && (scaled || !round.propagate));
    const bool skip = bad || round.skip.value_or(0) != 0 ||
                      norm > static_cast<double>(round.norm_limit.value_or(std::numeric_limits<float>::infinity()));
    const auto sums = plan_.grad_sum_squares();
    learnt.sums.assign(sums.begin(), sums.end());
    learnt.grad_norm = static_cast<float>(norm);
    learnt.found_inf = bad ? 1.0F : 0.0F;
    learnt.applied = skip ? 0.0F : 1.0F;
    learnt.skipped += skip ? 1 : 0;
    learnt.told = bad && round.found_inf ? 1.0F : round.found_inf.value_or(0);
    for (std::size_t i = 0; i < sums.size(); ++i) {
      learnt.grad_norms[i] = static_cast<float>(std::sqrt(sums[i]) / scale);
    }
    if (skip) {
      if (round.settings.zero_grad) plan_.zero_gradients({});
      return;
    }
    double clip = round.clip_norm > 0 ? round.clip_norm / (norm + 1e-6) : 1.0;
    if (clip > 1.0) clip = 1.0;
    TailSettings settings = round.settings;
    settings.grad_multiplier = clip / scale;
    plan_.apply(groups, settings, {});
    if (!settings.collect) return;
    for (std::size_t i = 0; i < sums.size(); ++i) {
      if (plan_.tensors()[i].grad == nullptr) continue;
      learnt.param_norms[i] = static_cast<float>(std::sqrt(plan_.param_sum_squares()[i]));
      learnt.update_norms[i] = static_cast<float>(std::sqrt(plan_.update_sum_squares()[i]));
    }
  }
  std::span<TailTensor> tensors() { return plan_.tensors(); }

  Learnt learnt;

 private:
  StepTailPlan plan_;
};

class DeviceTail {
 public:
  DeviceTail(const std::vector<TailTensor>& tensors, ThreadOrder order) {
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      tensors_.push_back(as_device(tensors[i], static_cast<std::uint32_t>(i)));
    }
    EXPECT_EQ(backend::create_tail(std::make_unique<EmulatedDevice>(order), tensors_.data(), count(), &tail_), OXY_OK)
        << backend::last_error_text;
    learnt.sums.resize(tensors.size(), -1);
    learnt.grad_norms.resize(tensors.size());
    learnt.param_norms.resize(tensors.size());
    learnt.update_norms.resize(tensors.size());
  }
  ~DeviceTail() { EXPECT_EQ(backend::destroy_tail(tail_), OXY_OK); }
  DeviceTail(const DeviceTail&) = delete;
  DeviceTail& operator=(const DeviceTail&) = delete;

  void step(const Round& round, std::span<const TailGroup> groups) {
    std::vector<oxy_tail_group> device_groups;
    for (const TailGroup& group : groups) device_groups.push_back(as_device(group));
    step(round, device_groups);
  }
  void step(const Round& round, const std::vector<oxy_tail_group>& groups) {
    float scale = round.grad_scale.value_or(0), found = round.found_inf.value_or(0);
    const float skip = round.skip.value_or(0), limit = round.norm_limit.value_or(0);
    const TailSettings& from = round.settings;
    oxy_tail_settings s{};
    s.size = sizeof(s);
    const auto flag = [](bool on, std::uint32_t bit) { return on ? bit : 0; };
    s.flags = flag(from.zero_grad, OXY_TAIL_ZERO_GRAD) | flag(from.collect, OXY_TAIL_COLLECT) |
              flag(from.stochastic, OXY_TAIL_STOCHASTIC) | flag(round.propagate, OXY_TAIL_PROPAGATE);
    s.grad_divisor = round.grad_divisor;
    s.clip_norm = round.clip_norm;
    s.clip_value = from.clip_value;
    s.agc = from.agc;
    s.agc_eps = from.agc_eps;
    s.ema_decay = from.ema_decay;
    s.seed = from.seed;
    s.grad_scale = round.grad_scale ? &scale : nullptr;
    s.found_inf = round.found_inf ? &found : nullptr;
    s.skip = round.skip ? &skip : nullptr;
    s.norm_limit = round.norm_limit ? &limit : nullptr;
    oxy_tail_results r{};
    r.size = sizeof(r);
    r.count = count();
    r.grad_norm = &learnt.grad_norm;
    r.found_inf = &learnt.found_inf;
    r.applied = &learnt.applied;
    r.skipped = &learnt.skipped;
    r.grad_norms = learnt.grad_norms.data();
    r.param_norms = learnt.param_norms.data();
    r.update_norms = learnt.update_norms.data();
    oxy_tail_verdict verdict{};
    const auto ok = [](oxy_status status) { EXPECT_EQ(status, OXY_OK) << backend::last_error_text; };
    ok(backend::configure_tail(tail_, nullptr, tensors_.data(), count(), groups.data(),
                               static_cast<std::uint32_t>(groups.size())));
    ok(backend::measure_tail(tail_, nullptr, learnt.sums.data()));
    ok(backend::judge_tail(tail_, nullptr, learnt.sums.data(), &s, &r, &verdict));
    ok(backend::apply_tail(tail_, nullptr, &verdict, &s, &r));
    learnt.told = found;
  }
  [[nodiscard]] std::uint32_t count() const { return static_cast<std::uint32_t>(tensors_.size()); }
  std::vector<oxy_tail_tensor>& tensors() { return tensors_; }
  [[nodiscard]] oxy_tail handle() const { return tail_; }

  Learnt learnt;

 private:
  std::vector<oxy_tail_tensor> tensors_;
  oxy_tail tail_ = nullptr;
};

std::vector<TailTensor> views_of(std::vector<Parameter>& parameters) {
  std::vector<TailTensor> views;
  for (auto& p : parameters) {
    views.push_back(p.view());
    views.back().stream = static_cast<std::uint32_t>(views.size() - 1);
    // One in five takes no part.
    if (views.size() % 5 == 4) views.back().grad = nullptr;
  }
  return views;
}

void expect_same(const Learnt& device, const Learnt& host) {
  EXPECT_THAT(device.sums, SameFloats(host.sums));
  EXPECT_THAT(device.grad_norms, SameFloats(host.grad_norms));
  EXPECT_THAT(device.param_norms, SameFloats(host.param_norms));
  EXPECT_THAT(device.update_norms, SameFloats(host.update_norms));
  EXPECT_THAT((std::vector{device.grad_norm, device.found_inf, device.applied, device.told}),
              SameFloats(std::vector{host.grad_norm, host.found_inf, host.applied, host.told}));
  EXPECT_EQ(device.skipped, host.skipped);
}

void expect_same(const std::vector<Parameter>& device, const std::vector<Parameter>& host) {
  for (std::size_t i = 0; i < host.size(); ++i) {
    SCOPED_TRACE("tensor " + std::to_string(i) + " of " + std::to_string(host[i].count) + " elements");
    const Parameter& d = device[i];
    const Parameter& h = host[i];
    EXPECT_TRUE(d.param == h.param) << "param";
    EXPECT_TRUE(d.grad == h.grad) << "grad";
    EXPECT_TRUE(d.copy == h.copy) << "copy";
    EXPECT_TRUE(d.state0 == h.state0 && d.state1 == h.state1 && d.state2 == h.state2) << "state";
    EXPECT_TRUE(d.master == h.master && d.residue == h.residue) << "master";
    EXPECT_EQ(d.ema, h.ema);
    EXPECT_EQ(d.step, h.step);
    if (testing::Test::HasFailure()) return;
  }
}

// Some rounds on both sides, which must not differ in a bit.
void check_rounds(const Case& c, std::span<const Round> rounds, std::span<const TailGroup> groups, ThreadOrder order,
                  unsigned seed = 11) {
  auto on_host = make(c, seed, kDeviceSizes);
  auto on_device = on_host;
  auto host_views = views_of(on_host);
  auto device_views = views_of(on_device);
  const bool first = c.rule == Rule::Sgd;
  for (auto* views : {&host_views, &device_views}) {
    for (std::size_t i = 0; i < views->size(); ++i) {
      (*views)[i].first = first && i % 2 == 0;
      (*views)[i].group = static_cast<std::uint32_t>(i % groups.size());
    }
  }
  HostTail host(host_views);
  DeviceTail device(device_views, order);
  for (const Round& round : rounds) {
    host.step(round, groups);
    device.step(round, groups);
    expect_same(device.learnt, host.learnt);
    expect_same(on_device, on_host);
    if (testing::Test::HasFailure()) return;
  }
}

Round round_of(const Options& options) {
  Round round;
  round.settings = settings_of(options);
  round.clip_norm = 0.5;
  round.grad_divisor = 2;
  return round;
}

class DeviceStepTail : public testing::TestWithParam<std::tuple<Rule, ElementType, ElementType>> {};

TEST_P(DeviceStepTail, HasTheBitsOfTheProcessor) {
  const auto [rule, type, state_type] = GetParam();
  std::size_t turn = 0;
  for (const Options& options : kOptions) {
    if (options.residue && type != BF16) continue;
    SCOPED_TRACE(options.name);
    std::vector<Round> rounds(3, round_of(options));
    rounds[1].settings.collect = false;
    rounds[1].settings.zero_grad = true;
    rounds[1].grad_scale = 1024.0F;
    TailGroup other = group_of(rule);
    other.lr = 1e-2;
    other.weight_decay = 0;
    other.nesterov = true;
    const TailGroup groups[] = {group_of(rule), other};
    constexpr ThreadOrder kOrders[] = {ThreadOrder::Forward, ThreadOrder::Backward, ThreadOrder::Shuffled};
    check_rounds({rule, type, state_type, options}, rounds, groups, kOrders[turn++ % 3]);
    if (HasFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(RulesAndTypes, DeviceStepTail,
                         testing::Combine(testing::Values(Rule::AdamW, Rule::Adam, Rule::Sgd, Rule::Lion, Rule::Adagrad,
                                                          Rule::RmsProp),
                                          testing::Values(F32, BF16, F16), testing::Values(F32, BF16, F16, Int8)));

}  // namespace
}  // namespace oxytorch::kernels
