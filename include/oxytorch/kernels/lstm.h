/// What lies around the matrix products of an LSTM layer: gates, cells, and their gradients, for the rows of one step.
///
/// Torch-free; `oxytorch::ops` puts matrix products between these. Rows are those of a batch. Gates lie side by side
/// in the order of torch (input, forget, cell, output), each `width` columns wide, of which `hidden` count: a multiple
/// of kTileStep. Columns beyond `hidden` hold no weights and stay without effect.
///
/// Threads. A function works on the memory it is given and keeps no state.
#pragma once

#include <cstdint>

#include "oxytorch/api.h"
#include "oxytorch/kernels/element_type.h"

namespace oxytorch::kernels {

/// Sizes of one step of a tile of rows.
struct LstmSizes {
  ElementType element = ElementType::F32;  ///< of outputs and stored gates: F32 or BF16
  std::int64_t rows = 0;                   ///< of the tile
  std::int64_t used = 0;                   ///< of them, rows of the batch; the others have no output
  std::int64_t hidden = 0;
  std::int64_t width = 0;
};

/// One step forward. i, f, o = sigmoid, g = tanh of `sums` + `bias`; cell = f cell + i g; output = o tanh(cell).
/// With an `element` of BF16 exponentials in these have a relative error below 3e-6.
struct LstmForward {
  LstmSizes sizes;
  const float* bias = nullptr;  ///< 4 x width
  const float* sums = nullptr;  ///< rows x 4 x width: products with the weights
  float* cell = nullptr;        ///< rows x width, in and out
  void* gates = nullptr;        ///< out: rows x 4 x width in `element`; null where no gradient is wanted
  float* cells = nullptr;       ///< out: the new cell, rows x width; null as `gates`
  void* output = nullptr;       ///< `used` rows in `element`
  std::int64_t output_stride = 0;
};
OXY_API void lstm_forward(const LstmForward& step);

/// The same step backward.
struct LstmBackward {
  LstmSizes sizes;
  const void* gates = nullptr;        ///< as lstm_forward() left them
  const float* cells = nullptr;       ///< after the step
  const float* before = nullptr;      ///< cells before it
  const void* grad_output = nullptr;  ///< `used` rows in `element`; null for zeros
  std::int64_t grad_output_stride = 0;
  const float* grad_hidden = nullptr;  ///< rows x width, added to `grad_output`
  float* grad_cell = nullptr;          ///< rows x width, in and out
  void* grad_sums = nullptr;           ///< out: rows x 4 x width in `element`
};
OXY_API void lstm_backward(const LstmBackward& step);

}  // namespace oxytorch::kernels
