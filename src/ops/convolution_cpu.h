/// The gradient of a convolution's weight on the CPU: products of bfloat16, sums of fp32.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>

namespace oxytorch::ops {

/// A convolution of images: for rows, then for columns.
struct ConvolutionShape {
  std::array<std::int64_t, 2> kernel, stride, padding;
};

/// Whether the kernel is worth calling for a weight of outputs x inputs x kernel: narrower ones are left to oneDNN,
/// which does not fill products with zeros.
[[nodiscard]] bool convolution_cpu_is_for(std::int64_t outputs, std::int64_t inputs);

/// Whether the kernel takes these: bfloat16 in channels_last memory, of batch x channels x rows x columns, on a CPU
/// that multiplies bfloat16; batches that fill blocks of images, as 16, 23 to 32, 46 to 64 and 69 or more do (of a
/// kernel of 1 x 1 that meets every place once, places are images); nothing empty.
[[nodiscard]] bool convolution_cpu_takes(const at::Tensor& grad_output, const at::Tensor& input,
                                         const ConvolutionShape& shape);

/// The gradient of the weight, outputs x inputs x kernel, in channels_last memory. The same bits for any number of
/// threads. Holds about 1 MiB for each thread, or as much as a few rows of a block of images take, beside fp32 sums of
/// at most 5 MiB, or one for each element of the weight.
at::Tensor convolution_cpu_weight_gradient(const at::Tensor& grad_output, const at::Tensor& input,
                                           const ConvolutionShape& shape);

}  // namespace oxytorch::ops
