/// What the datasets of one or several files of records share.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "data/file.h"

namespace oxytorch::data {

/// The files that a location names: itself, the range of its braces, or those of a folder whose names `belongs`
/// accepts, sorted. None for a folder that holds other folders or an index.json: it is of another format.
std::vector<std::string> record_locations(const std::string& location, bool (*belongs)(std::string_view name));

/// Files in order, each with some of a dataset's samples.
class RecordFiles {
 public:
  struct Place {
    std::size_t file;
    std::int64_t index;  ///< of the sample in this file
  };

  void add(std::shared_ptr<const File> file, std::int64_t samples);
  [[nodiscard]] std::int64_t size() const noexcept { return ends_.empty() ? 0 : ends_.back(); }
  [[nodiscard]] bool empty() const noexcept { return files_.empty(); }
  [[nodiscard]] const File& file(std::size_t index) const noexcept { return *files_[index]; }
  /// Errors: `OutOfRange` for an index that is not in [0, size()).
  [[nodiscard]] Place find(std::int64_t index) const;
  [[nodiscard]] std::string fingerprint() const;
  [[nodiscard]] bool remote() const noexcept;

 private:
  std::vector<std::shared_ptr<const File>> files_;
  std::vector<std::int64_t> ends_;  // of each file's samples in the dataset
};

}  // namespace oxytorch::data
