/// Reads the fields of a binary format one after the other, and never behind the end.
#pragma once

#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "oxytorch/data/value.h"
#include "oxytorch/error.h"

namespace oxytorch::data {

static_assert(std::endian::native == std::endian::little,
              "the formats read here are little-endian, and are read as they lie");

/// A number at any alignment; the caller has checked that it lies within the bytes.
template <class T>
[[nodiscard]] T load_number(const std::byte* from) noexcept {
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}

/// Bytes of an array; UINT64_MAX, more than any file has, where a dimension is negative or they are too many to count.
[[nodiscard]] inline std::uint64_t array_bytes(DType dtype, const std::vector<std::int64_t>& shape) noexcept {
  std::uint64_t bytes = size_of(dtype);
  for (const auto dimension : shape) {
    if (dimension < 0 || __builtin_mul_overflow(bytes, dimension, &bytes)) return UINT64_MAX;
  }
  return bytes;
}

/// A cursor over bytes that begin at offset `base` of `location`.
/// Errors: `Io` with location and offset for what ends behind the bytes.
class ByteReader {
 public:
  ByteReader(std::span<const std::byte> bytes, const std::string& location, std::uint64_t base = 0)
      : bytes_(bytes), location_(&location), base_(base) {}

  template <class T>
  [[nodiscard]] T take() {
    return load_number<T>(take_bytes(sizeof(T)).data());
  }
  [[nodiscard]] std::span<const std::byte> take_bytes(std::uint64_t length) {
    OXY_CHECK(length <= left(), Io, *location_, " is damaged: at offset ", offset(), " ", length,
              " bytes are expected, and ", left(), " are left.");
    const auto taken = bytes_.subspan(at_, length);
    at_ += length;
    return taken;
  }
  void skip(std::uint64_t length) { (void)take_bytes(length); }
  [[nodiscard]] std::string_view take_text(std::uint64_t length) {
    const auto taken = take_bytes(length);
    return {reinterpret_cast<const char*>(taken.data()), taken.size()};
  }
  [[nodiscard]] std::span<const std::byte> rest() { return take_bytes(left()); }
  /// The elements of an array, which must fill what is left.
  [[nodiscard]] std::span<const std::byte> rest_as(DType dtype, const std::vector<std::int64_t>& shape) {
    OXY_CHECK(array_bytes(dtype, shape) == left(), Io, *location_, " is damaged: the array at offset ", offset(),
              " has ", left(), " bytes, which do not fit its shape and dtype ", name(dtype), ".");
    return rest();
  }
  [[nodiscard]] std::uint64_t left() const noexcept { return bytes_.size() - at_; }
  [[nodiscard]] std::uint64_t offset() const noexcept { return base_ + at_; }
  [[nodiscard]] const std::string& location() const noexcept { return *location_; }

 private:
  std::span<const std::byte> bytes_;
  const std::string* location_;
  std::uint64_t base_;
  std::size_t at_ = 0;
};

}  // namespace oxytorch::data
