/// scaled_dot_product_attention with dropout, without the scores that torch holds for it.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace oxytorch::ops {

/// What torch's function is given: batch x heads x tokens x width.
struct DroppedAttention {
  at::Tensor query, key, value;
  std::optional<at::Tensor> mask = {};  ///< bool, or added to the scores
  double dropout = 0;
  bool is_causal = false;
  std::optional<double> scale = {};
  bool shares_keys = false;  ///< enable_gqa
};

/// Plain tensors on the CPU that the kernel takes, with a dropout within (0, 1), outside of transforms.
[[nodiscard]] bool dropped_attention_takes(const DroppedAttention& of);

/// The weights that are kept, bool, batch x heads x queries x keys: those that torch's dropout would draw now.
at::Tensor drawn_weights(const DroppedAttention& of);

/// The output, with a node that keeps `kept`, a byte for each weight; differentiable once.
at::Tensor dropped_attention(const DroppedAttention& of, const at::Tensor& kept);

}  // namespace oxytorch::ops
