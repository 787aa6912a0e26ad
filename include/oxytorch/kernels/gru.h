/// What lies around the matrix products of a GRU layer: gates, the state, and their gradients, for the rows of one
/// step.
///
/// Torch-free; `oxytorch::ops` puts matrix products between these. Rows are those of a batch. Parts of a row lie side
/// by side, each `width` columns wide: a multiple of kTileStep. Columns beyond those of the state hold no weights; the
/// state stays zero there.
///
/// Threads. A function works on the memory it is given and keeps no state.
#pragma once

#include <cstdint>

#include "oxytorch/api.h"
#include "oxytorch/kernels/element_type.h"

namespace oxytorch::kernels {

/// Parts of a row that forward keeps for backward: gates r, z and n, the state's part of n before r, the state before.
inline constexpr std::int64_t kGruKept = 5;

/// Sizes of one step of a tile of rows.
struct GruSizes {
  ElementType element = ElementType::F32;  ///< of what is kept and of gradients of sums: F32 or BF16
  std::int64_t rows = 0;
  std::int64_t width = 0;
};

/// One step forward. r, z = sigmoid, n = tanh(input's sum + r * state's sum); state = (1 - z) n + z state.
struct GruForward {
  GruSizes sizes;
  const float* bias = nullptr;        ///< 4 x width: r, z, n of the input, n of the state
  const float* input_sums = nullptr;  ///< rows x 3 x width: products with the weights; r, z, n
  const float* state_sums = nullptr;  ///< the same of the state
  float* state = nullptr;             ///< rows x width, in and out
  void* kept = nullptr;               ///< out: rows x kGruKept x width in `element`; null where no gradient is wanted
};
OXY_API void gru_forward(const GruForward& step);

/// The same step backward.
struct GruBackward {
  GruSizes sizes;
  const void* kept = nullptr;          ///< as gru_forward() left it
  const float* grad_output = nullptr;  ///< rows x width; null for zeros
  float* grad_state = nullptr;         ///< rows x width; in: added to `grad_output`; out: what z lets through
  void* grad_sums = nullptr;           ///< out: rows x 4 x width in `element`: n of the input, r, z, n of the state
};
OXY_API void gru_backward(const GruBackward& step);

}  // namespace oxytorch::kernels
