#include <simdjson.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <optional>

#include "data/byte_reader.h"
#include "data/file.h"
#include "data/formats.h"
#include "data/json_fields.h"
#include "data/shard_set.h"
#include "oxytorch/error.h"

namespace oxytorch::data {
namespace {

using simdjson::dom::element;

struct MdsDType {
  const char* name;
  std::uint8_t code;  // in ndarrays that carry their dtype; 0 for names of columns alone
  DType dtype;
};
constexpr std::array<MdsDType, 12> kMdsDTypes = {{{"int", 0, DType::I64},
                                                  {"uint8", 8, DType::U8},
                                                  {"int8", 9, DType::I8},
                                                  {"uint16", 16, DType::U16},
                                                  {"int16", 17, DType::I16},
                                                  {"float16", 18, DType::F16},
                                                  {"uint32", 32, DType::U32},
                                                  {"int32", 33, DType::I32},
                                                  {"float32", 34, DType::F32},
                                                  {"uint64", 64, DType::U64},
                                                  {"int64", 65, DType::I64},
                                                  {"float64", 66, DType::F64}}};

std::optional<DType> mds_dtype(std::string_view name) {
  const auto* const found =
      std::find_if(kMdsDTypes.begin(), kMdsDTypes.end(), [&](const auto& d) { return d.name == name; });
  return found == kMdsDTypes.end() ? std::nullopt : std::optional(found->dtype);
}

struct MdsColumn {
  Field field;
  std::string encoding;
  bool has_dtype = true, has_shape = true;  // an ndarray's values may carry them instead
  std::uint64_t size = 0;                   // bytes where all values have the same number; otherwise 0
};

/// "ndarray", "ndarray:float32" or "ndarray:float32:3,4".
void parse_ndarray_encoding(MdsColumn& column, const std::string& location) {
  const auto& text = column.encoding;
  const auto wrong = [&](bool right) {
    OXY_CHECK(right, Io, location, " is damaged: '", text, "' of column '", column.field.name,
              "' is no encoding of an array.");
  };
  column.has_dtype = column.has_shape = false;
  const auto first = text.find(':');
  if (first == std::string::npos) return;
  const auto second = text.find(':', first + 1);
  const auto dtype = mds_dtype(std::string_view(text).substr(first + 1, second - std::min(second, first + 1)));
  wrong(dtype.has_value());
  column.field.dtype = *dtype;
  column.has_dtype = true;
  if (second == std::string::npos) return;
  column.has_shape = true;
  std::uint64_t bytes = size_of(*dtype);
  for (const char *at = text.data() + second, *end = text.data() + text.size(); at != end;) {
    std::int64_t dimension = 0;
    const auto [next, error] = std::from_chars(at + 1, end, dimension);
    wrong(error == std::errc() && (next == end || *next == ',') && dimension > 0 &&
          !__builtin_mul_overflow(bytes, dimension, &bytes));
    column.field.shape.push_back(dimension);
    at = next;
  }
  column.size = bytes;
}

MdsColumn parse_mds_column(std::string name, std::string encoding, const std::string& location) {
  MdsColumn column;
  column.field.name = std::move(name);
  column.encoding = std::move(encoding);
  const std::string_view word = std::string_view(column.encoding).substr(0, column.encoding.find(':'));
  if (word == "ndarray") {
    parse_ndarray_encoding(column, location);
  } else if (const auto dtype = mds_dtype(word)) {
    column.field.dtype = *dtype;
    column.size = size_of(*dtype);
  } else if (word == "jpeg" || word == "png") {
    column.field.kind = Kind::Image;
  } else if (word == "str" || word == "json" || word == "str_int" || word == "str_float" || word == "str_decimal") {
    column.field.kind = Kind::Text;
  } else {
    OXY_CHECK(word != "pkl", NotSupported, location, ": column '", column.field.name,
              "' holds pickled Python objects, which can run any code when they are read; write it as json, bytes or "
              "ndarray.");
    OXY_CHECK(word == "bytes", NotSupported, location, ": column '", column.field.name, "' has the encoding '",
              column.encoding,
              "', which is not read here; write it as jpeg, png, ndarray, str, json, bytes or a number.");
    column.field.kind = Kind::Bytes;
  }
  if (column.field.kind != Kind::Array) column.field.shape = {-1};
  return column;
}

std::vector<MdsColumn> parse_mds_columns(const element& shard, const std::string& location) {
  const auto names = json_texts(shard, "column_names", location),
             encodings = json_texts(shard, "column_encodings", location);
  const auto sizes = json_field(shard, "column_sizes");
  simdjson::dom::array list;
  OXY_CHECK(
      names.size() == encodings.size() && sizes && sizes->get(list) == simdjson::SUCCESS && list.size() == names.size(),
      Io, location, " is damaged: 'column_names', 'column_encodings' and 'column_sizes' must be lists of one length.");
  std::vector<MdsColumn> columns;
  for (std::size_t i = 0; i < names.size(); ++i) {
    columns.push_back(parse_mds_column(names[i], encodings[i], location));
    std::uint64_t size = 0;
    const bool counted = list.at(i).get(size) == simdjson::SUCCESS;
    OXY_CHECK((counted || list.at(i).is_null()) && size == columns.back().size, Io, location, " is damaged: column '",
              names[i], "' of encoding '", encodings[i], "' cannot have the size that 'column_sizes' says.");
  }
  return columns;
}

ShardInfo parse_mds_shard(const element& shard, const std::string& folder, const std::string& location) {
  const auto format = json_text(shard, "format", location);
  OXY_CHECK(format == "mds" && json_count(shard, "version", location) == 2, NotSupported, location,
            ": only shards of format 'mds' and version 2 are read here; one is of format '", format, "'.");
  const auto raw = json_field(shard, "raw_data"), zip = json_field(shard, "zip_data");
  OXY_CHECK(raw, Io, location, " is damaged: a shard has no 'raw_data'.");
  ShardInfo info;
  info.location = join(folder, json_text(*raw, "basename", location));
  info.items = json_count(shard, "samples", location);
  info.bytes = json_count(*raw, "bytes", location);
  // Streaming leaves the decompressed shard beside the compressed one that it has read.
  if (!zip || exists(info.location)) return info;
  const auto compression = json_text(shard, "compression", location);
  OXY_CHECK(compression == "zstd" || compression.starts_with("zstd:"), NotSupported, location,
            ": shards compressed by '", compression,
            "' are not read here; write them with zstd or without compression.");
  info.location = join(folder, json_text(*zip, "basename", location));
  info.packing = Packing::Whole;
  if (const auto hashes = json_field(*zip, "hashes"); hashes && json_field(*hashes, "xxh3_64")) {
    info.xxh3 = json_text(*hashes, "xxh3_64", location);
  }
  return info;
}

class MdsDataset final : public ShardDataset {
 public:
  MdsDataset(std::vector<MdsColumn> columns, std::vector<ShardInfo> shards, const std::string& version)
      : ShardDataset(std::move(shards), version), columns_(std::move(columns)) {
    for (auto& column : columns_) schema_.fields.push_back(column.field);
    const bool open =
        std::any_of(columns_.begin(), columns_.end(), [](const auto& c) { return !c.has_dtype || !c.has_shape; });
    if (!open || shards_.size() == 0) return;
    // The values say what the index leaves open: the first one's dtype and number of dimensions hold for all.
    const auto first = decode(0);
    for (std::size_t i = 0; i < columns_.size(); ++i) {
      auto& field = schema_.fields[i];
      if (!columns_[i].has_dtype) field.dtype = first[i].dtype;
      if (!columns_[i].has_shape) field.shape.assign(first[i].shape.size(), -1);
    }
  }

  [[nodiscard]] std::string format() const override { return "mds"; }

 private:
  [[nodiscard]] Sample decode(std::int64_t index) const override {
    const auto item = shards_.item(index);
    ByteReader sizes(item.bytes, shards_.location(index), shards_.offset(index));
    const auto variable = std::count_if(columns_.begin(), columns_.end(), [](const auto& c) { return c.size == 0; });
    ByteReader values = sizes;
    values.skip(4 * static_cast<std::uint64_t>(variable));
    Sample sample;
    sample.reserve(columns_.size());
    for (const auto& column : columns_) {
      const auto size = column.size == 0 ? sizes.take<std::uint32_t>() : column.size;
      const auto at = values.offset();
      sample.push_back(decode_column(column, {values.take_bytes(size), item.owner}, values.location(), at));
    }
    OXY_CHECK(values.left() == 0, Io, values.location(), " is damaged: ", values.left(), " bytes at offset ",
              values.offset(), " belong to no column.");
    return sample;
  }

  static Value decode_column(const MdsColumn& column, View bytes, const std::string& location, std::uint64_t offset) {
    if (column.field.kind != Kind::Array) {
      const auto size = static_cast<std::int64_t>(bytes.bytes.size());
      return {DType::U8, {size}, std::move(bytes)};
    }
    if (column.size > 0) return {column.field.dtype, column.field.shape, std::move(bytes)};
    ByteReader reader(bytes.bytes, location, offset);
    auto dtype = column.field.dtype;
    if (!column.has_dtype) {
      const auto code = reader.take<std::uint8_t>();
      const auto* const found = std::find_if(kMdsDTypes.begin(), kMdsDTypes.end(),
                                             [&](const auto& d) { return d.code == code && code != 0; });
      OXY_CHECK(found != kMdsDTypes.end(), Io, location, " is damaged: ", int{code}, " at offset ", offset,
                " is no dtype.");
      dtype = found->dtype;
    }
    auto shape = take_shape(reader);
    const auto elements = reader.rest_as(dtype, shape);
    return {dtype, std::move(shape), {elements, std::move(bytes.owner)}};
  }

  /// A byte of the number of dimensions and the width that each takes, and the dimensions.
  static std::vector<std::int64_t> take_shape(ByteReader& reader) {
    const auto head = reader.take<std::uint8_t>();
    std::vector<std::int64_t> shape(head >> 2);
    for (auto& dimension : shape) {
      std::uint64_t value = 0;
      const auto bytes = reader.take_bytes(std::uint64_t{1} << (head & 3));
      std::memcpy(&value, bytes.data(), bytes.size());
      dimension = static_cast<std::int64_t>(value);
    }
    return shape;
  }

  std::vector<MdsColumn> columns_;
};

}  // namespace

std::shared_ptr<const Dataset> open_mds(const std::string& location) {
  if (!is_folder(location)) return nullptr;
  const auto path = join(location, "index.json");
  if (!exists(path)) return nullptr;
  const auto file = open_file(path);
  const auto text = file->view(0, file->size());
  simdjson::dom::parser parser;
  const auto root = parse_json(parser, text.text(), path);
  const auto list = json_field(root, "shards");
  if (!list) return nullptr;
  simdjson::dom::array shards;
  OXY_CHECK(list->get(shards) == simdjson::SUCCESS, Io, path, " is damaged: 'shards' must be a list.");
  std::vector<MdsColumn> columns;
  std::vector<ShardInfo> infos;
  for (const auto shard : shards) {
    infos.push_back(parse_mds_shard(shard, location, path));
    auto these = parse_mds_columns(shard, path);
    const bool same = std::equal(
        columns.begin(), columns.end(), these.begin(), these.end(),
        [](const auto& a, const auto& b) { return a.field.name == b.field.name && a.encoding == b.encoding; });
    OXY_CHECK(infos.size() == 1 || same, NotSupported, path, ": ", infos.back().location,
              " has other columns than the first shard; all must have the same.");
    columns = std::move(these);
  }
  return std::make_shared<MdsDataset>(std::move(columns), std::move(infos), file->version());
}

}  // namespace oxytorch::data
