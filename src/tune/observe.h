/// What a forward calls.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string_view>
#include <vector>

namespace oxytorch::tune {

/// True where `forward` calls an operator whose name contains one of `names` on this thread; run without gradients.
bool calls(const std::function<at::Tensor()>& forward, const std::vector<std::string_view>& names);

}  // namespace oxytorch::tune
