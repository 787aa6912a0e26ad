/// The files of a folder as one run of bytes, which a fuzzer changes: of each its name, its size and its content.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

namespace oxytorch::fuzz {

inline constexpr std::size_t kMostFiles = 16, kMostBytes = 1 << 16;

/// A file's name is at most 255 bytes long, which one byte counts; its size takes four.
inline std::string pack_files(const std::string& folder) {
  std::vector<std::filesystem::path> paths;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder)) {
    if (entry.is_regular_file()) paths.push_back(entry.path());
  }
  std::sort(paths.begin(), paths.end());
  std::string packed;
  for (const auto& path : paths) {
    const std::string name = path.lexically_relative(folder).string();
    std::ifstream file(path, std::ios::binary);
    const std::string content{std::istreambuf_iterator<char>(file), {}};
    if (name.size() > 255 || packed.size() + content.size() > kMostBytes) continue;
    const auto size = static_cast<std::uint32_t>(content.size());
    packed += static_cast<char>(name.size());
    packed += name;
    packed.append(reinterpret_cast<const char*>(&size), sizeof(size));
    packed += content;
  }
  return packed;
}

/// Writes them again, as far as sizes and names make sense: a changed size cuts, a name never leaves the folder.
inline void unpack_files(std::string_view packed, const std::string& folder) {
  const auto take = [&packed](std::size_t bytes) {
    const auto taken = packed.substr(0, bytes);
    packed.remove_prefix(taken.size());
    return taken;
  };
  for (std::size_t file = 0; file < kMostFiles && !packed.empty(); ++file) {
    const auto length = static_cast<unsigned char>(take(1)[0]);
    std::string name(take(length));
    std::uint32_t size = 0;
    const auto bytes = take(sizeof(size));
    std::memcpy(&size, bytes.data(), bytes.size());
    const auto content = take(size);
    std::replace(name.begin(), name.end(), '\0', '0');
    const auto path = std::filesystem::path(name).lexically_normal();
    const bool outside = path.empty() || path.is_absolute() || *path.begin() == ".." || !path.has_filename();
    const auto target = std::filesystem::path(folder) / (outside ? std::to_string(file) : path.string());
    std::error_code ignored;
    std::filesystem::create_directories(target.parent_path(), ignored);
    std::ofstream(target, std::ios::binary) << content;
  }
}

}  // namespace oxytorch::fuzz
