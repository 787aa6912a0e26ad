/// Files that are whole or absent.
#pragma once

#include <string>
#include <string_view>

namespace oxytorch::monitor {

/// Writes `content` to a new file beside `path`, synchronises it and renames it over `path`. On failure the old file is
/// as it was and Error(Io) names the path.
void write_file_atomically(const std::string& path, std::string_view content);

}  // namespace oxytorch::monitor
