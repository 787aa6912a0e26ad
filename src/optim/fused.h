/// torch's own fused update kernels, where a device has them: one launch for all parameters of a group and dtype.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "optim/composite.h"

namespace oxytorch::optim {

/// Updates those of `params` that torch's fused kernels can take, and returns the others. The kernels divide by a
/// scale, so they are given 1 / multiplier; they write the divided gradients back, as torch's do.
std::vector<CompositeParam> fused_update(const CompositeStep& step, const std::vector<CompositeParam>& params);

}  // namespace oxytorch::optim
