/// The kernels of the step tail and its formats, one table for each instruction set.
#pragma once

#include <cstdint>

#include "kernels/device/coefficients.h"
#include "oxytorch/isa.h"
#include "oxytorch/kernels/codec.h"
#include "oxytorch/kernels/step_tail.h"

namespace oxytorch::kernels {

/// `count` elements of a tensor from `offset`, which is a multiple of the plan's chunk.
struct ChunkUpdate {
  const TailTensor& tensor;
  std::int64_t offset;
  std::int64_t count;
  const Coefficients& coefficients;
  Rule rule;
  bool nesterov;
  bool zero_grad;
  bool stochastic;
  std::uint64_t seed;
  const float* row_multipliers;  // of the tensor; null without adaptive clipping
  double* param_sum_squares;     // null unless statistics are wanted
  double* update_sum_squares;
};

/// The code of state `index` under `rule`.
constexpr StateCode state_code(Rule rule, int index) {
  return index == 1 || (index == 2 && rule != Rule::RmsProp) ? StateCode::Unsigned : StateCode::Signed;
}

struct KernelTable {
  double (*sum_squares)(const void* data, ElementType type, std::int64_t count);
  /// Sums of the gradient and of the weights for each run of equal row within the chunk, in order.
  void (*row_sums)(const TailTensor& tensor, std::int64_t offset, std::int64_t count, double* grad, double* weight);
  void (*update)(const ChunkUpdate& chunk);
  void (*encode_state)(StateCode code, const float* values, std::int64_t count, void* codes, std::uint16_t* scales);
  void (*decode_state)(StateCode code, const void* codes, const std::uint16_t* scales, std::int64_t count,
                       float* values);
  void (*split_weights)(const float* values, std::int64_t count, std::uint16_t* bf16, std::int8_t* low_bits);
  void (*join_weights)(const std::uint16_t* bf16, const std::int8_t* low_bits, std::int64_t count, float* values);
};

/// The table of `isa`, which must be supported.
const KernelTable& kernel_table(Isa isa);

}  // namespace oxytorch::kernels
