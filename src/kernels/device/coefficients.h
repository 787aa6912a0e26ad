/// Coefficients and verdict of a step: one text for the processor's engine and for devices.
#pragma once

#include <cstdint>

#include "kernels/device/number.h"
#include "oxytorch/backend_kernels.h"

namespace oxytorch::kernels {

/// Coefficients of one update, rounded once from fp64.
struct Coefficients {
  float grad_multiplier;  // sign included when maximizing
  float clip_value;       // 0: no limit
  float weight_decay;     // added to the gradient
  float decay;            // decoupled: the part of the weight that goes
  float one_minus_beta1;
  float beta2;  // RmsProp: alpha
  float one_minus_beta2;
  float eps;
  float inv_sqrt_correction2;
  float step_size;  // lr, with the first bias correction or Adagrad's decay
  float momentum;
  float one_minus_dampening;
  float ema_weight;    // 1 - decay
  std::uint32_t step;  // for random bits
};

namespace device {

struct Powers {
  double first;
  double second;
};

/// Both bases to a whole power of at most 2^53, by squaring: within `exponent` * 2^-53 of the true powers, relatively.
/// std::pow would differ from one library to the next.
OXY_HOST_DEVICE inline Powers powers(double first, double second, double exponent) {
  Powers result{1, 1};
  for (auto n = static_cast<std::uint64_t>(exponent > 0 ? exponent : 0); n != 0; n >>= 1) {
    if ((n & 1) != 0) {
      result.first *= first;
      result.second *= second;
    }
    first *= first;
    second *= second;
  }
  return result;
}

/// `Group`: TailGroup or oxy_tail_group. `step`: the count after incrementing. `first`: Sgd's buffer is not yet filled.
template <class Group>
OXY_HOST_DEVICE Coefficients coefficients_of(const Group& group, double lr, double grad_multiplier, double clip_value,
                                             double ema_decay, double step, bool first) {
  const auto rule = static_cast<int>(group.rule);
  const bool adam = rule == OXY_RULE_ADAMW || rule == OXY_RULE_ADAM;
  const bool decoupled = rule == OXY_RULE_ADAMW || rule == OXY_RULE_LION;
  Coefficients c{};
  c.grad_multiplier = static_cast<float>(group.maximize ? -grad_multiplier : grad_multiplier);
  c.clip_value = static_cast<float>(clip_value);
  c.ema_weight = static_cast<float>(1.0 - ema_decay);
  c.step = static_cast<std::uint32_t>(step);
  (decoupled ? c.decay : c.weight_decay) = static_cast<float>(decoupled ? lr * group.weight_decay : group.weight_decay);
  c.one_minus_beta1 = static_cast<float>(1.0 - group.beta1);
  c.beta2 = static_cast<float>(group.beta2);
  c.one_minus_beta2 = static_cast<float>(1.0 - group.beta2);
  c.eps = static_cast<float>(group.eps);
  c.momentum = static_cast<float>(group.momentum);
  c.one_minus_dampening = first ? 1.0F : static_cast<float>(1.0 - group.dampening);
  double step_size = lr;
  if (adam) {
    const Powers decayed = powers(group.beta1, group.beta2, step);
    step_size /= 1.0 - decayed.first;
    c.inv_sqrt_correction2 = static_cast<float>(1.0 / sqrt(1.0 - decayed.second));
  }
  if (rule == OXY_RULE_ADAGRAD) step_size /= 1.0 + (step - 1.0) * group.lr_decay;
  c.step_size = static_cast<float>(step_size);
  return c;
}

}  // namespace device
}  // namespace oxytorch::kernels
