/// The gradient of an embedding on the CPU.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

namespace oxytorch::ops {

/// Whether embedding_gradient_cpu() takes these.
[[nodiscard]] bool embedding_gradient_cpu_takes(const at::Tensor& grad_output, const at::Tensor& input,
                                                std::int64_t rows);

/// The gradient of a table of `rows` rows, from that of the lookup; nothing where an index is out of range. `padding`,
/// where not negative, is left out. Where `sum` is defined (contiguous, in the sizes and dtype of the gradient), the
/// gradient is added to it, and it is what returns.
std::optional<at::Tensor> embedding_gradient_cpu(const at::Tensor& grad_output, const at::Tensor& input,
                                                 std::int64_t rows, std::int64_t padding, const at::Tensor& sum = {});

/// Lookup with the derivative of ops::embedding; `padding`: a row, or negative.
at::Tensor embedding_forward(const at::Tensor& weight, const at::Tensor& input, std::int64_t padding);

}  // namespace oxytorch::ops
