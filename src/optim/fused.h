/// torch's own fused update kernels, where a device has them: one launch for all parameters of a group and dtype.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "optim/composite.h"

namespace oxytorch::optim {

/// Updates those of `params` that torch's fused kernels can take, and returns the others. Arguments as in
/// composite_update. The kernels divide by a scale, so they are given 1 / multiplier; they write the
/// divided gradients back, as torch's do.
std::vector<CompositeParam> fused_update(Algorithm algorithm, const std::vector<CompositeParam>& params,
                                         const at::Tensor& multiplier, const at::Tensor& found_inf);

}  // namespace oxytorch::optim
