/// Activations over tensors by the kernels of this library.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>

#include "oxytorch/kernels/activation.h"

namespace oxytorch::ops {

/// Without `times`, a `packed` input holds both side by side in its last dimension.
struct ActivatedTensor {
  kernels::Activation activation;
  const at::Tensor& input;
  const at::Tensor& times;  ///< undefined: none
  bool packed = false;
};

/// float32, bfloat16 and float16 on the CPU, one dtype, nothing empty.
[[nodiscard]] bool activation_cpu_takes(const at::Tensor& input, const at::Tensor& times);

at::Tensor activation_cpu(const ActivatedTensor& of);
/// Into `to`, of the sizes and layout of `of.input`, which may be that itself.
void activation_cpu_into(const ActivatedTensor& of, const at::Tensor& to);

/// Gradients of input and `times`; undefined where not wanted. That of a packed input is packed.
std::array<at::Tensor, 2> activation_cpu_backward(const ActivatedTensor& of, const at::Tensor& grad,
                                                  std::array<bool, 2> wanted);

}  // namespace oxytorch::ops
