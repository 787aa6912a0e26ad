// Rotary position embedding of rows; compiled once for each instruction set.
#if defined(OXYTORCH_KERNELS_ROTARY_INL) == defined(HWY_TARGET_TOGGLE)
#ifdef OXYTORCH_KERNELS_ROTARY_INL
#undef OXYTORCH_KERNELS_ROTARY_INL
#else
#define OXYTORCH_KERNELS_ROTARY_INL
#endif

#include "kernels/attention-inl.h"
#include "oxytorch/kernels/rotary.h"

HWY_BEFORE_NAMESPACE();
namespace oxytorch::kernels::HWY_NAMESPACE {
namespace {

// The features of kLanes pairs that lie side by side, or of the first `count`; zeros for others.
template <class T>
HWY_INLINE void load_pairs(const T* from, std::int64_t count, V& a, V& b) {
  float side_by_side[2 * kLanes];
  store(load_some(from, 2 * count), side_by_side);
  store(2 * count > kLanes ? load_some(from + kLanes, 2 * count - kLanes) : hn::Zero(F32()), side_by_side + kLanes);
  hn::LoadInterleaved2(F32(), side_by_side, a, b);
}
template <class T>
HWY_INLINE void store_pairs(V a, V b, T* to, std::int64_t count) {
  float side_by_side[2 * kLanes];
  hn::StoreInterleaved2(a, b, F32(), side_by_side);
  store_some(load(side_by_side), to, 2 * count);
  if (2 * count > kLanes) store_some(load(side_by_side + kLanes), to + kLanes, 2 * count - kLanes);
}

// `count` pairs, at most kLanes; `second` is where the second features of halves lie.
template <bool kInterleaved, class T>
HWY_INLINE void rotate_pairs(const T* from, std::int64_t second, V c, V s, std::int64_t count, T* to) {
  V a, b;
  if constexpr (kInterleaved) {
    load_pairs(from, count, a, b);
  } else {
    a = load_some(from, count);
    b = load_some(from + second, count);
  }
  const V turned_a = fma(a, c, hn::Neg(hn::Mul(b, s))), turned_b = fma(b, c, hn::Mul(a, s));
  if constexpr (kInterleaved) {
    store_pairs(turned_a, turned_b, to, count);
  } else {
    store_some(turned_a, to, count);
    store_some(turned_b, to + second, count);
  }
}

// The rule by value: what is written could change one that is referred to.
template <bool kInterleaved, class T>
void rotate_all(const RotaryRule rule, const Rows& from, T* to, std::int64_t to_stride) {
  constexpr std::int64_t kApart = kInterleaved ? 2 : 1;
  const std::int64_t pairs = rule.pairs, whole = pairs / kLanes * kLanes, rotated = 2 * pairs;
  const V sign = set(rule.inverse ? -0.0F : 0.0F);
  for (std::int64_t i = 0; i < from.rows; ++i, to += to_stride) {
    const T* row = static_cast<const T*>(from.data) + i * from.stride;
    const float *cos = rule.cos + i * rule.cos_stride, *sin = rule.sin + i * rule.sin_stride;
    for (std::int64_t j = 0; j < whole; j += kLanes) {
      const V c = load(cos + j), s = hn::Xor(load(sin + j), sign);
      rotate_pairs<kInterleaved>(row + kApart * j, pairs, c, s, kLanes, to + kApart * j);
    }
    if (whole < pairs) {
      const std::int64_t rest = pairs - whole;
      const V c = load_some(cos + whole, rest), s = hn::Xor(load_some(sin + whole, rest), sign);
      rotate_pairs<kInterleaved>(row + kApart * whole, pairs, c, s, rest, to + kApart * whole);
    }
    if (rotated < from.columns) std::copy(row + rotated, row + from.columns, to + rotated);
  }
}

void rotate_rows(const RotaryRule& rule, const Rows& from, void* to, std::int64_t to_stride) {
  with_element(from.element, [&](auto kind) {
    auto* out = static_cast<decltype(kind)*>(to);
    rule.interleaved ? rotate_all<true>(rule, from, out, to_stride) : rotate_all<false>(rule, from, out, to_stride);
  });
}

}  // namespace
}  // namespace oxytorch::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
