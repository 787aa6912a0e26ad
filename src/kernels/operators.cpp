#include "oxytorch/kernels/operators.h"

#include "kernels/operators_table.h"

namespace oxytorch::kernels {

void max_pool2d(const PoolShape& shape, std::int64_t planes, const float* input, float* output, std::int64_t* indices) {
  operator_table(active_isa()).max_pool2d(shape, planes, input, output, indices);
}

bool max_pool2d_backward(const PoolShape& shape, std::int64_t planes, const float* grad_output,
                         const std::int64_t* indices, float* grad_input) {
  return operator_table(active_isa()).max_pool2d_backward(shape, planes, grad_output, indices, grad_input);
}

void batch_norm_forward(const BatchNormForward& args, std::int64_t begin, std::int64_t end) {
  operator_table(active_isa()).batch_norm_forward(args, begin, end);
}

void batch_norm_backward(const BatchNormBackward& args, std::int64_t begin, std::int64_t end) {
  operator_table(active_isa()).batch_norm_backward(args, begin, end);
}

void bernoulli(MersenneTwister& generator, double p, std::int64_t count, ElementType element, void* to) {
  operator_table(active_isa()).bernoulli(generator, p, count, element, to);
}

void adam_averages(const AdamLoop& loop, std::int64_t count, const float* param, const float* grad, float* exp_avg,
                   float* exp_avg_sq, float* max_exp_avg_sq) {
  operator_table(active_isa()).adam_averages(loop, count, param, grad, exp_avg, exp_avg_sq, max_exp_avg_sq);
}

void adam_parameters(const AdamLoop& loop, std::int64_t count, const float* exp_avg, const float* root, float* param) {
  operator_table(active_isa()).adam_parameters(loop, count, exp_avg, root, param);
}

void sgd_step(const SgdLoop& loop, std::int64_t count, const float* grad, float* momentum_buffer, float* param) {
  operator_table(active_isa()).sgd_step(loop, count, grad, momentum_buffer, param);
}

}  // namespace oxytorch::kernels
