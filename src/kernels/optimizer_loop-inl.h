// Steps of torch's optimizers, element by element as its loop over tensors rounds them; compiled once for each
// instruction set. Not by update_rule-inl.h, which rounds less often: what promises torch's bits has to round as torch
// does.
#if defined(OXYTORCH_KERNELS_OPTIMIZER_LOOP_INL) == defined(HWY_TARGET_TOGGLE)
#ifdef OXYTORCH_KERNELS_OPTIMIZER_LOOP_INL
#undef OXYTORCH_KERNELS_OPTIMIZER_LOOP_INL
#else
#define OXYTORCH_KERNELS_OPTIMIZER_LOOP_INL
#endif

#include "kernels/formats-inl.h"
#include "oxytorch/kernels/operators.h"

HWY_BEFORE_NAMESPACE();
namespace oxytorch::kernels::HWY_NAMESPACE {
namespace {

// value + factor * other, as torch's add, lerp and addcmul have it.
template <bool kFused>
HWY_INLINE V plus_product(V value, V factor, V other) {
  if constexpr (kFused) return fma(factor, other, value);
  return hn::Add(value, hn::Mul(factor, other));
}

// Correctly rounded quotients by one divisor without a division: two steps of Markstein's (IBM J. Res. Dev. 34, 1990)
// from the product with the rounded reciprocal. For dividends that are square roots of fp32 numbers.
class Divisor {
 public:
  explicit Divisor(float value) : value_(set(value)), reciprocal_(set(1.0F / value)) {
    // The theorem leaves out mantissas of ones alone; beyond the range a remainder might underflow.
    const bool all_ones = (std::bit_cast<std::uint32_t>(value) & 0x7FFFFFU) == 0x7FFFFFU;
    by_product_ = !OXYTORCH_KERNELS_SCALAR && !all_ones && value > 0x1p-40F && value < 0x1p40F;
  }
  HWY_INLINE V divide(V root) const {
    if (!by_product_) return hn::Div(root, value_);
    V quotient = hn::Mul(root, reciprocal_);
    quotient = fma(hn::NegMulAdd(value_, quotient, root), reciprocal_, quotient);
    quotient = fma(hn::NegMulAdd(value_, quotient, root), reciprocal_, quotient);
    return hn::IfThenElse(hn::IsInf(root), root, quotient);
  }

 private:
  V value_, reciprocal_;
  bool by_product_ = false;
};

// Calls body(load, store) for each vector, the last of which may be a part.
template <class Body>
HWY_INLINE void each_vector(std::int64_t count, Body body) {
  constexpr F32 d;
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    body([&](const float* from) { return hn::LoadU(d, from + i); },
         [&](V value, float* to) { hn::StoreU(value, d, to + i); });
  }
  if (i == count) return;
  const auto bytes = static_cast<std::size_t>(count - i) * sizeof(float);
  float part[kLanes] = {};
  body(
      [&](const float* from) {
        std::memcpy(part, from + i, bytes);
        return hn::LoadU(d, part);
      },
      [&](V value, float* to) {
        hn::StoreU(value, d, part);
        std::memcpy(to + i, part, bytes);
      });
}

template <bool kFused>
void adam_averages_as(const AdamLoop& loop, std::int64_t count, const float* param, const float* grad, float* exp_avg,
                      float* exp_avg_sq, float* max_exp_avg_sq) {
  // torch takes the shorter way between the two ends.
  const bool near = std::abs(loop.beta1_rest) < 0.5F;
  const V weight = set(!loop.lerp || near ? loop.beta1_rest : loop.beta1_rest - 1.0F);
  const V beta1 = set(loop.beta1), beta2 = set(loop.beta2), beta2_rest = set(loop.beta2_rest);
  const V weight_decay = set(loop.weight_decay);
  each_vector(count, [&](auto load, auto store) {
    V g = load(grad);
    if (loop.maximize) g = hn::Neg(g);
    if (loop.weight_decay != 0) g = plus_product<kFused>(g, weight_decay, load(param));
    V average = load(exp_avg);
    if (loop.lerp) {
      average = plus_product<kFused>(near ? average : g, weight, hn::Sub(g, average));
    } else {
      average = plus_product<kFused>(hn::Mul(average, beta1), weight, g);
    }
    store(average, exp_avg);
    V square = plus_product<kFused>(hn::Mul(load(exp_avg_sq), beta2), hn::Mul(beta2_rest, g), g);
    store(square, exp_avg_sq);
    if (max_exp_avg_sq != nullptr) {
      const V before = load(max_exp_avg_sq);
      // NaN wins, whichever it is.
      square = hn::IfThenElse(hn::Or(hn::Gt(before, square), hn::IsNaN(before)), before, square);
      store(square, max_exp_avg_sq);
    }
  });
}

void adam_averages(const AdamLoop& loop, std::int64_t count, const float* param, const float* grad, float* exp_avg,
                   float* exp_avg_sq, float* max_exp_avg_sq) {
  (loop.fused ? adam_averages_as<true> : adam_averages_as<false>)(loop, count, param, grad, exp_avg, exp_avg_sq,
                                                                  max_exp_avg_sq);
}

void adam_parameters(const AdamLoop& loop, std::int64_t count, const float* exp_avg, const float* root, float* param) {
  const V decay = set(loop.decay), eps = set(loop.eps), rate = set(loop.rate);
  const Divisor correction(loop.correction);
  each_vector(count, [&](auto load, auto store) {
    const V denominator = hn::Add(correction.divide(load(root)), eps);
    const V change = hn::Div(hn::Mul(rate, load(exp_avg)), denominator);
    store(hn::Add(hn::Mul(load(param), decay), change), param);
  });
}

template <bool kFused>
void sgd_step_as(const SgdLoop& loop, std::int64_t count, const float* grad, float* momentum_buffer, float* param) {
  const V weight_decay = set(loop.weight_decay), momentum = set(loop.momentum), rate = set(loop.rate);
  const V dampening_rest = set(loop.dampening_rest);
  each_vector(count, [&](auto load, auto store) {
    const V p = load(param);
    V g = load(grad);
    if (loop.maximize) g = hn::Neg(g);
    if (loop.weight_decay != 0) g = plus_product<kFused>(g, weight_decay, p);
    if (momentum_buffer != nullptr) {
      const V buffer = plus_product<kFused>(hn::Mul(load(momentum_buffer), momentum), dampening_rest, g);
      store(buffer, momentum_buffer);
      g = loop.nesterov ? plus_product<kFused>(g, momentum, buffer) : buffer;
    }
    store(plus_product<kFused>(p, rate, g), param);
  });
}

void sgd_step(const SgdLoop& loop, std::int64_t count, const float* grad, float* momentum_buffer, float* param) {
  (loop.fused ? sgd_step_as<true> : sgd_step_as<false>)(loop, count, grad, momentum_buffer, param);
}

}  // namespace
}  // namespace oxytorch::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
