/// One layer of a GRU over a sequence in one direction, by kernels of this library.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>

namespace oxytorch::ops {

/// A layer of torch's GRU. `input` is steps x batch x features; weights are 3 hidden x features and 3 hidden x hidden,
/// gates in the order reset, update, new. Each tensor is float32 or bfloat16.
struct GruLayer {
  const at::Tensor& input;
  const at::Tensor& weight_input;
  const at::Tensor& weight_hidden;
  const at::Tensor& bias_input;  ///< undefined where there are none
  const at::Tensor& bias_hidden;
  const at::Tensor& hidden;  ///< batch x hidden, before the first step
  bool reverse = false;      ///< from the last step to the first
  bool narrow = false;       ///< products and what is kept for backward are bfloat16
};

struct GruResults {
  at::Tensor output;  ///< steps x batch x hidden, as `hidden` in its dtype
  at::Tensor last;    ///< the state after the last step
  at::Tensor kept;    ///< for backward; undefined unless `train`
};

/// Sums and the state are fp32. The same bits for any number of threads.
GruResults gru_cpu(const GruLayer& layer, bool train);

/// What backward needs of a forward in training.
struct GruKept {
  const at::Tensor& input;
  const at::Tensor& weight_input;
  const at::Tensor& weight_hidden;
  const at::Tensor& kept;
  bool reverse = false;
};

/// Gradients of input, hidden, weights and biases, undefined where they are not `wanted`; those of hidden and biases
/// are float32. Those of outputs may be undefined.
std::array<at::Tensor, 6> gru_cpu_backward(const GruKept& layer, const at::Tensor& grad_output,
                                           const at::Tensor& grad_last, std::array<bool, 6> wanted);

}  // namespace oxytorch::ops
