/// The key of torch's dispatcher that comes before autograd and autocast and that torch leaves free: deferred logits
/// have it, and KeepDouble includes it. (The other key of this kind is own_random.cpp's.)
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKey.h>

namespace oxytorch::tune {

constexpr auto kAboveAutograd = c10::DispatchKey::TESTING_ONLY_GenericWrapper;

/// The tensor itself, or the values of one that is deferred.
at::Tensor values_of(const at::Tensor& tensor);

}  // namespace oxytorch::tune
