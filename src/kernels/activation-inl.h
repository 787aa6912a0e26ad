// GELU and SiLU with their derivatives; compiled once for each instruction set.
#if defined(OXYTORCH_KERNELS_ACTIVATION_INL) == defined(HWY_TARGET_TOGGLE)
#ifdef OXYTORCH_KERNELS_ACTIVATION_INL
#undef OXYTORCH_KERNELS_ACTIVATION_INL
#else
#define OXYTORCH_KERNELS_ACTIVATION_INL
#endif

#include "kernels/channel_norm-inl.h"
#include "oxytorch/kernels/activation.h"

HWY_BEFORE_NAMESPACE();
namespace oxytorch::kernels::HWY_NAMESPACE {
namespace {

// An activation is x * share: the share, and its derivative times x.
struct Share {
  V share, slope;
};

// 1 / d of positive d, to 1e-6 for what is rounded to 16 bits: exponent and mantissa taken from a constant are within
// 12.5 %, and each of Newton's steps squares that. A processor's own estimate differs from another's.
HWY_INLINE V narrow_inverse(V d) {
  V estimate = float_of(hn::Sub(set_bits(0x7EF311C7), bits_of(d)));
  for (int step = 0; step < 3; ++step) estimate = hn::Mul(estimate, fma(hn::Neg(d), estimate, set(2)));
  return estimate;
}

// The share is the normal distribution function. Above |x| it is exp(-x^2 / 2) times a function of 1 / (1 + a |x|) (the
// form of Abramowitz and Stegun 26.2.17), here a polynomial fitted for |x| up to 13.5: to 5e-8 of the value, and to
// 1.2e-5 for narrow ones.
template <bool kNarrow>
HWY_INLINE Share share_of_gelu(V x) {
  const V size = hn::Abs(x);
  const V exponent = hn::Mul(hn::Mul(x, x), set(-0.5F));
  V above, density;
  if constexpr (kNarrow) {
    density = narrow_exp(exponent);
    const V t = narrow_inverse(fma(hn::Min(size, set(16)), set(0.36F), set(1)));
    above = fma(set(-0.0989946573972702F), t, set(0.25565287470817566F));
    above = fma(above, t, set(0.03386276960372925F));
    above = fma(above, t, set(0.1692735254764557F));
    above = fma(above, t, set(0.14000093936920166F));
    above = fma(above, t, set(0.0002009719901252538F));
  } else {
    density = exp(exponent);
    const V t = hn::Div(set(1), fma(size, set(0.23F), set(1)));
    above = fma(set(-0.07842881188178683F), t, set(0.2902187389757695F));
    above = fma(above, t, set(-0.2777044756514316F));
    above = fma(above, t, set(0.30096336939402746F));
    above = fma(above, t, set(-0.03254618894678987F));
    above = fma(above, t, set(0.11934313964950793F));
    above = fma(above, t, set(0.08581032111887824F));
    above = fma(above, t, set(0.09237117186449195F));
    above = fma(above, t, set(-2.7288046473758846e-05F));
  }
  above = hn::Mul(above, density);
  const V share = hn::IfThenElse(hn::Lt(x, hn::Zero(F32())), above, hn::Sub(set(1), above));
  return {share, hn::Mul(hn::Mul(x, density), set(0.3989422804014327F))};
}

// The share is 1 / (1 + exp(-u)), by exp(-|u|): then neither it nor its derivative loses digits.
template <bool kNarrow>
HWY_INLINE Share share_of_sigmoid(V x, V u, V derivative_of_u) {
  const V exponent = hn::Neg(hn::Abs(u));
  const V e = kNarrow ? narrow_exp(exponent) : exp(exponent);
  const V d = kNarrow ? narrow_inverse(hn::Add(set(1), e)) : hn::Div(set(1), hn::Add(set(1), e));
  const V share = hn::IfThenElse(hn::Lt(u, hn::Zero(F32())), hn::Mul(e, d), d);
  return {share, hn::Mul(hn::Mul(hn::Mul(e, d), d), hn::Mul(x, derivative_of_u))};
}

// Narrow: for elements of 16 bits.
template <Activation kActivation, bool kNarrow>
HWY_INLINE Share share_of(V x) {
  if constexpr (kActivation == Activation::Gelu) return share_of_gelu<kNarrow>(x);
  if constexpr (kActivation == Activation::Silu) return share_of_sigmoid<kNarrow>(x, x, set(1));
  constexpr float kTwice = 1.5957691216057308F, kCubed = 0.044715F;  // 2 sqrt(2 / pi)
  const V square = hn::Mul(x, x);
  return share_of_sigmoid<kNarrow>(x, hn::Mul(hn::Mul(x, set(kTwice)), fma(square, set(kCubed), set(1))),
                                   hn::Mul(set(kTwice), fma(square, set(3 * kCubed), set(1))));
}

// `act(element, activation)` for each row, as types.
template <class Act>
HWY_INLINE void with_activation(const Activated& of, Act&& act) {
  with_element(of.input.element, [&](auto element) {
    switch (of.activation) {
      case Activation::Gelu: return act(element, std::integral_constant<Activation, Activation::Gelu>());
      case Activation::GeluTanh: return act(element, std::integral_constant<Activation, Activation::GeluTanh>());
      default: return act(element, std::integral_constant<Activation, Activation::Silu>());
    }
  });
}

template <class T>
HWY_INLINE T* row_to(const RowsTo& to, std::int64_t row) {
  return static_cast<T*>(to.data) + row * to.stride;
}

// `act(first, count, vectors)` for groups of vectors of a row: what is computed of one hides the latency of the others.
template <class Act>
HWY_INLINE void in_groups(std::int64_t columns, Act&& act) {
  constexpr std::int64_t kGroup = kAbreast * kLanes;
  std::int64_t j = 0;
  for (; j + kGroup <= columns; j += kGroup) act(j, kGroup, std::integral_constant<int, kAbreast>());
  for (; j < columns; j += kLanes) {
    act(j, std::min<std::int64_t>(kLanes, columns - j), std::integral_constant<int, 1>());
  }
}

template <int kVectors, class T>
HWY_INLINE void load_group(const T* from, std::int64_t count, V (&to)[kVectors]) {
  for (int k = 0; k < kVectors; ++k) to[k] = kVectors == 1 ? load_some(from, count) : load(from + k * kLanes);
}
template <int kVectors, class T>
HWY_INLINE void store_group(const V (&from)[kVectors], T* to, std::int64_t count) {
  if constexpr (kVectors == 1) {
    store_some(from[0], to, count);
  } else {
    for (int k = 0; k < kVectors; k += 2) store_two(from[k], from[k + 1], to + k * kLanes);
  }
}

void activate(const Activated& of, const RowsTo& to) {
  with_activation(of, [&](auto element, auto activation) {
    using T = decltype(element);
    for (std::int64_t i = 0; i < of.input.rows; ++i) {
      const T* input = row_of<T>(of.input, i);
      const T* times = of.times.data == nullptr ? nullptr : row_of<T>(of.times, i);
      T* out = row_to<T>(to, i);
      in_groups(of.input.columns, [&](auto j, auto count, auto vectors) {
        constexpr int kVectors = vectors.value;
        V x[kVectors], value[kVectors];
        load_group(input + j, count, x);
        for (int k = 0; k < kVectors; ++k)
          value[k] = hn::Mul(x[k], share_of<activation.value, sizeof(T) == 2>(x[k]).share);
        if (times != nullptr) {
          load_group(times + j, count, x);
          for (int k = 0; k < kVectors; ++k) value[k] = hn::Mul(value[k], x[k]);
        }
        store_group(value, out + j, count);
      });
    }
  });
}

void activate_backward(const Activated& of, const Rows& grad, const RowsTo& to_input, const RowsTo& to_times) {
  with_activation(of, [&](auto element, auto activation) {
    using T = decltype(element);
    for (std::int64_t i = 0; i < of.input.rows; ++i) {
      const T *input = row_of<T>(of.input, i), *slopes = row_of<T>(grad, i);
      const T* times = of.times.data == nullptr ? nullptr : row_of<T>(of.times, i);
      in_groups(of.input.columns, [&](auto j, auto count, auto vectors) {
        constexpr int kVectors = vectors.value;
        V x[kVectors], slope[kVectors];
        load_group(input + j, count, x);
        load_group(slopes + j, count, slope);
        V value[kVectors], derivative[kVectors];
        for (int k = 0; k < kVectors; ++k) {
          const Share found = share_of<activation.value, sizeof(T) == 2>(x[k]);
          value[k] = hn::Mul(slope[k], hn::Mul(x[k], found.share));
          derivative[k] = hn::Mul(slope[k], hn::Add(found.share, found.slope));
        }
        if (times != nullptr) {
          load_group(times + j, count, x);
          for (int k = 0; k < kVectors; ++k) derivative[k] = hn::Mul(derivative[k], x[k]);
        }
        if (to_times.data != nullptr) store_group(value, row_to<T>(to_times, i) + j, count);
        if (to_input.data != nullptr) store_group(derivative, row_to<T>(to_input, i) + j, count);
      });
    }
  });
}

void relu_backward(const Rows& output, const Rows& grad, const RowsTo& to) {
  with_element(output.element, [&](auto element) {
    using T = decltype(element);
    for (std::int64_t i = 0; i < output.rows; ++i) {
      const T *made = row_of<T>(output, i), *slopes = row_of<T>(grad, i);
      in_groups(output.columns, [&](auto j, auto count, auto vectors) {
        V y[vectors.value], slope[vectors.value];
        load_group(made + j, count, y);
        load_group(slopes + j, count, slope);
        for (int k = 0; k < vectors.value; ++k) {
          slope[k] = hn::IfThenZeroElse(hn::Le(y[k], hn::Zero(F32())), slope[k]);
        }
        store_group(slope, row_to<T>(to, i) + j, count);
      });
    }
  });
}

}  // namespace
}  // namespace oxytorch::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // OXYTORCH_KERNELS_ACTIVATION_INL toggle
