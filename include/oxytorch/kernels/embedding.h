/// Sums of rows with the same index: the gradient of an embedding.
///
/// Torch-free; `oxytorch::ops::embedding` runs this over a tensor. Results have the same bits for any instruction set.
///
/// Threads. The function works on the memory it is given and keeps no state.
#pragma once

#include <cstdint>

#include "oxytorch/api.h"
#include "oxytorch/kernels/attention.h"

namespace oxytorch::kernels {

/// Which rows are added up where.
struct RowSums {
  Rows from;                              ///< of `from.columns` columns; `from.rows` is not read
  const std::int32_t* targets = nullptr;  ///< rows of the result, ascending
  const std::int32_t* sources = nullptr;  ///< the row of `from` that belongs to each of them
  std::int64_t count = 0;                 ///< of both
  bool adds = false;                      ///< to what the result holds
};

/// Writes each row that is a target, in the element of `from`: the sum of its sources in their order, in fp32, then,
/// where it `adds`, what is there already, rounded once. `to` is where row 0 of the result lies.
OXY_API void sum_rows(const RowSums& sums, void* to, std::int64_t to_stride);

}  // namespace oxytorch::kernels
