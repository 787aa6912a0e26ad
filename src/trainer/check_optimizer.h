/// Whether a configuration and the options of an optimizer of oxytorch::optim go together.
#pragma once

#include <torch/optim/optimizer.h>

#include "oxytorch/config.h"

namespace oxytorch {

/// Refuses what contradicts the optimizer's own options; returns what of clip_norm is not left to it.
double check_optimizer(const PerformanceConfig& config, const torch::optim::Optimizer& optimizer);

}  // namespace oxytorch
