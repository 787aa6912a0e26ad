/// What a step changes before its update: for one that ran out of memory and is taken again, and for a look at a loss.
#pragma once

#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

#include "oxytorch/tune/training_step.h"

namespace oxytorch::tune {

/// Taken before a step. Holds the model's buffers and the random generators; gradients are dropped by the step itself.
class StepStart {
 public:
  /// Without `generators` random states are neither held nor put back.
  explicit StepStart(const TrainingStep& step, bool generators = true);
  /// Puts them back: the step can be taken from its start, unless its update had begun.
  void restore() const;

 private:
  const TrainingStep& step_;
  std::vector<std::pair<at::Tensor, at::Tensor>> buffers_;
  std::vector<at::Tensor> generators_;
};

}  // namespace oxytorch::tune
