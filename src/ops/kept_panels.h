/// What PackedWeights keeps, for the kernel that packs.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace oxytorch::ops {

/// The products that a weight is packed for: with the rows of a batch, or with the gradients of its outputs.
enum class PackedFor : std::uint8_t { Forward, Backward };

/// Whether a PackedWeights lives, and the weight's changes can be told.
[[nodiscard]] bool keeps_panels(const at::Tensor& weight);

/// The panels that were kept of the weight as it is now; undefined where there are none.
[[nodiscard]] at::Tensor kept_panels(const at::Tensor& weight, PackedFor products);

/// Keeps `panels` of the weight as it is now, in the place of earlier ones. Nobody writes to them any more.
void keep_panels(const at::Tensor& weight, PackedFor products, at::Tensor panels);

}  // namespace oxytorch::ops
