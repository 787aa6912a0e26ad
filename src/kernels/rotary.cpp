#include "oxytorch/kernels/rotary.h"

#include "kernels/operators_table.h"

namespace oxytorch::kernels {

void rotate_rows(const RotaryRule& rule, const Rows& from, void* to, std::int64_t to_stride) {
  operator_table(active_isa()).rotate_rows(rule, from, to, to_stride);
}

}  // namespace oxytorch::kernels
