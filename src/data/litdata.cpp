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

// LitData's numbers of dtypes; those left out (complex ones, objects) are not read.
constexpr std::array<std::optional<DType>, 21> kLitdataTorchDTypes = {
    DType::F32, DType::F32, DType::F64, DType::F64,  {},         {},          {},
    {},         DType::F16, DType::F16, DType::BF16, DType::U8,  DType::I8,   DType::I16,
    DType::I16, DType::I32, DType::I32, DType::I64,  DType::I64, DType::Bool, DType::U16};
constexpr std::array<std::optional<DType>, 14> kLitdataNumpyDTypes = {
    DType::I8,  DType::I16, DType::I32, DType::I64, DType::U8, DType::U16, DType::U32,
    DType::U64, DType::F16, DType::F32, DType::F64, {},        {},         DType::Bool};

template <std::size_t N>
DType litdata_dtype(const std::array<std::optional<DType>, N>& known, std::uint64_t number,
                    const std::string& location) {
  OXY_CHECK(number < N && known[number], NotSupported, location, ": LitData's dtype number ", number,
            " is not read here.");
  return *known[number];
}

/// How the bytes of a field become a value.
enum class LitdataForm : std::uint8_t {
  Plain,   // scalars, text, images and bytes are as they lie
  Run,     // elements of the field's dtype, without a header
  Tensor,  // u32 number of a torch dtype, u32 rank, u32 dimensions, then the elements
  Numpy,   // the same with the number of a numpy dtype
};

struct LitdataField {
  Field field;
  LitdataForm form = LitdataForm::Plain;
  std::uint64_t size = 0;  // bytes of a scalar
};

LitdataField litdata_scalar(DType dtype) {
  LitdataField field;
  field.field.dtype = dtype;
  field.size = size_of(dtype);
  return field;
}

LitdataField litdata_array(DType dtype, LitdataForm form) {
  LitdataField field;
  field.field.dtype = dtype;
  field.form = form;
  if (form == LitdataForm::Run) field.field.shape = {-1};
  return field;
}

LitdataField litdata_plain(Kind kind) {
  LitdataField field;
  field.field.kind = kind;
  field.field.shape = {-1};
  return field;
}

/// A serializer's name as data_format has it: "jpeg", "image:png", "no_header_tensor:17".
LitdataField parse_litdata_format(std::string_view format, const std::string& location) {
  const auto colon = std::min(format.find(':'), format.size());
  const auto word = format.substr(0, colon), rest = format.substr(std::min(colon + 1, format.size()));
  if (word == "int") return litdata_scalar(DType::I64);
  if (word == "float") return litdata_scalar(DType::F64);
  if (word == "bool" || word == "boolean") return litdata_scalar(DType::Bool);
  if (word == "str" || word == "text") return litdata_plain(Kind::Text);
  if (word == "jpeg") return litdata_plain(Kind::Image);
  if (word == "image") {
    const bool known = rest == "jpg" || rest == "jpeg" || rest == "png" || rest == "webp";
    return litdata_plain(known ? Kind::Image : Kind::Bytes);
  }
  if (word == "tensor") return litdata_array(DType::F32, LitdataForm::Tensor);
  if (word == "numpy") return litdata_array(DType::F32, LitdataForm::Numpy);
  if (word == "no_header_tensor" || word == "no_header_numpy") {
    std::uint32_t number = UINT32_MAX;
    std::from_chars(rest.data(), rest.data() + rest.size(), number);
    return litdata_array(word == "no_header_tensor" ? litdata_dtype(kLitdataTorchDTypes, number, location)
                                                    : litdata_dtype(kLitdataNumpyDTypes, number, location),
                         LitdataForm::Run);
  }
  OXY_CHECK(word != "pickle" && word != "graph", NotSupported, location,
            " holds pickled Python objects, which can run any code when they are read; write them as tensors, text or "
            "bytes.");
  constexpr std::array<std::string_view, 9> kFiles = {"bytes", "tifffile", "tiff", "video", "audio",
                                                      "file",  "nifti",    "mesh", "pdf"};
  OXY_CHECK(std::find(kFiles.begin(), kFiles.end(), word) != kFiles.end(), NotSupported, location,
            ": fields of LitData's format '", format,
            "' are not read here; write them as jpeg, tensor, numpy, text, bytes or a number.");
  return litdata_plain(Kind::Bytes);
}

/// Adds the names of a tree's leaves: the keys that lead to them, joined by dots.
void add_leaf_names(const element& node, const std::string& path, std::vector<std::string>& names,
                    const std::string& location) {
  simdjson::dom::array children;
  const auto list = json_field(node, "children_spec");
  OXY_CHECK(list && list->get(children) == simdjson::SUCCESS, Io, location, " is damaged: 'data_spec' is no tree.");
  if (!json_field(node, "type")) {
    names.push_back(path.empty() ? "field_0" : path);
    return;
  }
  std::vector<std::string> keys;
  simdjson::dom::parser parser;
  simdjson::dom::array words;
  if (json_field(node, "context")) {
    const auto context = json_text(node, "context", location);
    if (parse_json(parser, context, location).get(words) == simdjson::SUCCESS) {
      for (const auto word : words) {
        std::string_view text;
        keys.push_back(word.get(text) == simdjson::SUCCESS ? std::string(text) : simdjson::minify(word));
      }
    }
  }
  std::size_t i = 0;
  for (const auto child : children) {
    auto below = path.empty() ? path : path + ".";
    below += i < keys.size() ? keys[i] : (path.empty() ? "field_" : "") + std::to_string(i);
    add_leaf_names(child, below, names, location);
    ++i;
  }
}

/// The names of `count` fields: of the pytree in data_spec, a JSON text of its own: [1, {"type", "context",
/// "children_spec"}].
std::vector<std::string> litdata_names(const element& config, std::size_t count, const std::string& location) {
  std::vector<std::string> names;
  if (json_field(config, "data_spec")) {
    simdjson::dom::parser parser;
    const auto text = json_text(config, "data_spec", location);
    element tree;
    OXY_CHECK(parse_json(parser, text, location).at(1).get(tree) == simdjson::SUCCESS, Io, location,
              " is damaged: 'data_spec' is no tree.");
    add_leaf_names(tree, "", names, location);
    OXY_CHECK(names.size() == count, Io, location, " is damaged: 'data_spec' has ", names.size(),
              " leaves, and 'data_format' ", count, ".");
  } else {
    for (std::size_t i = 0; i < count; ++i) names.push_back("field_" + std::to_string(i));
  }
  return names;
}

class LitdataDataset final : public ShardDataset {
 public:
  LitdataDataset(std::vector<LitdataField> fields, bool one_run, std::vector<ShardInfo> shards,
                 const std::string& version)
      : ShardDataset(std::move(shards), version), fields_(std::move(fields)), one_run_(one_run) {
    for (const auto& field : fields_) schema_.fields.push_back(field.field);
    const bool open =
        std::any_of(fields_.begin(), fields_.end(), [](const auto& f) { return f.form >= LitdataForm::Tensor; });
    if (!open || shards_.size() == 0) return;
    // Values with a header say what the index leaves open: the first one's dtype and number of dimensions hold for all.
    const auto first = decode(0);
    for (std::size_t i = 0; i < fields_.size(); ++i) {
      if (fields_[i].form < LitdataForm::Tensor) continue;
      schema_.fields[i].dtype = first[i].dtype;
      schema_.fields[i].shape.assign(first[i].shape.size(), -1);
    }
  }

  [[nodiscard]] std::string format() const override { return "litdata"; }

 private:
  [[nodiscard]] Sample decode(std::int64_t index) const override {
    const auto item = shards_.item(index);
    const auto& location = shards_.location(index);
    ByteReader sizes(item.bytes, location, shards_.offset(index));
    if (one_run_) return {decode_field(fields_[0], item, location, sizes.offset())};
    OXY_CHECK(!item.bytes.empty() || fields_.empty(), NotSupported, location, ", sample ", index,
              ": the sample is empty, as where LitData keeps rows of text and numbers as an Arrow table behind the "
              "samples. oxytorch.data.open reads those of a local folder in Python; elsewhere, convert the dataset by "
              "litdata.optimize without pyarrow, or to Parquet.");
    ByteReader values = sizes;
    values.skip(4 * fields_.size());
    Sample sample;
    sample.reserve(fields_.size());
    for (const auto& field : fields_) {
      const auto size = sizes.take<std::uint32_t>();
      const auto at = values.offset();
      sample.push_back(decode_field(field, {values.take_bytes(size), item.owner}, location, at));
    }
    OXY_CHECK(values.left() == 0, Io, location, " is damaged: ", values.left(), " bytes at offset ", values.offset(),
              " belong to no field.");
    return sample;
  }

  static Value decode_field(const LitdataField& field, View bytes, const std::string& location, std::uint64_t offset) {
    ByteReader reader(bytes.bytes, location, offset);
    if (field.form >= LitdataForm::Tensor) return decode_array(field.form, reader, std::move(bytes.owner));
    std::vector<std::int64_t> shape;
    if (field.size == 0) shape.push_back(static_cast<std::int64_t>(bytes.bytes.size() / size_of(field.field.dtype)));
    const auto elements = reader.rest_as(field.field.dtype, shape);
    return {field.field.dtype, std::move(shape), {elements, std::move(bytes.owner)}};
  }

  static Value decode_array(LitdataForm form, ByteReader& reader, std::shared_ptr<const void> owner) {
    auto number = reader.take<std::uint32_t>(), rank = reader.take<std::uint32_t>();
    // Newer versions of LitData write a tensor's header in big-endian order; such numbers are small.
    const bool swapped = form == LitdataForm::Tensor && std::max(number, rank) > UINT16_MAX;
    if (swapped) number = __builtin_bswap32(number), rank = __builtin_bswap32(rank);
    const auto dtype = form == LitdataForm::Tensor ? litdata_dtype(kLitdataTorchDTypes, number, reader.location())
                                                   : litdata_dtype(kLitdataNumpyDTypes, number, reader.location());
    OXY_CHECK(rank <= reader.left() / 4, Io, reader.location(), " is damaged: an array at offset ", reader.offset(),
              " says that it has ", rank, " dimensions.");
    std::vector<std::int64_t> shape(rank);
    for (auto& dimension : shape) {
      const auto value = reader.take<std::uint32_t>();
      dimension = swapped ? __builtin_bswap32(value) : value;
    }
    const auto elements = reader.rest_as(dtype, shape);
    return {dtype, std::move(shape), {elements, std::move(owner)}};
  }

  std::vector<LitdataField> fields_;
  bool one_run_;  // an item is the elements of its one field, without a size: TokensLoader
};

/// How the chunks are compressed.
Packing litdata_packing(const element& config, const std::string& location) {
  if (!json_field(config, "compression")) return Packing::Plain;
  const auto compression = json_text(config, "compression", location);
  OXY_CHECK(compression == "zstd" || compression.starts_with("zstd:"), NotSupported, location,
            ": chunks compressed by '", compression,
            "' are not read here; write them with zstd or without compression.");
  const auto level =
      json_field(config, "compression_level") ? json_text(config, "compression_level", location) : "chunk";
  OXY_CHECK(level == "chunk" || level == "batch" || level == "sample", NotSupported, location,
            ": the compression_level '", level, "' is not read here; write the chunks with chunk, batch or sample.");
  return level == "chunk" ? Packing::Whole : level == "batch" ? Packing::Frames : Packing::Items;
}

std::vector<LitdataField> parse_litdata_fields(const element& config, const std::string& location) {
  const auto formats = json_texts(config, "data_format", location);
  auto names = litdata_names(config, formats.size(), location);
  std::vector<LitdataField> fields;
  for (std::size_t i = 0; i < formats.size(); ++i) {
    fields.push_back(parse_litdata_format(formats[i], location));
    fields.back().field.name = std::move(names[i]);
  }
  return fields;
}

}  // namespace

std::shared_ptr<const Dataset> open_litdata(const std::string& location) {
  if (!is_folder(location)) return nullptr;
  const auto path = join(location, "index.json");
  if (!exists(path)) return nullptr;
  const auto file = open_file(path);
  const auto text = file->view(0, file->size());
  simdjson::dom::parser parser;
  const auto root = parse_json(parser, text.text(), path);
  const auto list = json_field(root, "chunks"), config = json_field(root, "config");
  if (!list || !config) return nullptr;
  simdjson::dom::array chunks;
  OXY_CHECK(list->get(chunks) == simdjson::SUCCESS, Io, path, " is damaged: 'chunks' must be a list.");
  OXY_CHECK(!json_field(*config, "encryption"), NotSupported, path,
            ": encrypted chunks are not read here; write them plain.");
  const auto loader = json_field(*config, "item_loader") ? json_text(*config, "item_loader", path) : "PyTreeLoader";
  OXY_CHECK(loader == "PyTreeLoader" || loader == "TokensLoader", NotSupported, path, ": chunks for LitData's ", loader,
            " are not read here; those for PyTreeLoader and TokensLoader are.");
  auto fields = parse_litdata_fields(*config, path);
  const bool one_run = loader == "TokensLoader";
  OXY_CHECK(!one_run || (fields.size() == 1 && fields[0].form == LitdataForm::Run), Io, path,
            " is damaged: chunks for TokensLoader must have one field of tokens.");
  const auto packing = litdata_packing(*config, path);
  std::vector<ShardInfo> infos;
  for (const auto chunk : chunks) {
    ShardInfo info;
    info.location = join(location, json_text(chunk, "filename", path));
    info.items = json_count(chunk, "chunk_size", path);
    info.bytes = json_count(chunk, "chunk_bytes", path);
    info.bytes_of_items = true;
    info.packing = packing;
    infos.push_back(std::move(info));
  }
  return std::make_shared<LitdataDataset>(std::move(fields), one_run, std::move(infos), file->version());
}

}  // namespace oxytorch::data
