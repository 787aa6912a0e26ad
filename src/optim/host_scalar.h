/// One-element tensors whose memory is the host's: read and written in place, with no operator call.
#pragma once

#include <ATen/core/Tensor.h>

#include "oxytorch/error.h"

namespace oxytorch::optim {

/// Value of a one-element CPU tensor of dtype fp32, fp64 or bool; `what` names it in the error.
inline double host_scalar(const at::Tensor& tensor, const char* what) {
  OXY_CHECK(tensor.is_cpu(), InvalidArgument, what, " is on ", tensor.device(), "; it must be on the CPU here.");
  switch (tensor.scalar_type()) {
    case at::kFloat: return static_cast<double>(*tensor.const_data_ptr<float>());
    case at::kDouble: return *tensor.const_data_ptr<double>();
    case at::kBool: return *tensor.const_data_ptr<bool>() ? 1.0 : 0.0;
    default:
      detail::raise(ErrorCode::InvalidType, what, " is of dtype ", tensor.scalar_type(), "; use float32 or float64.");
  }
}

inline void set_host_scalar(const at::Tensor& tensor, double value) {
  if (tensor.scalar_type() == at::kDouble) {
    *tensor.mutable_data_ptr<double>() = value;
  } else {
    *tensor.mutable_data_ptr<float>() = static_cast<float>(value);
  }
}

}  // namespace oxytorch::optim
