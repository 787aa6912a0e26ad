/// Where the samples of a WebDataset shard are: made by one pass over the tar's headers, kept in a file beside it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "data/file.h"

namespace oxytorch::data {

/// The samples of one tar: consecutive files of one key, which is the path up to the first dot of its base name.
class TarIndex {
 public:
  struct Member {
    std::uint64_t offset = 0, size = 0;
  };

  /// Reads the index kept in `<shard>.oxidx` where it is whole and of this version of the shard; otherwise makes it,
  /// and keeps it where the folder can be written.
  /// Errors: `Io` for a damaged tar, `InvalidArgument` for samples that do not have the first one's fields (each
  /// with
  ///                offset and key), `NotSupported` for a compressed tar.
  static TarIndex of(const File& shard);

  /// Extensions in the order of the first sample, lower case, without the dot.
  [[nodiscard]] const std::vector<std::string>& fields() const noexcept { return fields_; }
  [[nodiscard]] std::size_t size() const noexcept { return key_ends_.size(); }
  [[nodiscard]] std::string_view key(std::size_t sample) const;
  /// A field's file in a sample, by its place in fields().
  [[nodiscard]] const Member& member(std::size_t sample, std::size_t field) const {
    return members_[sample * fields_.size() + field];
  }

 private:
  friend class TarIndexBuilder;

  [[nodiscard]] std::string packed(const std::string& version) const;
  /// False where the text is no index of this version.
  bool unpack(const View& text, const std::string& version, std::uint64_t shard_size);

  std::vector<std::string> fields_;
  std::vector<Member> members_;  // a row a sample
  std::string keys_;
  std::vector<std::uint64_t> key_ends_;
};

/// Whether bytes begin with a tar header.
bool is_tar(const File& file);

}  // namespace oxytorch::data
