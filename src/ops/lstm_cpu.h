/// One layer of an LSTM over a sequence in one direction, by kernels of this library.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <tuple>

namespace oxytorch::ops {

/// A layer with the arguments of torch's mkldnn_rnn_layer. `steps` x batch x features; weights 4 hidden x features and
/// 4 hidden x hidden, gates in the order input, forget, cell, output. Biases are not read where there are none.
struct LstmLayer {
  const at::Tensor& input;
  const at::Tensor& weight_input;
  const at::Tensor& weight_hidden;
  const at::Tensor& bias_input;
  const at::Tensor& bias_hidden;
  const at::Tensor& hidden;  ///< batch x hidden, before the first step
  const at::Tensor& cell;
  bool has_biases = true;
  bool reverse = false;  ///< from the last step to the first
};

/// Whether the kernel takes these: float32 or bfloat16 on the CPU, one dtype, sizes that fit, nothing empty.
[[nodiscard]] bool lstm_cpu_takes(const LstmLayer& layer);

/// Output, last hidden state, last cell, and what backward needs (nothing unless `train`). Sums and cells are fp32.
/// The same bits for any number of threads.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> lstm_cpu(const LstmLayer& layer, bool train);

/// Whether lstm_cpu() made this workspace, and not oneDNN.
[[nodiscard]] bool is_lstm_cpu_workspace(const at::Tensor& workspace);

/// Gradients of input, weights, biases, hidden state and cell. Those of outputs may be undefined.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> lstm_cpu_backward(
    const LstmLayer& layer, const at::Tensor& output, const at::Tensor& grad_output, const at::Tensor& grad_hidden,
    const at::Tensor& grad_cell, const at::Tensor& workspace);

}  // namespace oxytorch::ops
