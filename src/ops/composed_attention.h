/// scaled_dot_product_attention where torch composes it of other operators: with dropout of its weights, or with a mask
/// that has a gradient. The kernel holds no scores for it.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace oxytorch::ops {

/// What torch's function is given: batch x heads x tokens x width.
struct ComposedAttention {
  at::Tensor query, key, value;
  std::optional<at::Tensor> mask = {};  ///< bool, or added to the scores
  double dropout = 0;
  bool is_causal = false;
  std::optional<double> scale = {};
  bool shares_keys = false;  ///< enable_gqa
  double soft_cap = 0;       ///< as in oxytorch/ops/attention.h; torch's function has none
};

/// Plain tensors on the CPU that the kernel takes, with a dropout below 1, outside of transforms.
[[nodiscard]] bool composed_attention_takes(const ComposedAttention& of);

/// Which weights of these sizes are kept, bool: those that torch's dropout would draw now.
at::Tensor drawn_weights(at::IntArrayRef sizes, double dropout);

/// The output, with a node that keeps `kept`, a byte for each weight, batch x heads x queries x keys; differentiable
/// once. `kept` is undefined without dropout.
at::Tensor composed_attention(const ComposedAttention& of, const at::Tensor& kept);

/// The same where each query sees a key whose score is within the numbers that a mask adds; else nothing: a softmax
/// that a model writes out gives NaN where minus infinity hides all keys, and weighs them where a finite number does.
std::optional<at::Tensor> written_attention(const ComposedAttention& of, const at::Tensor& kept);

}  // namespace oxytorch::ops
