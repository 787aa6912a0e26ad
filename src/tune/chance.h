/// What random numbers do to a step: its losses with others, its backward with the same, and the step without dropout.
#pragma once

#include <torch/nn/module.h>

#include <utility>
#include <vector>

#include "oxytorch/tune/run.h"
#include "oxytorch/tune/verdict.h"

namespace oxytorch::tune {

/// Every dropout of a module with probability zero until the end of the scope. One that a model calls as a function is
/// out of reach.
class Still {
 public:
  explicit Still(torch::nn::Module& model);
  ~Still();
  Still(const Still&) = delete;
  Still& operator=(const Still&) = delete;

 private:
  template <class Module>
  void of_dropout(torch::nn::Module& module);
  void set(double& probability);
  std::vector<std::pair<double*, double>> before_;
};

/// Losses of one batch, each time with the next random numbers, and how far gradients are apart, two by two: of masks
/// at another rate the mean loss may be the same.
Draws draw_losses(Run& run, const Batch& batch);

/// How far the gradient is from the difference quotient of the loss with the same random numbers, relative: a
/// recomputation in backward with masks of its own is off by as much as masks matter. Of several losses the worst,
/// each by the parameters of its own optimizer, since it may hold the others fixed.
double backward_error(Run& run, const Batch& batch);

}  // namespace oxytorch::tune
