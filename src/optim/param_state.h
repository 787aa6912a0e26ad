/// The tensors of a parameter's state in one order, for whoever copies or compares all of them.
#pragma once

#include <array>

#include "oxytorch/optim/step_tail.h"

namespace oxytorch::optim {

/// Pointers to the fields of a ParamState, const where it is; those it does not have are undefined tensors.
template <class State>
auto fields(State& s) {
  return std::array{&s.step,      &s.moments[0], &s.moments[1], &s.moments[2], &s.scales[0], &s.scales[1],
                    &s.scales[2], &s.master,     &s.low_bits,   &s.ema,        &s.copy};
}

}  // namespace oxytorch::optim
