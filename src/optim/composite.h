/// The step tail composed from LibTorch's operators, for devices, dtypes and algorithms without native kernels.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "oxytorch/optim/step_tail.h"

namespace oxytorch::optim {

/// One parameter of a composite step. State tensors must exist already.
struct CompositeParam {
  at::Tensor param;
  at::Tensor grad;
  ParamState* state;
  const GroupOptions* group;
  std::uint32_t stream;  ///< identity for stochastic rounding
  bool first;            ///< SGD: the momentum buffer is not yet filled
  bool reads_itself;     ///< the gradient lies in the parameter's own memory
};

/// What one composite step works with.
struct CompositeStep {
  Algorithm algorithm;
  const TailOptions& options;
  at::Tensor multiplier;    ///< 0-dim fp64 or fp32 tensor on the device, applied to each gradient
  at::Tensor skip;          ///< undefined where the step is known to be taken; else 0-dim, and not 0: change nothing
  at::Tensor param_norms;   ///< undefined, or fp32 [params], written
  at::Tensor update_norms;  ///< undefined, or fp32 [params], written
  bool in_order = false;    ///< one after the other: a gradient lies in memory that the step of another writes
};

/// Norm of each gradient, fp64 where the device has it, on the device: [params].
at::Tensor composite_grad_norms(const std::vector<CompositeParam>& params);

/// One update.
void composite_update(const CompositeStep& step, const std::vector<CompositeParam>& params);

/// The weights at their best precision: fp32, or fp64 for fp64 parameters. A complex parameter comes as pairs.
at::Tensor best_weights(const at::Tensor& param, const ParamState& state);

/// The widest floating-point dtype that is known to be there on the tensor's device.
at::ScalarType wide_type(const at::Tensor& tensor) noexcept;

/// The dtype in which a parameter is computed: 16-bit ones in fp32.
at::ScalarType compute_type(at::ScalarType type) noexcept;

}  // namespace oxytorch::optim
