/// TrainingStep: one engine for the steps of a training run, which Trainer, Plan::step() and the trials of the tuner
/// go through.
///
/// step() is the least that trains, and what the tuner tries things on: gradients of before are dropped, forward, loss,
/// backward, clip, optimizer step.
///
/// take() is the step of the run, in this order:
///  1. at the beginning of a window of batches, gradients of before are dropped;
///  2. of each batch: inputs are transformed, forward and loss run under the scopes (autocast, the attention path), the
///     loss is divided by the batches of the window and multiplied by the scale, and backward runs;
///  3. once the window is full: gradients are looked at by the guard, unscaled, clipped by value and then by norm; the
///     optimizer steps, the moving average follows, the schedule steps.
/// What throws in it leaves no trace of the window. Nothing of it reads the device on the host but the guard, where it
/// has a policy, and the scaler with an optimizer that is not of oxytorch::optim.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "oxytorch/amp.h"
#include "oxytorch/api.h"
#include "oxytorch/optim/nonfinite.h"
#include "oxytorch/optim/optimizer.h"
#include "oxytorch/optim/schedule.h"
#include "oxytorch/tune/batch.h"

namespace oxytorch::tune {

/// An optimizer that does the steps of the user's one.
struct Replacement {
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  std::function<void()> hand_back;  ///< gives the state it has now to the user's optimizer; may be called many times
  bool clips = false;               ///< it clips by TrainingStep::clip_norm() itself
};

/// Model and optimizer are borrowed and must outlive it. Not for use from several threads at once.
class OXY_API TrainingStep {
 public:
  using Scope = std::function<std::shared_ptr<void>()>;
  using Transform = std::function<Batch(const Batch&)>;
  using Closure = std::function<at::Tensor()>;
  /// Makes a replacement that carries on where the user's optimizer stands.
  using MakeReplacement = std::function<Replacement(torch::optim::Optimizer& original)>;

  /// Without `loss` only closures can be taken. Error(InvalidArgument) without a parameter or for a negative clip_norm.
  TrainingStep(torch::nn::Module& model, torch::optim::Optimizer& optimizer, LossFunction loss, double clip_norm = 0);
  virtual ~TrainingStep();
  TrainingStep(const TrainingStep&) = delete;
  TrainingStep& operator=(const TrainingStep&) = delete;

  [[nodiscard]] torch::nn::Module& model() const noexcept { return model_; }
  [[nodiscard]] torch::optim::Optimizer& original() const noexcept { return original_; }  ///< the user's
  [[nodiscard]] torch::optim::Optimizer& optimizer() const noexcept;                      ///< the one that steps now
  /// Of the optimizer.
  [[nodiscard]] const std::vector<at::Tensor>& parameters() const noexcept { return parameters_; }
  [[nodiscard]] at::Device device() const noexcept { return device_; }
  [[nodiscard]] double clip_norm() const noexcept { return clip_norm_; }
  [[nodiscard]] bool has_loss() const noexcept { return static_cast<bool>(loss_); }

  // -- the least that trains ------------------------------------------------------------------------------------------

  /// The loss under what is active, with its graph. Error(InvalidArgument) where it is no scalar, Error(InvalidState)
  /// without a loss function.
  [[nodiscard]] at::Tensor loss(const Batch& batch) const;
  /// Enters the scopes, for a forward that is not the loss function's; they are left as what it returns ends.
  [[nodiscard]] std::shared_ptr<void> enter() const;
  /// Zeroes gradients, then forward and backward; the detached loss.
  at::Tensor backward(const Batch& batch);
  /// Clips and lets the optimizer step. Learning rates set on the user's optimizer count.
  void update();
  at::Tensor step(const Batch& batch);

  // -- the step of the run --------------------------------------------------------------------------------------------

  /// Takes one batch, and the optimizer once the window is full; the detached loss of this batch.
  at::Tensor take(const Batch& batch);
  at::Tensor take(const Closure& closure);
  /// Steps with the batches of an unfinished window, averaged over their number; false where none was waiting.
  bool flush();
  /// Drops the gradients of an unfinished window.
  void abandon();

  [[nodiscard]] std::int64_t waiting() const noexcept { return micro_; }  ///< batches of the window so far
  [[nodiscard]] std::int64_t taken() const noexcept { return taken_; }    ///< windows so far
  void set_taken(std::int64_t windows) noexcept { taken_ = windows; }
  /// Of forward, backward and the rest, in the last take().
  [[nodiscard]] const std::array<double, 3>& seconds() const noexcept { return seconds_; }
  /// Begins `average` from the parameters as they are: after each update, decay * average + (1 - decay) * parameter.
  void keep_average(double decay);

  /// What take() does beside step(); as it is here, nothing.
  std::int64_t accumulation = 1;  ///< batches of a window
  double clip_value = 0;          ///< of step() too
  NonFiniteGuard guard{optim::NonFinite::Propagate};
  std::unique_ptr<amp::GradScaler> scaler;
  std::unique_ptr<optim::Schedule> schedule;
  std::vector<at::Tensor> average;  ///< of each parameter, in their order; empty: none is kept
  /// Whether gradients stay until the next window begins; else they are dropped once they are applied.
  bool keeps_gradients = true;

  // -- where it may be changed ----------------------------------------------------------------------------------------

  void scope(const std::string& name, Scope enter);        ///< entered around each forward; empty: taken away
  void inputs(const std::string& name, Transform change);  ///< of each batch on its way in; empty: taken away
  /// Pieces that a batch is cut into along its first dimension, gradients averaged by their rows.
  void set_micro_batches(int pieces);
  [[nodiscard]] int micro_batches() const noexcept { return micro_batches_; }
  /// Lets what `make` returns do the steps; empty: the user's optimizer itself again, with the state reached.
  void replace_optimizer(MakeReplacement make);
  /// Brings the user's optimizer up to date with its replacement, which goes on.
  void hand_back();
  /// Makes the replacement anew, as the user's optimizer was changed.
  void renew_replacement();

 private:
  template <class Function>
  [[nodiscard]] at::Tensor under_scopes(const Function& compute) const;
  template <class Function>
  at::Tensor differentiate(const Function& compute, double share, bool windowed, bool last);
  template <class Function>
  at::Tensor take_one(const Function& gradients);
  at::Tensor differentiate_batch(const Batch& batch, bool windowed);
  void apply();
  void step_optimizer();
  [[nodiscard]] bool clips() const noexcept;
  void clip(const std::vector<at::Tensor>& gradients) const;
  void carry_rates();
  void use(Replacement replacement);

  torch::nn::Module& model_;
  torch::optim::Optimizer& original_;
  LossFunction loss_;
  std::vector<at::Tensor> parameters_;
  at::Device device_;
  double clip_norm_;
  double ema_decay_ = 0;
  int micro_batches_ = 1;
  std::int64_t micro_ = 0, taken_ = 0;
  std::array<double, 3> seconds_{};
  std::vector<std::pair<std::string, Scope>> scopes_;
  std::vector<std::pair<std::string, Transform>> inputs_;
  MakeReplacement make_;
  Replacement replacement_;
  optim::TailOptimizer* tail_ = nullptr;  // the one that steps now, where it is of oxytorch::optim
};

}  // namespace oxytorch::tune
