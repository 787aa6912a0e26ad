/// How PackSavedTensors keeps tensors. Knows no torch.
#pragma once

#include <cstdint>
#include <string_view>

#include "oxytorch/api.h"

namespace oxytorch::memory {

/// Each does what Lossless does, too.
enum class SavedFormat : std::uint8_t {
  Lossless,  ///< tensors of zero and one more value, as masks, in bits; int64 in 8, 16 or 32 bits where it fits
  BFloat16,  ///< float32 and float64 that an operator made, rounded to nearest
  Int8,      ///< floating point that an operator made, in units of the largest magnitude of 256 neighbours / 127
  File       ///< all that an operator made, in a file
};

/// "lossless", "bf16", "int8", "file".
[[nodiscard]] OXY_API std::string_view name(SavedFormat format) noexcept;
/// Error(InvalidArgument) for another word.
[[nodiscard]] OXY_API SavedFormat parse_saved_format(std::string_view word);

}  // namespace oxytorch::memory
