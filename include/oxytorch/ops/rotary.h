/// Rotary position embedding with a native kernel for CPUs.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "oxytorch/api.h"

namespace oxytorch::ops {

struct RotaryOptions {
  /// A pair is two features side by side, as in RoFormer and GPT-J; else it is one of each half, as in GPT-NeoX and in
  /// LLaMA of Hugging Face.
  bool interleaved = false;
  std::optional<std::int64_t> rotary_dim = {};  ///< features that are rotated, the first ones; all where not given
};

/// `x` with pairs of features (a, b) rotated to (a cos - b sin, b cos + a sin), differentiable any number of times.
///
/// `x`: batch x heads x tokens x width. `cos` and `sin`: tokens x angles, batch x tokens x angles, or batch x heads x
/// tokens x angles, where batch, heads and tokens may be 1; angles are half of the rotated features, or as many: then
/// each angle is there twice, as Hugging Face's tables have it, and one of the two is read. They get no gradient.
///
/// On a CPU, float32, bfloat16 and float16 take the kernel of this library: tables and arithmetic are fp32, a result is
/// rounded once, and results have the same bits for any number of threads. Everything else takes torch's operators, in
/// fp32 for the 16-bit dtypes. The output has the shape and dtype of `x`.
///
/// Throws InvalidArgument for sizes that do not fit, InvalidType for dtypes that are not floating, and NotSupported for
/// tables that require a gradient.
OXY_API at::Tensor rotary(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin,
                          const RotaryOptions& options = {});

}  // namespace oxytorch::ops
