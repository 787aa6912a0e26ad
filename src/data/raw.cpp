#include "data/byte_reader.h"
#include "data/row_dataset.h"
#include "oxytorch/error.h"

namespace oxytorch::data {

std::shared_ptr<const Dataset> open_raw(const std::string& location, DType dtype, std::vector<std::int64_t> shape) {
  const auto row_bytes = array_bytes(dtype, shape);
  OXY_CHECK(row_bytes > 0 && row_bytes != UINT64_MAX, InvalidArgument,
            "the shape of a raw file's samples must have positive dimensions, and fewer than 2^64 bytes in all.");
  std::vector<RowFile> files;
  for (const auto& name : expand_braces(location)) {
    auto file = open_file(name);
    OXY_CHECK(file->size() % row_bytes == 0, InvalidArgument, name, " has ", file->size(),
              " bytes, which is no multiple of the ", row_bytes, " bytes of a sample; check dtype and shape.");
    const auto rows = static_cast<std::int64_t>(file->size() / row_bytes);
    files.push_back({std::move(file), rows, {0}});
  }
  Schema schema{{{"array", Kind::Array, dtype, std::move(shape)}}};
  return std::make_shared<RowDataset>("raw", std::move(schema), std::move(files));
}

}  // namespace oxytorch::data
