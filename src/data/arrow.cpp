// Arrow's C data and C stream interfaces: https://arrow.apache.org/docs/format/CDataInterface.html and
// CStreamInterface.html. No library of Arrow's is needed: the structures below are the interface.
#include <algorithm>
#include <cstring>
#include <string_view>

#include "data/file.h"
#include "oxytorch/data/dataset.h"
#include "oxytorch/data/image.h"
#include "oxytorch/error.h"

namespace oxytorch::data {
namespace {

struct ArrowSchema {
  const char* format;
  const char* name;
  const char* metadata;
  std::int64_t flags;
  std::int64_t n_children;
  ArrowSchema** children;
  ArrowSchema* dictionary;
  void (*release)(ArrowSchema*);
  void* private_data;
};

struct ArrowArray {
  std::int64_t length;
  std::int64_t null_count;
  std::int64_t offset;
  std::int64_t n_buffers;
  std::int64_t n_children;
  const void** buffers;
  ArrowArray** children;
  ArrowArray* dictionary;
  void (*release)(ArrowArray*);
  void* private_data;
};

struct ArrowArrayStream {
  int (*get_schema)(ArrowArrayStream*, ArrowSchema* out);
  int (*get_next)(ArrowArrayStream*, ArrowArray* out);
  const char* (*get_last_error)(ArrowArrayStream*);
  void (*release)(ArrowArrayStream*);
  void* private_data;
};

/// One of the structures, released at the end.
template <class Structure>
struct ArrowOwned : Structure {
  ArrowOwned() : Structure{} {}
  ArrowOwned(const ArrowOwned&) = delete;
  ArrowOwned& operator=(const ArrowOwned&) = delete;
  ~ArrowOwned() {
    if (this->release != nullptr) this->release(this);
  }
};

/// How the values of a column lie.
enum class ArrowLayout : std::uint8_t { Number, Bit, Bytes, LargeBytes, List, LargeList, FixedList, BytesOfStruct };

struct ArrowColumn {
  ArrowLayout layout = ArrowLayout::Number;
  std::int64_t width = 0;    // of a FixedList
  std::int64_t child = 0;    // with the bytes, of a BytesOfStruct
  bool large_child = false;  // whether its offsets have 64 bits
};

bool arrow_number(std::string_view format, DType& dtype) {
  constexpr std::string_view kFormats = "CcSsIiLlefg";
  constexpr DType kDTypes[] = {DType::U8,  DType::I8,  DType::U16, DType::I16, DType::U32, DType::I32,
                               DType::U64, DType::I64, DType::F16, DType::F32, DType::F64};
  const auto at = format.size() == 1 ? kFormats.find(format[0]) : std::string_view::npos;
  if (at == std::string_view::npos) return false;
  dtype = kDTypes[at];
  return true;
}

const ArrowSchema& arrow_child(const ArrowSchema& schema) {
  OXY_CHECK(schema.n_children == 1, InvalidArgument, "the Arrow list '", schema.name, "' has ", schema.n_children,
            " children.");
  return *schema.children[0];
}

/// How a column is read, and its field.
ArrowColumn describe_arrow(const ArrowSchema& schema, Field& field) {
  const std::string_view format = schema.format;
  field.name = schema.name == nullptr ? "" : schema.name;
  ArrowColumn column;
  const auto list_of_numbers = [&](ArrowLayout layout, std::int64_t extent) {
    column.layout = layout;
    column.width = extent;
    field.shape = {extent};
    return arrow_number(arrow_child(schema).format, field.dtype);
  };
  const bool plain = schema.dictionary == nullptr;
  if (plain && arrow_number(format, field.dtype)) return column;
  if (plain && format == "b") {
    field.dtype = DType::Bool;
    column.layout = ArrowLayout::Bit;
    return column;
  }
  if (plain && (format == "u" || format == "U" || format == "z" || format == "Z")) {
    field.kind = format == "u" || format == "U" ? Kind::Text : Kind::Bytes;
    column.layout = format == "u" || format == "z" ? ArrowLayout::Bytes : ArrowLayout::LargeBytes;
    return column;
  }
  if (format == "+l" && list_of_numbers(ArrowLayout::List, -1)) return column;
  if (format == "+L" && list_of_numbers(ArrowLayout::LargeList, -1)) return column;
  if (format.starts_with("+w:") && list_of_numbers(ArrowLayout::FixedList, std::atoll(schema.format + 3)))
    return column;
  if (format == "+s") {  // an image as Hugging Face's datasets keep it: bytes and path
    for (std::int64_t i = 0; i < schema.n_children; ++i) {
      const std::string_view child = schema.children[i]->format;
      if (std::string_view(schema.children[i]->name) == "bytes" && (child == "z" || child == "Z")) {
        field.kind = Kind::Bytes;
        column = {ArrowLayout::BytesOfStruct, 0, i, child == "Z"};
        return column;
      }
    }
  }
  OXY_CHECK(
      false, NotSupported, "the column '", field.name, "' is of Arrow type '", format,
      plain ? "'" : "', dictionary-encoded",
      ". Columns of numbers, booleans, text, binary, lists of numbers and images are read: leave it out, or cast it.");
}

class ArrowDataset final : public Dataset {
 public:
  explicit ArrowDataset(ArrowArrayStream& stream) {
    ArrowOwned<ArrowSchema> schema;
    const auto check = [&stream](int code) {
      const char* said = code == 0 || stream.get_last_error == nullptr ? nullptr : stream.get_last_error(&stream);
      OXY_CHECK(code == 0, Io, "the Arrow stream fails: ", said == nullptr ? "it does not say why" : said, ".");
    };
    check(stream.get_schema(&stream, &schema));
    OXY_CHECK(schema.format != nullptr && std::string_view(schema.format) == "+s", InvalidArgument,
              "the Arrow stream is none of record batches.");
    for (std::int64_t i = 0; i < schema.n_children; ++i) {
      Field field;
      columns_.push_back(describe_arrow(*schema.children[i], field));
      schema_.fields.push_back(std::move(field));
    }
    OXY_CHECK(!columns_.empty(), InvalidArgument, "the Arrow stream has no columns.");
    ends_.push_back(0);
    for (;;) {
      auto batch = std::make_shared<ArrowOwned<ArrowArray>>();
      check(stream.get_next(&stream, batch.get()));
      if (batch->release == nullptr) break;
      OXY_CHECK(batch->n_children == schema.n_children, InvalidArgument, "an Arrow batch has ", batch->n_children,
                " columns, and the schema ", schema.n_children, ".");
      if (batch->length == 0) continue;
      ends_.push_back(ends_.back() + batch->length);
      batches_.push_back(std::move(batch));
    }
    find_images();
  }

  [[nodiscard]] const Schema& schema() const noexcept override { return schema_; }
  [[nodiscard]] std::int64_t size() const noexcept override { return ends_.back(); }
  [[nodiscard]] std::string format() const override { return "arrow"; }
  [[nodiscard]] std::string place(std::int64_t index) const override { return "row " + std::to_string(index); }

  [[nodiscard]] Sample read(std::int64_t index) const override {
    OXY_CHECK(index >= 0 && index < size(), OutOfRange, "sample ", index, " of ", size(), ".");
    const auto batch =
        static_cast<std::size_t>(std::upper_bound(ends_.begin(), ends_.end(), index) - ends_.begin() - 1);
    const auto row = index - ends_[batch] + batches_[batch]->offset;
    Sample sample;
    for (std::size_t i = 0; i < columns_.size(); ++i)
      sample.push_back(value(i, *batches_[batch]->children[i], row, batches_[batch]));
    return sample;
  }

  [[nodiscard]] std::string fingerprint() const override {
    std::vector<std::string> parts{"arrow"};
    for (const auto& field : schema_.fields) parts.push_back(field.name);
    for (std::size_t batch = 0; batch < batches_.size(); ++batch) {
      parts.push_back(std::to_string(ends_[batch + 1]));
      for (const auto& value : read(ends_[batch])) parts.emplace_back(value.data.text());
    }
    return fingerprint_of(parts);
  }

 private:
  using Owner = std::shared_ptr<const void>;

  [[nodiscard]] static bool is_null(const ArrowArray& array, std::int64_t at) {
    const auto* valid = array.n_buffers > 0 ? static_cast<const std::uint8_t*>(array.buffers[0]) : nullptr;
    return array.null_count != 0 && valid != nullptr && (valid[at / 8] >> (at % 8) & 1) == 0;
  }

  template <class Offset>
  [[nodiscard]] static std::pair<std::int64_t, std::int64_t> range_of(const ArrowArray& array, std::int64_t at) {
    const auto* offsets = static_cast<const Offset*>(array.buffers[1]);
    return {offsets[at], offsets[at + 1]};
  }

  template <class Offset>
  [[nodiscard]] static Value bytes_at(const ArrowArray& array, std::int64_t at, const Owner& owner) {
    if (is_null(array, at)) return {DType::U8, {0}, {{}, owner}};
    const auto [first, last] = range_of<Offset>(array, at);
    return {DType::U8,
            {last - first},
            {{static_cast<const std::byte*>(array.buffers[2]) + first, static_cast<std::size_t>(last - first)}, owner}};
  }

  [[nodiscard]] static Value numbers(DType dtype, const ArrowArray& array, std::int64_t first, std::int64_t count,
                                     std::vector<std::int64_t> shape, const Owner& owner) {
    const auto size = size_of(dtype);
    const auto* data =
        static_cast<const std::byte*>(array.buffers[1]) + static_cast<std::size_t>(first + array.offset) * size;
    return {dtype, std::move(shape), {{data, static_cast<std::size_t>(count) * size}, owner}};
  }

  [[nodiscard]] Value value(std::size_t column, const ArrowArray& array, std::int64_t row, const Owner& owner) const {
    const auto& described = columns_[column];
    const auto& field = schema_.fields[column];
    const auto at = row + array.offset;
    const bool is_text = field.kind != Kind::Array;
    OXY_CHECK(is_text || !is_null(array, at), InvalidArgument, "'", field.name,
              "' is null. Fill nulls, or leave such rows out.");
    switch (described.layout) {
      case ArrowLayout::Number: return numbers(field.dtype, array, row, 1, {}, owner);
      case ArrowLayout::Bit: {
        const auto bit =
            static_cast<std::uint8_t>(static_cast<const std::uint8_t*>(array.buffers[1])[at / 8] >> (at % 8) & 1);
        return own(DType::Bool, {}, std::as_bytes(std::span(&bit, 1)));
      }
      case ArrowLayout::Bytes: return bytes_at<std::int32_t>(array, at, owner);
      case ArrowLayout::LargeBytes: return bytes_at<std::int64_t>(array, at, owner);
      case ArrowLayout::List:
      case ArrowLayout::LargeList: {
        const auto [first, last] = described.layout == ArrowLayout::List ? range_of<std::int32_t>(array, at)
                                                                         : range_of<std::int64_t>(array, at);
        return numbers(field.dtype, *array.children[0], first, last - first, {last - first}, owner);
      }
      case ArrowLayout::FixedList:
        return numbers(field.dtype, *array.children[0], at * described.width, described.width, {described.width},
                       owner);
      case ArrowLayout::BytesOfStruct: {
        const auto& child = *array.children[described.child];
        return described.large_child ? bytes_at<std::int64_t>(child, at + child.offset, owner)
                                     : bytes_at<std::int32_t>(child, at + child.offset, owner);
      }
    }
    return {};
  }

  /// Binary columns whose first value begins as an image does are images.
  void find_images() {
    if (size() == 0) return;
    const auto first = read(0);
    for (std::size_t i = 0; i < first.size(); ++i) {
      auto& field = schema_.fields[i];
      const bool binary = field.kind == Kind::Bytes;
      if (binary && image_header(first[i].data.bytes).format != ImageFormat::Unknown) field.kind = Kind::Image;
    }
  }

  Schema schema_;
  std::vector<ArrowColumn> columns_;
  std::vector<std::shared_ptr<ArrowOwned<ArrowArray>>> batches_;
  std::vector<std::int64_t> ends_;
};

}  // namespace

std::shared_ptr<const Dataset> from_arrow(void* arrow_array_stream) {
  auto* given = static_cast<ArrowArrayStream*>(arrow_array_stream);
  OXY_CHECK(given != nullptr && given->release != nullptr, InvalidArgument,
            "the Arrow stream was used up or released before.");
  ArrowOwned<ArrowArrayStream> stream;
  static_cast<ArrowArrayStream&>(stream) = *given;
  given->release = nullptr;  // moved, as the interface has it
  return std::make_shared<ArrowDataset>(stream);
}

}  // namespace oxytorch::data
