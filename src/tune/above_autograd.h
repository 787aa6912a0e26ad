/// The key of torch's dispatcher that comes before autograd and autocast and that torch leaves free: deferred logits
/// have it, and KeepDouble includes it. (The other key of this kind is own_random.cpp's.)
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKey.h>

namespace oxytorch::tune {

constexpr auto kAboveAutograd = c10::DispatchKey::TESTING_ONLY_GenericWrapper;

/// The tensor itself, or the values of one that is deferred.
at::Tensor values_of(const at::Tensor& tensor);

/// A linear layer of a bfloat16 input that is left to its loss, where it may be; else an undefined tensor. The weight
/// is float32, as is the bias, which may be undefined.
at::Tensor deferred_linear(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias);

/// Of the right operand of a product that is a transposed weight, that; else an undefined tensor.
at::Tensor weight_of(const at::Tensor& right);

}  // namespace oxytorch::tune
