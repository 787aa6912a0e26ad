// The step tail on raw memory: against an fp64 evaluation, and the same bits on every instruction set and thread count.
#include "oxytorch/kernels/step_tail.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "oxytorch/isa.h"

namespace oxytorch::kernels {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

void run_on_threads(void* pool, int tasks, void (*task)(void*, int), void* context) {
  std::vector<std::thread> threads;
  for (int i = 0; i < tasks; ++i) threads.emplace_back(task, context, i);
  for (auto& thread : threads) thread.join();
}

Parallel threads(int count) { return {count, count == 1 ? nullptr : run_on_threads, nullptr}; }

std::uint16_t to_bf16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  return static_cast<std::uint16_t>((bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16);
}
float from_bf16(std::uint16_t bits) { return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16); }

// Elements of either type behind one interface.
struct Array {
  explicit Array(ElementType element_type, std::size_t count)
      : type(element_type), bytes(count * (element_type == ElementType::F32 ? 4 : 2)) {}
  [[nodiscard]] double at(std::size_t i) const {
    if (type == ElementType::F32) {
      float value;
      std::memcpy(&value, bytes.data() + 4 * i, 4);
      return value;
    }
    std::uint16_t value;
    std::memcpy(&value, bytes.data() + 2 * i, 2);
    return from_bf16(value);
  }
  void set(std::size_t i, double value) {
    const auto single = static_cast<float>(value);
    const std::uint16_t half = to_bf16(single);
    type == ElementType::F32 ? std::memcpy(bytes.data() + 4 * i, &single, 4)
                             : std::memcpy(bytes.data() + 2 * i, &half, 2);
  }
  void* data() { return bytes.empty() ? nullptr : bytes.data(); }
  bool operator==(const Array&) const = default;

  ElementType type;
  std::vector<unsigned char> bytes;
};

struct Parameter {
  Parameter(ElementType type, ElementType state_type, std::size_t n, bool with_max)
      : count(n),
        param(type, n),
        grad(type, n),
        state0(state_type, n),
        state1(state_type, n),
        state2(state_type, with_max ? n : 0),
        ema(n),
        step(3) {}
  TailTensor view(std::uint32_t group) {
    TailTensor t;
    t.param = param.data();
    t.grad = grad.data();
    t.state0 = state0.data();
    t.state1 = state1.data();
    t.state2 = state2.data();
    t.ema = ema.data();
    t.step = &step;
    t.numel = static_cast<std::int64_t>(count);
    t.group = group;
    t.type = param.type;
    t.state_type = state0.type;
    return t;
  }
  bool operator==(const Parameter&) const = default;

  std::size_t count;
  Array param, grad, state0, state1, state2;
  std::vector<float> ema;
  float step;
};

struct Case {
  Rule rule;
  ElementType type;
  ElementType state_type;
  bool with_max;
};

std::vector<Parameter> make(const Case& c, unsigned seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<double> normal;
  std::vector<Parameter> parameters;
  for (std::size_t n : {1U, 15U, 16U, 17U, 0U, 1000U, 40000U, 33U}) {
    Parameter p(c.type, c.state_type, n, c.with_max);
    for (std::size_t i = 0; i < n; ++i) {
      p.param.set(i, normal(random));
      p.grad.set(i, 1e-2 * normal(random));
      p.state0.set(i, 1e-2 * normal(random));
      p.state1.set(i, 1e-4 * std::abs(normal(random)));
      if (c.with_max) p.state2.set(i, 1e-4 * std::abs(normal(random)));
      p.ema[i] = static_cast<float>(normal(random));
    }
    parameters.push_back(std::move(p));
  }
  return parameters;
}

TailGroup group_of(Rule rule) {
  TailGroup g;
  g.rule = rule;
  g.lr = 3e-2;
  g.weight_decay = 0.1;
  g.momentum = 0.9;
  g.dampening = 0.2;
  return g;
}

constexpr TailSettings kSettings{0.37, 0.99, false, true};

double step_all(std::vector<Parameter>& parameters, const TailGroup& group, const TailSettings& settings, int count) {
  std::vector<TailTensor> views;
  for (auto& p : parameters) views.push_back(p.view(0));
  StepTailPlan plan(views);
  const double sum = plan.measure(threads(count));
  plan.apply(std::span(&group, 1), settings, threads(count));
  return sum;
}

double ulp(double value, ElementType type) {
  const auto single = static_cast<float>(std::abs(value));
  if (type == ElementType::F32) return std::nextafter(single, std::numeric_limits<float>::infinity()) - single;
  return std::ldexp(1.0, std::max(std::ilogb(single), -126) - 7);
}

class StepTail : public testing::TestWithParam<Case> {};

TEST_P(StepTail, AgreesWithAnFp64Evaluation) {
  const Case c = GetParam();
  auto parameters = make(c, 1);
  const auto before = parameters;
  const TailGroup g = group_of(c.rule);
  const double sum = step_all(parameters, g, kSettings, 1);
  double expected_sum = 0;
  for (const auto& p : before) {
    for (std::size_t i = 0; i < p.count; ++i) expected_sum += p.grad.at(i) * p.grad.at(i);
  }
  EXPECT_NEAR(sum, expected_sum, 1e-13 * expected_sum);
  for (std::size_t k = 0; k < before.size(); ++k) {
    const Parameter& old = before[k];
    const Parameter& now = parameters[k];
    EXPECT_EQ(now.step, old.step + (old.count > 0 ? 1 : 0));
    for (std::size_t i = 0; i < old.count; ++i) {
      double p = old.param.at(i);
      double grad = old.grad.at(i) * kSettings.grad_multiplier;
      double s0 = old.state0.at(i);
      double s1 = old.state1.at(i);
      // The sum may cancel; its error is one of the larger term.
      const double grad_scale = std::abs(grad) + (c.rule == Rule::AdamW ? 0.0 : g.weight_decay * std::abs(p));
      if (c.rule != Rule::AdamW) grad += g.weight_decay * p;
      if (c.rule == Rule::Sgd) {
        s0 = g.momentum * s0 + (1 - g.dampening) * grad;
        p -= g.lr * s0;
      } else {
        if (c.rule == Rule::AdamW) p *= 1 - g.lr * g.weight_decay;
        s0 = g.beta1 * s0 + (1 - g.beta1) * grad;
        s1 = g.beta2 * s1 + (1 - g.beta2) * grad * grad;
        const double step = now.step;
        // The kernel divides by what it computed in fp32; with max_exp_avg_sq the larger of the two counts.
        const double top = c.with_max ? std::max(s1, old.state2.at(i)) : s1;
        p -= g.lr / (1 - std::pow(g.beta1, step)) * s0 /
             (std::sqrt(top) / std::sqrt(1 - std::pow(g.beta2, step)) + g.eps);
        if (c.with_max) {
          ASSERT_LE(std::abs(now.state2.at(i) - top), 2 * ulp(top, c.state_type));
        }
        const double scale1 = s1 + (1 - g.beta2) * grad_scale * grad_scale;
        ASSERT_LE(std::abs(now.state1.at(i) - s1), 3 * ulp(scale1, c.state_type)) << k << "," << i;
      }
      const double magnitude = std::max(std::abs(p), std::abs(old.param.at(i)));
      ASSERT_LE(std::abs(now.param.at(i) - p), (c.type == ElementType::F32 ? 4 : 1) * ulp(magnitude, c.type))
          << "tensor " << k << ", element " << i;
      const double scale0 = std::abs(old.state0.at(i)) + grad_scale;
      ASSERT_LE(std::abs(now.state0.at(i) - s0), 2 * ulp(scale0, c.state_type));
      const double ema = old.ema[i] + (1 - kSettings.ema_decay) * (now.param.at(i) - old.ema[i]);
      const double ema_scale = std::max(std::abs(static_cast<double>(old.ema[i])), std::abs(now.param.at(i)));
      ASSERT_LE(std::abs(now.ema[i] - ema), 2 * ulp(ema_scale, ElementType::F32));
    }
  }
}

TEST_P(StepTail, GivesTheSameBitsOnEveryInstructionSetAndThreadCount) {
  const Case c = GetParam();
  std::unique_ptr<std::vector<Parameter>> reference;
  double reference_sum = 0;
  for (Isa isa : supported_isas()) {
    const ScopedIsa scope(isa);
    for (int count : {1, 2, 3, 7}) {
      auto parameters = make(c, 2);
      double sum = 0;
      for (int step = 0; step < 3; ++step) sum = step_all(parameters, group_of(c.rule), kSettings, count);
      if (!reference) {
        reference = std::make_unique<std::vector<Parameter>>(parameters);
        reference_sum = sum;
      }
      EXPECT_EQ(sum, reference_sum) << name(isa) << " with " << count << " threads";
      EXPECT_TRUE(parameters == *reference) << name(isa) << " with " << count << " threads";
    }
  }
}

TEST_P(StepTail, WritesNothingOutsideTheTensors) {
  const Case c = GetParam();
  auto parameters = make(c, 3);
  const auto before = parameters;
  const TailGroup g = group_of(c.rule);
  std::vector<TailTensor> views;
  for (auto& p : parameters) {
    TailTensor view = p.view(0);
    view.numel = view.numel > 3 ? view.numel - 3 : 0;
    views.push_back(view);
  }
  StepTailPlan plan(views);
  plan.apply(std::span(&g, 1), {1.0, 0.9, true, false}, threads(1));
  for (std::size_t k = 0; k < before.size(); ++k) {
    const std::size_t n = before[k].count;
    for (std::size_t i = n > 3 ? n - 3 : 0; i < n; ++i) {
      EXPECT_EQ(parameters[k].param.at(i), before[k].param.at(i));
      EXPECT_EQ(parameters[k].grad.at(i), before[k].grad.at(i));
      EXPECT_EQ(parameters[k].state0.at(i), before[k].state0.at(i));
      EXPECT_EQ(parameters[k].ema[i], before[k].ema[i]);
    }
    for (std::size_t i = 0; i + 3 < n; ++i) EXPECT_EQ(parameters[k].grad.at(i), 0.0);
  }
}

INSTANTIATE_TEST_SUITE_P(RulesAndTypes, StepTail,
                         testing::Values(Case{Rule::AdamW, ElementType::F32, ElementType::F32, false},
                                         Case{Rule::AdamW, ElementType::F32, ElementType::F32, true},
                                         Case{Rule::AdamW, ElementType::BF16, ElementType::BF16, false},
                                         Case{Rule::AdamW, ElementType::BF16, ElementType::F32, false},
                                         Case{Rule::Adam, ElementType::F32, ElementType::F32, false},
                                         Case{Rule::Sgd, ElementType::F32, ElementType::F32, false},
                                         Case{Rule::Sgd, ElementType::BF16, ElementType::BF16, false}));

TEST(StepTailMeasure, IsNotFiniteOnlyWhereAnElementIsNot) {
  for (Isa isa : supported_isas()) {
    const ScopedIsa scope(isa);
    for (ElementType type : {ElementType::F32, ElementType::BF16}) {
      for (std::size_t at : {0U, 17U, 39999U}) {
        Parameter p(type, type, 40000, false);
        std::vector<TailTensor> view{p.view(0)};
        StepTailPlan plan(view);
        // Squares of these overflow fp32; the sum is still a number.
        p.grad.set(at, 3e38);
        EXPECT_TRUE(std::isfinite(plan.measure(threads(2))));
        p.grad.set(at, kInf);
        EXPECT_FALSE(std::isfinite(plan.measure(threads(2))));
        p.grad.set(at, -kInf);
        EXPECT_FALSE(std::isfinite(plan.measure(threads(2))));
        if (type == ElementType::F32) {
          p.grad.set(at, std::nan(""));
          EXPECT_FALSE(std::isfinite(plan.measure(threads(2))));
        }
      }
    }
  }
}

TEST(StepTailMeasure, SumsTinyGradientsThatFp32SquaresWouldLose) {
  Parameter p(ElementType::F32, ElementType::F32, 100, false);
  for (std::size_t i = 0; i < 100; ++i) p.grad.set(i, 1e-30);
  std::vector<TailTensor> view{p.view(0)};
  StepTailPlan plan(view);
  EXPECT_NEAR(std::sqrt(plan.measure(threads(1))), 1e-29, 1e-35);
}

TEST(StepTail, LeavesTensorsWithoutGradientAlone) {
  auto parameters = make({Rule::AdamW, ElementType::F32, ElementType::F32, false}, 4);
  const auto before = parameters;
  std::vector<TailTensor> views;
  for (auto& p : parameters) views.push_back(p.view(0));
  for (auto& view : views) view.grad = nullptr;
  StepTailPlan plan(views);
  const TailGroup g = group_of(Rule::AdamW);
  EXPECT_EQ(plan.measure(threads(1)), 0.0);
  plan.apply(std::span(&g, 1), kSettings, threads(1));
  EXPECT_TRUE(parameters == before);
}

TEST(StepTail, StatisticsAreTheNormsOfParameterAndUpdate) {
  auto parameters = make({Rule::AdamW, ElementType::F32, ElementType::F32, false}, 5);
  const auto before = parameters;
  std::vector<TailTensor> views;
  for (auto& p : parameters) views.push_back(p.view(0));
  StepTailPlan plan(views);
  const TailGroup g = group_of(Rule::AdamW);
  plan.measure(threads(2));
  plan.apply(std::span(&g, 1), kSettings, threads(2));
  for (std::size_t k = 0; k < parameters.size(); ++k) {
    double param = 0, update = 0;
    for (std::size_t i = 0; i < before[k].count; ++i) {
      const double now = parameters[k].param.at(i);
      param += now * now;
      const auto difference = static_cast<double>(static_cast<float>(now) - static_cast<float>(before[k].param.at(i)));
      update += difference * difference;
    }
    EXPECT_NEAR(plan.param_sum_squares()[k], param, 1e-12 * param);
    EXPECT_NEAR(plan.update_sum_squares()[k], update, 1e-12 * update);
  }
}

TEST(StepTail, CountsItsBytes) {
  Parameter p(ElementType::F32, ElementType::F32, 10, false);
  const TailTensor view = p.view(0);
  EXPECT_EQ(step_bytes(view, {}, true), 400);  // 40 bytes a parameter: p, m, v, ema twice, g twice
  EXPECT_EQ(step_bytes(view, {}, false), 360);
}

}  // namespace
}  // namespace oxytorch::kernels
