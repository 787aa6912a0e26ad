/// torch's GRU, all layers and directions of it, by kernels of this library.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <tuple>

namespace oxytorch::ops {

/// The arguments of torch's gru, of a sequence that is not packed.
struct Gru {
  const at::Tensor& input;
  const at::Tensor& hidden;
  at::TensorList params;
  bool has_biases;
  std::int64_t num_layers;
  double dropout;
  bool train;
  bool bidirectional;
  bool batch_first;
};

/// Whether the kernels take these: plain tensors of the CPU in float32 or bfloat16, one dtype except under autocast to
/// bfloat16, sizes that fit, nothing empty, no transform of torch.func and no tangents around.
[[nodiscard]] bool gru_takes(const Gru& gru);

/// Output and last states, differentiable once. Under autocast products are of bfloat16, and outputs have the dtype of
/// `hidden`, as torch's.
std::tuple<at::Tensor, at::Tensor> gru(const Gru& gru);

}  // namespace oxytorch::ops
