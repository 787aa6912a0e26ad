/// Rows of fixed size: .npy, raw files, safetensors.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "data/record_files.h"
#include "data/token_source.h"
#include "oxytorch/data/dataset.h"

namespace oxytorch::data {

/// One file: where the first row of each field lies. Whoever makes it has checked that the rows are inside of the file.
struct RowFile {
  std::shared_ptr<const File> file;
  std::int64_t rows = 0;
  std::vector<std::uint64_t> offsets;
};

/// Samples are rows, each field's one after the other.
class RowDataset final : public Dataset, public TokenSource {
 public:
  RowDataset(std::string format, Schema schema, std::vector<RowFile> files);

  [[nodiscard]] const Schema& schema() const noexcept override { return schema_; }
  [[nodiscard]] std::int64_t size() const noexcept override { return files_.size(); }
  [[nodiscard]] Sample read(std::int64_t index) const override;
  [[nodiscard]] bool reads_into() const noexcept override { return true; }
  void read_into(std::int64_t index, const std::vector<std::byte*>& fields) const override;
  [[nodiscard]] std::string place(std::int64_t index) const override;
  [[nodiscard]] std::string fingerprint() const override { return files_.fingerprint(); }
  void will_read(std::int64_t index) const override;
  [[nodiscard]] bool remote() const noexcept override { return files_.remote(); }
  [[nodiscard]] std::string format() const override { return format_; }

  [[nodiscard]] std::int64_t tokens() const override;
  [[nodiscard]] DType token_dtype() const override { return schema_.fields.front().dtype; }
  [[nodiscard]] View view_tokens(std::int64_t first, std::int64_t count) const override;
  void will_view_tokens(std::int64_t first, std::int64_t count) const override;
  [[nodiscard]] std::string token_place(std::int64_t token) const override;

 private:
  struct TokenRun {
    const File& file;
    std::uint64_t offset, bytes;
  };
  [[nodiscard]] TokenRun token_run(std::int64_t first, std::int64_t count) const;
  [[nodiscard]] std::uint64_t offset(const RecordFiles::Place& place, std::size_t field) const;

  std::string format_;
  Schema schema_;
  std::vector<std::uint64_t> row_bytes_;  // of each field
  RecordFiles files_;
  std::vector<std::int64_t> rows_;                   // of each file
  std::vector<std::vector<std::uint64_t>> offsets_;  // of each file, of each field's first row
};

}  // namespace oxytorch::data
