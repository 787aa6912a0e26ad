/// Layer and RMS normalization of rows (Ba et al., arXiv:1607.06450; Zhang and Sennrich, arXiv:1910.07467), of a sum
/// that is made on the way: an input, with dropout, and a residual. Forward and backward.
///
/// Torch-free; `oxytorch::ops` runs these over tensors. Arithmetic is fp32. A sum along a row has one order for every
/// instruction set, and one over rows is of those of a call, in order.
///
/// Threads. A function works on the memory it is given and keeps no state.
#pragma once

#include <cstdint>

#include "oxytorch/api.h"
#include "oxytorch/kernels/activation.h"
#include "oxytorch/kernels/attention.h"

namespace oxytorch::kernels {

/// What is normalized: input * keep * scale + residual.
struct RowSum {
  Rows input;
  Rows keep;  ///< 1 where dropout keeps, else 0; no data: all
  float scale = 1;
  Rows residual;  ///< no data: none
};

struct RowNorm {
  const float* weight = nullptr;  ///< null: 1
  const float* bias = nullptr;    ///< null: 0
  float eps = 0;
  bool is_centered = true;  ///< whether the mean is taken off, as layer normalization does
};

/// Rows of an element. No data: not wanted.
struct RowsOf {
  ElementType element = ElementType::F32;
  RowsTo to;
};

/// The normalized rows into `output`; the sums that are normalized, rounded to their element, into `sum`; of each row
/// the mean (not where the norm is not centered) and 1 / root of the variance, or of the mean square, and eps. `work`
/// holds one row.
OXY_API void normalize_sums(const RowSum& sum_of, const RowNorm& norm, const RowsOf& sum, const RowsOf& output,
                            float* mean, float* invstd, float* work);

struct RowNormGradient {
  Rows grad;      ///< of the normalized rows
  Rows grad_sum;  ///< of the sums themselves; no data: none
  Rows sum;
  const float* mean = nullptr;
  const float* invstd = nullptr;
  Rows keep;  ///< as forward's
  float scale = 1;
  RowNorm norm;
};

/// Rows of which sums over rows are made at once.
inline constexpr std::int64_t kNormGroup = 8;

/// Gradients of the residual (the sum's) and of the input (that, behind dropout); of weight and bias the sums over
/// these rows, where they are not null. `work` holds 2 * kNormGroup rows.
OXY_API void row_norm_gradient(const RowNormGradient& of, const RowsOf& to_input, const RowsOf& to_residual,
                               float* weight, float* bias, float* work);

}  // namespace oxytorch::kernels
