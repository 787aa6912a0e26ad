/// One block of coefficients in the packed form that coefficients.h describes.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace oxytorch::data {

constexpr std::array<std::uint8_t, 64> make_natural_order() {
  std::array<std::uint8_t, 64> order{};
  int row = 0, column = 0;
  for (std::uint8_t& place : order) {
    place = static_cast<std::uint8_t>(row * 8 + column);
    const bool up = (row + column) % 2 == 0;
    int& ahead = up ? column : row;
    int& back = up ? row : column;
    if (ahead == 7) {
      ++back;
    } else {
      ++ahead;
      if (back > 0) --back;
    }
  }
  return order;
}

/// Natural position of each coefficient in zigzag order.
inline constexpr auto kNaturalOrder = make_natural_order();

/// The most bytes of a block's DC and mask, and of its values.
inline constexpr std::size_t kMaxFrameBytes = 10, kMaxValueBytes = 126;
/// What packing may write, and unpacking read, behind the end of a block's DC and mask and of its values.
inline constexpr std::size_t kBlockSlack = 128;

/// Writes a block's DC and mask to `frame` and its values to `value`, moves both on, and returns the byte of its sizes.
using PackBlock = std::uint8_t (*)(const std::int16_t* block, std::uint8_t*& frame, std::uint8_t*& value);

/// Where the next block of a row is, and where the row's parts end.
struct CoefficientCursor {
  const std::uint8_t *size = nullptr, *frame = nullptr, *value = nullptr;
  const std::uint8_t *frame_end = nullptr, *value_end = nullptr;
};

/// Unpacks `count` blocks, which are zero, and of them those alone whose bit of `needed` is set; false where the row
/// ends too early or is damaged.
using UnpackBlocks = bool (*)(CoefficientCursor& cursor, std::int16_t* const* blocks, std::uint32_t count,
                              std::uint32_t needed);

/// The fastest of each on the instruction set in use; all give the same.
PackBlock pack_block();
UnpackBlocks unpack_blocks();

}  // namespace oxytorch::data
