/// Layer and RMS normalization, of a tensor or of the sum of two, with dropout before.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <utility>

#include "oxytorch/api.h"

namespace oxytorch::ops {

struct RowNormOptions {
  std::optional<at::Tensor> weight = {};  ///< of each column; none: 1
  std::optional<at::Tensor> bias = {};    ///< none: 0; rms_norm() has none
  /// Added to the variance, or to the mean square; none: 1e-5 for layer normalization, and for the other what the dtype
  /// distinguishes from 1, as torch has it.
  std::optional<double> eps = {};
  /// Probability that an element of `input` is dropped before the sum; the others are divided by one less it. One mask
  /// is drawn from torch's generator, the same as torch's dropout draws.
  double dropout = 0;
};

/// Over the last dimension, differentiable twice (Ba et al., arXiv:1607.06450).
///
/// On the CPU, float32, bfloat16 and float16 with weights of float32 or of their dtype take the kernel of this library:
/// fp32 arithmetic, the same bits for any number of threads and any instruction set. Everything else takes torch's own
/// operators. Throws InvalidArgument for sizes that do not fit.
OXY_API at::Tensor layer_norm(const at::Tensor& input, const RowNormOptions& options = {});

/// Without a mean (Zhang and Sennrich, arXiv:1910.07467); all else as layer_norm().
OXY_API at::Tensor rms_norm(const at::Tensor& input, const RowNormOptions& options = {});

/// The norm of dropout(input) + residual, and that sum, made in one pass, with one pass for both gradients. The sum has
/// the dtype that torch's addition gives, and so has its norm.
OXY_API std::pair<at::Tensor, at::Tensor> add_layer_norm(const at::Tensor& input, const at::Tensor& residual,
                                                         const RowNormOptions& options = {});
OXY_API std::pair<at::Tensor, at::Tensor> add_rms_norm(const at::Tensor& input, const at::Tensor& residual,
                                                       const RowNormOptions& options = {});

}  // namespace oxytorch::ops
