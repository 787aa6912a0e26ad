#include "base/file_tree.h"

#include <algorithm>
#include <fstream>
#include <sstream>
#include <system_error>

namespace oxytorch::detail {
namespace {

namespace fs = std::filesystem;

// Files of /proc and /sys are short; a limit keeps a wrong root from filling the memory.
constexpr std::size_t kLargestFile = 16 << 20;

/// mountinfo writes a space as \040.
std::string unescape(const std::string& text) {
  std::string out;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const auto octal = [&](std::size_t at) { return at < text.size() && text[at] >= '0' && text[at] <= '7'; };
    if (text[i] == '\\' && octal(i + 1) && octal(i + 2) && octal(i + 3)) {
      out += static_cast<char>((text[i + 1] - '0') * 64 + (text[i + 2] - '0') * 8 + (text[i + 3] - '0'));
      i += 3;
    } else {
      out += text[i];
    }
  }
  return out;
}

}  // namespace

std::string read_text(const fs::path& path) {
  std::error_code unknown;
  if (!fs::is_regular_file(path, unknown)) return {};  // a pipe would wait for a writer
  std::ifstream file(path, std::ios::binary);
  std::string text;
  std::string block(8192, '\0');
  while (file && text.size() < kLargestFile) {
    file.read(block.data(), static_cast<std::streamsize>(block.size()));
    text.append(block.data(), static_cast<std::size_t>(file.gcount()));
  }
  return text;
}

std::vector<std::string> read_lines(const fs::path& path) {
  std::vector<std::string> lines;
  std::istringstream text(read_text(path));
  for (std::string line; std::getline(text, line);) lines.push_back(line);
  return lines;
}

std::optional<std::string> field(const std::vector<std::string>& lines, std::string_view key, char separator) {
  for (const std::string& line : lines) {
    const std::size_t at = line.find(separator);
    if (at != std::string::npos && trim(std::string_view(line).substr(0, at)) == key) {
      return std::string(trim(std::string_view(line).substr(at + 1)));
    }
  }
  return std::nullopt;
}

std::optional<std::uint64_t> kilobytes(const std::optional<std::string>& text) {
  if (!text || !text->ends_with("kB")) return std::nullopt;
  const auto count = parse<std::uint64_t>(std::string_view(*text).substr(0, text->size() - 2));
  if (!count || *count > UINT64_MAX / 1024) return std::nullopt;
  return *count * 1024;
}

std::set<int> parse_list(std::string_view text) {
  constexpr int kMost = 1 << 16;
  std::set<int> numbers;
  while (!text.empty()) {
    const std::size_t comma = std::min(text.find(','), text.size());
    const std::string_view item = trim(text.substr(0, comma));
    const std::size_t dash = item.find('-');
    const auto first = parse<int>(item.substr(0, dash));
    const auto last = dash == std::string_view::npos ? first : parse<int>(item.substr(dash + 1));
    if (first && last && *first >= 0 && *last < kMost) {
      for (int i = *first; i <= *last; ++i) numbers.insert(i);
    }
    text.remove_prefix(std::min(comma + 1, text.size()));
  }
  return numbers;
}

std::vector<std::string> split(const std::string& line, char separator) {
  std::vector<std::string> parts;
  std::istringstream text(line);
  for (std::string part; std::getline(text, part, separator);) parts.push_back(part);
  return parts;
}

fs::path under(const std::string& root, const std::string& path) {
  return fs::path(root) / fs::path(path).relative_path();
}

std::vector<Mount> read_mounts(const std::string& root) {
  std::vector<Mount> mounts;
  for (const std::string& line : read_lines(under(root, "/proc/self/mountinfo"))) {
    const std::size_t dash = line.find(" - ");
    if (dash == std::string::npos) continue;
    const auto left = split(line.substr(0, dash), ' ');
    const auto right = split(line.substr(dash + 3), ' ');
    if (left.size() < 6 || right.size() < 2) continue;
    mounts.push_back({unescape(left[3]), unescape(left[4]), split(left[5], ','), right[0], unescape(right[1]),
                      right.size() > 2 ? split(right[2], ',') : std::vector<std::string>{}});
  }
  return mounts;
}

bool contains(const std::vector<std::string>& list, const std::string& item) {
  return std::find(list.begin(), list.end(), item) != list.end();
}

}  // namespace oxytorch::detail
