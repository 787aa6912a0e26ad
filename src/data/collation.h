/// The columns of one batch while its samples arrive.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "oxytorch/data/loader.h"

namespace oxytorch::data {

/// What becomes of a field.
enum class Role : std::uint8_t {
  Pixels,   ///< the image that stages work on
  Mask,     ///< moves with it
  Boxes,    ///< move with it
  Text,     ///< a string for each sample
  Fixed,    ///< an array of one shape
  Varying,  ///< arrays that may differ in their first dimension
};

/// The role of each field of a dataset.
/// Errors: `InvalidArgument` for a name of `options` that the schema does not have, or not as it must be.
std::vector<Role> roles_of(const Schema& schema, const LoaderOptions& options);

/// May be used by several threads, each with rows of its own.
class Collation {
 public:
  using Allocate = std::function<std::shared_ptr<std::byte>(std::size_t)>;
  Collation(const Schema& schema, const std::vector<Role>& roles, const LoaderOptions& options, Allocate allocate,
            std::int64_t rows);
  /// Copies a sample into its row.
  /// Errors: `InvalidArgument` where it does not fit the others of the batch, with both shapes.
  void add(std::int64_t row, Item& item);
  /// Where a row of each field goes, where all are fixed and the schema says their shapes.
  void places(std::int64_t row, std::vector<std::byte*>& to);
  /// Leaves a row out.
  void drop(std::int64_t row);
  /// The columns, when each row was added or dropped.
  std::vector<Column> finish();
  /// Rows that were not dropped.
  [[nodiscard]] const std::vector<std::int64_t>& kept();

 private:
  struct Part {
    DType dtype = DType::U8;
    std::vector<std::int64_t> shape;  // of a row
    std::size_t row_bytes = 0;
    std::shared_ptr<std::byte> memory;  // of all rows
    std::vector<Value> values;          // of varying rows
    std::vector<std::string> texts;
  };

  std::byte* row_of(std::size_t field, std::int64_t row, DType dtype, const std::vector<std::int64_t>& shape);
  void add_pixels(std::size_t field, std::int64_t row, Item& item);
  Column joined(const Field& field, Part& part);
  Column stacked(const Field& field, Part& part);

  const Schema& schema_;
  const std::vector<Role>& roles_;
  const LoaderOptions& options_;
  Allocate allocate_;
  std::int64_t rows_;
  std::vector<Part> parts_;
  std::vector<char> dropped_;
  std::vector<std::int64_t> kept_;
  std::mutex mutex_;  // of the first row's shape, and the memory
};

}  // namespace oxytorch::data
