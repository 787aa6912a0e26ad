// The native step tail of a device on an emulated grid: the same bits as the processor's engine, for every rule, type
// and option, whatever the order of the threads.
#include "backends/device_tail.h"
#include "oxytorch/backend_kernels.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
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
  d.low_bits = t.low_bits;
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
  explicit DeviceTail(const std::vector<TailTensor>& tensors, ThreadOrder order = ThreadOrder::Forward,
                      EmulatedDevice::Log* log = nullptr) {
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      tensors_.push_back(as_device(tensors[i], static_cast<std::uint32_t>(i)));
    }
    EXPECT_EQ(backend::create_tail(std::make_unique<EmulatedDevice>(order, log), tensors_.data(), count(), &tail_),
              OXY_OK)
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
    EXPECT_TRUE(d.master == h.master && d.low_bits == h.low_bits) << "master";
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
    if (options.low_bits && type != BF16) continue;
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

const TailGroup kAdamW[] = {group_of(Rule::AdamW)};

TEST(DeviceTailVerdict, IsThatOfTheProcessorForEveryInput) {
  const Case c{Rule::AdamW, F32, F32, kPlain};
  std::vector<Round> rounds;
  for (const auto& change : std::vector<std::function<void(Round&)>>{
           [](Round& r) { r.skip = 1.0F; }, [](Round& r) { r.skip = 0.0F; }, [](Round& r) { r.found_inf = 1.0F; },
           [](Round& r) { r.found_inf = 0.0F; }, [](Round& r) { r.norm_limit = 1e-9F; },
           [](Round& r) { r.norm_limit = 1e9F; }, [](Round& r) { r.grad_scale = 65536.0F; },
           [](Round& r) { r.grad_scale = 0.0F; }, [](Round& r) { r.grad_scale = std::nanf(""); },
           [](Round& r) { r.clip_norm = 0; }, [](Round& r) { r.clip_norm = 1e-3; },
           [](Round& r) { r.skip = 1.0F, r.settings.zero_grad = true; }}) {
    rounds.push_back(round_of(kPlain));
    change(rounds.back());
  }
  check_rounds(c, rounds, kAdamW, ThreadOrder::Shuffled);
}

TEST(DeviceTailVerdict, SkipsRoundsThatAreNotFiniteAndChangesNothing) {
  for (const float bad : {std::numeric_limits<float>::infinity(), std::nanf("")}) {
    for (const bool told : {false, true}) {
      auto parameters = make({Rule::RmsProp, BF16, Int8, kOptions[1]}, 3, kDeviceSizes);
      for (auto& p : parameters) {
        if (p.count == 16385) p.grad.set(16384, bad);
      }
      auto on_host = parameters;
      auto host_views = views_of(on_host), views = views_of(parameters);
      HostTail host(host_views);
      DeviceTail device(views);
      Round round = round_of(kOptions[1]);
      round.propagate = told;  // a found_inf tensor overrules it
      if (told) round.found_inf = 0.0F;
      const TailGroup groups[] = {group_of(Rule::RmsProp)};
      const auto before = parameters;
      host.step(round, groups);
      device.step(round, groups);
      expect_same(parameters, before);
      expect_same(device.learnt, host.learnt);
      EXPECT_EQ(device.learnt.applied, 0);
      EXPECT_EQ(device.learnt.found_inf, 1);
      EXPECT_EQ(device.learnt.told, told ? 1 : 0);
      EXPECT_EQ(device.learnt.skipped, 1);
    }
  }
}

TEST(DeviceTailVerdict, LetsNaNThroughWhereAsked) {
  auto parameters = make({Rule::Sgd, F32, F32, kPlain}, 3, kDeviceSizes);
  parameters[9].grad.set(3, std::nan(""));
  DeviceTail device(views_of(parameters));
  Round round = round_of(kPlain);
  round.propagate = true;
  const TailGroup groups[] = {group_of(Rule::Sgd)};
  device.step(round, groups);
  EXPECT_EQ(device.learnt.applied, 1);
  EXPECT_EQ(device.learnt.found_inf, 0);
  // The clip coefficient is NaN, and with it everything.
  EXPECT_TRUE(std::isnan(parameters[12].param.at(0)));
}

TEST(DeviceTail, KeepsFirstOnItsOwnUntilARoundIsApplied) {
  const Case c{Rule::Sgd, F32, F32, kPlain};
  std::vector<Round> rounds(4, round_of(kPlain));
  rounds[0].skip = 1.0F;  // the first gradient is still to come
  const TailGroup groups[] = {group_of(Rule::Sgd)};
  check_rounds(c, rounds, groups, ThreadOrder::Forward);
}

TEST(DeviceTail, TakesANewBufferAtItsWord) {
  auto parameters = make({Rule::Sgd, F32, F32, kPlain}, 5, kDeviceSizes);
  DeviceTail device(views_of(parameters));
  const TailGroup groups[] = {group_of(Rule::Sgd)};
  device.step(round_of(kPlain), groups);
  std::vector<float> buffer(parameters[12].count, std::nanf(""));
  device.tensors()[12].state[0] = buffer.data();
  device.tensors()[12].first = 1;
  device.step(round_of(kPlain), groups);
  EXPECT_THAT(buffer, testing::Each(testing::Truly([](float x) { return std::isfinite(x); })));
}

TEST(DeviceTail, ReadsTheLearningRateFromDeviceMemory) {
  auto on_host = make({Rule::AdamW, F32, F32, kPlain}, 5, kDeviceSizes);
  auto parameters = on_host;
  auto host_views = views_of(on_host), views = views_of(parameters);
  HostTail host(host_views);
  DeviceTail device(views);
  oxy_tail_group group = as_device(kAdamW[0]);
  float narrow = 0;
  double wide = 0;
  for (int turn = 0; turn < 4; ++turn) {
    TailGroup same = kAdamW[0];
    group.lr_tensor = turn % 2 == 0 ? static_cast<const void*>(&narrow) : &wide;
    group.lr_type = turn % 2 == 0 ? OXY_F32 : OXY_F64;
    narrow = 0.01F * static_cast<float>(turn + 1);
    wide = 0.003 * (turn + 1);
    same.lr = turn % 2 == 0 ? static_cast<double>(narrow) : wide;
    host.step(round_of(kPlain), {&same, 1});
    device.step(round_of(kPlain), std::vector{group});
    expect_same(parameters, on_host);
  }
}

TEST(DeviceTail, ServesGroupsOfDifferentRules) {
  const TailGroup groups[] = {group_of(Rule::AdamW), group_of(Rule::Adam), group_of(Rule::RmsProp)};
  for (const ElementType type : {F32, BF16}) {
    for (const bool stochastic : {false, true}) {
      const Options options{.name = "mixed", .third_state = true, .stochastic = stochastic};
      check_rounds({Rule::Adam, type, F32, options}, std::vector<Round>(2, round_of(options)), groups,
                   ThreadOrder::Backward);
    }
  }
}

TEST(DeviceTail, TakesAnyAddressThatItsElementsMayHave) {
  for (const ElementType type : {F32, BF16}) {
    auto on_host = make({Rule::AdamW, type, type, kPlain}, 5, kDeviceSizes);
    auto parameters = on_host;
    auto host_views = views_of(on_host), views = views_of(parameters);
    for (auto* all : {&host_views, &views}) {
      for (TailTensor& t : *all) {
        if (t.numel < 3) continue;
        const int width = type == F32 ? 4 : 2;
        t.param = static_cast<unsigned char*>(t.param) + width;
        t.state[1].data = static_cast<unsigned char*>(t.state[1].data) + width;
        t.numel -= 1;
        t.rows = 1;
      }
    }
    HostTail host(host_views);
    DeviceTail device(views);
    host.step(round_of(kPlain), kAdamW);
    device.step(round_of(kPlain), kAdamW);
    expect_same(device.learnt, host.learnt);
    expect_same(parameters, on_host);
  }
}

// Over 128 chunks, where the sums are of two levels.
TEST(DeviceTail, AddsTheChunksOfALargeTensorInRuns) {
  constexpr Size kLarge[] = {{131 * 16384 + 777, 1}};
  auto on_host = make({Rule::Lion, F32, F32, kPlain}, 5, kLarge);
  auto parameters = on_host;
  auto host_views = views_of(on_host), views = views_of(parameters);
  HostTail host(host_views);
  DeviceTail device(views, ThreadOrder::Shuffled);
  const TailGroup groups[] = {group_of(Rule::Lion)};
  host.step(round_of(kPlain), groups);
  device.step(round_of(kPlain), groups);
  expect_same(device.learnt, host.learnt);
  expect_same(parameters, on_host);
  const double sum = sum_squares(host_views[0].grad, F32, host_views[0].numel, {});
  EXPECT_EQ(sum, device.learnt.sums[0]);
}

TEST(DeviceTail, UploadsWhatChangedAndAllocatesNothingAfterTheFirstRound) {
  EmulatedDevice::Log log;
  {
    auto parameters = make({Rule::AdamW, BF16, F32, kOptions[6]}, 5, kDeviceSizes);
    DeviceTail device(views_of(parameters), ThreadOrder::Forward, &log);
    const Round round = round_of(kOptions[6]);
    device.step(round, kAdamW);
    const int allocations = log.allocations;
    const auto uploads = [&] {
      return std::count(log.launches.begin(), log.launches.end(), device::TailKernel::Upload);
    };
    log.launches.clear();
    device.step(round, kAdamW);
    EXPECT_EQ(uploads(), 0);
    auto other = parameters;
    device.tensors()[12].grad = other[12].grad.data();
    device.step(round, kAdamW);
    EXPECT_EQ(uploads(), 1);
    TailGroup changed = kAdamW[0];
    changed.lr = 1;
    device.step(round, {&changed, 1});
    EXPECT_EQ(uploads(), 2);
    EXPECT_EQ(log.allocations, allocations);
  }
  EXPECT_EQ(log.live, 0);
}

TEST(DeviceTail, RepairsAConfigurationThatFailedHalfWay) {
  for (int fail_in = 0; fail_in < 12; ++fail_in) {
    EmulatedDevice::Log log;
    auto on_host = make({Rule::AdamW, F32, F32, kPlain}, 5, kDeviceSizes);
    auto parameters = on_host;
    auto host_views = views_of(on_host), views = views_of(parameters);
    HostTail host(host_views);
    DeviceTail device(views, ThreadOrder::Forward, &log);
    const oxy_tail_group group = as_device(kAdamW[0]);
    log.fail_in = fail_in;
    const oxy_status status =
        backend::configure_tail(device.handle(), nullptr, device.tensors().data(), device.count(), &group, 1);
    log.fail_in = -1;
    double sum = 0;
    if (status != OXY_OK) {
      EXPECT_EQ(backend::measure_tail(device.handle(), nullptr, &sum), OXY_INVALID_STATE);
    }
    host.step(round_of(kPlain), kAdamW);
    device.step(round_of(kPlain), kAdamW);
    expect_same(parameters, on_host);
  }
}

TEST(DeviceTail, FreesWhatAFailedCreationMade) {
  for (int fail_in = 0; fail_in < 4; ++fail_in) {
    EmulatedDevice::Log log;
    log.fail_in = fail_in;
    oxy_tail_tensor tensor{};
    tensor.numel = 1;
    tensor.rows = 1;
    oxy_tail tail = nullptr;
    EXPECT_NE(backend::create_tail(std::make_unique<EmulatedDevice>(ThreadOrder::Forward, &log), &tensor, 1, &tail),
              OXY_OK);
    EXPECT_EQ(tail, nullptr);
    EXPECT_EQ(log.live, 0);
  }
}

class DeviceTailRefuses : public testing::Test {
 protected:
  DeviceTailRefuses() : parameter_({Rule::AdamW, BF16, Int8, kPlain}, BF16, 64, 2) {
    const TailTensor view = parameter_.view();
    tensor_ = as_device(view, 3);
    group_ = as_device(kAdamW[0]);
  }
  oxy_status create(const oxy_tail_tensor& tensor) {
    oxy_tail tail = nullptr;
    const oxy_status status =
        backend::create_tail(std::make_unique<EmulatedDevice>(ThreadOrder::Forward), &tensor, 1, &tail);
    if (tail != nullptr) backend::destroy_tail(tail);
    return status;
  }
  void refuses(const oxy_tail_tensor& tensor, const oxy_tail_group& group, const char* why) {
    oxy_tail tail = nullptr;
    ASSERT_EQ(backend::create_tail(std::make_unique<EmulatedDevice>(ThreadOrder::Forward), &tensor_, 1, &tail), OXY_OK);
    EXPECT_EQ(backend::configure_tail(tail, nullptr, &tensor, 1, &group, 1), OXY_INVALID_ARGUMENT) << why;
    EXPECT_THAT(backend::last_error_text, testing::HasSubstr(why));
    backend::destroy_tail(tail);
  }
  Parameter parameter_;
  oxy_tail_tensor tensor_;
  oxy_tail_group group_;
};

TEST_F(DeviceTailRefuses, TensorsThatNoTailCanHave) {
  const auto changed = [&](auto change) {
    oxy_tail_tensor t = tensor_;
    change(t);
    return create(t);
  };
  EXPECT_EQ(create(tensor_), OXY_OK);
  EXPECT_EQ(changed([](auto& t) { t.numel = -1; }), OXY_INVALID_ARGUMENT);
  EXPECT_EQ(changed([](auto& t) { t.rows = 3; }), OXY_INVALID_ARGUMENT);
  EXPECT_EQ(changed([](auto& t) { t.rows = 0; }), OXY_INVALID_ARGUMENT);
  EXPECT_EQ(changed([](auto& t) { t.type = OXY_INT8; }), OXY_INVALID_ARGUMENT);
  EXPECT_EQ(changed([](auto& t) { t.grad_type = OXY_F64; }), OXY_INVALID_ARGUMENT);
  EXPECT_EQ(changed([](auto& t) { t.copy_type = 9; }), OXY_INVALID_ARGUMENT);
  EXPECT_EQ(changed([](auto& t) { t.state_type = OXY_F64; }), OXY_INVALID_ARGUMENT);
  std::int8_t low_bits = 0;
  EXPECT_EQ(changed([&](auto& t) { t.type = OXY_F32, t.low_bits = &low_bits; }), OXY_INVALID_ARGUMENT);
}

TEST_F(DeviceTailRefuses, ConfigurationsWithASentenceForEach) {
  const auto tensor = [&](auto change, const char* why) {
    oxy_tail_tensor t = tensor_;
    change(t);
    refuses(t, group_, why);
  };
  const auto group = [&](auto change, const char* why) {
    oxy_tail_group g = group_;
    change(g);
    refuses(tensor_, g, why);
  };
  tensor([](auto& t) { t.numel = 32; }, "other sizes or types");
  tensor([](auto& t) { t.state_type = OXY_F32; }, "other sizes or types");
  tensor([](auto& t) { t.group = 1; }, "names group 1 of 1");
  tensor([](auto& t) { t.param = nullptr; }, "has a gradient but no parameter");
  tensor([](auto& t) { t.state[1] = nullptr; }, "lacks state[1]");
  tensor([](auto& t) { t.scale[0] = nullptr; }, "without its scales");
  tensor([](auto& t) { t.grad = static_cast<unsigned char*>(t.grad) + 1; }, "no multiple of its element's size");
  group([](auto& g) { g.rule = 6; }, "names rule 6");
  float lr = 0;
  group([&](auto& g) { g.lr_tensor = &lr, g.lr_type = OXY_BF16; }, "learning-rate tensor of type 1");
}

TEST_F(DeviceTailRefuses, CallsWithoutWhatTheyNeed) {
  const std::vector<TailTensor> views{parameter_.view()};
  DeviceTail device(views);
  oxy_tail_settings s{};
  oxy_tail_results r{};
  oxy_tail_verdict verdict{};
  double sums[1] = {};
  s.size = sizeof(s);
  r.size = sizeof(r);
  s.grad_divisor = 1;
  EXPECT_EQ(backend::measure_tail(device.handle(), nullptr, sums), OXY_INVALID_STATE);
  EXPECT_EQ(backend::apply_tail(device.handle(), nullptr, &verdict, &s, &r), OXY_INVALID_STATE);
  EXPECT_EQ(backend::configure_tail(device.handle(), nullptr, device.tensors().data(), 2, &group_, 1),
            OXY_INVALID_ARGUMENT);
  device.step(round_of(kPlain), kAdamW);
  const auto judge = [&] { return backend::judge_tail(device.handle(), nullptr, sums, &s, &r, &verdict); };
  const auto apply = [&] { return backend::apply_tail(device.handle(), nullptr, &verdict, &s, &r); };
  EXPECT_EQ(judge(), OXY_OK);
  s.grad_divisor = 0;
  EXPECT_EQ(judge(), OXY_INVALID_ARGUMENT);
  s.grad_divisor = 1;
  s.size = 8;
  EXPECT_EQ(judge(), OXY_INVALID_ARGUMENT);
  EXPECT_EQ(apply(), OXY_INVALID_ARGUMENT);
  s.size = sizeof(s);
  r.size = 8;
  EXPECT_EQ(judge(), OXY_INVALID_ARGUMENT);
  EXPECT_EQ(apply(), OXY_INVALID_ARGUMENT);
  r.size = sizeof(r);
  EXPECT_EQ(backend::measure_tail(device.handle(), nullptr, nullptr), OXY_INVALID_ARGUMENT);
  EXPECT_EQ(backend::judge_tail(device.handle(), nullptr, sums, &s, &r, nullptr), OXY_INVALID_ARGUMENT);
  EXPECT_EQ(backend::apply_tail(device.handle(), nullptr, nullptr, &s, &r), OXY_INVALID_ARGUMENT);
  EXPECT_EQ(backend::destroy_tail(nullptr), OXY_INVALID_ARGUMENT);
  float norm = 0;
  s.flags = OXY_TAIL_COLLECT;
  r.param_norms = &norm;
  EXPECT_EQ(apply(), OXY_INVALID_ARGUMENT) << "norms of no places";
}

TEST(DeviceCoefficients, PowersAreWithinTheirBound) {
  for (const double base : {0.0, 0.5, 0.9, 0.95, 0.999, 0.9999, 1.0}) {
    for (const double exponent : {0.0, 1.0, 2.0, 3.0, 7.0, 100.0, 1023.0, 65537.0, 1e6}) {
      const long double expected = std::pow(static_cast<long double>(base), static_cast<long double>(exponent));
      const device::Powers found = device::powers(base, 0.5, exponent);
      EXPECT_NEAR(found.first, static_cast<double>(expected), static_cast<double>(expected) * (exponent + 1) * 0x1p-53)
          << base << " to " << exponent;
      EXPECT_EQ(found.second, std::pow(0.5, exponent));
    }
  }
}

}  // namespace
}  // namespace oxytorch::kernels
