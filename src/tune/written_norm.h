/// RMS normalization as models write it out: x * rsqrt(mean(x^2) + eps), rounded to x's dtype, times a weight.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <cstdint>
#include <optional>

#include "tune/operator_call.h"

namespace oxytorch::tune {

/// Whether rows of `x` may be those of a norm that is written out: plain, contiguous, of a dtype and device served.
[[nodiscard]] bool may_begin_written_norm(const at::Tensor& x);

// The first operators of one, left to what follows: of a plain tensor that may begin it.
at::Tensor deferred_square(const char* name, const char* overload, const Arguments& arguments);
at::Tensor deferred_wide(const Arguments& arguments);  ///< to.dtype

/// What an operator gives of a deferred sum that has no values yet where it is a part of such a norm, or nothing. The
/// sum is the argument at `position`, of a contiguous float32, bfloat16 or float16 tensor.
std::optional<at::Tensor> written_norm_of_sum(const c10::OperatorHandle& op, const Arguments& arguments,
                                              std::size_t position);

/// The norm of `rows`, a deferred sum or a plain tensor, by the kernel of this library on a CPU and by torch's
/// elsewhere; nothing where that does not take them. `weight` may be undefined.
std::optional<at::Tensor> rms_norm_of(const at::Tensor& rows, const at::Tensor& weight, double eps);

/// Norms that models wrote out and rms_norm_of() computed, so far.
[[nodiscard]] std::int64_t written_norms() noexcept;

}  // namespace oxytorch::tune
