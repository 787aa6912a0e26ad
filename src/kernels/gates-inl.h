// The gates of recurrent layers and their slopes; compiled once for each instruction set.
#if defined(OXYTORCH_KERNELS_GATES_INL) == defined(HWY_TARGET_TOGGLE)
#ifdef OXYTORCH_KERNELS_GATES_INL
#undef OXYTORCH_KERNELS_GATES_INL
#else
#define OXYTORCH_KERNELS_GATES_INL
#endif

#include "kernels/attention-inl.h"

HWY_BEFORE_NAMESPACE();
namespace oxytorch::kernels::HWY_NAMESPACE {
namespace {

HWY_INLINE V sigmoid(V x) { return hn::Div(set(1), hn::Add(set(1), exp(hn::Neg(x)))); }

struct Gates {
  V in, forget, fresh, out;
};

// Where values are rounded to bfloat16: exponentials have a relative error below 3e-6, and are at most 1.
HWY_INLINE V decay(V x) { return narrow_exp(hn::Neg(hn::Abs(x))); }
HWY_INLINE V narrow_tanh(V x) {
  const V e = decay(hn::Add(x, x)), one = set(1);
  return hn::CopySign(hn::Div(hn::Sub(one, e), hn::Add(one, e)), x);
}
// By one division for all: with e = decay(x) a sigmoid is 1 / (1 + e), or e / (1 + e) of a negative x.
HWY_INLINE Gates narrow_gates(V in, V forget, V fresh, V out) {
  const V one = set(1), e_in = decay(in), e_forget = decay(forget), e_fresh = decay(hn::Add(fresh, fresh)),
          e_out = decay(out);
  const V by_in = hn::Add(one, e_in), by_forget = hn::Add(one, e_forget), by_fresh = hn::Add(one, e_fresh),
          by_out = hn::Add(one, e_out);
  const V first = hn::Mul(by_in, by_forget), second = hn::Mul(by_fresh, by_out);
  const V whole = hn::Div(one, hn::Mul(first, second));
  const V of_first = hn::Mul(whole, second), of_second = hn::Mul(whole, first);
  const auto above = [&](V x, V e) { return hn::IfThenElse(hn::Lt(x, hn::Zero(F32())), e, one); };
  return {hn::Mul(above(in, e_in), hn::Mul(of_first, by_forget)),
          hn::Mul(above(forget, e_forget), hn::Mul(of_first, by_in)),
          hn::CopySign(hn::Mul(hn::Sub(one, e_fresh), hn::Mul(of_second, by_out)), fresh),
          hn::Mul(above(out, e_out), hn::Mul(of_second, by_fresh))};
}

// Slopes, by the values.
HWY_INLINE V slope_of_sigmoid(V value) { return hn::Mul(value, hn::Sub(set(1), value)); }
HWY_INLINE V slope_of_tanh(V value) { return fma(hn::Neg(value), value, set(1)); }

}  // namespace
}  // namespace oxytorch::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
