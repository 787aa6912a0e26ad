#include "oxytorch/kernels/lstm.h"

#include "kernels/operators_table.h"

namespace oxytorch::kernels {

void lstm_forward(const LstmForward& step) { operator_table(active_isa()).lstm_forward(step); }

void lstm_backward(const LstmBackward& step) { operator_table(active_isa()).lstm_backward(step); }

}  // namespace oxytorch::kernels
