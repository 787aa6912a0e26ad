/// Narrow formats of state and weights on tensors of any device: the byte formats of oxytorch/kernels/codec.h composed
/// from LibTorch's operators. On CPU conversions that are not part of a step go through the kernels' own encoders.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <utility>

#include "optim/algorithm.h"

namespace oxytorch::optim {

/// Where random bits come from: the step, a 0-dim tensor with the count after incrementing.
struct Rounding {
  std::uint64_t seed;
  std::uint32_t stream;
  kernels::RoundingOperand operand;
  at::Tensor step;
};

/// A view of a dense tensor's elements in memory order: [numel].
at::Tensor in_memory_order(const at::Tensor& dense);

/// `values` (fp32 or fp64, any strides) in the memory order of `like`: fp32 [numel].
at::Tensor flat_like(const at::Tensor& values, const at::Tensor& like);

/// The bytes for `values` and their scales, shaped as `like` and [groups]. `rounding`: stochastic, or to nearest.
std::pair<at::Tensor, at::Tensor> encode_int8(const at::Tensor& values, kernels::StateCode code, const at::Tensor& like,
                                              const std::optional<Rounding>& rounding);
/// fp32, laid out as `codes`.
at::Tensor decode_int8(const at::Tensor& codes, const at::Tensor& scales, kernels::StateCode code);

/// A bf16 tensor, laid out as `like`.
at::Tensor round_bf16(const at::Tensor& values, const at::Tensor& like, const Rounding& rounding);

/// bf16 weights and int8 low bits, laid out as `like`.
std::pair<at::Tensor, at::Tensor> split_weights(const at::Tensor& values, const at::Tensor& like,
                                                const std::optional<Rounding>& rounding);
/// fp32, laid out as `weights`.
at::Tensor join_weights(const at::Tensor& weights, const at::Tensor& low_bits);

}  // namespace oxytorch::optim
