#include "data/crc32c.h"

#include <nmmintrin.h>

#include <array>

#include "data/byte_reader.h"
#include "oxytorch/isa.h"

namespace oxytorch::data {
namespace {

constexpr auto kCrc32cTable = [] {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t i = 0; i < 256; ++i) {
    std::uint32_t crc = i;
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? 0x82F63B78U : 0);
    table[i] = crc;
  }
  return table;
}();

[[gnu::target("sse4.2")]] std::uint32_t crc32c_sse42(std::span<const std::byte> bytes, std::uint32_t crc) noexcept {
  std::uint64_t wide = crc;
  for (; bytes.size() >= 8; bytes = bytes.subspan(8))
    wide = _mm_crc32_u64(wide, load_number<std::uint64_t>(bytes.data()));
  crc = static_cast<std::uint32_t>(wide);
  for (const auto byte : bytes) crc = _mm_crc32_u8(crc, static_cast<std::uint8_t>(byte));
  return crc;
}

std::uint32_t crc32c_table(std::span<const std::byte> bytes, std::uint32_t crc) noexcept {
  for (const auto byte : bytes) crc = crc >> 8 ^ kCrc32cTable[(crc ^ static_cast<std::uint8_t>(byte)) & 255];
  return crc;
}

}  // namespace

std::uint32_t crc32c(std::span<const std::byte> bytes) noexcept {
  // Whatever has AVX2 has SSE 4.2.
  return ~(active_isa() == Isa::Scalar ? crc32c_table(bytes, ~0U) : crc32c_sse42(bytes, ~0U));
}

}  // namespace oxytorch::data
