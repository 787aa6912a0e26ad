// streaming/base/format/mds/{writer,encodings}.py of mosaicml-streaming 0.13.
#include "data/mds_writer.h"

#include <zstd.h>

#include <algorithm>
#include <cstdio>
#include <limits>
#include <nlohmann/json.hpp>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "data/file.h"
#include "oxytorch/data/image.h"
#include "oxytorch/error.h"

namespace oxytorch::data {
namespace {

constexpr int kMdsLevel = 3;  // of zstd

std::string mds_hash(std::string_view bytes) {
  char text[17];
  std::snprintf(text, sizeof(text), "%016lx", static_cast<unsigned long>(XXH3_64bits(bytes.data(), bytes.size())));
  return text;
}

std::string mds_dtype(const Field& field) {
  OXY_CHECK(field.dtype != DType::BF16, InvalidArgument, "the field '", field.name,
            "' is of bfloat16, which MDS cannot hold. Convert it to float32 first.");
  return field.dtype == DType::Bool ? "uint8" : name(field.dtype);
}

template <class Number>
void append_number(std::string& text, Number number) {
  text.append(reinterpret_cast<const char*>(&number), sizeof(number));
}

/// The shape as MDS writes it where it is not in the encoding: dimensions and the width of an extent, then the extents.
void append_shape(std::string& text, const std::vector<std::int64_t>& shape) {
  std::int64_t largest = 0;
  for (const auto extent : shape) largest = std::max(largest, extent);
  const std::uint8_t width = largest <= 0xFF ? 0 : largest <= 0xFFFF ? 1 : largest <= 0xFFFFFFFF ? 2 : 3;
  append_number(text, static_cast<std::uint8_t>(shape.size() << 2 | width));
  for (const auto extent : shape) text.append(reinterpret_cast<const char*>(&extent), std::size_t{1} << width);
}

std::string join_extents(const std::vector<std::int64_t>& shape) {
  std::string text;
  for (const auto extent : shape) text += (text.empty() ? "" : ",") + std::to_string(extent);
  return text;
}

nlohmann::json config_of(const std::vector<MdsColumn>& columns, bool compress) {
  nlohmann::json names = nlohmann::json::array(), encodings = names, sizes = names;
  for (const auto& column : columns) {
    names.push_back(column.name);
    encodings.push_back(column.encoding);
    sizes.push_back(column.size < 0 ? nlohmann::json() : nlohmann::json(column.size));
  }
  return {{"column_encodings", encodings},
          {"column_names", names},
          {"column_sizes", sizes},
          {"compression", compress ? nlohmann::json("zstd:" + std::to_string(kMdsLevel)) : nlohmann::json()},
          {"format", "mds"},
          {"hashes", {"xxh3_64"}},
          {"size_limit", nullptr},
          {"version", 2}};
}

}  // namespace

std::vector<MdsColumn> mds_columns(const Schema& schema, const Sample& first) {
  std::vector<MdsColumn> columns;
  for (std::size_t i = 0; i < schema.fields.size(); ++i) {
    const auto& field = schema.fields[i];
    MdsColumn column{i, field.name, "bytes", -1};
    if (field.kind == Kind::Text) column.encoding = "str";
    if (field.kind == Kind::Image) {
      OXY_ASSERT(first[i].shape.size() != 3, "the images of '", field.name, "' are not encoded.");
      const auto format = image_header(first[i].data.bytes).format;
      if (format == ImageFormat::Jpeg) column.encoding = "jpeg";
      if (format == ImageFormat::Png) column.encoding = "png";
    }
    if (field.kind == Kind::Array) {
      const auto dtype = mds_dtype(field);
      const bool fixed = std::all_of(field.shape.begin(), field.shape.end(), [](auto extent) { return extent > 0; });
      column.encoding =
          field.shape.empty() ? dtype : "ndarray:" + dtype + (fixed ? ":" + join_extents(field.shape) : "");
      if (fixed)
        column.size = Value{field.dtype, field.shape, {}}.elements() * static_cast<std::int64_t>(size_of(field.dtype));
    }
    columns.push_back(std::move(column));
  }
  std::sort(columns.begin(), columns.end(), [](const auto& a, const auto& b) { return a.name < b.name; });
  return columns;
}

MdsShard::MdsShard(const std::vector<MdsColumn>& columns) : columns_(columns) {}

void MdsShard::add(const Schema& schema, const Sample& sample) {
  std::string values;
  for (const auto& column : columns_) {
    const auto& value = sample[column.field];
    std::string head;
    const auto& field = schema.fields[column.field];
    if (field.kind == Kind::Array && !field.shape.empty() && column.size < 0) append_shape(head, value.shape);
    const auto size = head.size() + value.data.bytes.size();
    OXY_CHECK(column.size < 0 || static_cast<std::int64_t>(size) == column.size, InvalidArgument, "'", column.name,
              "' has ", size, " bytes, and ", column.size, " in other samples.");
    OXY_CHECK(size <= std::numeric_limits<std::uint32_t>::max(), InvalidArgument, "'", column.name, "' has ", size,
              " bytes; MDS holds values below 4 GiB.");
    if (column.size < 0) append_number(data_, static_cast<std::uint32_t>(size));
    values += head;
    values += value.data.text();
  }
  data_ += values;
  OXY_CHECK(data_.size() < std::numeric_limits<std::uint32_t>::max() - (1U << 24), InvalidArgument,
            "a shard grew above 4 GiB; give smaller shards.");
  ends_.push_back(static_cast<std::uint32_t>(data_.size()));
}

std::int64_t MdsShard::bytes() const noexcept { return static_cast<std::int64_t>(data_.size() + 4 * ends_.size()); }

std::string MdsShard::write(const std::string& folder, std::int64_t number, bool compress) {
  auto about = config_of(columns_, compress);
  config_ = about.dump();
  std::string head;
  append_number(head, static_cast<std::uint32_t>(ends_.size()));
  const auto start = static_cast<std::uint32_t>(4 + 4 * (ends_.size() + 1) + config_.size());
  append_number(head, start);
  for (const auto end : ends_) append_number(head, start + end);
  head += config_;
  char base[32];
  std::snprintf(base, sizeof(base), "shard.%05ld.mds", static_cast<long>(number));
  const auto file = [](const std::string& basename, std::string_view bytes) {
    return nlohmann::json{{"basename", basename}, {"bytes", bytes.size()}, {"hashes", {{"xxh3_64", mds_hash(bytes)}}}};
  };
  head += data_;
  about["samples"] = ends_.size();
  about["raw_data"] = file(base, head);
  about["zip_data"] = nullptr;
  if (compress) {
    std::string packed(ZSTD_compressBound(head.size()), '\0');
    const auto size = ZSTD_compress(packed.data(), packed.size(), head.data(), head.size(), kMdsLevel);
    OXY_ASSERT(ZSTD_isError(size) == 0, ZSTD_getErrorName(size));
    packed.resize(size);
    about["zip_data"] = file(std::string(base) + ".zstd", packed);
    write_location(join(folder, std::string(base) + ".zstd"), packed);
  } else {
    write_location(join(folder, base), head);
  }
  return about.dump();
}

}  // namespace oxytorch::data
