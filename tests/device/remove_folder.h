/// Removes a folder with all that is in it, in programs that link LibTorch.
#pragma once

#include <ftw.h>

#include <cstdio>
#include <filesystem>

namespace oxytorch {

/// Not by std::filesystem::remove_all: libtorch.so 2.9 exports a copy of it that jumps to address 0.
inline void remove_folder(const std::filesystem::path& folder) {
  constexpr int kOpenFolders = 16;
  const auto each = [](const char* path, const struct stat*, int, struct FTW*) { return std::remove(path); };
  static_cast<void>(::nftw(folder.c_str(), each, kOpenFolders, FTW_DEPTH | FTW_PHYS));
}

}  // namespace oxytorch
