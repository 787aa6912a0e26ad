/// Rotary position embedding: pairs of features of a row, rotated by the angles of its position.
///
/// Torch-free; `oxytorch::ops::rotary` runs this over a tensor. Results have the same bits for any instruction set.
///
/// Threads. The function works on the memory it is given and keeps no state.
#pragma once

#include <cstdint>

#include "oxytorch/api.h"
#include "oxytorch/kernels/attention.h"

namespace oxytorch::kernels {

/// How rows are rotated. The first 2 * `pairs` features are, others are copied.
struct RotaryRule {
  std::int64_t pairs = 0;
  bool interleaved = false;     ///< a pair is features 2i and 2i + 1, else i and pairs + i
  bool inverse = false;         ///< by the negative angles
  const float* cos = nullptr;   ///< of each pair, for the first row
  const float* sin = nullptr;   ///< the same
  std::int64_t cos_stride = 0;  ///< elements from row to row
  std::int64_t sin_stride = 0;  ///< the same
};

/// Writes the rotated rows in the element of `from`: (a cos - b sin, b cos + a sin) in fp32, rounded once.
OXY_API void rotate_rows(const RotaryRule& rule, const Rows& from, void* to, std::int64_t to_stride);

}  // namespace oxytorch::kernels
