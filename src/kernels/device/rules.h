/// The update rules for one element.
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
OXY_HOST_DEVICE inline float zero_below(float value, float least) {
  return value < least && -value < least ? 0.0F : value;
}
// 0 of 0 and of NaN, as torch.sign.
OXY_HOST_DEVICE inline float sign(float value) { return value > 0 ? 1.0F : value < 0 ? -1.0F : 0.0F; }

using Number = float;
OXY_HOST_DEVICE inline float set(float value) { return value; }
OXY_HOST_DEVICE inline float add(float a, float b) { return a + b; }
OXY_HOST_DEVICE inline float multiply(float a, float b) { return a * b; }
OXY_HOST_DEVICE inline float negate(float value) { return -value; }
OXY_HOST_DEVICE inline float root(float value) { return sqrt(value); }

#define OXY_UPDATE_RULE OXY_HOST_DEVICE inline
#include "kernels/update_rule-inl.h"
#undef OXY_UPDATE_RULE

/// The state of one element. Which of it there is, is the same for a whole tensor.
struct ElementState {
  float at[3];
};
struct StatePresence {
  bool at[3];
};

/// What the rule asks for it.
class PresentState {
 public:
  OXY_HOST_DEVICE PresentState(ElementState& state, const StatePresence& presence)
      : state_(state), presence_(presence) {}
  template <int kIndex>
  OXY_HOST_DEVICE bool has() const {
    return presence_.at[kIndex];
  }
  template <int kIndex>
  OXY_HOST_DEVICE float get() const {
    return state_.at[kIndex];
  }
  template <int kIndex>
  OXY_HOST_DEVICE void put(float value) const {
    state_.at[kIndex] = value;
  }

 private:
  ElementState& state_;
  const StatePresence& presence_;
};

}  // namespace oxytorch::kernels::device
