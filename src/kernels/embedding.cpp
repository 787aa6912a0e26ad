#include "oxytorch/kernels/embedding.h"

#include "kernels/operators_table.h"

namespace oxytorch::kernels {

void sum_rows(const RowSums& sums, void* to, std::int64_t to_stride) {
  operator_table(active_isa()).sum_rows(sums, to, to_stride);
}

}  // namespace oxytorch::kernels
