/// The checksum of TFRecord files.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace oxytorch::data {

/// CRC-32C (Castagnoli, polynomial 0x1EDC6F41).
std::uint32_t crc32c(std::span<const std::byte> bytes) noexcept;

}  // namespace oxytorch::data
