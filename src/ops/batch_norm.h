/// Batch normalization in its parts: the moments of a batch, and what is made of them.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace oxytorch::ops {

/// Of each channel of a batch; float32.
struct ChannelMoments {
  at::Tensor mean;
  at::Tensor invstd;  ///< 1 / root of variance and eps
};

/// Whether the running ones of a layer can follow batch_moments().
[[nodiscard]] bool running_cpu_takes(const at::Tensor& input, const std::optional<at::Tensor>& mean,
                                     const std::optional<at::Tensor>& var);

/// The moments of an input that batch_norm_cpu_takes(); the running ones are updated.
ChannelMoments batch_moments(const at::Tensor& input, const std::optional<at::Tensor>& running_mean,
                             const std::optional<at::Tensor>& running_var, double momentum, double eps);

/// The rest of oxytorch::ops::batch_norm(), differentiable; tensors that are not there are undefined.
at::Tensor normalized(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias,
                      const ChannelMoments& moments, const at::Tensor& added, bool relu, at::IntArrayRef pool);

}  // namespace oxytorch::ops
