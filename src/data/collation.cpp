#include "data/collation.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "oxytorch/error.h"

namespace oxytorch::data {
namespace {

std::string shape_text(const std::vector<std::int64_t>& shape) {
  std::string text = "[";
  for (const auto extent : shape) text += (text.size() > 1 ? ", " : "") + std::to_string(extent);
  return text + "]";
}

std::size_t bytes_of_shape(DType dtype, const std::vector<std::int64_t>& shape) {
  std::size_t bytes = size_of(dtype);
  for (const auto extent : shape) bytes *= static_cast<std::size_t>(extent);
  return bytes;
}

/// Rows of `value` whose indices are in `kept`.
Value rows_of(const Value& value, const std::vector<std::int64_t>& kept) {
  if (value.shape.empty() || value.shape[0] == static_cast<std::int64_t>(kept.size())) return value;
  const auto row = value.shape[0] == 0 ? 0 : value.data.bytes.size() / static_cast<std::size_t>(value.shape[0]);
  std::vector<std::byte> bytes;
  for (const auto index : kept) {
    OXY_CHECK(index >= 0 && index < value.shape[0], InvalidArgument, "a field of one row a box has ", value.shape[0],
              " rows, and box ", index, " is kept.");
    const auto part = value.data.bytes.subspan(static_cast<std::size_t>(index) * row, row);
    bytes.insert(bytes.end(), part.begin(), part.end());
  }
  auto shape = value.shape;
  shape[0] = static_cast<std::int64_t>(kept.size());
  return own(value.dtype, std::move(shape), bytes);
}

template <typename Number>
void fill_numbers(Number value, std::byte* to, std::size_t bytes) {
  for (std::size_t at = 0; at < bytes; at += sizeof(Number)) std::memcpy(to + at, &value, sizeof(Number));
}

/// Fills memory with one number.
void fill_with(DType dtype, double value, std::byte* to, std::size_t bytes) {
  const auto whole = static_cast<std::int64_t>(value);  // of integers the low bits are stored
  switch (dtype) {
    case DType::F64: return fill_numbers(value, to, bytes);
    case DType::F32: return fill_numbers(static_cast<float>(value), to, bytes);
    case DType::F16:
    case DType::BF16:
      OXY_CHECK(value == 0, NotSupported, "fields of ", name(dtype), " are padded with 0 alone, not with ", value, ".");
      return fill_numbers(std::uint16_t{0}, to, bytes);
    default: break;
  }
  switch (size_of(dtype)) {
    case 1: return fill_numbers(static_cast<std::uint8_t>(whole), to, bytes);
    case 2: return fill_numbers(static_cast<std::uint16_t>(whole), to, bytes);
    case 4: return fill_numbers(static_cast<std::uint32_t>(whole), to, bytes);
    default: return fill_numbers(static_cast<std::uint64_t>(whole), to, bytes);
  }
}

std::int64_t find_field(const Schema& schema, const std::string& field) {
  const auto found = schema.find(field);
  OXY_CHECK(found >= 0, InvalidArgument, "the dataset has no field '", field, "'.");
  return found;
}

}  // namespace

std::vector<Role> roles_of(const Schema& schema, const LoaderOptions& options) {
  std::vector<Role> roles;
  bool has_image = false;
  for (const auto& field : schema.fields) {
    const bool mask = std::find(options.masks.begin(), options.masks.end(), field.name) != options.masks.end();
    if (mask) {
      OXY_CHECK(field.kind == Kind::Image, InvalidArgument, "the field '", field.name,
                "' is named as a mask, and holds no encoded image.");
      roles.push_back(Role::Mask);
    } else if (field.kind == Kind::Image && !has_image) {
      roles.push_back(Role::Pixels);
      has_image = true;
    } else if (field.kind != Kind::Array && !(field.kind == Kind::Image && field.shape.size() == 3)) {
      roles.push_back(Role::Text);
    } else {
      const bool varies = std::find(field.shape.begin(), field.shape.end(), -1) != field.shape.end();
      roles.push_back(varies ? Role::Varying : Role::Fixed);
    }
  }
  for (const auto& each : options.masks) find_field(schema, each);
  if (!options.boxes.empty()) {
    const auto& field = schema.fields[static_cast<std::size_t>(find_field(schema, options.boxes))];
    OXY_CHECK(field.kind == Kind::Array && field.dtype == DType::F32 && field.shape.size() == 2 && field.shape[1] == 4,
              InvalidArgument, "boxes must be float32 of [n, 4], and '", field.name, "' is ", name(field.dtype), " of ",
              shape_text(field.shape), ".");
    roles[static_cast<std::size_t>(&field - schema.fields.data())] = Role::Boxes;
  }
  for (const auto& each : options.per_box) find_field(schema, each);
  for (const auto& [field, value] : options.pad) {
    OXY_CHECK(roles[static_cast<std::size_t>(find_field(schema, field))] == Role::Varying, InvalidArgument,
              "the field '", field, "' is to be padded, and its samples do not differ in length.");
  }
  OXY_CHECK(has_image || (options.masks.empty() && options.boxes.empty()), InvalidArgument,
            "boxes and masks move with an image, and the dataset has none.");
  return roles;
}

Collation::Collation(const Schema& schema, const std::vector<Role>& roles, const LoaderOptions& options,
                     Allocate allocate, std::int64_t rows)
    : schema_(schema),
      roles_(roles),
      options_(options),
      allocate_(std::move(allocate)),
      rows_(rows),
      parts_(roles.size()),
      dropped_(static_cast<std::size_t>(rows)) {
  for (std::size_t field = 0; field < roles.size(); ++field) {
    const auto count = static_cast<std::size_t>(rows);
    if (roles[field] == Role::Text) parts_[field].texts.resize(count);
    if (roles[field] == Role::Boxes || roles[field] == Role::Varying) parts_[field].values.resize(count);
  }
}

std::byte* Collation::row_of(std::size_t field, std::int64_t row, DType dtype, const std::vector<std::int64_t>& shape) {
  auto& part = parts_[field];
  {
    const std::lock_guard lock(mutex_);
    if (!part.memory) {
      part.dtype = dtype;
      part.shape = shape;
      part.row_bytes = bytes_of_shape(dtype, shape);
      part.memory = allocate_(std::max<std::size_t>(part.row_bytes * static_cast<std::size_t>(rows_), 1));
    }
  }
  OXY_CHECK(part.dtype == dtype && part.shape == shape, InvalidArgument, "'", schema_.fields[field].name, "' is ",
            name(dtype), " of ", shape_text(shape), ", and ", name(part.dtype), " of ", shape_text(part.shape),
            " in another sample of the batch. ",
            roles_[field] == Role::Pixels || roles_[field] == Role::Mask
                ? "Images of a batch must have one size: add a stage such as RandomResizedCrop or Resize."
                : "Give every sample the same, or, of a dataset of Python's, name the field in pad.");
  return part.memory.get() + part.row_bytes * static_cast<std::size_t>(row);
}

void Collation::add_pixels(std::size_t field, std::int64_t row, Item& item) {
  const auto& pixels = item.image.pixels();
  const auto& output = options_.image;
  const std::int64_t height = pixels.height, width = pixels.width, channels = pixels.channels;
  const auto shape = output.channels_last ? std::vector{height, width, channels} : std::vector{channels, height, width};
  write_pixels(pixels, output, row_of(field, row, output.normalize ? output.dtype : DType::U8, shape));
}

void Collation::add(std::int64_t row, Item& item) {
  const auto at = static_cast<std::size_t>(row);
  std::size_t mask = 0;
  for (std::size_t field = 0; field < roles_.size(); ++field) {
    auto& part = parts_[field];
    const auto& value = item.sample[field];
    switch (roles_[field]) {
      case Role::Pixels: add_pixels(field, row, item); break;
      case Role::Mask: {
        const auto& pixels = item.masks[mask++];
        std::memcpy(row_of(field, row, DType::U8, {pixels.height, pixels.width}), pixels.data.get(), pixels.bytes());
        break;
      }
      case Role::Boxes:
        part.values[at] =
            own(DType::F32, {static_cast<std::int64_t>(item.boxes.size()), 4}, std::as_bytes(std::span(item.boxes)));
        break;
      case Role::Text:
        OXY_CHECK(
            value.shape.size() < 2, InvalidArgument, "'", schema_.fields[field].name,
            "' is a second image of each sample, of pixels in this one and encoded in others, which make no batch. "
            "Name it in masks where it is one.");
        part.texts[at] = value.data.text();
        break;
      case Role::Fixed:
        if (auto* to = row_of(field, row, value.dtype, value.shape); !value.data.bytes.empty()) {
          std::memcpy(to, value.data.bytes.data(), value.data.bytes.size());
        }
        break;
      case Role::Varying: {
        const auto& per_box = options_.per_box;
        const bool one_a_box = std::find(per_box.begin(), per_box.end(), schema_.fields[field].name) != per_box.end();
        part.values[at] = one_a_box ? rows_of(value, item.box_ids) : value;
        break;
      }
    }
  }
}

void Collation::places(std::int64_t row, std::vector<std::byte*>& to) {
  to.clear();
  for (std::size_t field = 0; field < roles_.size(); ++field) {
    to.push_back(row_of(field, row, schema_.fields[field].dtype, schema_.fields[field].shape));
  }
}

void Collation::drop(std::int64_t row) { dropped_[static_cast<std::size_t>(row)] = 1; }

const std::vector<std::int64_t>& Collation::kept() {
  if (kept_.empty()) {
    for (std::int64_t row = 0; row < rows_; ++row) {
      if (dropped_[static_cast<std::size_t>(row)] == 0) kept_.push_back(row);
    }
  }
  return kept_;
}

Column Collation::stacked(const Field& field, Part& part) {
  std::size_t to = 0;
  for (const auto row : kept()) {
    const auto from = static_cast<std::size_t>(row);
    if (from != to)
      std::memcpy(part.memory.get() + to * part.row_bytes, part.memory.get() + from * part.row_bytes, part.row_bytes);
    ++to;
  }
  auto shape = part.shape;
  shape.insert(shape.begin(), static_cast<std::int64_t>(to));
  const std::span<const std::byte> bytes(part.memory.get(), to * part.row_bytes);
  return {
      .name = field.name, .array = {part.dtype, std::move(shape), {bytes, part.memory}}, .lengths = {}, .texts = {}};
}

Column Collation::joined(const Field& field, Part& part) {
  Column column{.name = field.name, .array = {}, .lengths = {}, .texts = {}};
  const auto& first = part.values[static_cast<std::size_t>(kept().front())];
  auto tail = first.shape;
  if (!tail.empty()) tail.erase(tail.begin());
  std::int64_t total = 0;
  for (const auto row : kept()) {
    const auto& value = part.values[static_cast<std::size_t>(row)];
    const bool fits = value.dtype == first.dtype && !value.shape.empty() &&
                      std::equal(value.shape.begin() + 1, value.shape.end(), tail.begin(), tail.end());
    OXY_CHECK(fits, InvalidArgument, "'", field.name, "' is ", name(value.dtype), " of ", shape_text(value.shape),
              ", and ", name(first.dtype), " of ", shape_text(first.shape),
              " in another sample of the batch: they may differ in their first dimension alone.");
    column.lengths.push_back(value.shape[0]);
    total += value.shape[0];
  }
  const auto padding = std::find_if(options_.pad.begin(), options_.pad.end(),
                                    [&](const auto& each) { return each.first == field.name; });
  const bool padded = padding != options_.pad.end();
  const auto longest = *std::max_element(column.lengths.begin(), column.lengths.end());
  const auto count = static_cast<std::int64_t>(column.lengths.size());
  auto shape = tail;
  shape.insert(shape.begin(), padded ? longest : total);
  if (padded) shape.insert(shape.begin(), count);
  const auto bytes = bytes_of_shape(first.dtype, shape);
  const auto memory = allocate_(std::max<std::size_t>(bytes, 1));
  if (padded) fill_with(first.dtype, padding->second, memory.get(), bytes);
  const std::size_t stride = padded ? bytes / static_cast<std::size_t>(count) : 0;
  std::size_t at = 0, row_start = 0;
  for (const auto row : kept()) {
    const auto& from = part.values[static_cast<std::size_t>(row)].data.bytes;
    if (!from.empty()) std::memcpy(memory.get() + at, from.data(), from.size());
    at = padded ? (row_start += stride) : at + from.size();
  }
  if (padded) column.lengths.clear();
  column.array = {first.dtype, std::move(shape), {{memory.get(), bytes}, memory}};
  return column;
}

std::vector<Column> Collation::finish() {
  std::vector<Column> columns;
  if (kept().empty()) return columns;
  for (std::size_t field = 0; field < roles_.size(); ++field) {
    const auto& described = schema_.fields[field];
    auto& part = parts_[field];
    Column column;
    if (roles_[field] == Role::Text) {
      column.name = described.name;
      for (const auto row : kept()) column.texts.push_back(std::move(part.texts[static_cast<std::size_t>(row)]));
      column.kind = described.kind == Kind::Image ? Kind::Bytes : described.kind;
    } else if (roles_[field] == Role::Boxes || roles_[field] == Role::Varying) {
      column = joined(described, part);
    } else {
      column = stacked(described, part);
    }
    columns.push_back(std::move(column));
  }
  return columns;
}

}  // namespace oxytorch::data
