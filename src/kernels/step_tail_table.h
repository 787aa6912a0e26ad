/// The per-chunk kernels, one table for each instruction set.
#pragma once

#include <cstdint>

#include "oxytorch/isa.h"
#include "oxytorch/kernels/step_tail.h"

namespace oxytorch::kernels {

/// Coefficients of one update, rounded once from fp64.
struct Coefficients {
  float grad_multiplier;  // sign included when maximizing
  float weight_decay;     // Adam, Sgd: added to the gradient
  float decay;            // AdamW: lr * weight_decay
  float one_minus_beta1;  // Adam family
  float beta2;
  float one_minus_beta2;
  float eps;
  float inv_sqrt_correction2;
  float step_size;  // lr over the first bias correction; Sgd: lr
  float momentum;   // Sgd
  float one_minus_dampening;
  float ema_weight;  // 1 - decay
};

/// One chunk of one tensor.
struct ChunkUpdate {
  void* param;
  void* grad;
  void* state0;
  void* state1;
  void* state2;
  float* ema;
  std::int64_t count;
  const Coefficients* coefficients;
  Rule rule;
  ElementType type;
  ElementType state_type;
  bool nesterov;
  bool zero_grad;
  double* param_sum_squares;  // null unless statistics are wanted
  double* update_sum_squares;
};

struct KernelTable {
  double (*sum_squares)(const void* data, ElementType type, std::int64_t count);
  void (*update)(const ChunkUpdate& chunk);
};

/// The table of `isa`, which must be supported.
const KernelTable& kernel_table(Isa isa);

}  // namespace oxytorch::kernels
