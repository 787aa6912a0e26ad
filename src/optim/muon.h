/// Newton-Schulz iteration of Muon.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "oxytorch/optim/step_tail.h"

namespace oxytorch::optim {

/// The nearest orthogonal matrix to each of `matrices` (one shape), approximately, in bf16: the quintic iteration of
/// K. Jordan, "Muon", 2024, with the coefficients and steps of `group`, as torch.optim.Muon runs it; all in one batch.
std::vector<at::Tensor> orthogonalized(const std::vector<at::Tensor>& matrices, const GroupOptions& group);

}  // namespace oxytorch::optim
