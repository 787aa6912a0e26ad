/// The step tail composed from LibTorch's operators, for devices and dtypes without native kernels.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "oxytorch/optim/step_tail.h"

namespace oxytorch::optim {

/// One parameter of a composite step. State tensors must exist already.
struct CompositeParam {
  at::Tensor param;
  at::Tensor grad;
  ParamState* state;
  const GroupOptions* group;
  bool first;  ///< SGD: the momentum buffer is not yet filled
};

/// Norm of each gradient, fp64 where the device has it, on the device: [params].
at::Tensor composite_grad_norms(const std::vector<CompositeParam>& params);

/// One update. `multiplier`: 0-dim fp64 or fp32 tensor on the device, applied to each gradient.
/// `found_inf`: undefined where the step is known to be good; else 0-dim fp32 on the device, and where it is not 0
/// nothing changes. `param_norms`, `update_norms`: undefined, or fp32 [params], written.
void composite_update(Algorithm algorithm, const TailOptions& options, const std::vector<CompositeParam>& params,
                      const at::Tensor& multiplier, const at::Tensor& found_inf, const at::Tensor& param_norms,
                      const at::Tensor& update_norms);

}  // namespace oxytorch::optim
