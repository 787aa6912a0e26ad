/// What a sample is made of: values of a dtype and a shape, and the schema that names them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "oxytorch/api.h"

namespace oxytorch::data {

/// The dtype of a value's elements.
enum class DType : std::uint8_t { U8, I8, U16, I16, U32, I32, U64, I64, F16, BF16, F32, F64, Bool };

/// Bytes of one element.
OXY_API std::size_t size_of(DType dtype) noexcept;
/// As numpy names it: "uint8", "float32", "bfloat16", "bool".
OXY_API const char* name(DType dtype) noexcept;

/// Bytes that stay readable while `owner` lives.
struct View {
  std::span<const std::byte> bytes;
  std::shared_ptr<const void> owner;
  /// The bytes as text; not checked to be UTF-8.
  [[nodiscard]] std::string_view text() const { return {reinterpret_cast<const char*>(bytes.data()), bytes.size()}; }
};

/// An array, row-major; a scalar has no dimensions. Bytes and text are arrays of U8 with one dimension.
struct Value {
  DType dtype = DType::U8;
  std::vector<std::int64_t> shape;
  View data;  ///< any alignment
  [[nodiscard]] OXY_API std::int64_t elements() const noexcept;
};

/// A value that owns a copy of `bytes`.
OXY_API Value own(DType dtype, std::vector<std::int64_t> shape, std::span<const std::byte> bytes);
/// A value of text.
OXY_API Value own(std::string_view text);

/// What a field holds.
enum class Kind : std::uint8_t {
  Array,  ///< numbers
  Image,  ///< an encoded image (JPEG, PNG or WebP), or pixels: U8 of [height, width, channels]
  Text,   ///< UTF-8
  Bytes,  ///< anything else
};

/// One named field of each sample.
struct Field {
  std::string name;
  Kind kind = Kind::Array;
  DType dtype = DType::U8;          ///< U8 unless `kind` is Array
  std::vector<std::int64_t> shape;  ///< of an Array, or of pixels alone; -1 where a dimension differs between samples
  bool operator==(const Field&) const = default;
};

/// The fields of a dataset, in order.
struct Schema {
  std::vector<Field> fields;
  /// Index of a field; -1 where there is none of that name.
  [[nodiscard]] OXY_API std::int64_t find(std::string_view name) const noexcept;
  bool operator==(const Schema&) const = default;
};

/// The values of one sample, as many as its schema has fields and in their order.
using Sample = std::vector<Value>;

}  // namespace oxytorch::data
