/// One element from and to the storage formats: the definitions of oxytorch/kernels/codec.h for one thread of a device.
///
/// What src/kernels/formats-inl.h does for vectors; the same bits but for the payload of a NaN.
#pragma once

#include "kernels/device/number.h"
#include "oxytorch/kernels/codec.h"

#if defined(__CUDACC__)
#include <cuda_fp16.h>
#endif

namespace oxytorch::kernels::device {

/// What rounding to nearest adds in place of 16 random bits.
inline constexpr std::uint32_t kNearest = 0xFFFFFFFF;

OXY_HOST_DEVICE inline float from_bf16(std::uint16_t bits) { return float_of(static_cast<std::uint32_t>(bits) << 16); }
/// `piece`: random bits below the cut, or kNearest.
OXY_HOST_DEVICE inline std::uint16_t to_bf16(float value, std::uint32_t piece) {
  const std::uint32_t bits = bits_of(value);
  if (value != value) return static_cast<std::uint16_t>(bits >> 16 | 0x40);
  return static_cast<std::uint16_t>((bits + (piece == kNearest ? 0x7FFF + (bits >> 16 & 1) : piece)) >> 16);
}

OXY_HOST_DEVICE inline float from_f16(std::uint16_t half) {
#ifdef __CUDA_ARCH__
  return __half2float(__ushort_as_half(half));
#else
  const std::uint32_t sign = (half & 0x8000U) << 16;
  const std::uint32_t magnitude = half & 0x7FFFU;
  if (magnitude > 0x7C00U) return float_of(sign | 0x7FC00000U | magnitude << 13);
  if (magnitude == 0x7C00U) return float_of(sign | 0x7F800000U);
  // A float with the half's exponent field, then the difference of the biases; exact for denormals too.
  return float_of(sign | magnitude << 13) * 0x1p112F;
#endif
}
OXY_HOST_DEVICE inline std::uint16_t to_f16(float value) {
#ifdef __CUDA_ARCH__
  return __half_as_ushort(__float2half_rn(value));
#else
  const std::uint32_t sign = bits_of(value) >> 16 & 0x8000U;
  const std::uint32_t magnitude = bits_of(value) & 0x7FFFFFFFU;
  std::uint32_t half;
  if (magnitude > 0x7F800000U) {
    half = 0x7E00U | (magnitude >> 13 & 0x3FFU);
  } else if (magnitude >= 0x47800000U) {
    half = 0x7C00U;
  } else if (magnitude < 0x38800000U) {
    // Adding 1/2 puts the last bit of a denormal half at the last bit of a float, rounded to nearest even.
    half = bits_of(float_of(magnitude) + 0.5F) - 0x3F000000U;
  } else {
    half = (magnitude - 0x38000000U + 0xFFFU + (magnitude >> 13 & 1U)) >> 13;
  }
  return static_cast<std::uint16_t>(sign | half);
#endif
}

OXY_HOST_DEVICE inline float join_weight(std::uint16_t high, std::int8_t low) {
  const std::uint32_t magnitude = ((high & 0x7FFFU) << 8) + static_cast<std::uint32_t>(static_cast<std::int32_t>(low));
  return float_of(magnitude << 8 | (high & 0x8000U) << 16);
}
OXY_HOST_DEVICE inline void split_weight(float value, std::uint32_t piece, std::uint16_t* high, std::int8_t* low) {
  const std::uint32_t bits = bits_of(value);
  const std::uint32_t magnitude = value == value ? bits & 0x7FFFFFFF : 0x7FC00000;
  const std::uint32_t whole = (magnitude + ((piece == kNearest ? 0x8000 : piece) >> 8)) >> 8;
  const std::uint32_t top = (whole + 0x80) >> 8;
  *high = static_cast<std::uint16_t>(top | (bits >> 16 & 0x8000));
  *low = static_cast<std::int8_t>(static_cast<std::uint8_t>(whole - (top << 8)));
}

/// 8-bit state. Both curves share their form: y = bits >> kShift, plus what maps 1 to 1.
template <StateCode kCode>
struct Curve {
  static constexpr bool kSigned = kCode == StateCode::Signed;
  static constexpr int kShift = kSigned ? 1 : 2;
  static constexpr std::uint32_t kOffset = kSigned ? 0x1FC00000 : 0x2FA00000;
  static constexpr float kTop = kSigned ? 127 : 255;
};

/// A group's scale in bf16 bits and its reciprocal, from the bits of its largest magnitude.
struct GroupScale {
  std::uint16_t bits;
  float inverse;
};
OXY_HOST_DEVICE inline GroupScale group_scale(std::uint32_t largest) {
  if (largest >= 0x7F800000) return {0x7FC0, 0};
  if (largest <= 0x037FFFFF) return {0, 0};
  const std::uint32_t up = (largest + 0xFFFF) >> 16;
  const std::uint32_t rounded = up < 0x7F7F ? up : 0x7F7F;
  return {static_cast<std::uint16_t>(rounded), divide(1, float_of(rounded << 16))};
}

/// The byte of `value` in a group of reciprocal scale `inverse`.
template <StateCode kCode>
OXY_HOST_DEVICE inline std::uint8_t encode_code(float value, float inverse, std::uint32_t piece) {
  using C = Curve<kCode>;
  const std::uint32_t magnitude = bits_of(value) & 0x7FFFFFFF;
  // As integers a NaN, whatever its sign, is above 1 and becomes the top code.
  const std::uint32_t scaled = bits_of(float_of(magnitude) * inverse);
  const std::uint32_t a = scaled < 0x3F800000 ? scaled : 0x3F800000;
  const float r = piece == kNearest ? 0.5F : static_cast<float>(piece) * 0x1p-16F;
  const auto code = static_cast<std::int32_t>(fma(C::kTop, float_of((a >> C::kShift) + C::kOffset), r));
  if constexpr (C::kSigned) return static_cast<std::uint8_t>(bits_of(value) >> 31 != 0 ? -code : code);
  const std::int32_t least = magnitude != 0 ? 1 : 0;
  return static_cast<std::uint8_t>(code > least ? code : least);
}

template <StateCode kCode>
OXY_HOST_DEVICE inline float decode_code(std::uint8_t byte, float scale) {
  using C = Curve<kCode>;
  const std::int32_t code = C::kSigned ? static_cast<std::int8_t>(byte) : static_cast<std::int32_t>(byte);
  const std::uint32_t y = bits_of(static_cast<float>(code < 0 ? -code : code) * (1.0F / C::kTop));
  // Code 0 has a y below every line; raised to the lowest it becomes 0.
  const float value = float_of(((y > C::kOffset ? y : C::kOffset) - C::kOffset) << C::kShift) * scale;
  return C::kSigned ? float_of(bits_of(value) | (static_cast<std::uint32_t>(code) & 0x80000000)) : value;
}

/// The random pieces (codec.h, rounding_bits) of the four elements of one thread, through a block of 128 elements.
struct RandomFour {
  PhiloxBlock block[4];
  /// `counter`: of the first of the four in the block.
  OXY_HOST_DEVICE void fill(std::uint64_t seed, std::uint32_t stream, RoundingOperand operand, std::uint32_t step,
                            std::uint32_t counter) {
    for (std::uint32_t j = 0; j < 4; ++j) {
      block[j] = philox4x32(counter + j, static_cast<std::uint32_t>(operand), stream, step,
                            static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32));
    }
  }
  /// Piece `k` of element `j`. Selected word by word: an index would force the blocks out of registers.
  OXY_HOST_DEVICE std::uint32_t piece(int j, int k) const {
    const std::uint32_t* word = block[j].word;
    const std::uint32_t low = k < 2 ? word[0] : word[1];
    const std::uint32_t high = k < 6 ? word[2] : word[3];
    return (k < 4 ? low : high) >> (k % 2 * 16) & 0xFFFF;
  }
};

}  // namespace oxytorch::kernels::device
