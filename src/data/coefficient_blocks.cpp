#include "data/coefficient_blocks.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "oxytorch/isa.h"

#if defined(__x86_64__)
// GCC 12 warns of values that its own intrinsics leave undefined on purpose (its bug 105593).
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

namespace oxytorch::data {
namespace {

/// Bits of the byte of a block's sizes.
constexpr std::uint32_t kMaskBytesBits = 15, kWideDc = 16, kWidthShift = 5;
/// How wide the values of a block are.
constexpr std::uint32_t kNibbles = 0, kBytes = 1, kWords = 2;

struct BlockFrame {
  std::uint64_t mask;
  const std::uint8_t* value;
  std::uint32_t width;
  std::int16_t dc;
};

/// Reads a block's DC and mask and moves the cursor behind the block.
[[gnu::always_inline]] inline bool next_frame(CoefficientCursor& cursor, BlockFrame& frame) noexcept {
  static constexpr auto kKept = [] {
    std::array<std::uint64_t, 16> kept{};
    for (unsigned i = 1; i < kept.size(); ++i) kept[i] = ~0ULL >> (i < 8 ? 64 - 8 * i : 1);
    return kept;
  }();
  const std::uint32_t size = *cursor.size++;
  const std::uint32_t mask_bytes = size & kMaskBytesBits;
  std::memcpy(&frame.dc, cursor.frame, sizeof(frame.dc));
  if ((size & kWideDc) == 0) frame.dc = static_cast<std::int16_t>(((frame.dc & 0xFF) ^ 0x80) - 0x80);
  cursor.frame += (size & kWideDc) == 0 ? 1 : 2;
  std::memcpy(&frame.mask, cursor.frame, sizeof(frame.mask));
  frame.mask &= kKept[mask_bytes];
  cursor.frame += mask_bytes;
  frame.width = size >> kWidthShift;
  frame.value = cursor.value;
  const auto count = static_cast<std::uint32_t>(std::popcount(frame.mask));
  cursor.value += frame.width == kNibbles ? (count + 1) / 2 : count << (frame.width - 1);
  return mask_bytes <= 8 && frame.width <= kWords && cursor.frame <= cursor.frame_end &&
         cursor.value <= cursor.value_end;
}

[[gnu::always_inline]] inline void spread_values(const BlockFrame& frame, std::int16_t* block) noexcept {
  block[0] = frame.dc;
  std::uint64_t mask = frame.mask;
  for (std::size_t i = 0; mask != 0; ++i, mask &= mask - 1) {
    std::int16_t value = 0;
    if (frame.width == kNibbles) {
      const int half = frame.value[i / 2] >> (i % 2 * 4) & 15;
      value = static_cast<std::int16_t>((half ^ 8) - 8);
    } else if (frame.width == kBytes) {
      value = static_cast<std::int16_t>((frame.value[i] ^ 0x80) - 0x80);
    } else {
      std::memcpy(&value, frame.value + 2 * i, sizeof(value));
    }
    block[kNaturalOrder[static_cast<unsigned>(std::countr_zero(mask)) + 1]] = value;
  }
}

[[gnu::always_inline]] inline bool spread_blocks(CoefficientCursor& cursor, std::int16_t* const* blocks,
                                                 std::uint32_t count, std::uint32_t needed) noexcept {
  for (std::uint32_t i = 0; i < count; ++i) {
    BlockFrame frame;
    if (!next_frame(cursor, frame)) return false;
    if ((needed >> i & 1) != 0) spread_values(frame, blocks[i]);
  }
  return true;
}

bool unpack_blocks_scalar(CoefficientCursor& cursor, std::int16_t* const* blocks, std::uint32_t count,
                          std::uint32_t needed) {
  return spread_blocks(cursor, blocks, count, needed);
}

/// Writes DC and mask and returns the byte of sizes.
[[gnu::always_inline]] inline std::uint8_t write_frame(std::int16_t dc, std::uint64_t mask, std::uint32_t width,
                                                       std::uint8_t*& frame) noexcept {
  const bool wide = dc != static_cast<std::int8_t>(dc);
  const auto mask_bytes = static_cast<std::uint32_t>(std::bit_width(mask) + 7) / 8;
  std::memcpy(frame, &dc, sizeof(dc));
  frame += wide ? 2 : 1;
  std::memcpy(frame, &mask, sizeof(mask));
  frame += mask_bytes;
  return static_cast<std::uint8_t>(mask_bytes | (wide ? kWideDc : 0) | width << kWidthShift);
}

std::uint8_t pack_block_scalar(const std::int16_t* block, std::uint8_t*& frame, std::uint8_t*& value) {
  std::uint64_t mask = 0;
  for (unsigned k = 1; k < 64; ++k) mask |= std::uint64_t{block[kNaturalOrder[k]] != 0} << (k - 1);
  std::int16_t found[64];
  std::size_t count = 0;
  int magnitude = 0;  // as many bits as the largest value has without its sign
  for (std::uint64_t rest = mask; rest != 0; rest &= rest - 1) {
    const std::int16_t coefficient = block[kNaturalOrder[static_cast<unsigned>(std::countr_zero(rest)) + 1]];
    found[count++] = coefficient;
    magnitude |= coefficient ^ (coefficient >> 15);
  }
  const std::uint32_t width = magnitude < 8 ? kNibbles : magnitude < 128 ? kBytes : kWords;
  if (width == kNibbles) {
    found[count] = 0;
    for (std::size_t i = 0; i < count; i += 2) {
      *value++ = static_cast<std::uint8_t>((found[i] & 15) | (found[i + 1] & 15) << 4);
    }
  } else if (width == kBytes) {
    for (std::size_t i = 0; i < count; ++i) *value++ = static_cast<std::uint8_t>(found[i]);
  } else {
    std::memcpy(value, found, 2 * count);
    value += 2 * count;
  }
  return write_frame(block[0], mask, width, frame);
}

#if defined(__x86_64__)

[[gnu::target("bmi,bmi2,lzcnt,popcnt")]] bool unpack_blocks_bmi(CoefficientCursor& cursor, std::int16_t* const* blocks,
                                                                std::uint32_t count, std::uint32_t needed) {
  return spread_blocks(cursor, blocks, count, needed);
}

#define OXY_TARGET_VBMI2 gnu::target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vbmi2,bmi,bmi2,lzcnt,popcnt")

struct ZigzagTables {
  alignas(64) std::uint8_t place[64];    // zigzag position - 1 of each natural position; 63 is no coefficient's
  alignas(64) std::uint16_t source[64];  // natural position of each zigzag position - 1
};
constexpr ZigzagTables kZigzag = [] {
  ZigzagTables tables{};
  tables.place[0] = 63;
  for (unsigned k = 1; k < 64; ++k) {
    tables.place[kNaturalOrder[k]] = static_cast<std::uint8_t>(k - 1);
    tables.source[k - 1] = kNaturalOrder[k];
  }
  return tables;
}();

[[OXY_TARGET_VBMI2]] bool unpack_blocks_vbmi2(CoefficientCursor& cursor, std::int16_t* const* blocks,
                                              std::uint32_t count, std::uint32_t needed) {
  const __m512i place = _mm512_load_si512(kZigzag.place);
  for (std::uint32_t i = 0; i < count; ++i) {
    BlockFrame frame;
    if (!next_frame(cursor, frame)) return false;
    if ((needed >> i & 1) == 0) continue;
    std::int16_t* block = blocks[i];
    if (frame.width == kWords) {
      spread_values(frame, block);
      continue;
    }
    const __m512i bytes = _mm512_loadu_si512(frame.value);
    const __m512i pairs = _mm512_cvtepu8_epi16(_mm512_castsi512_si256(bytes));
    const __m512i halves = _mm512_and_si512(_mm512_or_si512(pairs, _mm512_slli_epi16(pairs, 4)), _mm512_set1_epi8(15));
    const __m512i eight = _mm512_set1_epi8(8);
    const __m512i nibbles = _mm512_sub_epi8(_mm512_xor_si512(halves, eight), eight);
    const __m512i values = _mm512_mask_mov_epi8(bytes, frame.width == kNibbles ? ~0ULL : 0, nibbles);
    const __m512i natural = _mm512_permutexvar_epi8(place, _mm512_maskz_expand_epi8(frame.mask, values));
    const __m512i low = _mm512_cvtepi8_epi16(_mm512_castsi512_si256(natural));
    _mm512_storeu_si512(block, _mm512_mask_set1_epi16(low, 1, frame.dc));
    _mm512_storeu_si512(block + 32, _mm512_cvtepi8_epi16(_mm512_extracti64x4_epi64(natural, 1)));
  }
  return true;
}

[[OXY_TARGET_VBMI2]] std::uint8_t pack_block_vbmi2(const std::int16_t* block, std::uint8_t*& frame,
                                                   std::uint8_t*& value) {
  const __m512i first = _mm512_loadu_si512(block), second = _mm512_loadu_si512(block + 32);
  const __m512i low = _mm512_permutex2var_epi16(first, _mm512_load_si512(kZigzag.source), second);
  const __m512i high = _mm512_maskz_permutex2var_epi16(~0U >> 1, first, _mm512_load_si512(kZigzag.source + 32), second);
  const std::uint64_t mask = _mm512_test_epi16_mask(low, low) | std::uint64_t{_mm512_test_epi16_mask(high, high)} << 32;
  const __m256i low_bytes = _mm512_cvtepi16_epi8(low), high_bytes = _mm512_cvtepi16_epi8(high);
  const std::uint32_t too_wide = _mm512_cmpneq_epi16_mask(_mm512_cvtepi8_epi16(low_bytes), low) |
                                 _mm512_cmpneq_epi16_mask(_mm512_cvtepi8_epi16(high_bytes), high);
  if (too_wide != 0) return pack_block_scalar(block, frame, value);
  const __m512i bytes = _mm512_inserti64x4(_mm512_castsi256_si512(low_bytes), high_bytes, 1);
  const __m512i values = _mm512_maskz_compress_epi8(mask, bytes);
  const auto count = static_cast<std::uint32_t>(std::popcount(mask));
  const bool nibbles = _mm512_cmpgt_epu8_mask(_mm512_add_epi8(bytes, _mm512_set1_epi8(8)), _mm512_set1_epi8(15)) == 0;
  if (nibbles) {
    const __m512i halves = _mm512_and_si512(values, _mm512_set1_epi8(15));
    const __m512i pairs = _mm512_maddubs_epi16(halves, _mm512_set1_epi16(0x1001));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(value), _mm512_cvtepi16_epi8(pairs));
    value += (count + 1) / 2;
  } else {
    _mm512_storeu_si512(value, values);
    value += count;
  }
  return write_frame(block[0], mask, nibbles ? kNibbles : kBytes, frame);
}

#undef OXY_TARGET_VBMI2

bool has_vbmi2() {
  return active_isa() == Isa::Avx512 && __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vbmi2");
}

#endif

}  // namespace

PackBlock pack_block() {
#if defined(__x86_64__)
  if (has_vbmi2()) return pack_block_vbmi2;
#endif
  return pack_block_scalar;
}

UnpackBlocks unpack_blocks() {
#if defined(__x86_64__)
  if (has_vbmi2()) return unpack_blocks_vbmi2;
  if (active_isa() != Isa::Scalar && __builtin_cpu_supports("bmi2")) return unpack_blocks_bmi;
#endif
  return unpack_blocks_scalar;
}

}  // namespace oxytorch::data
