/// Embedding lookup with a native kernel for the gradient on CPUs.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "oxytorch/api.h"

namespace oxytorch::ops {

/// The rows of `weight` at the indices `input`: torch's embedding, differentiable any number of times.
///
/// `input`: int64 or int32 of any sizes. `weight`: rows x columns. The result has the sizes of `input` and columns. A
/// row `padding_idx`, counted from the end where it is negative, gets no gradient.
///
/// On a CPU, the gradient of a weight of float32, bfloat16 or float16 takes the kernel of this library: each row is
/// the sum in fp32 of what belongs to it, in the order of `input`, rounded once. In float32 these are
/// torch's bits; in 16 bits torch rounds after each addition, and loses what is small beside the sum. Results have the
/// same bits for any number of threads. Beside the gradient it holds 16 bytes for each index. Everything else takes
/// torch's operators.
///
/// Throws InvalidArgument for sizes that do not fit and a padding_idx outside of the table, InvalidType for an input
/// that is not of indices, and torch's exception for an index out of range.
OXY_API at::Tensor embedding(const at::Tensor& input, const at::Tensor& weight,
                             std::optional<std::int64_t> padding_idx = {});

}  // namespace oxytorch::ops
