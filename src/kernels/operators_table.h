/// The kernels of oxytorch/kernels/operators.h, one table for each instruction set.
#pragma once

#include "oxytorch/isa.h"
#include "oxytorch/kernels/operators.h"

namespace oxytorch::kernels {

struct OperatorTable {
  void (*max_pool2d)(const PoolShape& shape, std::int64_t planes, const float* input, float* output,
                     std::int64_t* indices);
  bool (*max_pool2d_backward)(const PoolShape& shape, std::int64_t planes, const float* grad_output,
                              const std::int64_t* indices, float* grad_input);
  void (*batch_norm_forward)(const BatchNormForward& args, std::int64_t begin, std::int64_t end);
  void (*batch_norm_backward)(const BatchNormBackward& args, std::int64_t begin, std::int64_t end);
  void (*bernoulli)(MersenneTwister& generator, double p, std::int64_t count, float* to);
  void (*adam_averages)(const AdamLoop& loop, std::int64_t count, const float* param, const float* grad, float* exp_avg,
                        float* exp_avg_sq, float* max_exp_avg_sq);
  void (*adam_parameters)(const AdamLoop& loop, std::int64_t count, const float* exp_avg, const float* root,
                          float* param);
  void (*sgd_step)(const SgdLoop& loop, std::int64_t count, const float* grad, float* momentum_buffer, float* param);
};

/// The table of `isa`, which must be supported.
const OperatorTable& operator_table(Isa isa);

}  // namespace oxytorch::kernels
