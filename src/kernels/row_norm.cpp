#include "oxytorch/kernels/row_norm.h"

#include "kernels/operators_table.h"

namespace oxytorch::kernels {

void normalize_sums(const RowSum& sum_of, const RowNorm& norm, const RowsOf& sum, const RowsOf& output, float* mean,
                    float* invstd, float* work) {
  operator_table(active_isa()).normalize_sums(sum_of, norm, sum, output, mean, invstd, work);
}

void row_norm_gradient(const RowNormGradient& of, const RowsOf& to_input, const RowsOf& to_residual, float* weight,
                       float* bias, float* work) {
  operator_table(active_isa()).row_norm_gradient(of, to_input, to_residual, weight, bias, work);
}

}  // namespace oxytorch::kernels
