#include "oxytorch/kernels/gru.h"

#include "kernels/operators_table.h"

namespace oxytorch::kernels {

void gru_forward(const GruForward& step) { operator_table(active_isa()).gru_forward(step); }

void gru_backward(const GruBackward& step) { operator_table(active_isa()).gru_backward(step); }

}  // namespace oxytorch::kernels
