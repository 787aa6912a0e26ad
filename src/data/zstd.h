/// Decompression of zstd frames.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "oxytorch/data/value.h"

namespace oxytorch::data {

/// The content of one or more zstd frames, at most `most` bytes. Memory grows with what is really there, whatever sizes
/// the frames declare.
/// Errors: `Io` with `location` for what is no zstd, ends too early or is larger than `most`.
View unzstd(std::span<const std::byte> compressed, std::uint64_t most, const std::string& location);

}  // namespace oxytorch::data
