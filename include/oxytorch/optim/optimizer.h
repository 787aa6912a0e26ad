/// What the optimizers with the fused step tail share; the classes themselves are in oxytorch/optim/optimizers.h.
#pragma once

#include <c10/util/flat_hash_map.h>
#include <torch/optim/optimizer.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include "oxytorch/api.h"
#include "oxytorch/optim/step_tail.h"

namespace oxytorch::optim {

class BackwardHooks;
class NumericalStabilityManager;

/// What a TailOptimizer asks of the options of its class.
class OXY_API TailOptimizerOptions : public torch::optim::OptimizerOptions {
 public:
  ~TailOptimizerOptions() override;

  /// The name of the optimizer's class, for example "AdamW".
  [[nodiscard]] virtual const char* optimizer_name() const noexcept = 0;
  [[nodiscard]] virtual Algorithm algorithm() const noexcept = 0;

  /// The hyperparameters as they stand now.
  [[nodiscard]] virtual GroupOptions group() const = 0;

  /// Throws Error(InvalidArgument) for values that exclude each other; StepTail checks single ones.
  virtual void validate() const = 0;

  /// Takes the value of `defaults`, of the same class, wherever this still has the one its constructor gives.
  virtual void inherit(const TailOptimizerOptions& defaults) = 0;

  /// Options of the whole tail. Those given to the optimizer's constructor count, those of single groups are ignored.
  [[nodiscard]] const TailOptions& tail() const noexcept { return tail_; }

 protected:
  TailOptions tail_;
};

/// The tail's options with chained setters, and the rest of what options do, for a struct of TORCH_ARGs.
template <class Derived>
class OXY_API TailArguments : public TailOptimizerOptions {
 public:
  using TailOptimizerOptions::tail;
  Derived& tail(const TailOptions& value) { return set(tail_, value); }
  Derived& clip_norm(double value) { return set(tail_.clip_norm, value); }
  Derived& clip_value(double value) { return set(tail_.clip_value, value); }
  Derived& agc(double value) { return set(tail_.agc, value); }
  Derived& agc_eps(double value) { return set(tail_.agc_eps, value); }
  Derived& ema_decay(double value) { return set(tail_.ema_decay, value); }
  Derived& nonfinite(NonFinite value) { return set(tail_.nonfinite, value); }
  Derived& state_dtype(StateFormat value) { return set(tail_.state_dtype, value); }
  Derived& master_weights(MasterFormat value) { return set(tail_.master_weights, value); }
  Derived& copy_dtype(at::ScalarType value) { return set(tail_.copy_dtype, std::optional(value)); }
  Derived& stochastic_rounding(bool value) { return set(tail_.stochastic_rounding, value); }
  Derived& seed(std::uint64_t value) { return set(tail_.seed, value); }
  Derived& collect_stats(bool value) { return set(tail_.collect_stats, value); }
  Derived& zero_grads(bool value) { return set(tail_.zero_grads, value); }
  Derived& norm_in_backward(bool value) { return set(tail_.norm_in_backward, value); }
  Derived& step_in_backward(bool value) { return set(tail_.step_in_backward, value); }
  Derived& force_composite(bool value) { return set(tail_.force_composite, value); }

  [[nodiscard]] const char* optimizer_name() const noexcept override;
  [[nodiscard]] Algorithm algorithm() const noexcept override;
  [[nodiscard]] GroupOptions group() const override;
  void validate() const override;
  void inherit(const TailOptimizerOptions& defaults) override;
  [[nodiscard]] std::unique_ptr<torch::optim::OptimizerOptions> clone() const override;
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
  [[nodiscard]] double get_lr() const override;
  void set_lr(double value) override;

 private:
  template <class T>
  Derived& set(T& field, const T& value) {
    field = value;
    return static_cast<Derived&>(*this);
  }
};

/// A group's options are read at each step, so learning-rate schedules work as ever. State is kept by the tail
/// (`tail().state(i)`); torch's `state()` stays empty.
///
/// Threads: one call at a time. With norm_in_backward or step_in_backward backward() calls in as gradients arrive,
/// from whichever threads autograd uses; an error there is thrown by backward(). Where processes average gradients
/// after backward(), as c10d does without overlap, neither option may be set: what arrives is not yet the sum.
class OXY_API TailOptimizer : public torch::optim::Optimizer {
 public:
  ~TailOptimizer() override;

  /// One step; the closure, if any, is evaluated first with gradients enabled and its loss returned.
  /// Errors: those of StepTail::step.
  torch::Tensor step(LossClosure closure = nullptr) override;

  /// Adds a group; what its options leave at their constructor's values is inherited from the optimizer's. Throws
  /// Error for bad options or parameters, and adds nothing then. (torch's own add_param_group drops the options of
  /// classes it does not know; this one hides it.)
  void add_param_group(const torch::optim::OptimizerParamGroup& group);

  /// For the next step only: divide gradients by `scale`, and skip where `found_inf` holds 1; either may be undefined.
  /// See StepTail::step. oxytorch::amp::GradScaler calls this.
  void set_grad_scale(at::Tensor scale, at::Tensor found_inf);

  /// For the next step only: skip where `skip` is not 0, or where the gradient norm is above `norm_limit`.
  void set_skip(at::Tensor skip);
  void set_norm_limit(at::Tensor norm_limit);

  /// Divide gradients by the number of micro-batches that were summed into them; holds until it is set again.
  void set_grad_divisor(double divisor);

  /// From now on each group's learning rate is kept as a 0-dim fp32 tensor on the parameters' device too, and the step
  /// reads that: a captured graph follows what is written there. The schedules of oxytorch/optim/schedule.h write it as
  /// they set a rate; a rate set by hand is written by sync_lr() or the next step(). Nothing is read on the host.
  void use_lr_tensors();
  /// One a group; empty before use_lr_tensors().
  [[nodiscard]] const std::vector<at::Tensor>& lr_tensors() const noexcept { return lr_tensors_; }
  void sync_lr();

  /// To be called after parameters changed dtype in place (`set_data`), as oxytorch::amp::prepare does: the state goes
  /// on beside them. Master weights that do not exist yet start from `values`, fp32 by parameter, where it has one.
  void adopt_dtypes(const std::unordered_map<const c10::TensorImpl*, at::Tensor>& values = {}) { rebuild(values); }

  /// True while gradients that arrive are parts of a sum: neither measured nor applied in backward(). See
  /// AccumulateGuard.
  [[nodiscard]] bool accumulating() const noexcept { return accumulating_; }
  void set_accumulating(bool value) noexcept { accumulating_ = value; }
  /// With step_in_backward or norm_in_backward: uses the gradient that a parameter has now, whether or not gradients
  /// are accumulated. backward() calls it as gradients arrive, else.
  void gradient_arrived(const at::Tensor& param);

  /// Undefined tensors before the first step.
  [[nodiscard]] const TailStats& tail_stats() const;

  /// The running averages, in the order of the parameters; undefined tensors where a parameter was never stepped.
  [[nodiscard]] std::vector<at::Tensor> ema_parameters() const;

  /// The weights in copy_dtype, likewise; undefined also for a parameter that has that dtype itself.
  [[nodiscard]] std::vector<at::Tensor> copies() const;

  /// Puts the running averages in the parameters' place, and back. See StepTail::apply_ema.
  void apply_ema();
  void restore_parameters();

  /// The layout of torch::optim's archives: the class of the same name loads it, and this loads that class's.
  ///
  /// Also saved, under names that torch ignores: averages and copies. What torch could not carry on from (8-bit state,
  /// master weights, low bits, maximize) makes its class refuse the archive. Options of the tail are not saved.
  void save(torch::serialize::OutputArchive& archive) const override;

  /// State is converted where this optimizer keeps it in another format. Throws Error(InvalidArgument), changing
  /// nothing: an archive of another class or for other parameters, or one with master weights or averages that this
  /// optimizer does not keep. An archive without averages leaves them as they are.
  void load(torch::serialize::InputArchive& archive) override;

  /// Gives a parameter its state; see StepTail::set_state.
  void set_state(std::size_t index, ParamState state);

  [[nodiscard]] const StepTail& tail() const;

 protected:
  TailOptimizer(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                std::unique_ptr<TailOptimizerOptions> defaults);

 private:
  friend class NumericalStabilityManager;

  struct Place {
    std::size_t index, group;
  };

  [[nodiscard]] const TailOptimizerOptions& options_of(const torch::optim::OptimizerParamGroup& group) const;
  [[nodiscard]] std::unique_ptr<StepTail> make_tail() const;
  [[nodiscard]] bool matches() const;
  void complete_group(std::size_t index, const torch::optim::OptimizerParamGroup& given);
  [[nodiscard]] GroupOptions group_now(std::size_t index) const;
  void build();
  void rebuild(const std::unordered_map<const c10::TensorImpl*, at::Tensor>& masters);
  void adopt_tail(std::unique_ptr<StepTail> tail);
  void watch_gradients();

  TailOptions options_;
  std::unique_ptr<StepTail> tail_;                 // built at first use, since groups may be added
  ska::flat_hash_map<const void*, Place> places_;  // of the tail's parameters
  std::vector<const void*> order_;                 // the same, in order
  StepInputs inputs_;                              // of the next step
  bool uses_lr_tensors_ = false;
  std::vector<at::Tensor> lr_tensors_;
  std::vector<double> written_lr_;
  std::mutex arrival_;
  bool accumulating_ = false;
  bool averages_shown_ = false;
  std::unique_ptr<BackwardHooks> hooks_;  // last: gone before anything they use
};

/// For the backward passes of all micro-batches but the last of a step: with norm_in_backward it saves measuring sums
/// that are not complete; with step_in_backward it keeps them from being applied. Else it changes nothing.
class [[nodiscard]] AccumulateGuard {
 public:
  explicit AccumulateGuard(TailOptimizer& optimizer) : optimizer_(optimizer), before_(optimizer.accumulating()) {
    optimizer_.set_accumulating(true);
  }
  ~AccumulateGuard() { optimizer_.set_accumulating(before_); }
  AccumulateGuard(const AccumulateGuard&) = delete;
  AccumulateGuard& operator=(const AccumulateGuard&) = delete;

 private:
  TailOptimizer& optimizer_;
  bool before_;
};

}  // namespace oxytorch::optim
