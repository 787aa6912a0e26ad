/// Cross entropy of logits in fp32, and its gradient: in tiles of many classes, or whole rows of few.
///
/// Threads. A function works on the memory it is given and keeps no state.
#pragma once

#include <cstdint>

#include "oxytorch/api.h"
#include "oxytorch/kernels/attention.h"

namespace oxytorch::kernels {

/// One tile of the gradient of cross entropy: a class a row, a token a column.
struct CrossEntropyGradient {
  TileFormat format = TileFormat::Float32;
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  const float* largest = nullptr;  ///< for each token, its largest logit
  const float* log_sum = nullptr;  ///< and the logarithm of the sum of exp(logit - largest), which loses no digits
  const float* weight = nullptr;   ///< for each token, what its loss is multiplied by
  float smoothing = 0;             ///< taken from every probability
  float* logits = nullptr;         ///< Float32: out: the gradient
  std::uint16_t* left_gradient = nullptr;   ///< BFloat16: the gradient as a left operand
  std::int64_t left_stride = kTile;         ///< elements from row to row of it
  std::uint16_t* right_gradient = nullptr;  ///< BFloat16: and as a right one
};
/// gradient = (exp(logit - largest - log_sum) - smoothing) * weight.
OXY_API void cross_entropy_gradient(const CrossEntropyGradient& tile);

/// Logits of tokens, a token a row.
struct CrossEntropyRows {
  float* logits = nullptr;  ///< in: logits; out: exp(logit - largest), of tokens that count
  std::int64_t stride = 0;  ///< elements from row to row
  std::int64_t rows = 0;
  std::int64_t classes = 0;               ///< at least 1
  const std::int64_t* targets = nullptr;  ///< of each row: its class, or `ignore_index`: it does not count
  std::int64_t ignore_index = -100;       ///< no class
  double smoothing = 0;                   ///< from 0 to 1, spread over all classes
  float weight = 1;                       ///< what a loss is multiplied by, for its gradient
  std::uint16_t* gradient = nullptr;      ///< in bfloat16; null: not wanted
  std::int64_t gradient_stride = 0;       ///< elements from row to row of it
};
/// The sum of the losses of the tokens that count, each logsumexp(logits) - (1 - smoothing) logit[target] - smoothing
/// mean(logits). gradient = (softmax(logits) - (1 - smoothing) [class is target] - smoothing / classes) * weight, and 0
/// where a token does not count.
OXY_API double cross_entropy_rows(const CrossEntropyRows& rows);

}  // namespace oxytorch::kernels
