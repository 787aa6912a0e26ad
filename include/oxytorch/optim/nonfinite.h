/// What a training run does with a step whose gradients hold inf or NaN where the optimizer does not look itself: the
/// optimizers of oxytorch::optim have the policy inside, a loss scaler skips by its own rule.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "oxytorch/api.h"
#include "oxytorch/optim/step_tail.h"

namespace oxytorch {

/// Not for use from several threads.
class OXY_API NonFiniteGuard {
 public:
  explicit NonFiniteGuard(optim::NonFinite policy) : policy_(policy) {}

  /// Whether a step with these gradients may be taken; with Propagate nothing is looked at, else one number is read on
  /// the host. Under Raise it throws Error(InvalidState), which names the first gradient at fault by its index.
  bool admits(const std::vector<at::Tensor>& gradients);

  [[nodiscard]] optim::NonFinite policy() const noexcept { return policy_; }
  [[nodiscard]] std::int64_t skipped() const noexcept { return skipped_; }  ///< steps that were not admitted

 private:
  optim::NonFinite policy_;
  std::int64_t skipped_ = 0;
};

}  // namespace oxytorch
