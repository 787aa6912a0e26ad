/// The update rules for one element, as src/kernels/step_tail_kernels.cpp writes them for vectors.
#pragma once

#include "kernels/device/tail_arguments.h"
#include "oxytorch/kernels/codec.h"

namespace oxytorch::kernels::device {

/// Which state a family keeps; the third, and momentum where it is optional, may still be absent.
OXY_HOST_DEVICE constexpr bool keeps_state(Family family, int index) {
  switch (family) {
    case Family::Adam:
    case Family::RmsProp: return true;
    case Family::Adagrad: return index == 1;
    default: return index == 0;
  }
}

OXY_HOST_DEVICE constexpr StateCode state_code(Family family, int index) {
  return index == 1 || (index == 2 && family != Family::RmsProp) ? StateCode::Unsigned : StateCode::Signed;
}

// NaN in either place is not a limit.
OXY_HOST_DEVICE inline float limit(float value, float bound) {
  value = value > bound ? bound : value;
  return value < -bound ? -bound : value;
}
OXY_HOST_DEVICE inline float not_below(float value, float least) { return value < least ? least : value; }
// 0 of 0 and of NaN, as torch.sign.
OXY_HOST_DEVICE inline float sign(float value) { return value > 0 ? 1.0F : value < 0 ? -1.0F : 0.0F; }

/// The state of one element. Which of it there is, is the same for a whole tensor.
struct ElementState {
  float at[3];
};
struct StatePresence {
  bool at[3];
};

/// One element: `grad` is multiplied and limited already, `state` is read and written. Gives the new weight.
template <Family kFamily>
OXY_HOST_DEVICE inline float step_element(const TailCoefficients& coefficients, float weight, float grad,
                                          ElementState& state, const StatePresence& has) {
  const Coefficients& c = coefficients.value;
  auto& [s0, s1, s2] = state.at;
  if (c.weight_decay != 0) grad = fma(c.weight_decay, weight, grad);
  if (c.decay != 0) weight = fma(-c.decay, weight, weight);
  if constexpr (kFamily == Family::Adam) {
    s0 = lerp(s0, grad, c.one_minus_beta1);
    float square = s1 = fma(c.one_minus_beta2 * grad, grad, c.beta2 * s1);
    if (has.at[2]) square = s2 = not_below(square, s2);
    return fma(-c.step_size, divide(s0, fma(sqrt(square), c.inv_sqrt_correction2, c.eps)), weight);
  } else if constexpr (kFamily == Family::Sgd) {
    if (has.at[0]) {
      const float moved = coefficients.first != 0 ? 0.0F : c.momentum * s0;
      s0 = fma(c.one_minus_dampening, grad, moved);
      grad = coefficients.nesterov != 0 ? fma(c.momentum, s0, grad) : s0;
    }
    return fma(-c.step_size, grad, weight);
  } else if constexpr (kFamily == Family::Lion) {
    const float direction = sign(lerp(s0, grad, c.one_minus_beta1));
    s0 = lerp(s0, grad, c.one_minus_beta2);
    return fma(-c.step_size, direction, weight);
  } else if constexpr (kFamily == Family::Adagrad) {
    s1 = fma(grad, grad, s1);
    return fma(-c.step_size, divide(grad, sqrt(s1) + c.eps), weight);
  } else {
    float square = s1 = fma(c.one_minus_beta2 * grad, grad, c.beta2 * s1);
    if (has.at[2]) {
      s2 = lerp(s2, grad, c.one_minus_beta2);
      square = not_below(fma(-s2, s2, square), 0.0F);
    }
    float change = divide(grad, sqrt(square) + c.eps);
    if (has.at[0]) change = s0 = fma(c.momentum, s0, change);
    return fma(-c.step_size, change, weight);
  }
}

}  // namespace oxytorch::kernels::device
