#include "oxytorch/data/value.h"

#include <algorithm>
#include <functional>
#include <numeric>

namespace oxytorch::data {

std::size_t size_of(DType dtype) noexcept {
  switch (dtype) {
    case DType::U8:
    case DType::I8:
    case DType::Bool: return 1;
    case DType::U16:
    case DType::I16:
    case DType::F16:
    case DType::BF16: return 2;
    case DType::U32:
    case DType::I32:
    case DType::F32: return 4;
    case DType::U64:
    case DType::I64:
    case DType::F64: return 8;
  }
  return 1;
}

const char* name(DType dtype) noexcept {
  switch (dtype) {
    case DType::U8: return "uint8";
    case DType::I8: return "int8";
    case DType::U16: return "uint16";
    case DType::I16: return "int16";
    case DType::U32: return "uint32";
    case DType::I32: return "int32";
    case DType::U64: return "uint64";
    case DType::I64: return "int64";
    case DType::F16: return "float16";
    case DType::BF16: return "bfloat16";
    case DType::F32: return "float32";
    case DType::F64: return "float64";
    case DType::Bool: return "bool";
  }
  return "unknown";
}

std::int64_t Value::elements() const noexcept {
  return std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>());
}

Value own(DType dtype, std::vector<std::int64_t> shape, std::span<const std::byte> bytes) {
  auto held = std::make_shared<std::vector<std::byte>>(bytes.begin(), bytes.end());
  const std::span<const std::byte> view(*held);
  return {dtype, std::move(shape), {view, std::move(held)}};
}

Value own(std::string_view text) {
  return own(DType::U8, {static_cast<std::int64_t>(text.size())}, std::as_bytes(std::span(text)));
}

std::int64_t Schema::find(std::string_view wanted) const noexcept {
  const auto found = std::find_if(fields.begin(), fields.end(), [&](const Field& f) { return f.name == wanted; });
  return found == fields.end() ? -1 : found - fields.begin();
}

}  // namespace oxytorch::data
