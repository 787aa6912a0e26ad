/// Batch normalization in training over a tensor, by kernels of this library.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <utility>

namespace oxytorch::ops {

/// What is normalized, and what follows. Tensors that are not there are undefined.
struct NormalizedLayer {
  const at::Tensor& input;
  const at::Tensor& weight;
  const at::Tensor& bias;
  const at::Tensor& added;
  const at::Tensor& mean;    ///< of each channel of this batch, float32
  const at::Tensor& invstd;  ///< 1 / root of variance and eps
  bool relu = false;
  at::IntArrayRef pool = {};
};

/// Whether the kernel takes an input with these weights: rows of channels of float32, bfloat16 or float16.
[[nodiscard]] bool batch_norm_cpu_takes(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias);
/// Whether windows of that size fill the image.
[[nodiscard]] bool windows_fill(const at::Tensor& input, at::IntArrayRef pool);
/// Whether `added` lies as such an input.
[[nodiscard]] bool lies_as(const at::Tensor& added, const at::Tensor& input);

/// Mean and variance of each channel, without Bessel's correction.
std::pair<at::Tensor, at::Tensor> batch_norm_cpu_moments(const at::Tensor& input);

/// The result, and where it is one of windows the places of the maxima; else an empty tensor.
std::pair<at::Tensor, at::Tensor> batch_norm_cpu(const NormalizedLayer& layer);

/// Gradients of input, weight, bias and what was added; undefined where not wanted. Of the layer `added` is not
/// read: `output` is given where something was added and ReLU followed, `taps` of windows.
std::array<at::Tensor, 4> batch_norm_cpu_backward(const NormalizedLayer& layer, const at::Tensor& grad_output,
                                                  const at::Tensor& output, const at::Tensor& taps,
                                                  std::array<bool, 4> wanted);

}  // namespace oxytorch::ops
