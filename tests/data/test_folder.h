/// A folder for the files of a test.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <system_error>

#include "../fuzz/file_set.h"

namespace oxytorch::data {

/// Goes with its scope. Where OXYTORCH_SEEDS names a folder, what it held then stays there, for `make fuzz` to begin
/// with, where it is small.
class TestFolder {
 public:
  TestFolder() {
    static std::atomic<int> number{0};
    path_ = ::testing::TempDir() + "oxytorch-data-" + std::to_string(::getpid()) + "-" + std::to_string(number++);
    std::filesystem::create_directories(path_);
  }
  TestFolder(const TestFolder&) = delete;
  TestFolder& operator=(const TestFolder&) = delete;
  ~TestFolder() {
    std::error_code ignored;
    if (const char* seeds = std::getenv("OXYTORCH_SEEDS"); seeds != nullptr && bytes() < kSeedBytes) {
      const std::string name = std::filesystem::path(path_).filename().string();
      std::ofstream(std::string(seeds) + "/" + name, std::ios::binary) << fuzz::pack_files(path_);
    }
    std::filesystem::remove_all(path_, ignored);
  }
  [[nodiscard]] std::uintmax_t bytes() const {
    std::uintmax_t sum = 0;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(path_)) {
      if (entry.is_regular_file()) sum += entry.file_size();
    }
    return sum;
  }
  [[nodiscard]] const std::string& path() const { return path_; }
  [[nodiscard]] std::string path(const std::string& name) const { return path_ + "/" + name; }
  [[nodiscard]] std::string operator/(const std::string& name) const { return path(name); }
  /// Writes a file. @returns its path.
  std::string write(const std::string& name, const std::string& content) const {  // NOLINT(modernize-use-nodiscard)
    std::filesystem::create_directories(std::filesystem::path(path(name)).parent_path());
    std::ofstream(path(name), std::ios::binary) << content;
    return path(name);
  }

 private:
  static constexpr std::uintmax_t kSeedBytes = 1 << 20;  // an input is cut to 64 KiB
  std::string path_;
};

}  // namespace oxytorch::data
