/// Parameters, arrays and options of the step tail's tests: one of each kind, with bits to compare.
#pragma once

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "oxytorch/kernels/codec.h"
#include "oxytorch/kernels/step_tail.h"

namespace oxytorch::kernels {

using enum ElementType;

inline constexpr double kInf = std::numeric_limits<double>::infinity();

inline void run_on_threads(void* pool, int tasks, void (*task)(void*, int), void* context) {
  std::vector<std::thread> threads;
  for (int i = 0; i < tasks; ++i) threads.emplace_back(task, context, i);
  for (auto& thread : threads) thread.join();
}

// A small grain, so that also these sizes are shared among the threads.
inline Parallel threads(int count) { return {count, count == 1 ? nullptr : run_on_threads, nullptr, 256}; }

inline std::uint16_t to_bf16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  return static_cast<std::uint16_t>((bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16);
}
inline float from_bf16(std::uint16_t bits) { return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16); }

inline double from_f16(std::uint16_t bits) {
  const int exponent = bits >> 10 & 31;
  const int mantissa = bits & 1023;
  const double sign = (bits & 0x8000) != 0 ? -1 : 1;
  if (exponent == 31) return mantissa == 0 ? sign * kInf : std::nan("");
  return sign * (exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25));
}
// For values whose nearest half is normal or zero; the compiler's own conversion.
inline std::uint16_t to_f16(float value) { return std::bit_cast<std::uint16_t>(static_cast<_Float16>(value)); }

// Unit in the last place of `value` in `type`.
inline double ulp(double value, ElementType type) {
  const int digits = type == F32 ? 23 : type == BF16 ? 7 : 10;
  const int least = type == F16 ? -14 : -126;
  return std::ldexp(1.0, std::max(value == 0 ? least : std::ilogb(value), least) - digits);
}

// Elements of any type behind one interface. Int8 is set and read as whole groups.
struct Array {
  Array(ElementType element_type, std::size_t count, StateCode state_code = StateCode::Signed)
      : type(element_type),
        code(state_code),
        bytes(count * (type == F32    ? 4
                       : type == Int8 ? 1
                                      : 2)),
        scales(type == Int8 ? static_cast<std::size_t>(state_groups(static_cast<std::int64_t>(count))) : 0) {}
  [[nodiscard]] std::size_t size() const { return bytes.size() / (type == F32 ? 4 : type == Int8 ? 1 : 2); }
  [[nodiscard]] double at(std::size_t i) const {
    if (type == F32) {
      float value;
      std::memcpy(&value, bytes.data() + 4 * i, 4);
      return value;
    }
    if (type == Int8) return values()[i];
    std::uint16_t value;
    std::memcpy(&value, bytes.data() + 2 * i, 2);
    return type == BF16 ? from_bf16(value) : from_f16(value);
  }
  void set(std::size_t i, double value) {
    const auto single = static_cast<float>(value);
    const std::uint16_t half = type == BF16 ? to_bf16(single) : to_f16(single);
    type == F32 ? std::memcpy(bytes.data() + 4 * i, &single, 4) : std::memcpy(bytes.data() + 2 * i, &half, 2);
  }
  void set(const std::vector<float>& from) {
    if (type == Int8) return encode_state(code, from, bytes.data(), scales.data());
    for (std::size_t i = 0; i < from.size(); ++i) set(i, from[i]);
  }
  [[nodiscard]] std::vector<float> values() const {
    std::vector<float> result(size());
    if (type == Int8) {
      decode_state(code, bytes.data(), scales.data(), result);
    } else {
      for (std::size_t i = 0; i < result.size(); ++i) result[i] = static_cast<float>(at(i));
    }
    return result;
  }
  void* data() { return bytes.empty() ? nullptr : bytes.data(); }
  TailState state() { return {data(), scales.empty() ? nullptr : scales.data()}; }
  bool operator==(const Array&) const = default;

  ElementType type;
  StateCode code;
  std::vector<unsigned char> bytes;
  std::vector<std::uint16_t> scales;
};

// What a case has beside its rule and types.
struct Options {
  const char* name;
  bool master = false;
  bool low_bits = false;
  bool copy = false;
  bool third_state = false;  // amsgrad, centered
  bool stochastic = false;
  double clip_value = 0;
  double agc = 0;
};

inline constexpr Options kPlain{"plain"};
inline constexpr Options kOptions[] = {
    kPlain,
    {.name = "third", .copy = true, .third_state = true},
    {.name = "master", .master = true, .copy = true, .clip_value = 2e-3},
    {.name = "low_bits", .low_bits = true, .copy = true},
    {.name = "low_bits_stochastic", .low_bits = true, .stochastic = true, .agc = 1e-2},
    {.name = "stochastic", .third_state = true, .stochastic = true, .clip_value = 3e-3},
    {.name = "agc", .agc = 5e-3},
};

struct Case {
  Rule rule;
  ElementType type;
  ElementType state_type;
  Options options;
};

struct Parameter {
  Parameter(const Case& c, ElementType grad_type, std::size_t n, std::int64_t row_count)
      : count(n),
        rows(row_count),
        param(c.type, n),
        grad(grad_type, n),
        copy(c.type == BF16 ? F16 : BF16, c.options.copy ? n : 0),
        state0(c.state_type, c.rule == Rule::Adagrad ? 0 : n),
        state1(c.state_type, c.rule == Rule::Sgd || c.rule == Rule::Lion ? 0 : n, StateCode::Unsigned),
        state2(c.state_type, c.options.third_state && has_third(c.rule) ? n : 0,
               c.rule == Rule::RmsProp ? StateCode::Signed : StateCode::Unsigned),
        master(c.options.master ? n : 0),
        low_bits(c.options.low_bits ? n : 0),
        ema(n),
        step(3) {}
  static bool has_third(Rule rule) { return rule == Rule::AdamW || rule == Rule::Adam || rule == Rule::RmsProp; }
  TailTensor view(std::uint32_t group = 0) {
    TailTensor t;
    t.param = param.data();
    t.grad = grad.data();
    t.master = master.empty() ? nullptr : master.data();
    t.low_bits = low_bits.empty() ? nullptr : low_bits.data();
    t.copy = copy.data();
    t.state[0] = state0.state();
    t.state[1] = state1.state();
    t.state[2] = state2.state();
    t.ema = ema.data();
    t.step = &step;
    t.numel = static_cast<std::int64_t>(count);
    t.rows = rows;
    t.group = group;
    t.stream = static_cast<std::uint32_t>(count);
    t.type = param.type;
    t.grad_type = grad.type;
    t.state_type = state0.type;
    t.copy_type = copy.type;
    return t;
  }
  // The weights at their best precision.
  [[nodiscard]] std::vector<float> weights() const {
    if (!master.empty()) return master;
    std::vector<float> result = param.values();
    if (!low_bits.empty()) {
      join_weights(reinterpret_cast<const std::uint16_t*>(param.bytes.data()), low_bits.data(), result);
    }
    return result;
  }
  bool operator==(const Parameter&) const = default;

  std::size_t count;
  std::int64_t rows;
  Array param, grad, copy, state0, state1, state2;
  std::vector<float> master;
  std::vector<std::int8_t> low_bits;
  std::vector<float> ema;
  float step;
};

// Elements and rows: rows inside a chunk, over several, and of one element.
using Size = std::pair<std::size_t, std::int64_t>;
inline constexpr Size kSizes[] = {{1, 1}, {15, 15},   {16, 1}, {17, 1},    {0, 1},
                                  {3, 1}, {1000, 40}, {33, 3}, {17000, 2}, {2500, 500}};

inline std::vector<Parameter> make(const Case& c, unsigned seed, std::span<const Size> sizes = kSizes) {
  std::mt19937_64 random(seed);
  std::normal_distribution<double> normal;
  const auto draw = [&](std::size_t n, double scale, bool positive) {
    std::vector<float> values(n);
    for (float& v : values) {
      const double x = scale * normal(random);
      v = static_cast<float>(positive ? std::abs(x) : x);
    }
    return values;
  };
  std::vector<Parameter> parameters;
  for (const auto& [n, rows] : sizes) {
    // Gradients may be of another type than the parameter; every third is.
    Parameter p(c, parameters.size() % 3 == 2 ? BF16 : c.type, n, rows);
    const std::vector<float> weights = draw(n, 1, false);
    p.param.set(weights);
    if (c.options.master) p.master = weights;
    if (c.options.low_bits) {
      split_weights(weights, reinterpret_cast<std::uint16_t*>(p.param.bytes.data()), p.low_bits.data());
    }
    p.grad.set(draw(n, 1e-2, false));
    if (p.state0.size() > 0) p.state0.set(draw(n, 1e-2, false));
    std::vector<float> squares = draw(n, 1e-2, true);
    std::vector<float> averages = draw(n, 1e-3, c.rule != Rule::RmsProp);
    for (std::size_t i = 0; i < n; ++i) {
      // A square_avg is at least the square of its grad_avg.
      squares[i] = c.rule == Rule::RmsProp ? 1e-4F + squares[i] * squares[i] : squares[i] * squares[i];
      if (c.rule != Rule::RmsProp) averages[i] *= 0.1F;
    }
    if (p.state1.size() > 0) p.state1.set(squares);
    if (p.state2.size() > 0) p.state2.set(averages);
    p.ema = draw(n, 1, false);
    parameters.push_back(std::move(p));
  }
  return parameters;
}

inline TailGroup group_of(Rule rule) {
  TailGroup g;
  g.rule = rule;
  g.lr = 3e-2;
  g.weight_decay = 0.1;
  g.momentum = 0.9;
  g.dampening = 0.2;
  g.lr_decay = 0.01;
  return g;
}

inline TailSettings settings_of(const Options& options) {
  TailSettings s;
  s.grad_multiplier = 0.37;
  s.clip_value = options.clip_value;
  s.agc = options.agc;
  s.ema_decay = 0.99;
  s.collect = true;
  s.stochastic = options.stochastic;
  s.seed = 0x0123456789ABCDEF;
  return s;
}

}  // namespace oxytorch::kernels
