// The step tail on raw memory: every rule, type and option against an fp64 evaluation, and the same bits on every
// instruction set and thread count.
#include "oxytorch/kernels/step_tail.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "oxytorch/error.h"
#include "oxytorch/isa.h"
#include "oxytorch/kernels/codec.h"
#include "step_tail_cases.h"

namespace oxytorch::kernels {
namespace {

const TailSettings kSettings = settings_of(kPlain);

double step_all(std::vector<Parameter>& parameters, const TailGroup& group, const TailSettings& settings, int count) {
  std::vector<TailTensor> views;
  for (auto& p : parameters) views.push_back(p.view());
  StepTailPlan plan(views);
  const double sum = plan.measure(threads(count));
  plan.apply(std::span(&group, 1), settings, threads(count));
  return sum;
}

// The step of one element in fp64. A sum that cancels has the error of its terms: `grad_terms` and `update_terms` are
// the magnitudes of the gradient and of the update without the signs of theirs.
struct Expected {
  double weight, grad, state[3], grad_terms, update_terms;
};

Expected evaluate(const TailGroup& g, double step, bool has_third, double p, double grad, const double (&state)[3]) {
  Expected e{p, grad, {state[0], state[1], state[2]}, std::abs(grad), 0};
  auto& [s0, s1, s2] = e.state;
  if (g.rule == Rule::AdamW || g.rule == Rule::Lion) {
    p *= 1 - g.lr * g.weight_decay;
  } else {
    e.grad_terms += g.weight_decay * std::abs(p);
    grad += g.weight_decay * p;
  }
  e.grad = grad;
  const auto average = [](double old, double decay, double value) { return decay * old + (1 - decay) * value; };
  double terms = e.grad_terms;
  double update = grad;
  double lr = g.lr;
  const auto divide = [&](double denominator) {
    update /= denominator;
    terms /= denominator;
  };
  const auto gather = [&](double decay, double weight) {
    terms = decay * std::abs(s0) + weight * terms;
    update = s0 = decay * s0 + weight * update;
  };
  switch (g.rule) {
    case Rule::AdamW:
    case Rule::Adam: {
      gather(g.beta1, 1 - g.beta1);
      s1 = average(s1, g.beta2, grad * grad);
      if (has_third) s2 = std::max(s2, s1);
      divide(std::sqrt(has_third ? s2 : s1) / std::sqrt(1 - std::pow(g.beta2, step)) + g.eps);
      lr /= 1 - std::pow(g.beta1, step);
      break;
    }
    case Rule::Sgd: gather(g.momentum, 1 - g.dampening); break;
    case Rule::Lion:
      update = average(s0, g.beta1, grad);
      update = update > 0 ? 1 : update < 0 ? -1 : 0;
      s0 = average(s0, g.beta2, grad);
      terms = 1;
      break;
    case Rule::Adagrad:
      s1 += grad * grad;
      divide(std::sqrt(s1) + g.eps);
      lr /= 1 + (step - 1) * g.lr_decay;
      break;
    case Rule::RmsProp:
      s1 = average(s1, g.beta2, grad * grad);
      if (has_third) s2 = average(s2, g.beta2, grad);
      divide(std::sqrt(std::max(0.0, s1 - s2 * s2)) + g.eps);
      gather(g.momentum, 1);
      break;
  }
  e.weight = p - lr * update;
  e.update_terms = lr * terms;
  return e;
}

// The gradients that the rule sees.
std::vector<double> gradients(const Parameter& p, const TailSettings& settings) {
  std::vector<double> result(p.count);
  const std::vector<float> weights = p.weights();
  const std::size_t length = p.count / static_cast<std::size_t>(p.rows);
  for (std::size_t row = 0; length > 0 && row < p.count / length; ++row) {
    double grad = 0, weight = 0;
    for (std::size_t i = row * length; i < (row + 1) * length; ++i) {
      result[i] = p.grad.at(i) * settings.grad_multiplier;
      grad += result[i] * result[i];
      weight += static_cast<double>(weights[i]) * weights[i];
    }
    const double most = settings.agc * std::max(std::sqrt(weight), settings.agc_eps);
    for (std::size_t i = row * length; i < (row + 1) * length; ++i) {
      if (settings.agc > 0 && std::sqrt(grad) > most) result[i] *= most / std::sqrt(grad);
      if (settings.clip_value > 0) result[i] = std::clamp(result[i], -settings.clip_value, settings.clip_value);
    }
  }
  return result;
}

// How far a state may be from `expected` when the fp32 computation has an error of `error`.
double state_bound(ElementType type, StateCode code, bool stochastic, double expected, double largest, double error) {
  const double steps = stochastic ? 2 : 1;
  if (type == F32) return error;
  if (type == Int8) return steps * (code == StateCode::Signed ? 1.0 / 127 : 2.0 / 255) * 1.01 * largest + error;
  return steps * 0.5001 * ulp(std::abs(expected) + error, type) + error;
}

void check_state(const Case& c, const Array& now, const std::vector<double>& expected,
                 const std::vector<double>& error) {
  const std::vector<float> values = now.values();
  const bool stochastic = c.options.stochastic && c.state_type != F16;
  for (std::size_t i = 0; i < values.size(); ++i) {
    double largest = 0;
    for (std::size_t j = i / 32 * 32; j < std::min(values.size(), i / 32 * 32 + 32); ++j) {
      largest = std::max(largest, std::abs(expected[j]));
    }
    ASSERT_LE(std::abs(values[i] - expected[i]),
              state_bound(c.state_type, now.code, stochastic, expected[i], largest, error[i]))
        << "element " << i << " of " << values.size() << " expected " << expected[i];
  }
}

double weight_bound(const Case& c, double magnitude) {
  const bool stochastic = c.options.stochastic && c.type == BF16;
  if (c.type == F32 || c.options.master) return 4 * ulp(magnitude, F32);
  if (c.options.low_bits) return (stochastic ? 2 : 1) * std::ldexp(magnitude, -16) + 4 * ulp(magnitude, F32);
  return (stochastic ? 1 : 0.5) * ulp(magnitude, c.type) + 4 * ulp(magnitude, F32);
}

void check_against_fp64(const Case& c) {
  auto parameters = make(c, 1);
  const auto before = parameters;
  const TailGroup g = group_of(c.rule);
  const TailSettings settings = settings_of(c.options);
  const double sum = step_all(parameters, g, settings, 1);
  double expected_sum = 0;
  for (const auto& p : before) {
    for (std::size_t i = 0; i < p.count; ++i) expected_sum += p.grad.at(i) * p.grad.at(i);
  }
  EXPECT_NEAR(sum, expected_sum, 1e-13 * expected_sum);
  for (std::size_t k = 0; k < before.size(); ++k) {
    const Parameter& old = before[k];
    const Parameter& now = parameters[k];
    EXPECT_EQ(now.step, old.step + (old.count > 0 ? 1 : 0));
    const std::vector<double> grads = gradients(old, settings);
    const std::vector<float> weights = old.weights(), updated = now.weights();
    const std::vector<float> old_states[] = {old.state0.values(), old.state1.values(), old.state2.values()};
    std::vector<double> states[3], errors[3];
    for (std::size_t i = 0; i < old.count; ++i) {
      double state[3];
      for (std::size_t s = 0; s < 3; ++s) state[s] = old_states[s].empty() ? 0 : old_states[s][i];
      const Expected e = evaluate(g, now.step, !old_states[2].empty(), weights[i], grads[i], state);
      const double magnitude = std::max({std::abs(e.weight), std::abs(double{weights[i]}), e.update_terms});
      const double first = std::abs(g.beta1 * state[0] + (1 - g.beta1) * e.grad);
      const bool sign_is_open = c.rule == Rule::Lion && first < 4 * ulp(std::abs(state[0]) + e.grad_terms, F32);
      if (!sign_is_open) {
        ASSERT_LE(std::abs(updated[i] - e.weight), weight_bound(c, magnitude)) << "tensor " << k << ", element " << i;
      }
      for (std::size_t s = 0; s < 3; ++s) {
        const bool square = s == 1 || (s == 2 && c.rule != Rule::RmsProp);
        double error = 3 * ulp(std::abs(state[s]) + (square ? e.grad_terms * e.grad_terms : e.grad_terms), F32);
        if (s == 2 && square) error = std::max(error, errors[1].back());
        if (c.rule == Rule::RmsProp && s == 0) error = 4 * ulp(e.update_terms / g.lr, F32);
        states[s].push_back(e.state[s]);
        errors[s].push_back(error);
      }
      const double ema = old.ema[i] + (1 - settings.ema_decay) * (static_cast<double>(updated[i]) - old.ema[i]);
      const double ema_scale = std::abs(old.ema[i]) + std::abs(updated[i]);
      ASSERT_LE(std::abs(now.ema[i] - ema), 2 * ulp(ema_scale, F32));
      if (c.options.copy) {
        ASSERT_LE(std::abs(now.copy.at(i) - updated[i]), 0.5 * ulp(updated[i], now.copy.type)) << i;
      }
      if (c.options.master || c.options.low_bits) {
        ASSERT_LE(std::abs(now.param.at(i) - updated[i]), 0.5 * ulp(updated[i], c.type)) << i;
      }
    }
    if (old.state0.size() > 0) check_state(c, now.state0, states[0], errors[0]);
    if (old.state1.size() > 0) check_state(c, now.state1, states[1], errors[1]);
    if (old.state2.size() > 0) check_state(c, now.state2, states[2], errors[2]);
    if (testing::Test::HasFatalFailure()) {
      ADD_FAILURE() << "tensor " << k << " of " << old.count << " elements";
      return;
    }
  }
}

void check_same_bits(const Case& c) {
  std::unique_ptr<std::vector<Parameter>> reference;
  std::vector<double> reference_sums;
  for (Isa isa : supported_isas()) {
    const ScopedIsa scope(isa);
    for (int count : {1, 2, 3}) {
      auto parameters = make(c, 2);
      std::vector<TailTensor> views;
      for (auto& p : parameters) views.push_back(p.view());
      StepTailPlan plan(views);
      const TailGroup g = group_of(c.rule);
      std::vector<double> sums;
      sums.push_back(plan.measure(threads(count)));
      plan.apply(std::span(&g, 1), settings_of(c.options), threads(count));
      for (const auto& values : {plan.param_sum_squares(), plan.update_sum_squares()}) {
        sums.insert(sums.end(), values.begin(), values.end());
      }
      if (!reference) {
        reference = std::make_unique<std::vector<Parameter>>(parameters);
        reference_sums = sums;
      }
      EXPECT_EQ(sums, reference_sums) << name(isa) << " with " << count << " threads";
      EXPECT_TRUE(parameters == *reference) << name(isa) << " with " << count << " threads";
    }
  }
}

class StepTail : public testing::TestWithParam<std::tuple<Rule, ElementType, ElementType>> {
 protected:
  template <class F>
  void for_options(F&& check) {
    const auto [rule, type, state_type] = GetParam();
    for (const Options& options : kOptions) {
      if (options.low_bits && type != BF16) continue;
      SCOPED_TRACE(options.name);
      check(Case{rule, type, state_type, options});
      if (HasFailure()) return;
    }
  }
};

TEST_P(StepTail, AgreesWithAnFp64Evaluation) { for_options(check_against_fp64); }

TEST_P(StepTail, GivesTheSameBitsOnEveryInstructionSetAndThreadCount) { for_options(check_same_bits); }

TEST_P(StepTail, WritesNothingOutsideTheTensors) {
  for_options([](const Case& c) {
    if (c.state_type == Int8) return;  // a group that is cut has other members
    auto parameters = make(c, 3);
    const auto before = parameters;
    const TailGroup g = group_of(c.rule);
    std::vector<TailTensor> views;
    for (auto& p : parameters) {
      TailTensor view = p.view();
      view.numel = view.numel > 3 ? view.numel - 3 : 0;
      view.rows = 1;
      views.push_back(view);
    }
    StepTailPlan plan(views);
    TailSettings settings = settings_of(c.options);
    settings.zero_grad = true;
    plan.apply(std::span(&g, 1), settings, threads(1));
    for (std::size_t k = 0; k < before.size(); ++k) {
      const std::size_t n = before[k].count;
      const std::size_t changed = n > 3 ? n - 3 : 0;
      const auto same = [&](const Array& a, const Array& b) {
        const std::size_t width = a.size() == 0 ? 0 : a.bytes.size() / a.size();
        return std::equal(a.bytes.begin() + static_cast<std::ptrdiff_t>(std::min(a.size(), changed) * width),
                          a.bytes.end(),
                          b.bytes.begin() + static_cast<std::ptrdiff_t>(std::min(a.size(), changed) * width));
      };
      EXPECT_TRUE(same(parameters[k].param, before[k].param));
      EXPECT_TRUE(same(parameters[k].grad, before[k].grad));
      EXPECT_TRUE(same(parameters[k].copy, before[k].copy));
      EXPECT_TRUE(same(parameters[k].state0, before[k].state0));
      EXPECT_TRUE(same(parameters[k].state1, before[k].state1));
      EXPECT_TRUE(same(parameters[k].state2, before[k].state2));
      for (std::size_t i = changed; i < n; ++i) EXPECT_EQ(parameters[k].ema[i], before[k].ema[i]);
      for (std::size_t i = 0; i < changed; ++i) EXPECT_EQ(parameters[k].grad.at(i), 0.0);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(RulesAndTypes, StepTail,
                         testing::Combine(testing::Values(Rule::AdamW, Rule::Adam, Rule::Sgd, Rule::Lion, Rule::Adagrad,
                                                          Rule::RmsProp),
                                          testing::Values(F32, BF16, F16), testing::Values(F32, BF16, F16, Int8)));

Parameter fp32_parameter(std::size_t count, Rule rule = Rule::AdamW, ElementType type = F32) {
  return {Case{rule, type, type, kPlain}, type, count, 1};
}

TEST(StepTailMeasure, IsNotFiniteOnlyWhereAnElementIsNot) {
  for (Isa isa : supported_isas()) {
    const ScopedIsa scope(isa);
    for (ElementType type : {F32, BF16, F16}) {
      for (std::size_t at : {0U, 17U, 39999U}) {
        Parameter p = fp32_parameter(40000, Rule::AdamW, type);
        const TailTensor view = p.view();
        StepTailPlan plan({&view, 1});
        // Squares of these overflow fp32; the sum is still a number.
        p.grad.set(at, type == F16 ? 6e4 : 3e38);
        EXPECT_TRUE(std::isfinite(plan.measure(threads(2))));
        for (double bad : {kInf, -kInf, std::nan("")}) {
          p.grad.set(at, bad);
          EXPECT_FALSE(std::isfinite(plan.measure(threads(2)))) << bad;
        }
      }
    }
  }
}

TEST(StepTailMeasure, SumsTinyGradientsThatFp32SquaresWouldLose) {
  Parameter p = fp32_parameter(100);
  for (std::size_t i = 0; i < 100; ++i) p.grad.set(i, 1e-30);
  const TailTensor view = p.view();
  StepTailPlan plan({&view, 1});
  EXPECT_NEAR(std::sqrt(plan.measure(threads(1))), 1e-29, 1e-35);
}

TEST(StepTailMeasure, TakesKnownSums) {
  for (ElementType type : {F32, BF16, F16}) {
    auto parameters = make({Rule::AdamW, type, F32, kPlain}, 6);
    std::vector<TailTensor> views;
    for (auto& p : parameters) views.push_back(p.view());
    StepTailPlan plan(views);
    const double sum = plan.measure(threads(2));
    const std::vector<double> sums(plan.grad_sum_squares().begin(), plan.grad_sum_squares().end());
    std::vector<double> known;
    for (const TailTensor& t : views) known.push_back(sum_squares(t.grad, t.grad_type, t.numel, threads(3)));
    EXPECT_EQ(known, sums);
    for (auto& p : parameters) std::fill(p.grad.bytes.begin(), p.grad.bytes.end(), 0);
    EXPECT_EQ(plan.measure(threads(2), known), sum);
    known[8] = -1;  // not known: measured, and its gradient is zero now
    EXPECT_LT(plan.measure(threads(2), known), sum);
    EXPECT_EQ(plan.grad_sum_squares()[8], 0.0);
    known[8] = std::nan("");
    EXPECT_TRUE(std::isnan(plan.measure(threads(1), known)));
    EXPECT_EQ(plan.measure(threads(1)), 0.0);
  }
}

TEST(StepTail, LeavesTensorsWithoutGradientAlone) {
  auto parameters = make({Rule::AdamW, F32, Int8, kPlain}, 4);
  const auto before = parameters;
  std::vector<TailTensor> views;
  for (auto& p : parameters) views.push_back(p.view());
  for (auto& view : views) view.grad = nullptr;
  StepTailPlan plan(views);
  const TailGroup g = group_of(Rule::AdamW);
  TailSettings settings = kSettings;
  settings.agc = 0.1;
  EXPECT_EQ(plan.measure(threads(1)), 0.0);
  plan.apply(std::span(&g, 1), settings, threads(1));
  EXPECT_TRUE(parameters == before);
}

TEST(StepTail, StatisticsAreTheNormsOfParameterAndUpdate) {
  for (const Options& options : {kOptions[0], kOptions[2], kOptions[3], kOptions[5]}) {
    for (ElementType type : {F32, BF16}) {
      if (options.low_bits && type == F32) continue;
      auto parameters = make({Rule::AdamW, type, F32, options}, 5);
      const auto before = parameters;
      std::vector<TailTensor> views;
      for (auto& p : parameters) views.push_back(p.view());
      StepTailPlan plan(views);
      const TailGroup g = group_of(Rule::AdamW);
      plan.apply(std::span(&g, 1), settings_of(options), threads(2));
      for (std::size_t k = 0; k < parameters.size(); ++k) {
        double param = 0, update = 0;
        const std::vector<float> now = parameters[k].weights(), old = before[k].weights();
        for (std::size_t i = 0; i < now.size(); ++i) {
          param += static_cast<double>(now[i]) * now[i];
          const auto difference = static_cast<double>(now[i] - old[i]);
          update += difference * difference;
        }
        EXPECT_NEAR(plan.param_sum_squares()[k], param, 4e-6 * param);
        EXPECT_NEAR(plan.update_sum_squares()[k], update, 4e-6 * update);
      }
    }
  }
}

// One step of one parameter with all gradients `grad` from weights 1, without decay.
std::vector<float> step_once(Parameter& p, TailGroup g, const std::vector<float>& grad, bool first = false) {
  g.weight_decay = 0;
  p.grad.set(grad);
  TailTensor view = p.view();
  view.first = first;
  StepTailPlan plan({&view, 1});
  plan.apply({&g, 1}, {}, {});
  EXPECT_FALSE(plan.tensors()[0].first);
  return p.weights();
}

TEST(StepTailSgd, TakesTheFirstGradientAsItsBufferWhateverIsInIt) {
  Parameter p = fp32_parameter(20, Rule::Sgd);
  p.state0.set(std::vector<float>(20, std::nanf("")));
  TailGroup g = group_of(Rule::Sgd);
  g.lr = 0.5;
  EXPECT_THAT(step_once(p, g, std::vector<float>(20, 0.25F), true), testing::Each(-0.125F));
  EXPECT_THAT(p.state0.values(), testing::Each(0.25F));
  // buffer 0.9 * 0.25 + 0.8 * 1, then Nesterov: 1 + 0.9 * buffer
  g.nesterov = true;
  const double expected = -0.125 - 0.5 * (1 + 0.9 * (0.9 * 0.25 + 0.8));
  EXPECT_THAT(step_once(p, g, std::vector<float>(20, 1)), testing::Each(testing::FloatNear(float(expected), 1e-6F)));
}

TEST(StepTail, MaximizesByTheSameStepAlongTheNegativeGradient) {
  for (Rule rule : {Rule::AdamW, Rule::Sgd, Rule::Lion, Rule::Adagrad, Rule::RmsProp}) {
    for (double clip_value : {0.0, 2e-3}) {
      const Case c{rule, F32, F32, {.name = "", .clip_value = clip_value}};
      auto down = make(c, 7), up = make(c, 7);
      for (auto& p : up) {
        std::vector<float> grad = p.grad.values();
        for (float& g : grad) g = -g;
        p.grad.set(grad);
      }
      TailGroup g = group_of(rule);
      step_all(down, g, settings_of(c.options), 1);
      g.maximize = true;
      step_all(up, g, settings_of(c.options), 1);
      for (std::size_t k = 0; k < up.size(); ++k) EXPECT_EQ(up[k].weights(), down[k].weights());
    }
  }
}

// Of a number whose gradient has become 0; arithmetic on denormal ones would be slow for the rest of the run.
TEST(StepTailState, DecaysToZeroAndStaysAtNoDenormalNumber) {
  const auto states = [](Rule rule, double eps) {
    constexpr float kLeast = std::numeric_limits<float>::min();
    Parameter p = fp32_parameter(37, rule);
    std::vector<float> averages(37, kLeast), squares(37, kLeast);
    for (std::size_t i = 0; i < 37; i += 2) averages[i] = -kLeast;
    if (p.state0.size() > 0) p.state0.set(averages);
    if (p.state1.size() > 0) p.state1.set(squares);
    TailGroup g = group_of(rule);
    g.eps = eps;
    const auto weights = step_once(p, g, std::vector<float>(37, 0));
    if (rule != Rule::Lion) EXPECT_THAT(weights, testing::Each(testing::FloatNear(0, 1e-25F)));
    return std::pair{p.state0.values(), p.state1.values()};
  };
  for (Isa isa : supported_isas()) {
    const ScopedIsa scope(isa);
    for (Rule rule : {Rule::AdamW, Rule::Adam, Rule::Sgd, Rule::RmsProp}) {
      const auto [averages, squares] = states(rule, 1e-8);
      EXPECT_THAT(averages, testing::Each(0)) << name(isa);
      EXPECT_THAT(squares, testing::Each(0)) << name(isa);
    }
    EXPECT_THAT(states(Rule::AdamW, 0).second, testing::Each(testing::Gt(0))) << "the root of it decides then";
    EXPECT_THAT(states(Rule::Lion, 1e-8).first, testing::Each(testing::Ne(0))) << "its sign decides";
  }
  Parameter p = fp32_parameter(1, Rule::AdamW);
  p.state0.set({std::nanf("")});
  step_once(p, group_of(Rule::AdamW), {0});
  EXPECT_TRUE(std::isnan(p.state0.values()[0])) << "nothing is hidden";
}

TEST(StepTailLion, DoesNotMoveWhereTheAverageIsZeroOrNaN) {
  Parameter p = fp32_parameter(2, Rule::Lion);
  EXPECT_THAT(step_once(p, group_of(Rule::Lion), {0, std::nanf("")}), testing::ElementsAre(0, 0));
}

// The fp32 result that a step would store, before it is rounded: the same step with fp32 in place of `type`.
TEST(StepTailStochastic, AddsTheDocumentedBitsBelowTheCut) {
  constexpr std::size_t kCount = 20000;
  const Case narrow{Rule::AdamW, BF16, F32, {.name = "", .stochastic = true}};
  for (bool with_low_bits : {false, true}) {
    Parameter p({narrow.rule, BF16, F32, {.name = "", .low_bits = with_low_bits, .stochastic = true}}, F32, kCount, 1);
    Parameter wide({narrow.rule, F32, F32, kPlain}, F32, kCount, 1);
    std::mt19937 random(8);
    std::normal_distribution<float> normal;
    std::vector<float> grad(kCount), start(kCount);
    for (std::size_t i = 0; i < kCount; ++i) {
      grad[i] = normal(random);
      start[i] = from_bf16(to_bf16(normal(random)));
    }
    for (Parameter* each : {&p, &wide}) {
      each->param.set(start);
      each->grad.set(grad);
      std::fill(each->low_bits.begin(), each->low_bits.end(), 0);
      each->ema.clear();
    }
    const TailGroup g = group_of(Rule::AdamW);
    TailSettings settings;
    settings.stochastic = true;
    settings.seed = 0xFEDCBA9876543210;
    for (Parameter* each : {&p, &wide}) {
      const TailTensor view = each->view();
      StepTailPlan plan({&view, 1});
      plan.apply({&g, 1}, settings, threads(2));
    }
    const std::vector<float> exact = wide.weights(), stored = p.weights();
    for (std::size_t i = 0; i < kCount; ++i) {
      const auto bits = std::bit_cast<std::uint32_t>(exact[i]);
      const std::uint16_t r =
          rounding_bits(settings.seed, kCount, RoundingOperand::Param, 4, static_cast<std::int64_t>(i));
      const std::uint32_t expected =
          with_low_bits ? (bits + (r >> 8)) & 0xFFFFFF00U : (bits + std::uint32_t{r}) & 0xFFFF0000U;
      ASSERT_EQ(std::bit_cast<std::uint32_t>(stored[i]), expected) << i;
    }
  }
}

TEST(StepTailStochastic, RoundsStateWithoutBias) {
  // Sgd without momentum decay keeps the buffer near a value that the format lacks; its mean must stay there.
  for (ElementType type : {BF16, Int8}) {
    constexpr std::size_t kCount = 4096;
    constexpr int kSteps = 50;
    Parameter p({Rule::Sgd, F32, type, kPlain}, F32, kCount, 1);
    std::vector<float> grad(kCount);
    for (std::size_t i = 0; i < kCount; ++i) grad[i] = i % 32 == 0 ? 1.0F : 0.3F + 0.0001F * static_cast<float>(i % 32);
    p.grad.set(grad);
    TailGroup g;
    g.rule = Rule::Sgd;
    g.lr = 0;
    TailSettings settings;
    settings.stochastic = true;
    TailTensor view = p.view();
    StepTailPlan plan({&view, 1});
    // The spacing of the format around 0.3: of bf16 2^-9, of the code 2/127 times the slope of the curve there.
    const double spacing = type == BF16 ? std::ldexp(1.0, -9) : 1.0 / 127;
    double sum = 0, at_nearest = 0;
    for (int step = 0; step < kSteps; ++step) {
      plan.apply({&g, 1}, settings, {});  // momentum 0: the buffer becomes the gradient, rounded
      const std::vector<float> stored = p.state0.values();
      for (std::size_t i = 0; i < kCount; ++i) {
        if (i % 32 == 0) continue;
        const double error = stored[i] - static_cast<double>(grad[i]);
        ASSERT_LE(std::abs(error), 1.01 * spacing);
        sum += error;
        at_nearest += std::abs(error) <= spacing / 2 ? 1 : 0;
      }
    }
    const double n = kSteps * kCount * 31.0 / 32;
    EXPECT_LE(std::abs(sum / n), 4 * spacing / 2 / std::sqrt(n)) << sum / n / spacing;
    EXPECT_LT(at_nearest, 0.99 * n);  // it is not rounding to nearest
  }
}

TEST(StepTailState, PaddingOfTheLastGroupChangesNothing) {
  // eps 0 makes 0 / 0 in the padding; the three elements' scale must be theirs alone.
  for (Rule rule : {Rule::AdamW, Rule::RmsProp, Rule::Adagrad}) {
    Parameter p({rule, F32, Int8, kPlain}, F32, 3, 1);
    p.grad.set({1, -2, 0.5F});
    TailGroup g = group_of(rule);
    g.eps = 0;
    g.weight_decay = 0;
    const TailTensor view = p.view();
    StepTailPlan plan({&view, 1});
    TailSettings settings;
    settings.collect = true;
    plan.apply({&g, 1}, settings, {});
    EXPECT_TRUE(std::isfinite(plan.update_sum_squares()[0]));
    EXPECT_TRUE(std::isfinite(plan.param_sum_squares()[0]));
    const float largest = rule == Rule::Adagrad ? 4.0F : 0.004F;
    EXPECT_NEAR(from_bf16(p.state1.scales[0]), largest, largest / 128);
    for (float weight : p.weights()) EXPECT_TRUE(std::isfinite(weight) && weight != 0);
  }
}

TEST(StepTailState, NotANumberSpoilsItsOwnGroupOnly) {
  Parameter p({Rule::AdamW, F32, Int8, kPlain}, F32, 96, 1);
  std::vector<float> grad(96, 1);
  grad[40] = std::nanf("");
  p.grad.set(grad);
  TailGroup g = group_of(Rule::AdamW);
  const TailTensor view = p.view();
  StepTailPlan plan({&view, 1});
  plan.apply({&g, 1}, {}, {});
  EXPECT_EQ(p.state0.scales[1], 0x7FC0);
  const std::vector<float> average = p.state0.values();
  for (std::size_t i = 0; i < 96; ++i) EXPECT_EQ(std::isnan(average[i]), i / 32 == 1) << i;
  for (std::size_t i = 0; i < 96; ++i) EXPECT_EQ(std::isnan(p.weights()[i]), i == 40) << i;
}

TEST(StepTail, CountsItsBytes) {
  Parameter p = fp32_parameter(10);
  TailTensor view = p.view();
  EXPECT_EQ(step_bytes(view, {}, true), 400);  // 40 bytes a parameter: p, m, v, ema twice, g twice
  EXPECT_EQ(step_bytes(view, {}, false), 360);
  view.copy = p.param.data();  // never read here
  EXPECT_EQ(step_bytes(view, {}, false), 380);
  TailSettings settings;
  settings.zero_grad = true;
  EXPECT_EQ(step_bytes(view, settings, false), 420);
  settings = {};
  settings.agc = 1;
  EXPECT_EQ(step_bytes(view, settings, false), 460);  // gradient and weights once more

  Parameter seven({Rule::AdamW, BF16, Int8, {.name = "", .low_bits = true}}, BF16, 64, 1);
  view = seven.view();
  view.ema = nullptr;
  // Weight 3 bytes twice, gradient 2, two states of 1 + 2/32 twice.
  EXPECT_EQ(step_bytes(view, {}, false), 64 * (6 + 2 + 4) + 2 * 2 * 2 * 2);

  Parameter mixed({Rule::Sgd, F16, F32, {.name = "", .master = true}}, F16, 10, 1);
  view = mixed.view();
  view.ema = nullptr;
  EXPECT_EQ(step_bytes(view, {}, true), 10 * (4 + 4 + 2 + 2 + 2 + 8));
}

TEST(StepTail, RefusesTensorsThatItCannotServe) {
  Parameter p = fp32_parameter(10);
  const auto refused = [&](auto change) {
    TailTensor view = p.view();
    change(view);
    EXPECT_THROW(StepTailPlan({&view, 1}), Error);
  };
  refused([](TailTensor& t) { t.numel = -1; });
  refused([](TailTensor& t) { t.rows = 3; });
  refused([](TailTensor& t) { t.rows = 0; });
  refused([](TailTensor& t) { t.type = Int8; });
  refused([](TailTensor& t) { t.grad_type = Int8; });
  refused([](TailTensor& t) { t.copy_type = Int8; });
  std::int8_t low_bits[10];
  refused([&](TailTensor& t) { t.low_bits = low_bits; });
  EXPECT_THROW(sum_squares(low_bits, Int8, 10, {}), Error);
}

}  // namespace
}  // namespace oxytorch::kernels
