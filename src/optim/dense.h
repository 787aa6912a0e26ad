/// Dense tensors as the kernels see them: element type, address, layout.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "oxytorch/kernels/step_tail.h"

namespace oxytorch::optim {

inline std::optional<kernels::ElementType> element_type(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat: return kernels::ElementType::F32;
    case at::kBFloat16: return kernels::ElementType::BF16;
    case at::kHalf: return kernels::ElementType::F16;
    case at::kChar:
    case at::kByte: return kernels::ElementType::Int8;
    default: return std::nullopt;
  }
}

/// True where element `i` in memory is the same element of both.
inline bool same_layout(const at::Tensor& tensor, const at::Tensor& like) {
  return tensor.device() == like.device() && tensor.layout() == at::kStrided && tensor.sizes() == like.sizes() &&
         ((tensor.is_contiguous() && like.is_contiguous()) || tensor.strides() == like.strides()) && !tensor.is_neg() &&
         !tensor.is_conj();
}

/// A gradient that the kernels can read where it is.
inline bool readable(const at::Tensor& grad, const at::Tensor& param) {
  const auto type = element_type(grad);
  return type && *type != kernels::ElementType::Int8 && same_layout(grad, param);
}

/// Undefined, or of this dtype and laid out as the parameter.
inline bool absent_or_like(const at::Tensor& tensor, at::ScalarType type, const at::Tensor& param) {
  return !tensor.defined() || (tensor.scalar_type() == type && same_layout(tensor, param));
}

/// An empty tensor has no address; the kernels take null for "none".
inline void* address(c10::TensorImpl& tensor) {
  static float nowhere = 0;
  return tensor.numel() == 0 ? &nowhere : tensor.mutable_data();
}
inline void* address(const at::Tensor& tensor) { return address(*tensor.unsafeGetTensorImpl()); }

template <class T>
T* address_or_null(const at::Tensor& tensor) {
  return tensor.defined() ? static_cast<T*>(address(tensor)) : nullptr;
}

/// True where the first dimension is the outermost in memory, so that a row is one run of it.
inline bool rows_are_runs(const at::Tensor& p) {
  return p.dim() < 2 || p.numel() == 0 || p.size(0) == 1 || p.stride(0) * p.size(0) == p.numel();
}

}  // namespace oxytorch::optim
