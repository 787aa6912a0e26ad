/// A linear layer that waits for the ReLU behind it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKeySet.h>

#include <cstdint>

namespace oxytorch::tune {

/// The layer of a bfloat16 input, without values, where ReLU is likely to follow and it may wait; else an undefined
/// tensor. The weight is float32, as is the bias, which may be undefined. ReLU then computes both, by
/// ops::linear; anything else that asks gets the layer's values. Asked for after what it is of was changed in place, it
/// throws Error(InvalidState).
at::Tensor deferred_before_relu(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias);

/// aten::relu and relu_ under autocast, which see what layers ReLU follows.
at::Tensor relu_seen(c10::DispatchKeySet keys, const at::Tensor& self);
at::Tensor& relu_in_place_seen(c10::DispatchKeySet keys, at::Tensor& self);

/// ReLUs that were computed with their layer so far.
[[nodiscard]] std::int64_t relus_joined() noexcept;

}  // namespace oxytorch::tune
