/// Stops a run whose metric no longer improves, and brings back the weights of its best epoch.
///
/// ```cpp
/// oxytorch::EarlyStopping stopping({.patience = 3, .restore_best = true});
/// for (int epoch = 0; epoch < 100; ++epoch) {
///   train(model);
///   if (stopping.step(validation_loss(model), model.get())) break;
/// }
/// stopping.restore(*model);
/// ```
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "oxytorch/api.h"

namespace torch {
namespace nn {
class Module;
}
namespace serialize {
class InputArchive;
class OutputArchive;
}  // namespace serialize
}  // namespace torch

namespace oxytorch {

/// Settings of EarlyStopping.
struct EarlyStoppingOptions {
  int64_t patience = 10;      ///< evaluations without improvement after which the run is over; at least 1
  double min_delta = 0;       ///< an improvement is more than this; at least 0
  bool minimize = true;       ///< false: the metric is to grow
  bool restore_best = false;  ///< keep a copy of the weights and buffers of the best evaluation
};

/// The rule of the trainers' early stopping; oxytorch.EarlyStopping in Python is this. A NaN is no improvement. Not for
/// use from several threads.
class OXY_API EarlyStopping {
 public:
  /// Throws InvalidArgument for a patience below 1 or a min_delta below 0 or not finite.
  explicit EarlyStopping(EarlyStoppingOptions options = {});

  /// Reports the metric, a number on the host, of one more evaluation; true where the run is over. With restore_best
  /// the weights and buffers of `model` are copied where the metric improved.
  bool step(double metric, const torch::nn::Module* model = nullptr);

  /// Writes the copied weights and buffers into `model`; false where there are none. Throws InvalidArgument for a model
  /// of other tensors; nothing is changed then.
  bool restore(torch::nn::Module& model) const;

  [[nodiscard]] bool improved() const noexcept { return evaluations_ > 0 && bad_ == 0; }  ///< the last one was the best
  [[nodiscard]] double best() const noexcept { return best_; }  ///< infinite before the first improvement
  [[nodiscard]] int64_t best_evaluation() const noexcept { return best_evaluation_; }  ///< from 0; -1 before it
  [[nodiscard]] int64_t bad_evaluations() const noexcept { return bad_; }              ///< since the best one
  [[nodiscard]] int64_t evaluations() const noexcept { return evaluations_; }
  [[nodiscard]] const EarlyStoppingOptions& options() const noexcept { return options_; }

  /// Where the rule stands: best, best_evaluation, bad_evaluations, evaluations.
  [[nodiscard]] std::vector<double> state() const;
  /// Throws InvalidArgument for another number of values.
  void load_state(const std::vector<double>& state);

  /// The same with the copied weights.
  void save(torch::serialize::OutputArchive& archive) const;
  void load(torch::serialize::InputArchive& archive);

 private:
  EarlyStoppingOptions options_;
  double best_;
  int64_t best_evaluation_ = -1;
  int64_t bad_ = 0;
  int64_t evaluations_ = 0;
  std::vector<at::Tensor> kept_;  // parameters, then buffers
};

}  // namespace oxytorch
