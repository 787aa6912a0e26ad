#include "oxytorch/kernels/cross_entropy.h"

#include "kernels/operators_table.h"

namespace oxytorch::kernels {

void cross_entropy_gradient(const CrossEntropyGradient& tile) {
  operator_table(active_isa()).cross_entropy_gradient(tile);
}

double cross_entropy_rows(const CrossEntropyRows& rows) {
  return operator_table(active_isa()).cross_entropy_rows(rows);
}

}  // namespace oxytorch::kernels
