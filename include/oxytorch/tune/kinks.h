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
/// gradients of states that differ by a rounding (kink_nudge()) from the one of `right`: they show which units are, and
/// by how much the gradient jumps there. The error's part along those jumps (least squares over all tensors, each by
/// its own size), at most twice the largest, is rounding and is taken away.
///
/// Where more units are near a kink than there are jumps, those do not span what a rounding can do. How much they leave
/// is seen in the jumps themselves: of each, what the others do not explain. What is left of a tensor's error is taken
/// away too where two jumps leave as much of theirs. An error of another form stays as large as it is, however small
/// that is. What is changed is in float64.
[[nodiscard]] OXY_API std::vector<at::Tensor> unexplained(const std::vector<at::Tensor>& given,
                                                          const std::vector<at::Tensor>& right,
                                                          const std::vector<std::vector<at::Tensor>>& jumps);

/// How far a state for `jumps` is moved, each parameter by a random part of itself, at most so large: by what sums of
/// float32 in another order may be off, or products in half precision.
[[nodiscard]] OXY_API double kink_nudge(bool reduced_precision) noexcept;
/// Whether such a state must be taken in float64, as the dtype of one of the parameters would not hold the nudge.
[[nodiscard]] OXY_API bool nudged_in_float64(const std::vector<at::Tensor>& parameters);
/// How many such states, for parameters of so many elements.
[[nodiscard]] OXY_API int kink_states(double elements) noexcept;

}  // namespace oxytorch::tune
