/// Layer and RMS normalization of a sum, over tensors, by the kernels of this library.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>

namespace oxytorch::ops {

/// The sum input * keep * keep_scale + residual, and its norm over the last dimension. Undefined tensors: none.
struct NormOfSum {
  at::Tensor input;
  at::Tensor residual;
  at::Tensor keep;  ///< 1 where dropout keeps, else 0
  at::Tensor weight;
  at::Tensor bias;
  double eps = 1e-5;
  double keep_scale = 1;
  bool is_centered = true;
  std::optional<at::ScalarType> rounded_to = {};  ///< the result's dtype, where it is not the sum's

  /// Whether the sum is another tensor than the input.
  [[nodiscard]] bool has_sum() const { return residual.defined() || keep.defined(); }
  /// The dtype of the sum: what torch's addition gives.
  [[nodiscard]] at::ScalarType type() const;
  [[nodiscard]] at::ScalarType result_type() const { return rounded_to.value_or(type()); }
};

/// float32, bfloat16 and float16 on the CPU, nothing empty; weight and bias of float32 or of the sum's dtype.
[[nodiscard]] bool row_norm_cpu_takes(const NormOfSum& of);

/// `sum` is undefined where that is the input. Of each row the mean and 1 / root, float32.
struct NormedRows {
  at::Tensor output, sum, mean, invstd;
};
NormedRows row_norm_cpu(const NormOfSum& of);

/// What backward needs of it.
struct NormedSum {
  at::Tensor sum;  ///< the input, where nothing was added
  at::Tensor mean, invstd;
  at::Tensor keep, weight;
  double keep_scale = 1;
  bool is_centered = true;
  at::ScalarType input_type, residual_type;
};

/// Whether the gradients of input and residual are the same numbers, which are then made once.
[[nodiscard]] bool is_one_gradient(const at::Tensor& keep, at::ScalarType input_type, at::ScalarType residual_type,
                                   std::array<bool, 4> wanted);

/// Gradients of input, residual, weight and bias; undefined where not wanted, and of the residual where it
/// is_one_gradient(). `grad_sum` may be undefined.
std::array<at::Tensor, 4> row_norm_cpu_backward(const NormedSum& of, const at::Tensor& grad_output,
                                                const at::Tensor& grad_sum, std::array<bool, 4> wanted);

}  // namespace oxytorch::ops
