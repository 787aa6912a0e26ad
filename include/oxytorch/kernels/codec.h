/// Narrow formats of optimizer state and weights, and random bits for rounding into them.
///
/// Every format is defined by integer and correctly rounded fp32 operations alone, so an encoder on another device
/// gives the same bytes. Arrays are taken in memory order.
#pragma once

#include <cstdint>
#include <span>

#include "oxytorch/api.h"

namespace oxytorch::kernels {

/// Elements that share a scale; the last group of an array may be shorter.
inline constexpr std::int64_t kStateGroup = 32;

/// 8-bit blockwise state: a bf16 scale for each group and one byte an element.
///
/// The scale is the group's largest magnitude rounded up to bf16, at most the largest finite one, 0 below 2^-120, and
/// NaN (0x7FC0) where an element is not finite: such a group decodes to NaN. With a = |x| * (1 / scale), limited to 1
/// (0 for |x| where the scale is 0; 1 for inf and NaN):
/// Signed (averages of gradients): y = float with bits (bits(a) >> 1) + 0x1FC00000, a piecewise linear square root;
/// code = sign(x) * floor(127 y + r). Unsigned (averages of squares): y of bits (bits(a) >> 2) + 0x2FA00000, a
/// piecewise linear fourth root; code = floor(255 y + r), at least 1 where x > 0, so that no denominator becomes 0. r
/// is 1/2, or uniform in [0, 1) for stochastic rounding. Decoding inverts the same lines; code 0 is 0.
enum class StateCode : std::uint8_t { Signed, Unsigned };

/// Errors of a value encoded to nearest and decoded: at most kStateError of its group's scale and, where it is at least
/// 1/4 (Signed) or 1/16 (Unsigned) of the scale, at most kStateRelativeError of itself. Below, the relative error
/// doubles for every factor of 4 or 16. Stochastic rounding at most doubles both.
inline constexpr double kStateError = 0.0079;
inline constexpr double kStateRelativeError = 0.0158;

/// Scales for `numel` elements.
[[nodiscard]] constexpr std::int64_t state_groups(std::int64_t numel) {
  return (numel + kStateGroup - 1) / kStateGroup;
}

/// Encodes to nearest. `codes`: numel bytes (int8 or uint8 by `code`); `scales`: state_groups(numel) bf16.
OXY_API void encode_state(StateCode code, std::span<const float> values, void* codes, std::uint16_t* scales);
OXY_API void decode_state(StateCode code, const void* codes, const std::uint16_t* scales, std::span<float> values);

/// SplitWeight: a weight of 24 bits (sign, 8 exponent and 15 mantissa bits) in a bf16 and a byte of low bits.
///
/// The fp32 magnitude bits are rounded to a multiple of 2^8: m. bf16 = (m + 0x80) >> 8, which is the weight to nearest
/// bf16, and low bits = m - (bf16 << 8) in [-128, 127]. Joined, the weight is within 2^-16 of the fp32 one, relatively.
OXY_API void split_weights(std::span<const float> values, std::uint16_t* bf16, std::int8_t* low_bits);
OXY_API void join_weights(const std::uint16_t* bf16, const std::int8_t* low_bits, std::span<float> values);

/// What a random piece is for; part of the Philox counter.
enum class RoundingOperand : std::uint32_t { Param = 0, State0 = 1, State1 = 2, State2 = 3, AttentionWeight = 4 };

/// The 16 random bits for `element` of parameter `stream` at `step` (the count after incrementing): of the
/// Philox4x32-10 block with key `seed` and counter {element / 128 * 16 + element % 16, operand, stream, step}, piece k
/// = element % 128 / 16, which is the low (k even) or high (k odd) half of word k / 2. bf16: added to the fp32 bits
/// before they are cut. Split weights: the piece's high 8 bits are added before the cut. Int8: r = piece / 65536.
OXY_API std::uint16_t rounding_bits(std::uint64_t seed, std::uint32_t stream, RoundingOperand operand,
                                    std::uint32_t step, std::int64_t element);

}  // namespace oxytorch::kernels
