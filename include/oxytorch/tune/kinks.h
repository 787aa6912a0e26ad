/// What of a gradient's error the reference's own kinks explain.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "oxytorch/api.h"

namespace oxytorch::tune {

/// Gradients less what the reference's own jumps explain of their error; all lists by parameter, undefined where there
/// is no gradient.
///
/// A unit whose input is within rounding of a kink (of ReLU, of a maximum) may be on either side of it. `jumps` are the
/// gradients in float64 of states that differ by a rounding from the one of `right`: they show which units are, and by
/// how much the gradient jumps there. The error's part along those jumps (least squares over all tensors, each by its
/// own size), at most twice the largest, is rounding and is taken away; an error of another form stays as large as it
/// is, however small that is. What is changed is in float64.
[[nodiscard]] OXY_API std::vector<at::Tensor> unexplained(const std::vector<at::Tensor>& given,
                                                          const std::vector<at::Tensor>& right,
                                                          const std::vector<std::vector<at::Tensor>>& jumps);

}  // namespace oxytorch::tune
