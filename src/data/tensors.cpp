#include <ATen/ATen.h>

#include <cstring>

#include "oxytorch/data/tensors.h"
#include "oxytorch/error.h"

namespace oxytorch::data {
namespace {

at::ScalarType scalar_type_of(DType dtype) {
  switch (dtype) {
    case DType::U8: return at::kByte;
    case DType::I8: return at::kChar;
    case DType::U16: return at::kUInt16;
    case DType::I16: return at::kShort;
    case DType::U32: return at::kUInt32;
    case DType::I32: return at::kInt;
    case DType::U64: return at::kUInt64;
    case DType::I64: return at::kLong;
    case DType::F16: return at::kHalf;
    case DType::BF16: return at::kBFloat16;
    case DType::F32: return at::kFloat;
    case DType::F64: return at::kDouble;
    case DType::Bool: return at::kBool;
  }
  return at::kByte;
}

DType dtype_of(at::ScalarType type) {
  for (int i = 0; i <= static_cast<int>(DType::Bool); ++i) {
    if (scalar_type_of(static_cast<DType>(i)) == type) return static_cast<DType>(i);
  }
  OXY_CHECK(false, InvalidType, "values of dtype ", c10::toString(type), " are not known to the data pipeline.");
}

}  // namespace

at::Tensor to_tensor(const Value& value) {
  const auto options = at::TensorOptions().dtype(scalar_type_of(value.dtype));
  const auto& bytes = value.data.bytes;
  const auto aligned = reinterpret_cast<std::uintptr_t>(bytes.data()) % size_of(value.dtype) == 0;
  if (bytes.empty() || !aligned) {
    auto copy = at::empty(value.shape, options);
    if (!bytes.empty()) std::memcpy(copy.data_ptr(), bytes.data(), bytes.size());
    return copy;
  }
  return at::from_blob(
      const_cast<std::byte*>(bytes.data()), value.shape, [owner = value.data.owner](void*) {}, options);
}

Value to_value(const at::Tensor& tensor) {
  OXY_CHECK(tensor.device().is_cpu(), InvalidType, "a sample's tensor is on ", tensor.device().str(),
            "; move it to the CPU.");
  const auto whole = std::make_shared<at::Tensor>(tensor.detach().contiguous());
  const std::span<const std::byte> bytes(static_cast<const std::byte*>(whole->const_data_ptr()), whole->nbytes());
  return {dtype_of(whole->scalar_type()), whole->sizes().vec(), {bytes, whole}};
}

}  // namespace oxytorch::data
