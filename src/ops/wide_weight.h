/// Layers whose weight and bias are float32 while their input is bfloat16: what autocast would cast for each step, and
/// the gradients with it, a kernel reads and writes as it lies.
#pragma once

#include <ATen/ops/linear.h>

#include <optional>
#include <tuple>

#include "ops/dispatch.h"

namespace oxytorch::ops {

/// Throws InvalidType for a weight that is neither of its input's dtype nor float32 where that is bfloat16, and for a
/// bias that is not of the weight's. `layer` is its name.
inline void check_types(const char* layer, const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias) {
  OXY_CHECK(weight.scalar_type() == input.scalar_type() ||
                (weight.scalar_type() == at::kFloat && input.scalar_type() == at::kBFloat16),
            InvalidType, layer,
            " takes a weight of the dtype of its input, or of float32 where that is bfloat16; input is ",
            input.scalar_type(), ", weight ", weight.scalar_type(), ".");
  OXY_CHECK(!bias.defined() || bias.scalar_type() == weight.scalar_type(), InvalidType, layer,
            " takes a bias of the dtype of its weight, ", weight.scalar_type(), "; it is ", bias.scalar_type(), ".");
}

/// torch's linear, of weight and bias in the dtype of the input.
inline at::Tensor linear_by_torch(const at::Tensor& input, const at::Tensor& weight,
                                  const std::optional<at::Tensor>& bias) {
  const auto type = input.scalar_type();
  const at::Tensor added = or_none(bias);
  return at::linear(input, weight.to(type), if_defined(added.defined() ? added.to(type) : added));
}

/// What autocast makes of them, but for a weight and a bias of float32 beside bfloat16.
inline std::tuple<at::Tensor, at::Tensor, std::optional<at::Tensor>> autocast_input(
    const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  const at::Tensor narrow = autocast(input), added = or_none(bias);
  const bool is_wide = weight.scalar_type() == at::kFloat && (!added.defined() || added.scalar_type() == at::kFloat);
  if (narrow.scalar_type() == at::kBFloat16 && is_wide) return {narrow, weight, bias};
  return {narrow, autocast(weight), if_defined(added.defined() ? autocast(added) : added)};
}

}  // namespace oxytorch::ops
