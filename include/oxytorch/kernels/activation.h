/// GELU and SiLU of matrices, alone or times a second matrix (GEGLU, SwiGLU), forward and backward.
///
/// Torch-free; `oxytorch::ops` runs these over tensors. Arithmetic is fp32, a result is rounded once; the same bits for
/// any instruction set.
///
/// Threads. A function works on the memory it is given and keeps no state.
#pragma once

#include <cstdint>

#include "oxytorch/api.h"
#include "oxytorch/kernels/attention.h"

namespace oxytorch::kernels {

/// GELU x Phi(x) and its tanh form, 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) (Hendrycks and Gimpel,
/// arXiv:1606.08415); SiLU x / (1 + exp(-x)).
enum class Activation : std::uint8_t { Gelu, GeluTanh, Silu };

struct Activated {
  Activation activation = Activation::Gelu;
  Rows input;
  Rows times;  ///< of the size and element of `input`; no data: nothing
};

/// Where rows of the element of an input go.
struct RowsTo {
  void* data = nullptr;
  std::int64_t stride = 0;  ///< elements from row to row

  /// From row `first` on; nowhere stays nowhere.
  [[nodiscard]] OXY_API RowsTo from(std::int64_t first, ElementType element) const;
};

/// activation(input) * times. `to` may be where the input is.
OXY_API void activate(const Activated& of, const RowsTo& to);

/// `grad` times the derivative by the input, and by `times`; where one has no data, it is not computed. Either may be
/// where `grad` is.
OXY_API void activate_backward(const Activated& of, const Rows& grad, const RowsTo& to_input, const RowsTo& to_times);

/// `grad` where `output`, which ReLU gave, is not 0, else 0; of one element and size. As torch's of NaN.
OXY_API void relu_backward(const Rows& output, const Rows& grad, const RowsTo& to);

}  // namespace oxytorch::kernels
