/// Readers of /proc and /sys, and of trees that stand for another machine's. What cannot be read is empty.
#pragma once

#include <charconv>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "base/spelling.h"

namespace oxytorch::detail {

/// The text of a regular file, at most 16 MiB of it; "" where there is none or it cannot be read.
std::string read_text(const std::filesystem::path& path);
std::vector<std::string> read_lines(const std::filesystem::path& path);

/// `path` below `root`.
std::filesystem::path under(const std::string& root, const std::string& path);

template <class T>
std::optional<T> parse(std::string_view text) {
  text = trim(text);
  T value{};
  const auto [end, status] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (status != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

/// "key: value" lines, as in /proc/meminfo and /proc/self/status; of several equal keys the first.
std::optional<std::string> field(const std::vector<std::string>& lines, std::string_view key, char separator = ':');

/// "123 kB" in bytes.
std::optional<std::uint64_t> kilobytes(const std::optional<std::string>& text);

/// "0-3,8,10-11"; what cannot be read is left out.
std::set<int> parse_list(std::string_view text);

std::vector<std::string> split(const std::string& line, char separator);

/// One line of /proc/self/mountinfo, without the optional fields.
struct Mount {
  std::string root;   // of the file system mounted, as this process sees it
  std::string point;  // where it is mounted
  std::vector<std::string> options;
  std::string type;
  std::string source;
  std::vector<std::string> super_options;
};
std::vector<Mount> read_mounts(const std::string& root);

bool contains(const std::vector<std::string>& list, const std::string& item);

}  // namespace oxytorch::detail
