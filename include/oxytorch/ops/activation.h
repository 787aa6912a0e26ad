/// GELU, and gated activations (SwiGLU, GEGLU) in one pass.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>

#include "oxytorch/api.h"

namespace oxytorch::ops {

/// x Phi(x), or with `approximate` "tanh" instead of "none" its form by tanh (Hendrycks and Gimpel, arXiv:1606.08415).
///
/// On the CPU, float32, bfloat16 and float16 take the kernel of this library: fp32 arithmetic, one rounding, the same
/// bits for any number of threads and any instruction set. Everything else takes torch's own operators. Differentiable
/// twice. Throws InvalidArgument for another `approximate`.
OXY_API at::Tensor gelu(const at::Tensor& input, std::string_view approximate = "none");

/// silu(gate) * up (Shazeer, arXiv:2002.05202). Without `up`, the last dimension of `gate` holds both side by side, the
/// gate first, and so does its gradient.
///
/// Kept for backward are `gate` and `up`; between, nothing is written. Kernel, bits and derivatives as of gelu().
/// Throws InvalidArgument for sizes that differ or an odd last dimension, InvalidType for dtypes that differ.
OXY_API at::Tensor swiglu(const at::Tensor& gate, const std::optional<at::Tensor>& up = {});

/// gelu(gate) * up, as swiglu() otherwise.
OXY_API at::Tensor geglu(const at::Tensor& gate, const std::optional<at::Tensor>& up = {},
                         std::string_view approximate = "none");

}  // namespace oxytorch::ops
