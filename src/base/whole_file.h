/// Files that are whole or absent.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>

#include "oxytorch/api.h"

namespace oxytorch {

/// Whether a file must outlast a failure of the machine, which takes milliseconds.
enum class Flush : std::uint8_t { ToDisk, No };

/// Writes the parts one after another to a new file beside `path` and renames it over `path`. On failure the old file
/// is as it was and Error(Io) names the path, Error(NotFound) where its folder is not there. Several threads may write
/// one path.
void write_whole_file(const std::string& path, std::initializer_list<std::string_view> parts,
                      Flush flush = Flush::ToDisk);

/// Writes all to a descriptor, however many calls that takes; 0, or what errno was.
OXY_API int write_all(int descriptor, const void* data, std::size_t bytes) noexcept;

}  // namespace oxytorch
