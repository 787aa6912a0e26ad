/// How far the gradients of one batch with changes are from those without.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "oxytorch/api.h"
#include "oxytorch/tune/guard.h"

namespace oxytorch::tune {

/// Both lists by parameter, undefined where there is no gradient; one that is there on one side alone is infinitely
/// far. A tensor is measured against its own size, or a twentieth of that of all where its own gradient cancels.
[[nodiscard]] OXY_API Apart gradients_apart(const std::vector<at::Tensor>& with,
                                            const std::vector<at::Tensor>& without);

}  // namespace oxytorch::tune
