#include "oxytorch/kernels/activation.h"

#include <cstddef>

#include "kernels/operators_table.h"

namespace oxytorch::kernels {

RowsTo RowsTo::from(std::int64_t first, ElementType element) const {
  if (data == nullptr) return *this;
  return {static_cast<std::byte*>(data) + first * stride * (element == ElementType::F32 ? 4 : 2), stride};
}

void activate(const Activated& of, const RowsTo& to) { operator_table(active_isa()).activate(of, to); }

void activate_backward(const Activated& of, const Rows& grad, const RowsTo& to_input, const RowsTo& to_times) {
  operator_table(active_isa()).activate_backward(of, grad, to_input, to_times);
}

void relu_backward(const Rows& output, const Rows& grad, const RowsTo& to) {
  operator_table(active_isa()).relu_backward(output, grad, to);
}

}  // namespace oxytorch::kernels
