/// A linear layer on the CPU: products of bfloat16, sums of fp32.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>

namespace oxytorch::ops {

/// Whether the kernel takes these: an input of bfloat16, of any sizes x features, weight and bias (which may be
/// undefined) both bfloat16 or both float32, on a CPU that multiplies bfloat16; nothing empty.
[[nodiscard]] bool linear_cpu_takes(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias);

/// rows x features times outputs x features, transposed, plus outputs; with `relu`, no less than 0. Of bfloat16, or
/// sums as they are in float32. The same bits for any number of threads.
at::Tensor linear_cpu(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias, bool relu = false,
                      at::ScalarType type = at::kBFloat16);

/// Gradients of input, weight and bias where they are wanted; undefined where not. Those of weight and bias have the
/// dtype of `weight`. `input` may be undefined where the weight's is not wanted. The weight's is added to `sum` where
/// that is defined (contiguous, in the sizes and dtype of `weight`), as fp32 sums that are rounded once, and is
/// undefined then. `output`, where defined, is what linear_cpu() gave with `relu`.
struct LinearGradients {
  at::Tensor input, weight, bias;
};
LinearGradients linear_cpu_backward(const at::Tensor& grad_output, const at::Tensor& input, const at::Tensor& weight,
                                    std::array<bool, 3> wanted, const at::Tensor& sum = {},
                                    const at::Tensor& output = {});

}  // namespace oxytorch::ops
