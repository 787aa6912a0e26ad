/// Normalization of a sum, with dropout's mask given.
#pragma once

#include <torch/csrc/autograd/edge.h>

#include "ops/row_norm_cpu.h"

namespace oxytorch::ops {

/// The norm and the sum, which is undefined where that is the input; differentiable twice. By torch's operators where
/// the kernel does not take them.
std::pair<at::Tensor, at::Tensor> normalized_sum(const NormOfSum& of);

/// The eps of RMS normalization, as torch's where none is given.
[[nodiscard]] double rms_eps(const at::Tensor& input, std::optional<double> eps);

/// `normed` came of normalized_sum(), `sum` leads to the node of the sum as somebody else sees it: hooks that it gets,
/// also later, see the sum's gradient in backward, which then goes through that node.
void let_hooks_see_sum(const at::Tensor& normed, torch::autograd::Edge sum);

}  // namespace oxytorch::ops
