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

void bernoulli(MersenneTwister& generator, double p, std::int64_t count, float* to) {
  operator_table(active_isa()).bernoulli(generator, p, count, to);
}

}  // namespace oxytorch::kernels
