/// The wide loops over pixels, one table for each instruction set; all give the same bits.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "oxytorch/data/value.h"
#include "oxytorch/isa.h"

namespace oxytorch::data {

/// Bits behind the point of a weight, as PIL has them: 32, less 8 of the pixel and 2 to spare.
inline constexpr int kWeightBits = 32 - 8 - 2;

/// One axis of a resize. Output i is the sum of weights[i * stride + k] times input first[i] + k, k < taps[i].
struct ResizeAxis {
  int stride = 0;
  std::vector<int> first, taps;
  std::vector<std::int32_t> weights;
};

/// Bytes that transposed rows have side by side.
inline constexpr std::size_t kRowsAside = 16;
/// Elements that are normalized at once, a whole number of pixels of 1 to 4 channels.
inline constexpr std::size_t kNormalized = 48;

/// How values become floats: value * scale + bias in double, rounded once.
struct NormalizeLines {
  alignas(64) std::array<double, kNormalized> scale, bias;
};

struct PixelKernels {
  /// Weighs elements of `count` bytes, `stride` apart; outputs lie one after the other.
  void (*resample)(const ResizeAxis& axis, const std::uint8_t* from, std::size_t stride, std::uint8_t* to,
                   std::size_t count);
  /// to[column * kRowsAside + row] = row `row` of `from`; behind the last of `rows` it is repeated.
  void (*gather_rows)(const std::uint8_t* from, std::size_t stride, std::size_t rows, std::size_t columns,
                      std::uint8_t* to);
  /// The inverse; `rows` of them.
  void (*scatter_rows)(const std::uint8_t* from, std::size_t rows, std::size_t columns, std::uint8_t* to,
                       std::size_t stride);
  /// `count` values one after the other; line i % kNormalized is for value i.
  void (*normalize)(const std::uint8_t* from, std::size_t count, const NormalizeLines& lines, DType dtype,
                    std::byte* to);
  /// Pixels of three channels into three planes of `pixels` elements; lines 16 c to 16 c + 15 are for channel c. U8 is
  /// copied.
  void (*planes)(const std::uint8_t* from, std::size_t pixels, const NormalizeLines& lines, DType dtype, std::byte* to);
  /// Sum of PIL's gray of RGB pixels.
  std::uint64_t (*gray_sum)(const std::uint8_t* rgb, std::size_t pixels);
  /// RGB pixels from their gray by `factor`: gray + factor * (value - gray).
  void (*blend_gray)(std::uint8_t* rgb, std::size_t pixels, float factor);
  /// The same from PIL's SMOOTH of a row of `count` bytes, whose neighbours are `channels` bytes apart; `count` without
  /// the first and the last pixel.
  void (*blend_smooth)(const std::uint8_t* above, const std::uint8_t* row, const std::uint8_t* below, std::size_t count,
                       std::size_t channels, float factor, std::uint8_t* to);
  /// to = own * to + others * from.
  void (*mix)(DType dtype, std::byte* to, const std::byte* from, std::size_t count, float own, float others);
};

/// The table of `isa`, which must be supported.
const PixelKernels& pixel_kernels(Isa isa);
inline const PixelKernels& pixel_kernels() { return pixel_kernels(active_isa()); }

}  // namespace oxytorch::data
