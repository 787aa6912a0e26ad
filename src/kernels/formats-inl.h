// Vectors of fp32 from and to the storage formats, and random bits; compiled once for each instruction set.
#if defined(OXYTORCH_KERNELS_FORMATS_INL) == defined(HWY_TARGET_TOGGLE)
#ifdef OXYTORCH_KERNELS_FORMATS_INL
#undef OXYTORCH_KERNELS_FORMATS_INL
#else
#define OXYTORCH_KERNELS_FORMATS_INL
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "oxytorch/kernels/codec.h"
#include "oxytorch/random.h"

HWY_BEFORE_NAMESPACE();
namespace oxytorch::kernels::HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

#undef OXYTORCH_KERNELS_SCALAR
#if HWY_TARGET == HWY_EMU128 || HWY_TARGET == HWY_SCALAR
#define OXYTORCH_KERNELS_SCALAR 1
#else
#define OXYTORCH_KERNELS_SCALAR 0
#endif

// A block is 16 fp32 elements on every set: sums then have the same lanes everywhere.
constexpr int kBlock = 16;
using F32 = hn::CappedTag<float, kBlock>;
constexpr int kLanes = static_cast<int>(hn::MaxLanes(F32()));
using I32 = hn::RebindToSigned<F32>;
using U32 = hn::RebindToUnsigned<F32>;
using U16 = hn::Rebind<std::uint16_t, F32>;
using U8 = hn::Rebind<std::uint8_t, F32>;
using I8 = hn::Rebind<std::int8_t, F32>;
using V = hn::Vec<F32>;
using VI = hn::Vec<I32>;
using VU = hn::Vec<U32>;

struct Bf16 {
  std::uint16_t bits;
};
struct Half {
  std::uint16_t bits;
};

// a * b + c with one rounding. Highway's emulated target rounds twice, hence the lane loop there.
template <class D, class W = hn::Vec<D>>
HWY_INLINE W fma(D d, W a, W b, W c) {
#if OXYTORCH_KERNELS_SCALAR
  constexpr int lanes = static_cast<int>(hn::MaxLanes(D()));
  hn::TFromD<D> x[lanes], y[lanes], z[lanes];
  hn::StoreU(a, d, x);
  hn::StoreU(b, d, y);
  hn::StoreU(c, d, z);
  for (int i = 0; i < lanes; ++i) z[i] = std::fma(x[i], y[i], z[i]);
  return hn::LoadU(d, z);
#else
  (void)d;
  return hn::MulAdd(a, b, c);
#endif
}
HWY_INLINE V fma(V a, V b, V c) { return fma(F32(), a, b, c); }
// a * b - c with one rounding.
HWY_INLINE V fms(V a, V b, V c) {
#if OXYTORCH_KERNELS_SCALAR
  return fma(a, b, hn::Neg(c));
#else
  return hn::MulSub(a, b, c);
#endif
}

HWY_INLINE V set(float value) { return hn::Set(F32(), value); }
HWY_INLINE VU bits_of(V value) { return hn::BitCast(U32(), value); }
HWY_INLINE V float_of(VU bits) { return hn::BitCast(F32(), bits); }
HWY_INLINE VU set_bits(std::uint32_t bits) { return hn::Set(U32(), bits); }

// The 16-bit pieces of rounding_bits(), or what rounding to nearest takes in their place.
template <bool kStochastic>
HWY_INLINE VU pieces(const std::uint16_t* random, std::uint32_t nearest) {
  if constexpr (kStochastic) return hn::PromoteTo(U32(), hn::LoadU(U16(), random));
  return set_bits(nearest);
}

template <bool kStochastic>
HWY_INLINE const std::uint16_t* advance(const std::uint16_t* random, std::int64_t count) {
  return kStochastic ? random + count : nullptr;
}

HWY_INLINE V load(const float* from) { return hn::LoadU(F32(), from); }
HWY_INLINE void store(V value, float* to) { hn::StoreU(value, F32(), to); }
template <bool kStochastic>
HWY_INLINE void store(V value, float* to, const std::uint16_t*) {
  store(value, to);
}

HWY_INLINE void store_low16(VU value, std::uint16_t* to) { hn::StoreU(hn::TruncateTo(U16(), value), U16(), to); }

HWY_INLINE V load(const Bf16* from) {
  return float_of(hn::ShiftLeft<16>(hn::PromoteTo(U32(), hn::LoadU(U16(), &from->bits))));
}
// As bf16 to nearest even, in the upper half of each word. NaN stays one where its lower half is 0, as bf16 or a
// computation left it.
HWY_INLINE VU rounded_bf16(V value) {
  const VU bits = bits_of(value);
  return hn::Add(bits, hn::Add(hn::And(hn::ShiftRight<16>(bits), set_bits(1)), set_bits(0x7FFF)));
}
// A value as it was rounded to bf16, but NaN keeps its top bits and stays a NaN. The lower half is anything.
HWY_INLINE VU rounded_or_nan(V value, VU rounded) {
  const auto is_number = hn::RebindMask(U32(), hn::Eq(value, value));
  return hn::IfThenElse(is_number, rounded, hn::Or(bits_of(value), set_bits(0x400000)));
}
// Any value to nearest even.
HWY_INLINE VU as_bf16(V value) { return rounded_or_nan(value, rounded_bf16(value)); }
// To nearest even, or by adding random bits below the cut.
template <bool kStochastic>
HWY_INLINE void store(V value, Bf16* to, const std::uint16_t* random) {
  const VU rounded = kStochastic ? hn::Add(bits_of(value), pieces<kStochastic>(random, 0)) : rounded_bf16(value);
  store_low16(hn::ShiftRight<16>(rounded_or_nan(value, rounded)), &to->bits);
}

// Two vectors, to nearest: of bf16 in one store.
template <class T>
HWY_INLINE void store_two(V first, V second, T* to) {
#if !OXYTORCH_KERNELS_SCALAR
  if constexpr (std::is_same_v<T, Bf16>) {
    constexpr hn::Repartition<std::uint16_t, F32> halves;
    const auto low = hn::BitCast(halves, as_bf16(first)), high = hn::BitCast(halves, as_bf16(second));
    hn::StoreU(hn::ConcatOdd(halves, high, low), halves, &to->bits);
    return;
  }
#endif
  store<false>(first, to, nullptr);
  store<false>(second, to + kLanes, nullptr);
}

#if OXYTORCH_KERNELS_SCALAR
inline float float_of_half(std::uint32_t half) {
  const std::uint32_t sign = (half & 0x8000U) << 16;
  const std::uint32_t magnitude = half & 0x7FFFU;
  if (magnitude > 0x7C00U) return std::bit_cast<float>(sign | 0x7FC00000U | magnitude << 13);
  if (magnitude == 0x7C00U) return std::bit_cast<float>(sign | 0x7F800000U);
  // A float with the half's exponent field, then the difference of the biases; exact for denormals too.
  return std::bit_cast<float>(sign | magnitude << 13) * 0x1p112F;
}
inline std::uint16_t half_of_float(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = bits >> 16 & 0x8000U;
  const std::uint32_t magnitude = bits & 0x7FFFFFFFU;
  std::uint32_t half;
  if (magnitude > 0x7F800000U) {
    half = 0x7E00U | (magnitude >> 13 & 0x3FFU);
  } else if (magnitude >= 0x47800000U) {
    half = 0x7C00U;
  } else if (magnitude < 0x38800000U) {
    // Adding 1/2 puts the last bit of a denormal half at the last bit of a float, rounded to nearest even.
    half = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0.5F) - 0x3F000000U;
  } else {
    half = (magnitude - 0x38000000U + 0xFFFU + (magnitude >> 13 & 1U)) >> 13;
  }
  return static_cast<std::uint16_t>(sign | half);
}
HWY_INLINE V load(const Half* from) {
  float wide[kLanes];
  for (int i = 0; i < kLanes; ++i) wide[i] = float_of_half(from[i].bits);
  return load(wide);
}
template <bool kStochastic>
HWY_INLINE void store(V value, Half* to, const std::uint16_t*) {
  float wide[kLanes];
  store(value, wide);
  for (int i = 0; i < kLanes; ++i) to[i].bits = half_of_float(wide[i]);
}
#else
using F16 = hn::Rebind<hwy::float16_t, F32>;
HWY_INLINE V load(const Half* from) {
  return hn::PromoteTo(F32(), hn::LoadU(F16(), reinterpret_cast<const hwy::float16_t*>(from)));
}
template <bool kStochastic>
HWY_INLINE void store(V value, Half* to, const std::uint16_t*) {
  hn::StoreU(hn::DemoteTo(F16(), value), F16(), reinterpret_cast<hwy::float16_t*>(to));
}
#endif

// A weight as bf16 and low bits.
HWY_INLINE V load(const Bf16* from, const std::int8_t* low_bits) {
  const VU high = hn::PromoteTo(U32(), hn::LoadU(U16(), &from->bits));
  const VU low = hn::BitCast(U32(), hn::PromoteTo(I32(), hn::LoadU(I8(), low_bits)));
  const VU magnitude = hn::Add(hn::ShiftLeft<8>(hn::And(high, set_bits(0x7FFF))), low);
  return float_of(hn::Or(hn::ShiftLeft<8>(magnitude), hn::ShiftLeft<16>(hn::And(high, set_bits(0x8000)))));
}
template <bool kStochastic>
HWY_INLINE void store(V value, Bf16* to, std::int8_t* low_bits, const std::uint16_t* random) {
  const VU bits = bits_of(value);
  const auto is_number = hn::RebindMask(U32(), hn::Eq(value, value));
  const VU magnitude = hn::IfThenElse(is_number, hn::And(bits, set_bits(0x7FFFFFFF)), set_bits(0x7FC00000));
  const VU added = hn::ShiftRight<8>(pieces<kStochastic>(random, 0x8000));
  const VU whole = hn::ShiftRight<8>(hn::Add(magnitude, added));
  const VU high = hn::ShiftRight<8>(hn::Add(whole, set_bits(0x80)));
  const VU low = hn::Sub(whole, hn::ShiftLeft<8>(high));
  store_low16(hn::Or(high, hn::And(hn::ShiftRight<16>(bits), set_bits(0x8000))), &to->bits);
  hn::StoreU(hn::DemoteTo(I8(), hn::BitCast(I32(), low)), I8(), low_bits);
}

// The first `count` elements, and zeros.
template <class T>
HWY_INLINE V load_some(const T* from, std::int64_t count) {
  if (count >= kLanes) return load(from);
  T rest[kLanes] = {};
  std::copy_n(from, count, rest);
  return load(rest);
}
template <class T>
HWY_INLINE void store_some(V value, T* to, std::int64_t count) {
  if (count >= kLanes) return store<false>(value, to, nullptr);
  T rest[kLanes];
  store<false>(value, rest, nullptr);
  std::copy_n(rest, count, to);
}

// 8-bit state. Both curves share their form: y = bits >> kShift, plus what maps 1 to 1.
template <StateCode kCode>
struct Curve {
  static constexpr bool kSigned = kCode == StateCode::Signed;
  static constexpr int kShift = kSigned ? 1 : 2;
  static constexpr std::uint32_t kOffset = kSigned ? 0x1FC00000 : 0x2FA00000;
  static constexpr float kTop = kSigned ? 127 : 255;
};

// Lane k of the result is the largest lane of rows[k]; `rows` is used up.
HWY_INLINE VU largest_lanes(VU (&rows)[kLanes]) {
#if HWY_TARGET != HWY_SCALAR
  using U64 = hn::RepartitionToWide<U32>;
  for (int i = 0; i < kLanes / 2; ++i) {
    const VU a = rows[2 * i];
    const VU b = rows[2 * i + 1];
    rows[i] = hn::Max(hn::InterleaveLower(a, b), hn::InterleaveUpper(U32(), a, b));
  }
  for (int i = 0; i < kLanes / 4; ++i) {
    const auto a = hn::BitCast(U64(), rows[2 * i]);
    const auto b = hn::BitCast(U64(), rows[2 * i + 1]);
    rows[i] =
        hn::Max(hn::BitCast(U32(), hn::InterleaveLower(a, b)), hn::BitCast(U32(), hn::InterleaveUpper(U64(), a, b)));
  }
  // Each row now has four results in every 128-bit block; the blocks are left to be merged.
  const auto halves = [](VU a, VU b) {
    return hn::Max(hn::ConcatLowerLower(U32(), b, a), hn::ConcatUpperUpper(U32(), b, a));
  };
  if constexpr (kLanes == 8) return halves(rows[0], rows[1]);
  if constexpr (kLanes == 16) {
    const auto blocks = [](VU a) { return hn::Max(a, hn::SwapAdjacentBlocks(a)); };
    return hn::OddEvenBlocks(blocks(halves(rows[1], rows[3])), blocks(halves(rows[0], rows[2])));
  }
#endif
  return rows[0];
}

// The scales in bf16 bits and their reciprocals, from the groups' largest magnitudes.
struct GroupScales {
  VU bits;
  V inverse;
};
HWY_INLINE GroupScales group_scales(VU largest) {
  const auto finite = hn::Lt(largest, set_bits(0x7F800000));
  const auto usable = hn::And(finite, hn::Gt(largest, set_bits(0x037FFFFF)));
  const VU rounded = hn::Min(hn::ShiftRight<16>(hn::Add(largest, set_bits(0xFFFF))), set_bits(0x7F7F));
  const V inverse = hn::Div(set(1), float_of(hn::ShiftLeft<16>(rounded)));
  return {hn::IfThenElse(finite, hn::IfThenElseZero(usable, rounded), set_bits(0x7FC0)),
          hn::IfThenElseZero(hn::RebindMask(F32(), usable), inverse)};
}

// The unsigned integer code of each magnitude.
template <StateCode kCode, bool kStochastic>
HWY_INLINE VI code_of(VU magnitude, V inverse, const std::uint16_t* random) {
  using C = Curve<kCode>;
  // As integers a NaN, whatever its sign, is above 1 and becomes the top code.
  const VU a = hn::Min(bits_of(hn::Mul(float_of(magnitude), inverse)), set_bits(0x3F800000));
  const V y = float_of(hn::Add(hn::ShiftRight<C::kShift>(a), set_bits(C::kOffset)));
  V r = set(0.5F);
  if constexpr (kStochastic) {
    r = hn::Mul(hn::ConvertTo(F32(), hn::BitCast(I32(), pieces<true>(random, 0))), set(0x1p-16F));
  }
  const VI code = hn::ConvertTo(I32(), fma(set(C::kTop), y, r));
  if constexpr (C::kSigned) return code;
  return hn::Max(code, hn::BitCast(I32(), hn::Min(magnitude, set_bits(1))));
}

// Code 0 has a y below every line; raised to the lowest it becomes 0.
template <StateCode kCode>
HWY_INLINE V value_of(VI code, V scale) {
  using C = Curve<kCode>;
  const VU y = bits_of(hn::Mul(hn::ConvertTo(F32(), code), set(1.0F / C::kTop)));
  const VU offset = set_bits(C::kOffset);
  return hn::Mul(float_of(hn::ShiftLeft<C::kShift>(hn::Sub(hn::Max(y, offset), offset))), scale);
}

template <StateCode kCode>
HWY_INLINE V decode_vector(const std::uint8_t* codes, V scale) {
  if constexpr (Curve<kCode>::kSigned) {
    const VI code = hn::PromoteTo(I32(), hn::LoadU(I8(), reinterpret_cast<const std::int8_t*>(codes)));
    const VU sign = hn::And(hn::BitCast(U32(), code), set_bits(0x80000000));
    return float_of(hn::Or(bits_of(value_of<kCode>(hn::Abs(code), scale)), sign));
  } else {
    return value_of<kCode>(hn::PromoteTo(I32(), hn::LoadU(U8(), codes)), scale);
  }
}

// Groups that are encoded together, so that their scales are one vector.
constexpr std::int64_t kGroups = kLanes;

// The first `groups` of kGroups groups, or all of them.
template <StateCode kCode, bool kStochastic, bool kAll>
HWY_INLINE void encode_groups(const float* from, std::int64_t groups, std::uint8_t* codes, std::uint16_t* scales,
                              const std::uint16_t* random) {
  const VU magnitude = set_bits(0x7FFFFFFF);
  VU largest[kGroups];
#pragma GCC unroll 16
  for (std::int64_t g = 0; g < kGroups; ++g) {
    largest[g] = hn::Zero(U32());
    if (!kAll && g >= groups) continue;
    for (int i = 0; i < kStateGroup; i += kLanes) {
      largest[g] = hn::Max(largest[g], hn::And(bits_of(load(from + g * kStateGroup + i)), magnitude));
    }
  }
  const GroupScales all = group_scales(largest_lanes(largest));
  std::uint16_t scale[kGroups];
  float inverse[kGroups];
  store_low16(all.bits, scale);
  store(all.inverse, inverse);
  std::copy_n(scale, kAll ? kGroups : groups, scales);
  for (std::int64_t g = 0; g < (kAll ? kGroups : groups); ++g) {
    const V group_inverse = set(inverse[g]);
    for (int k = 0; k < kStateGroup; k += kLanes) {
      const std::int64_t i = g * kStateGroup + k;
      const VU bits = bits_of(load(from + i));
      const VI code =
          code_of<kCode, kStochastic>(hn::And(bits, magnitude), group_inverse, advance<kStochastic>(random, i));
      VU byte = hn::BitCast(U32(), code);
      if constexpr (Curve<kCode>::kSigned) {
        const auto negative = hn::Lt(hn::BitCast(I32(), bits), hn::Zero(I32()));
        byte = hn::BitCast(U32(), hn::IfThenElse(negative, hn::Neg(code), code));
      }
      hn::StoreU(hn::TruncateTo(U8(), byte), U8(), codes + i);
    }
  }
}

template <StateCode kCode>
HWY_INLINE void decode_group(const std::uint8_t* codes, std::uint16_t scale_bits, float* to) {
  const V scale = set(std::bit_cast<float>(static_cast<std::uint32_t>(scale_bits) << 16));
  for (int i = 0; i < kStateGroup; i += kLanes) store(decode_vector<kCode>(codes + i, scale), to + i);
}

// Arrays. A part of a block or group goes through a copy that is padded with zeros, which change no scale.

template <class T>
void decode(const T* from, std::int64_t count, float* to) {
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(load(from + i), to + i);
  if (i < count) {
    T rest[kLanes] = {};
    float wide[kLanes];
    const auto left = static_cast<std::size_t>(count - i);
    std::memcpy(rest, from + i, left * sizeof(T));
    store(load(rest), wide);
    std::memcpy(to + i, wide, left * sizeof(float));
  }
}

template <bool kStochastic, class T>
void encode(const float* from, std::int64_t count, T* to, const std::uint16_t* random) {
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store<kStochastic>(load(from + i), to + i, advance<kStochastic>(random, i));
  if (i < count) {
    float wide[kLanes] = {};
    T rest[kLanes];
    const auto left = static_cast<std::size_t>(count - i);
    std::memcpy(wide, from + i, left * sizeof(float));
    store<kStochastic>(load(wide), rest, advance<kStochastic>(random, i));
    std::memcpy(to + i, rest, left * sizeof(T));
  }
}

[[maybe_unused]] void join(const Bf16* from, const std::int8_t* low_bits, std::int64_t count, float* to) {
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(load(from + i, low_bits + i), to + i);
  if (i < count) {
    Bf16 high[kLanes] = {};
    std::int8_t low[kLanes] = {};
    float wide[kLanes];
    const auto left = static_cast<std::size_t>(count - i);
    std::memcpy(high, from + i, left * sizeof(Bf16));
    std::memcpy(low, low_bits + i, left);
    store(load(high, low), wide);
    std::memcpy(to + i, wide, left * sizeof(float));
  }
}

template <bool kStochastic>
void split(const float* from, std::int64_t count, Bf16* to, std::int8_t* low_bits, const std::uint16_t* random) {
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    store<kStochastic>(load(from + i), to + i, low_bits + i, advance<kStochastic>(random, i));
  if (i < count) {
    float wide[kLanes] = {};
    Bf16 high[kLanes];
    std::int8_t low[kLanes];
    const auto left = static_cast<std::size_t>(count - i);
    std::memcpy(wide, from + i, left * sizeof(float));
    store<kStochastic>(load(wide), high, low, advance<kStochastic>(random, i));
    std::memcpy(to + i, high, left * sizeof(Bf16));
    std::memcpy(low_bits + i, low, left);
  }
}

template <StateCode kCode>
void decode_state(const std::uint8_t* codes, const std::uint16_t* scales, std::int64_t count, float* to) {
  std::int64_t i = 0;
  for (; i + kStateGroup <= count; i += kStateGroup) decode_group<kCode>(codes + i, *scales++, to + i);
  if (i < count) {
    std::uint8_t rest[kStateGroup] = {};
    float wide[kStateGroup];
    const auto left = static_cast<std::size_t>(count - i);
    std::memcpy(rest, codes + i, left);
    decode_group<kCode>(rest, *scales, wide);
    std::memcpy(to + i, wide, left * sizeof(float));
  }
}

template <StateCode kCode, bool kStochastic>
void encode_state(const float* from, std::int64_t count, std::uint8_t* codes, std::uint16_t* scales,
                  const std::uint16_t* random) {
  const std::int64_t whole = count / kStateGroup;
  for (std::int64_t g = 0; g < whole; g += kGroups) {
    const std::int64_t i = g * kStateGroup;
    const std::uint16_t* const bits = advance<kStochastic>(random, i);
    if (whole - g >= kGroups) {
      encode_groups<kCode, kStochastic, true>(from + i, kGroups, codes + i, scales + g, bits);
    } else {
      encode_groups<kCode, kStochastic, false>(from + i, whole - g, codes + i, scales + g, bits);
    }
  }
  if (const std::int64_t i = whole * kStateGroup; i < count) {
    float wide[kStateGroup] = {};
    std::uint8_t rest[kStateGroup];
    const auto left = static_cast<std::size_t>(count - i);
    std::memcpy(wide, from + i, left * sizeof(float));
    encode_groups<kCode, kStochastic, false>(wide, 1, rest, scales + whole, advance<kStochastic>(random, i));
    std::memcpy(codes + i, rest, left);
  }
}

#if !OXYTORCH_KERNELS_SCALAR
// A Philox counter for each even lane; odd lanes hold what does not matter, since products take even lanes alone.
struct PhiloxLanes {
  using U64 = hn::RepartitionToWide<U32>;
  VU c0, c1, c2, c3;
  HWY_INLINE void round(VU k0, VU k1) {
    const auto p0 = hn::MulEven(c0, set_bits(0xD2511F53U));
    const auto p1 = hn::MulEven(c2, set_bits(0xCD9E8D57U));
    c0 = hn::Xor(hn::Xor(hn::BitCast(U32(), hn::ShiftRight<32>(p1)), c1), k0);
    c2 = hn::Xor(hn::Xor(hn::BitCast(U32(), hn::ShiftRight<32>(p0)), c3), k1);
    c1 = hn::BitCast(U32(), p1);
    c3 = hn::BitCast(U32(), p0);
  }
};
HWY_INLINE VU odd_to_even(VU lanes) {
  using U64 = hn::RepartitionToWide<U32>;
  return hn::BitCast(U32(), hn::ShiftRight<32>(hn::BitCast(U64(), lanes)));
}
HWY_INLINE VU merge(VU even, VU odd) {
  using U64 = hn::RepartitionToWide<U32>;
  return hn::OddEven(hn::BitCast(U32(), hn::ShiftLeft<32>(hn::BitCast(U64(), odd))), even);
}
#endif

// rounding_bits() of the elements from `element`, a multiple of 128, until `count` more, rounded up to 128.
struct RandomSource {
  std::uint64_t seed;
  std::uint32_t stream;
  std::uint32_t step;

  void fill(RoundingOperand operand, std::int64_t element, std::int64_t count, std::uint16_t* to) const {
    const auto key0 = static_cast<std::uint32_t>(seed);
    const auto key1 = static_cast<std::uint32_t>(seed >> 32);
#if !OXYTORCH_KERNELS_SCALAR
    std::uint32_t k0[10], k1[10];
    for (std::uint32_t round = 0; round < 10; ++round) {
      k0[round] = key0 + round * 0x9E3779B9U;
      k1[round] = key1 + round * 0xBB67AE85U;
    }
#endif
    for (std::int64_t done = 0; done < count; done += 128) {
      const auto first = static_cast<std::uint32_t>((element + done) / 8);
      for (int lane = 0; lane < 16; lane += kLanes) {
        std::uint16_t* const at = to + done + lane;
        const std::uint32_t counter = first + static_cast<std::uint32_t>(lane);
#if OXYTORCH_KERNELS_SCALAR
        for (unsigned i = 0; i < kLanes; ++i) {
          const PhiloxBlock block =
              philox4x32(counter + i, static_cast<std::uint32_t>(operand), stream, step, key0, key1);
          for (unsigned k = 0; k < 8; ++k) {
            at[16 * k + i] = static_cast<std::uint16_t>(block.word[k / 2] >> (k % 2 * 16));
          }
        }
#else
        const VU c0 = hn::Iota(U32(), counter);
        const VU c1 = set_bits(static_cast<std::uint32_t>(operand));
        PhiloxLanes even{c0, c1, set_bits(stream), set_bits(step)};
        PhiloxLanes odd{odd_to_even(c0), c1, set_bits(stream), set_bits(step)};
        for (int round = 0; round < 10; ++round) {
          even.round(set_bits(k0[round]), set_bits(k1[round]));
          odd.round(set_bits(k0[round]), set_bits(k1[round]));
        }
        int k = 0;
        for (const VU word :
             {merge(even.c0, odd.c0), merge(even.c1, odd.c1), merge(even.c2, odd.c2), merge(even.c3, odd.c3)}) {
          store_low16(hn::And(word, set_bits(0xFFFF)), at + 16 * k++);
          store_low16(hn::ShiftRight<16>(word), at + 16 * k++);
        }
#endif
      }
    }
  }
};

}  // namespace
}  // namespace oxytorch::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // OXYTORCH_KERNELS_FORMATS_INL
