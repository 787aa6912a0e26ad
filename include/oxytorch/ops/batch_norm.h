/// Batch normalization in training with what follows it in one pass: an addition, ReLU, max pooling.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "oxytorch/api.h"

namespace oxytorch::ops {

struct BatchNormOptions {
  std::optional<at::Tensor> weight = {};        ///< of each channel; none: 1
  std::optional<at::Tensor> bias = {};          ///< none: 0
  std::optional<at::Tensor> running_mean = {};  ///< updated in place; none: not kept
  std::optional<at::Tensor> running_var = {};   ///< unbiased, as torch keeps it
  double momentum = 0.1;                        ///< share of this batch in the running ones
  double eps = 1e-5;
  std::optional<at::Tensor> added = {};  ///< of the size and dtype of `input`, added to what is normalized
  bool relu = false;                     ///< negative results become zero
  /// Height and width of windows that lie side by side, of which the largest elements are returned; empty: none.
  std::vector<std::int64_t> pool = {};
};

/// max_pool2d(relu(batch_norm(input) + added), pool), differentiable; mean and variance are those of this batch.
///
/// `input`: batch x channels, or batch x channels x height x width.
///
/// On the CPU, a dense matrix, or an image in channels_last, of float32, bfloat16 or float16 with weights of float32
/// takes the kernel of this library, which reads the input twice, writes the result once, and keeps nothing but the
/// input, and the result where something was added, for backward. Sums are fp32 and double, results have the same bits
/// for any number of threads. Windows that do not fill the image, and everything else, take torch's own operators.
///
/// Throws InvalidArgument for sizes that do not fit.
OXY_API at::Tensor batch_norm(const at::Tensor& input, const BatchNormOptions& options = {});

}  // namespace oxytorch::ops
