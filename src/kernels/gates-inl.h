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

// Slopes, by the values.
HWY_INLINE V slope_of_sigmoid(V value) { return hn::Mul(value, hn::Sub(set(1), value)); }
HWY_INLINE V slope_of_tanh(V value) { return fma(hn::Neg(value), value, set(1)); }

}  // namespace
}  // namespace oxytorch::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
