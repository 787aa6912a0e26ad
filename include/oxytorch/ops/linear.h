/// A linear layer whose products are of bfloat16 and whose weight stays float32.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "oxytorch/api.h"

namespace oxytorch::ops {

/// input weight^T + bias, differentiable; with `relu`, the ReLU of that.
///
/// `input`: any sizes x features; `weight`: outputs x features, as of torch::nn::Linear, in the dtype of `input` or,
/// where that is bfloat16, in float32; `bias`: outputs, in the dtype of `weight`. Returns sizes x outputs in the dtype
/// of `input`.
///
/// On a CPU that multiplies bfloat16, inputs of bfloat16 take the kernel of this library: a float32 weight is rounded
/// as it is laid out for the products, sums and the bias are fp32, and the gradients of weight and bias are the fp32
/// sums themselves, which torch rounds to bfloat16 first. Results have the same bits for any number of threads.
/// Everything else takes torch's own operators. Under autocast to bfloat16, `input` is cast and the others stay.
///
/// Throws InvalidArgument for sizes that do not fit and InvalidType for other dtypes.
OXY_API at::Tensor linear(const at::Tensor& input, const at::Tensor& weight,
                          const std::optional<at::Tensor>& bias = std::nullopt, bool relu = false);

}  // namespace oxytorch::ops
