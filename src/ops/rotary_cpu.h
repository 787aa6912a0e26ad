/// Rotary position embedding on the CPU.
#pragma once

#include <ATen/core/Tensor.h>

namespace oxytorch::ops {

/// Whether rotary_cpu() takes these.
[[nodiscard]] bool rotary_cpu_takes(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin);

/// `x`, batch x heads x tokens x width, rotated by tables of float32 that broadcast to batch x heads x tokens x pairs;
/// `inverse`: by the negative angles.
at::Tensor rotary_cpu(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, bool interleaved,
                      bool inverse);

}  // namespace oxytorch::ops
