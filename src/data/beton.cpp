#include <simdjson.h>

#include <algorithm>
#include <array>
#include <optional>

#include "data/byte_reader.h"
#include "data/file.h"
#include "data/formats.h"
#include "data/json_fields.h"
#include "oxytorch/error.h"

namespace oxytorch::data {
namespace {

// u16 version, u16 fields, u32 page size, u64 samples, u64 offset of the allocation table; then the fields, each u8
// type, 16 bytes of name and 1,024 of arguments; then a row of metadata a sample.
constexpr std::uint64_t kBetonHeader = 24, kBetonName = 16, kBetonArguments = 1024,
                        kBetonField = 1 + kBetonName + kBetonArguments;
constexpr std::uint64_t kBetonAllocation = 24;  // u64 sample, u64 offset, u64 bytes

/// Numbers of FFCV's field types. Torch tensors are stored as arrays are.
enum class BetonType : std::uint8_t {
  Float = 0,
  Int = 1,
  RgbImage = 2,
  Bytes = 3,
  NdArray = 4,
  Json = 5,
  TorchTensor = 6
};

struct BetonColumn {
  Field field;
  BetonType type = BetonType::Float;
  std::uint64_t offset = 0;  // in a row of metadata
};

struct BetonLayout {
  std::uint64_t size, alignment;
};

/// As numpy lays out a struct with align=True: structs within it are packed, so that they may stand anywhere.
BetonLayout beton_layout(BetonType type) {
  switch (type) {
    case BetonType::RgbImage: return {13, 1};  // u8 mode, u16 width, u16 height, u64 offset
    case BetonType::Bytes:
    case BetonType::Json: return {16, 1};  // u64 offset, u64 bytes
    default: return {8, 8};                // the number itself, or u64 offset
  }
}

std::optional<DType> beton_dtype(std::string_view name) {
  constexpr std::array<std::pair<std::string_view, DType>, 12> kKnown = {{{"|u1", DType::U8},
                                                                          {"|i1", DType::I8},
                                                                          {"<u2", DType::U16},
                                                                          {"<i2", DType::I16},
                                                                          {"<u4", DType::U32},
                                                                          {"<i4", DType::I32},
                                                                          {"<u8", DType::U64},
                                                                          {"<i8", DType::I64},
                                                                          {"<f2", DType::F16},
                                                                          {"<f4", DType::F32},
                                                                          {"<f8", DType::F64},
                                                                          {"|b1", DType::Bool}}};
  for (const auto& [known, dtype] : kKnown) {
    if (known == name) return dtype;
  }
  return std::nullopt;
}

/// Arguments of an array: u64 dimensions[32], of which the last ones are 0, u64 length, and numpy's description: [["",
/// "<f4"]].
void parse_beton_array(BetonColumn& column, ByteReader arguments) {
  for (int i = 0; i < 32; ++i) column.field.shape.push_back(arguments.take<std::int64_t>());
  while (!column.field.shape.empty() && column.field.shape.back() == 0) column.field.shape.pop_back();
  const auto text = arguments.take_text(arguments.take<std::uint64_t>());
  simdjson::dom::parser parser;
  simdjson::dom::array all, one;
  std::string_view name;
  const bool described = parse_json(parser, text, arguments.location()).get(all) == simdjson::SUCCESS &&
                         all.size() == 1 && all.at(0).get(one) == simdjson::SUCCESS && one.size() == 2 &&
                         one.at(1).get(name) == simdjson::SUCCESS;
  const auto dtype = described ? beton_dtype(name) : std::nullopt;
  OXY_CHECK(dtype, NotSupported, arguments.location(), ": arrays of '", text, "' in field '", column.field.name,
            "' are not read here; write numbers or booleans of one dtype.");
  column.field.dtype = *dtype;
}

BetonColumn parse_beton_column(ByteReader reader) {
  BetonColumn column;
  const auto type = reader.take<std::uint8_t>();
  const auto name = reader.take_text(kBetonName);
  column.field.name = name.substr(0, name.find('\0'));
  OXY_CHECK(type <= 6, NotSupported, reader.location(), ": field '", column.field.name, "' has type ", int{type},
            ", as fields of the user's own have, which are not read here.");
  column.type = static_cast<BetonType>(type);
  switch (column.type) {
    case BetonType::Float: column.field.dtype = DType::F64; break;
    case BetonType::Int: column.field.dtype = DType::I64; break;
    case BetonType::RgbImage:
    case BetonType::Bytes:
    case BetonType::Json:
      column.field.kind = column.type == BetonType::RgbImage ? Kind::Image
                          : column.type == BetonType::Json   ? Kind::Text
                                                             : Kind::Bytes;
      column.field.shape = {-1};
      break;
    case BetonType::NdArray:
    case BetonType::TorchTensor: parse_beton_array(column, reader); break;
  }
  return column;
}

struct BetonImage {
  bool raw;
  std::uint64_t width, height, offset;
};

struct BetonAllocation {
  std::uint64_t offset, bytes;
};

class BetonDataset final : public Dataset {
 public:
  explicit BetonDataset(std::shared_ptr<const File> file) : file_(std::move(file)) {
    const auto head = file_->view(0, kBetonHeader);
    ByteReader reader(head.bytes, file_->location());
    const auto version = reader.take<std::uint16_t>();
    OXY_CHECK(version == 2, NotSupported, file_->location(), " is a .beton file of version ", version,
              ", and version 2 is read here; write it again by ffcv 1.0 or later.");
    const std::uint64_t fields = reader.take<std::uint16_t>();
    reader.skip(4);
    samples_ = reader.take<std::uint64_t>();
    OXY_CHECK(fields > 0, Io, file_->location(), " is damaged: it says at offset 2 that it has no fields.");
    read_columns(fields);
    // Checked by division: the number of samples may be anything.
    const auto at = kBetonHeader + kBetonField * fields;
    OXY_CHECK(samples_ <= (file_->size() - at) / row_, Io, file_->location(),
              " is truncated or damaged: it says at offset 8 that it has ", samples_, " samples of ", row_,
              " bytes of metadata, and it has ", file_->size(), " bytes.");
    rows_ = file_->view(at, row_ * samples_);
    read_allocations(reader.take<std::uint64_t>());
    describe_pixels();
    for (const auto& column : columns_) schema_.fields.push_back(column.field);
  }

  [[nodiscard]] const Schema& schema() const noexcept override { return schema_; }
  [[nodiscard]] std::int64_t size() const noexcept override { return static_cast<std::int64_t>(samples_); }
  [[nodiscard]] std::string fingerprint() const override {
    return fingerprint_of({base_name(file_->location()), file_->version()});
  }
  [[nodiscard]] bool remote() const noexcept override { return file_->remote(); }
  [[nodiscard]] std::string format() const override { return "beton"; }

  [[nodiscard]] std::string place(std::int64_t index) const override {
    const auto* row = row_of(index);
    auto text = file_->location() + ", sample " + std::to_string(index);
    for (const auto& column : columns_) {
      if (const auto at = data_offset(column, row)) return text + ", offset " + std::to_string(*at);
    }
    return text;
  }

  void will_read(std::int64_t index) const override {
    const auto* row = row_of(index);
    for (const auto& column : columns_) {
      if (const auto at = data_offset(column, row)) file_->will_view(*at, allocated(*at).value_or(1));
    }
  }

  [[nodiscard]] Sample read(std::int64_t index) const override {
    const auto* row = row_of(index);
    Sample sample;
    sample.reserve(columns_.size());
    for (const auto& column : columns_) sample.push_back(read_column(column, row));
    return sample;
  }

 private:
  void read_columns(std::uint64_t fields) {
    const auto descriptions = file_->view(kBetonHeader, kBetonField * fields);
    std::uint64_t alignment = 1;
    for (std::uint64_t i = 0; i < fields; ++i) {
      const auto bytes = descriptions.bytes.subspan(kBetonField * i, kBetonField);
      auto column = parse_beton_column({bytes, file_->location(), kBetonHeader + kBetonField * i});
      const auto layout = beton_layout(column.type);
      column.offset = (row_ + layout.alignment - 1) / layout.alignment * layout.alignment;
      row_ = column.offset + layout.size;
      alignment = std::max(alignment, layout.alignment);
      columns_.push_back(std::move(column));
    }
    row_ = (row_ + alignment - 1) / alignment * alignment;
  }

  void read_allocations(std::uint64_t at) {
    OXY_CHECK(at <= file_->size() && (file_->size() - at) % kBetonAllocation == 0, Io, file_->location(),
              " is truncated or damaged: its allocation table is said to begin at offset ", at, ", and the file has ",
              file_->size(), " bytes.");
    // Only a JPEG's size is nowhere else.
    if (std::none_of(columns_.begin(), columns_.end(), [](const auto& c) { return c.type == BetonType::RgbImage; }))
      return;
    const auto table = file_->view(at, file_->size() - at);
    allocations_.reserve(table.bytes.size() / kBetonAllocation);
    for (std::uint64_t row = 0; row < table.bytes.size(); row += kBetonAllocation) {
      allocations_.push_back({load_number<std::uint64_t>(table.bytes.data() + row + 8),
                              load_number<std::uint64_t>(table.bytes.data() + row + 16)});
    }
    const auto before = [](const BetonAllocation& a, const BetonAllocation& b) { return a.offset < b.offset; };
    if (!std::is_sorted(allocations_.begin(), allocations_.end(), before)) {
      std::sort(allocations_.begin(), allocations_.end(), before);
    }
  }

  /// FFCV writes each image as a JPEG or as pixels. A field of pixels alone has their shape.
  void describe_pixels() {
    for (auto& column : columns_) {
      if (column.type != BetonType::RgbImage || samples_ == 0) continue;
      const auto first = image(column, rows_.bytes.data());
      bool raw = first.raw, same_size = true;
      for (std::uint64_t i = 1; i < samples_ && raw; ++i) {
        const auto next = image(column, rows_.bytes.data() + row_ * i);
        raw = next.raw;
        same_size = same_size && next.width == first.width && next.height == first.height;
      }
      if (!raw) continue;
      column.field.shape = {-1, -1, 3};
      if (same_size)
        column.field.shape = {static_cast<std::int64_t>(first.height), static_cast<std::int64_t>(first.width), 3};
    }
  }

  [[nodiscard]] const std::byte* row_of(std::int64_t index) const {
    OXY_CHECK(index >= 0 && index < size(), OutOfRange, "sample ", index, " does not exist: ", file_->location(),
              " has ", samples_, ".");
    return rows_.bytes.data() + row_ * static_cast<std::uint64_t>(index);
  }

  static BetonImage image(const BetonColumn& column, const std::byte* row) {
    const auto* at = row + column.offset;
    return {load_number<std::uint8_t>(at) != 0, load_number<std::uint16_t>(at + 1), load_number<std::uint16_t>(at + 3),
            load_number<std::uint64_t>(at + 5)};
  }

  /// Where a column's bytes are in the file; empty for numbers, which are in the row.
  static std::optional<std::uint64_t> data_offset(const BetonColumn& column, const std::byte* row) {
    if (column.type == BetonType::Float || column.type == BetonType::Int) return std::nullopt;
    return load_number<std::uint64_t>(row + column.offset + (column.type == BetonType::RgbImage ? 5 : 0));
  }

  [[nodiscard]] std::optional<std::uint64_t> allocated(std::uint64_t offset) const {
    const auto found =
        std::lower_bound(allocations_.begin(), allocations_.end(), offset,
                         [](const BetonAllocation& a, std::uint64_t wanted) { return a.offset < wanted; });
    return found == allocations_.end() || found->offset != offset ? std::nullopt : std::optional(found->bytes);
  }

  [[nodiscard]] Value read_column(const BetonColumn& column, const std::byte* row) const {
    const auto offset = data_offset(column, row);
    if (!offset) return {column.field.dtype, {}, {{row + column.offset, 8}, rows_.owner}};
    if (column.type == BetonType::RgbImage) return read_image(image(column, row));
    if (column.type == BetonType::Bytes || column.type == BetonType::Json) {
      auto view = file_->view(*offset, load_number<std::uint64_t>(row + column.offset + 8));
      // FFCV ends JSON with a zero byte.
      if (column.type == BetonType::Json)
        view.bytes = view.bytes.first(std::min(view.text().find('\0'), view.bytes.size()));
      const auto length = static_cast<std::int64_t>(view.bytes.size());
      return {DType::U8, {length}, std::move(view)};
    }
    return {column.field.dtype, column.field.shape,
            file_->view(*offset, array_bytes(column.field.dtype, column.field.shape))};
  }

  [[nodiscard]] Value read_image(const BetonImage& image) const {
    if (image.raw) {
      std::vector<std::int64_t> shape{static_cast<std::int64_t>(image.height), static_cast<std::int64_t>(image.width),
                                      3};
      return {DType::U8, std::move(shape), file_->view(image.offset, 3 * image.height * image.width)};
    }
    const auto bytes = allocated(image.offset);
    OXY_CHECK(bytes, Io, file_->location(), " is damaged: its allocation table has no entry for the image at offset ",
              image.offset, ".");
    return {DType::U8, {static_cast<std::int64_t>(*bytes)}, file_->view(image.offset, *bytes)};
  }

  std::shared_ptr<const File> file_;
  std::vector<BetonColumn> columns_;
  std::uint64_t samples_ = 0, row_ = 0;  // bytes of a row
  View rows_;
  std::vector<BetonAllocation> allocations_;  // by offset
  Schema schema_;
};

}  // namespace

std::shared_ptr<const Dataset> open_beton(const std::string& location) {
  // The format has no signature: FFCV's own readers go by the name too.
  if (!location.ends_with(".beton") || is_folder(location)) return nullptr;
  return std::make_shared<BetonDataset>(open_file(location));
}

}  // namespace oxytorch::data
