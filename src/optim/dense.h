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

/// True where both have the same sizes and an element lies in the same place of both. The stride of a dimension of one
/// element says nothing.
inline bool same_strides(const c10::TensorImpl& tensor, const c10::TensorImpl& like) {
  const auto sizes = tensor.sizes(), wanted_sizes = like.sizes();
  if (sizes.size() != wanted_sizes.size()) return false;
  const auto strides = tensor.strides(), wanted = like.strides();
  bool same = true;
  for (std::size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] != wanted_sizes[d]) return false;
    same &= strides[d] == wanted[d] || sizes[d] == 1;
  }
  return same || tensor.numel() == 0;
}

/// Whether the storage holds all elements of a dense tensor: somebody may have freed or shrunk it.
inline bool in_storage(const c10::TensorImpl& dense) {
  const auto end = static_cast<std::size_t>(dense.storage_offset() + dense.numel());
  return end * dense.itemsize() <= dense.unsafe_storage().nbytes() || dense.numel() == 0;
}

/// True where element `i` in memory is the same element of both.
inline bool same_layout(const at::Tensor& tensor, const at::Tensor& like) {
  return tensor.device() == like.device() && tensor.layout() == at::kStrided &&
         same_strides(*tensor.unsafeGetTensorImpl(), *like.unsafeGetTensorImpl()) && !tensor.is_neg() &&
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
