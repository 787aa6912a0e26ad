/// Linear layer and cross entropy on the CPU, 256 tokens at a time.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>

namespace oxytorch::ops {

struct LinearCrossEntropy {
  const at::Tensor& input;   ///< tokens x width
  const at::Tensor& weight;  ///< classes x width
  const at::Tensor& target;  ///< tokens; each is a class or `ignore_index`
  const at::Tensor& bias;    ///< classes, or undefined
  std::int64_t ignore_index = -100;
  double label_smoothing = 0;
  bool mean = true;
};

/// The loss, and the gradients of input, weight and bias that are wanted; undefined where not. Gradients of float16 are
/// float32: they are not scaled yet.
struct LossAndGradients {
  at::Tensor loss, input, weight, bias;
};
LossAndGradients linear_cross_entropy_cpu(const LinearCrossEntropy& call, std::array<bool, 3> wanted);

}  // namespace oxytorch::ops
