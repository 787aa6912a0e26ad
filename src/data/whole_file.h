/// Files that exist whole or not at all.
#pragma once

#include <initializer_list>
#include <string>
#include <string_view>

namespace oxytorch::data {

/// Writes a file aside, flushes it to the disk and renames it.
/// Errors: `Io` with the path, and then no file of that name is there or the one of before.
void write_whole_file(const std::string& path, std::initializer_list<std::string_view> parts);

/// Writes all of `data` to a descriptor, however many calls that takes.
/// Errors: `Io` with `path`.
void write_all(int descriptor, const void* data, std::size_t bytes, const std::string& path);

}  // namespace oxytorch::data
