#include "data/row_dataset.h"

#include <algorithm>
#include <cstring>

#include "data/byte_reader.h"

namespace oxytorch::data {

RowDataset::RowDataset(std::string format, Schema schema, std::vector<RowFile> files)
    : format_(std::move(format)), schema_(std::move(schema)) {
  for (const auto& field : schema_.fields) row_bytes_.push_back(array_bytes(field.dtype, field.shape));
  for (auto& file : files) {
    files_.add(std::move(file.file), file.rows);
    rows_.push_back(file.rows);
    offsets_.push_back(std::move(file.offsets));
  }
}

std::uint64_t RowDataset::offset(const RecordFiles::Place& place, std::size_t field) const {
  return offsets_[place.file][field] + static_cast<std::uint64_t>(place.index) * row_bytes_[field];
}

Sample RowDataset::read(std::int64_t index) const {
  const auto place = files_.find(index);
  Sample sample;
  sample.reserve(schema_.fields.size());
  for (std::size_t i = 0; i < schema_.fields.size(); ++i) {
    const auto& field = schema_.fields[i];
    sample.push_back({field.dtype, field.shape, files_.file(place.file).view(offset(place, i), row_bytes_[i])});
  }
  return sample;
}

void RowDataset::read_into(std::int64_t index, const std::vector<std::byte*>& fields) const {
  const auto place = files_.find(index);
  for (std::size_t i = 0; i < fields.size(); ++i) {
    const auto row = files_.file(place.file).view(offset(place, i), row_bytes_[i]);
    if (!row.bytes.empty()) std::memcpy(fields[i], row.bytes.data(), row.bytes.size());
  }
}

std::string RowDataset::place(std::int64_t index) const {
  const auto place = files_.find(index);
  const auto& location = files_.file(place.file).location();
  return schema_.fields.empty() ? location : location + ", offset " + std::to_string(offset(place, 0));
}

void RowDataset::will_read(std::int64_t index) const {
  const auto place = files_.find(index);
  for (std::size_t i = 0; i < schema_.fields.size(); ++i) {
    files_.file(place.file).will_view(offset(place, i), row_bytes_[i]);
  }
}

std::int64_t RowDataset::tokens() const {
  if (schema_.fields.size() != 1 || schema_.fields[0].shape.size() > 1 || !is_integer(token_dtype())) return -1;
  // No overflow: the rows are inside of files.
  return size() * static_cast<std::int64_t>(row_bytes_[0] / size_of(token_dtype()));
}

RowDataset::TokenRun RowDataset::token_run(std::int64_t first, std::int64_t count) const {
  const auto size = size_of(token_dtype());
  const auto in_row = static_cast<std::int64_t>(row_bytes_[0] / size);
  const auto place = files_.find(first / in_row);
  const auto skipped = first % in_row;
  const auto left = (rows_[place.file] - place.index) * in_row - skipped;
  return {files_.file(place.file), offset(place, 0) + static_cast<std::uint64_t>(skipped) * size,
          static_cast<std::uint64_t>(std::min(count, left)) * size};
}

View RowDataset::view_tokens(std::int64_t first, std::int64_t count) const {
  const auto run = token_run(first, count);
  return run.file.view(run.offset, run.bytes);
}

void RowDataset::will_view_tokens(std::int64_t first, std::int64_t count) const {
  const auto run = token_run(first, count);
  run.file.will_view(run.offset, run.bytes);
}

std::string RowDataset::token_place(std::int64_t token) const {
  const auto run = token_run(token, 1);
  return run.file.location() + ", offset " + std::to_string(run.offset);
}

}  // namespace oxytorch::data
