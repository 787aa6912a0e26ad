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
///
/// With several optimizers, one loss is of all of them: their gradients are dropped, forward, loss, backward, and each
/// clips its own and steps. Of several losses there is one for each optimizer, and all that is done for the first one,
/// its step too, before the next one begins; then take() is step(), and a window is one batch.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "oxytorch/amp.h"
#include "oxytorch/api.h"
#include "oxytorch/optim/nonfinite.h"
#include "oxytorch/optim/optimizer.h"
#include "oxytorch/optim/schedule.h"
#include "oxytorch/tune/batch.h"
#include "oxytorch/tune/models.h"

namespace oxytorch::optim {
class BackwardHooks;
}

namespace oxytorch::tune {

/// An optimizer that does the steps of the user's one.
struct Replacement {
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  std::function<void()> hand_back;  ///< gives the state it has now to the user's optimizer; may be called many times
  bool clips = false;               ///< it clips by TrainingStep::clip_norm() itself
};
/// Makes a replacement that carries on where the user's optimizer stands; without an optimizer in it, that one itself
/// goes on.
using MakeReplacement = std::function<Replacement(torch::optim::Optimizer& original)>;

/// One optimizer of a step, and what does its work.
class OXY_API OptimizerSlot {
 public:
  /// `name`: what messages call it, "the optimizer", or of several "optimizer[1]".
  OptimizerSlot(torch::optim::Optimizer& original, std::string name);

  [[nodiscard]] torch::optim::Optimizer& original() const noexcept { return original_; }  ///< the user's
  [[nodiscard]] torch::optim::Optimizer& optimizer() const noexcept;                      ///< the one that steps now
  /// That one, where it is of oxytorch::optim; else null.
  [[nodiscard]] optim::TailOptimizer* tail() const noexcept { return tail_; }
  [[nodiscard]] const std::string& name() const noexcept { return name_; }
  [[nodiscard]] const std::vector<at::Tensor>& parameters() const noexcept { return parameters_; }

 private:
  friend class TrainingStep;
  void use(Replacement replacement);
  void hand_back();
  void carry_rates();
  /// The step of one parameter alone. A tail in the place of the user's optimizer has step_in_backward.
  void step_one(const at::Tensor& parameter);

  torch::optim::Optimizer& original_;
  std::string name_;
  std::vector<at::Tensor> parameters_;
  Replacement replacement_;
  optim::TailOptimizer* tail_ = nullptr;
};

/// Models and optimizers are borrowed and must outlive it. Not for use from several threads at once.
class OXY_API TrainingStep {
 public:
  using Scope = std::function<std::shared_ptr<void>()>;
  using Transform = std::function<Batch(const Batch&)>;
  using Closure = std::function<at::Tensor()>;

  /// Without a loss only closures can be taken. Error(InvalidArgument) for a negative clip_norm, an optimizer without a
  /// parameter, something given twice, or losses that are neither one nor one for each optimizer.
  TrainingStep(const Models& models, const Optimizers& optimizers, std::vector<LossFunction> losses,
               double clip_norm = 0);
  TrainingStep(torch::nn::Module& model, torch::optim::Optimizer& optimizer, LossFunction loss, double clip_norm = 0);
  virtual ~TrainingStep();
  TrainingStep(const TrainingStep&) = delete;
  TrainingStep& operator=(const TrainingStep&) = delete;

  /// Of several models one that holds them as "model[0]" and so on, to walk what they hold.
  [[nodiscard]] torch::nn::Module& model() const noexcept { return *model_; }
  [[nodiscard]] const Models& models() const noexcept { return models_; }
  [[nodiscard]] const std::vector<OptimizerSlot>& slots() const noexcept { return slots_; }
  /// The user's optimizer, and the one that steps now; of several the first.
  [[nodiscard]] torch::optim::Optimizer& original() const noexcept { return slots_.front().original(); }
  [[nodiscard]] torch::optim::Optimizer& optimizer() const noexcept { return slots_.front().optimizer(); }
  /// Of all optimizers, in their order; one that two of them step comes twice.
  [[nodiscard]] const std::vector<at::Tensor>& parameters() const noexcept { return parameters_; }
  [[nodiscard]] at::Device device() const noexcept { return device_; }
  [[nodiscard]] double clip_norm() const noexcept { return clip_norm_; }
  [[nodiscard]] bool has_loss() const noexcept { return !losses_.empty(); }
  /// Losses of a step, at least 1, and what one of them is of: all optimizers, or of several losses its own one.
  [[nodiscard]] std::size_t parts() const noexcept { return losses_.empty() ? 1 : losses_.size(); }
  [[nodiscard]] std::vector<at::Tensor> parameters(std::size_t part) const;

  // -- the least that trains ------------------------------------------------------------------------------------------

  /// A loss under what is active, with its graph. Error(InvalidArgument) where it is no scalar, Error(InvalidState)
  /// without a loss function.
  [[nodiscard]] at::Tensor loss(const Batch& batch, std::size_t part = 0) const;
  /// The sum of all losses.
  [[nodiscard]] at::Tensor losses(const Batch& batch) const;
  /// Enters the scopes, for a forward that is not the loss function's; they are left as what it returns ends.
  [[nodiscard]] std::shared_ptr<void> enter() const;
  void zero_grad(std::size_t part);
  /// Of one loss after the other: zeroes gradients, then forward and backward, then calls then(part). Returns the
  /// detached sum of the losses.
  at::Tensor backward(const Batch& batch, const std::function<void(std::size_t part)>& then = {});
  /// Clips and lets the optimizers of a part step, or all. Learning rates set on the user's optimizers count.
  void update(std::size_t part);
  void update();
  at::Tensor step(const Batch& batch);
  /// step() as a run with `accumulation` takes it, of the same batch up to four times; `then` as in backward().
  at::Tensor step_of_window(const Batch& batch, const std::function<void(std::size_t part)>& then);

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
  /// Whether the last take() went as far as the optimizers' update: one that threw before it can be taken again.
  [[nodiscard]] bool update_begun() const noexcept { return update_begun_; }
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
  /// Updates each parameter as its gradient arrives, in the backward after which nothing is added to it, and lets the
  /// gradient go. Parameters that had arrived are updated where such a backward throws. For optimizers that step each
  /// parameter by itself, without clipping, guard and scaler.
  void set_updates_in_backward(bool value);
  [[nodiscard]] bool updates_in_backward() const noexcept { return updates_in_backward_; }
  /// Lets what `make` returns for each optimizer do its steps; empty: the user's optimizers themselves again, with the
  /// state reached.
  void replace_optimizer(MakeReplacement make);
  /// Brings the user's optimizers up to date with their replacements, which go on.
  void hand_back();
  /// Makes the replacements anew, as the user's optimizers were changed.
  void renew_replacement();

 private:
  template <class Function>
  [[nodiscard]] at::Tensor under_scopes(const Function& compute) const;
  template <class Function>
  at::Tensor differentiate(const Function& compute, double share, bool windowed, bool last);
  template <class Function>
  at::Tensor timed(const Function& take);
  template <class Function>
  at::Tensor take_one(const Function& gradients);
  at::Tensor differentiate_batch(const Batch& batch, bool windowed, std::size_t part, double share = 1,
                                 bool last = true);
  /// Of a part's optimizers the first, and one past the last.
  [[nodiscard]] std::pair<std::size_t, std::size_t> slots_of(std::size_t part) const noexcept;
  void apply();
  void step_optimizer();
  [[nodiscard]] bool clips(const OptimizerSlot& slot) const noexcept;
  void clip(const OptimizerSlot& slot, const std::vector<at::Tensor>& gradients) const;
  void drop_gradients();
  void replace(const MakeReplacement& make);
  void update_arrived(const at::Tensor& parameter);

  std::shared_ptr<torch::nn::Module> holder_;  // of several models
  torch::nn::Module* model_;
  Models models_;
  std::vector<OptimizerSlot> slots_;
  std::vector<LossFunction> losses_;
  std::vector<at::Tensor> parameters_;
  at::Device device_;
  double clip_norm_;
  double ema_decay_ = 0;
  int micro_batches_ = 1;
  std::int64_t micro_ = 0, taken_ = 0;
  bool update_begun_ = false;
  std::array<double, 3> seconds_{};
  std::vector<std::pair<std::string, Scope>> scopes_;
  std::vector<std::pair<std::string, Transform>> inputs_;
  MakeReplacement make_;
  bool updates_in_backward_ = false;
  bool completes_gradients_ = false;  // a backward runs after which nothing is added to the gradients of its step
  std::mutex arrival_;
  std::unique_ptr<optim::BackwardHooks> hooks_;  // last: gone before anything they use
};

}  // namespace oxytorch::tune
