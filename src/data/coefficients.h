/// Quantised DCT coefficients of a JPEG in a compact form that is unpacked without entropy decoding.
///
/// Layout, little-endian, any alignment: StrippedHead | a JPEG header (SOI to SOS, no Huffman tables) | mcu_rows + 1
/// row entries | the rows | kStrippedPadding zero bytes. An entry has two offsets from the start of the whole: of the
/// row, and of its values; the last one is the end of the last row. A row of MCUs, each of blocks_in_mcu blocks, has
/// three parts:
///   - one byte a block: bits 0-3 the bytes of its mask, bit 4 whether its DC takes two bytes, bits 5-6 the width of
///   its values;
///   - for each block its DC (absolute, not a difference, so that decoding can start in any row) and its mask: bit k
///   says that
///     AC coefficient k + 1 in zigzag order is not zero; zero bytes at the end of a mask are left out;
///   - for each block its nonzero AC coefficients in zigzag order, all of 4, 8 or 16 bits; four-bit ones begin with the
///   low half.
/// Where blocks are given and taken, their coefficients are in natural order, as in libjpeg's JBLOCK.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "data/coefficient_blocks.h"
#include "oxytorch/api.h"

namespace oxytorch::data {

/// The most blocks that an MCU of a JPEG may have.
inline constexpr std::uint32_t kMaxBlocksInMcu = 10;
/// Zero bytes at the end, so that vector loads need no care.
inline constexpr std::size_t kStrippedPadding = kBlockSlack;

struct OXY_API McuLayout {
  std::uint32_t mcus_per_row = 0, mcu_rows = 0, blocks_in_mcu = 0;
  bool operator==(const McuLayout&) const = default;
};

struct OXY_API StrippedHead {
  char magic[4];
  std::uint32_t version, header_bytes;
  McuLayout layout;
  std::uint64_t total_bytes;
};

/// Packs the blocks of one image after the other; its buffers are reused.
class OXY_API CoefficientWriter {
 public:
  void begin(const McuLayout& layout, std::string jpeg_header);
  /// The next MCU in raster order: blocks_in_mcu times 64 coefficients.
  void add_mcu(const std::int16_t* blocks);
  /// The packed form, once every MCU was added.
  [[nodiscard]] std::string finish();

 private:
  struct RowEntry {
    std::uint32_t row, values;
  };
  void end_row();

  McuLayout layout_;
  std::string jpeg_header_;
  std::uint32_t column_ = 0;
  std::vector<RowEntry> entries_;
  std::vector<std::uint8_t> body_, sizes_, frames_, values_;
  std::uint8_t *size_ = nullptr, *frame_ = nullptr, *value_ = nullptr;
  PackBlock pack_ = nullptr;
};

/// Hands out the blocks of a packed image in the order in which a decoder asks for MCUs. It reads only inside of the
/// bytes that it was given, whatever they hold.
class OXY_API CoefficientReader {
 public:
  /// Errors: `Io` where sizes and offsets are not those of a packed image of this version.
  explicit CoefficientReader(std::span<const std::byte> stripped);

  [[nodiscard]] std::span<const std::byte> jpeg_header() const noexcept { return jpeg_header_; }
  [[nodiscard]] const McuLayout& layout() const noexcept { return layout_; }
  [[nodiscard]] std::size_t bytes() const noexcept { return size_; }

  /// Limits what next_mcu() unpacks to the columns [first, last] of MCUs and to the blocks whose bit of `needed` is
  /// set.
  void select(std::uint32_t first, std::uint32_t last, std::uint32_t needed) noexcept;
  void skip_mcu() noexcept;
  /// Unpacks the next MCU into blocks_in_mcu blocks that are zero; false where the data are damaged or the image has
  /// ended.
  [[nodiscard]] bool next_mcu(std::int16_t* const* blocks) noexcept;

 private:
  void open_row(std::uint32_t row) noexcept;

  const std::uint8_t* data_;
  std::size_t size_;
  std::size_t entries_ = 0;  // offset of the row entries
  McuLayout layout_;
  std::span<const std::byte> jpeg_header_;
  std::uint32_t first_ = 0, last_ = 0, needed_ = ~0U;
  std::uint32_t row_ = 0, column_ = 0;  // of the MCU that the decoder asks for next
  // The row and column where the cursor is: it follows only when blocks are needed.
  std::uint32_t cursor_row_ = ~0U, cursor_column_ = 0;
  CoefficientCursor cursor_;
  UnpackBlocks unpack_;
};

}  // namespace oxytorch::data
