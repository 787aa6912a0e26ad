/// The last linear layer of a classifier and its cross entropy as one, without the logits.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "oxytorch/api.h"

namespace oxytorch::ops {

enum class LossReduction : std::uint8_t { Mean, Sum };

struct LinearCrossEntropyOptions {
  std::optional<at::Tensor> bias = {};  ///< classes
  std::int64_t ignore_index = -100;     ///< tokens of this target do not count
  double label_smoothing = 0;           ///< in [0, 1]
  LossReduction reduction = LossReduction::Mean;
};

/// cross_entropy(input weight^T + bias, target), differentiable once.
///
/// `input`: any sizes x width; `weight`: classes x width, as of torch::nn::Linear; `target`: int64, the sizes of
/// `input` without the last. Mean is over the tokens that count; NaN where none does. Returns a number.
///
/// On a CPU, float32, bfloat16 and float16 take the kernel of this library: of the logits it holds those of 256 tokens
/// at a time, in fp32, and computes the gradients in the same pass, so that backward only multiplies them, and where an
/// earlier batch left a gradient of `weight`, adds them to it. Of at most 1,024 classes in bfloat16 it holds a million
/// logits at a time, and the gradients of all, in bfloat16. Results have the same bits for any number of threads. The
/// loss is float32. Other devices do the same by torch's operators, without a read on the host; of the logits they
/// hold about as many as the input has elements, those of 256 tokens at least. float64 takes torch's own two operators.
///
/// `weight` and `bias` have the dtype of `input`, or are float32 where that is bfloat16: products are of bfloat16 where
/// the processor multiplies it, and gradients are sums of float32 that are not rounded. Autocast to bfloat16 leaves
/// them so, too; other dtypes it casts as for torch's linear.
///
/// Throws InvalidArgument for sizes or targets that do not fit and InvalidType for dtypes that differ.
OXY_API at::Tensor linear_cross_entropy(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& target,
                                        const LinearCrossEntropyOptions& options = {});

}  // namespace oxytorch::ops
