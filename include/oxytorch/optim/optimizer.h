/// Optimizers with the fused step tail for C++ programs: drop-in `torch::optim::Optimizer`s.
///
/// ```cpp
/// oxytorch::optim::AdamW opt(model->parameters(),
/// oxytorch::optim::AdamWOptions(1e-3).clip_norm(1.0).ema_decay(0.999)); loss.backward(); opt.step(); opt.zero_grad();
/// ```
///
/// Archives written by `save` are those of the torch::optim class of the same name and load into it, and the reverse.
#pragma once

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "oxytorch/api.h"
#include "oxytorch/optim/step_tail.h"

namespace oxytorch::optim {

/// The tail's options with chained setters. They belong to the whole optimizer: those given to its constructor count,
/// those of single groups are ignored.
template <class Derived>
class TailArguments {
 public:
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
  [[nodiscard]] const TailOptions& tail() const noexcept { return tail_; }

 private:
  template <class T>
  Derived& set(T& field, T value) {
    field = value;
    return static_cast<Derived&>(*this);
  }
  TailOptions tail_;
};

/// torch::optim::AdamWOptions with `maximize` and the tail's options.
struct OXY_API AdamWOptions : public torch::optim::OptimizerCloneableOptions<AdamWOptions>,
                              public TailArguments<AdamWOptions> {
  using betas_t = std::tuple<double, double>;
  AdamWOptions(double lr = 1e-3) : lr_(lr) {}  // NOLINT(google-explicit-constructor): as torch's
  TORCH_ARG(double, lr) = 1e-3;
  TORCH_ARG(betas_t, betas) = std::make_tuple(0.9, 0.999);
  TORCH_ARG(double, eps) = 1e-8;
  TORCH_ARG(double, weight_decay) = 1e-2;
  TORCH_ARG(bool, amsgrad) = false;
  TORCH_ARG(bool, maximize) = false;

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
  [[nodiscard]] double get_lr() const override { return lr_; }
  void set_lr(double value) override { lr_ = value; }
};

/// torch::optim::SGDOptions with `maximize` and the tail's options.
struct OXY_API SGDOptions : public torch::optim::OptimizerCloneableOptions<SGDOptions>,
                            public TailArguments<SGDOptions> {
  SGDOptions(double lr = 1e-3) : lr_(lr) {}  // NOLINT(google-explicit-constructor): as torch's
  TORCH_ARG(double, lr) = 1e-3;
  TORCH_ARG(double, momentum) = 0;
  TORCH_ARG(double, dampening) = 0;
  TORCH_ARG(double, weight_decay) = 0;
  TORCH_ARG(bool, nesterov) = false;
  TORCH_ARG(bool, maximize) = false;

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
  [[nodiscard]] double get_lr() const override { return lr_; }
  void set_lr(double value) override { lr_ = value; }
};

class NumericalStabilityManager;

/// What all optimizers here share. A group's options are read at each step, so learning-rate schedules work as ever.
class OXY_API TailOptimizer : public torch::optim::Optimizer {
 public:
  ~TailOptimizer() override;

  /// One step; the closure, if any, is evaluated first with gradients enabled and its loss returned.
  /// Errors: those of StepTail::step.
  torch::Tensor step(LossClosure closure = nullptr) override;

  /// Adds a group; what its options leave at their constructor's values is inherited from the optimizer's. (torch's
  /// own add_param_group drops the options of classes it does not know; this one hides it.)
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
  void adopt_dtypes(const std::unordered_map<const c10::TensorImpl*, at::Tensor>& values = {});

  [[nodiscard]] const TailStats& tail_stats() const;

  /// The running averages, in the order of the parameters; undefined tensors where a parameter was never stepped.
  [[nodiscard]] std::vector<at::Tensor> ema_parameters() const;

  /// Puts the running averages in the parameters' place, and back. See StepTail::apply_ema.
  void apply_ema();
  void restore_parameters();

  [[nodiscard]] const StepTail& tail() const;

 protected:
  TailOptimizer(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                std::unique_ptr<torch::optim::OptimizerOptions> defaults, Algorithm algorithm,
                const TailOptions& options);

  /// Hyperparameters of a group as its options stand now.
  [[nodiscard]] virtual GroupOptions group_options(const torch::optim::OptimizerOptions& options) const = 0;

  /// Gives `options` the value of `defaults` wherever it still has the one its constructor gives, as torch does for
  /// its own optimizers.
  virtual void inherit(torch::optim::OptimizerOptions& options,
                       const torch::optim::OptimizerOptions& defaults) const = 0;

  /// Restores what torch dropped of the options of `groups`, then inherits; constructors of derived classes call it.
  void complete_groups(const std::vector<torch::optim::OptimizerParamGroup>& groups);

  /// Copies the tail's state into torch's `state_` for saving, and back after loading.
  void publish_state(const std::function<std::unique_ptr<torch::optim::OptimizerParamState>(const ParamState&)>& make);
  void adopt_state(const std::function<ParamState(const torch::optim::OptimizerParamState&)>& make);

 private:
  friend class NumericalStabilityManager;
  void build();

  Algorithm algorithm_;
  TailOptions options_;
  std::unique_ptr<StepTail> tail_;
  StepInputs inputs_;  // of the next step
  bool uses_lr_tensors_ = false;
  std::vector<at::Tensor> lr_tensors_;
  std::vector<double> written_lr_;
};

/// AdamW, Loshchilov and Hutter 2019; equal to torch.optim.AdamW within the tail's error bound.
class OXY_API AdamW : public TailOptimizer {
 public:
  explicit AdamW(const std::vector<torch::optim::OptimizerParamGroup>& groups, AdamWOptions defaults = {});
  explicit AdamW(std::vector<torch::Tensor> params, AdamWOptions defaults = {});
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 protected:
  [[nodiscard]] GroupOptions group_options(const torch::optim::OptimizerOptions& options) const override;
  void inherit(torch::optim::OptimizerOptions& options, const torch::optim::OptimizerOptions& defaults) const override;
};

/// Stochastic gradient descent with momentum, as torch.optim.SGD.
class OXY_API SGD : public TailOptimizer {
 public:
  explicit SGD(const std::vector<torch::optim::OptimizerParamGroup>& groups, SGDOptions defaults = {});
  explicit SGD(std::vector<torch::Tensor> params, SGDOptions defaults = {});
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 protected:
  [[nodiscard]] GroupOptions group_options(const torch::optim::OptimizerOptions& options) const override;
  void inherit(torch::optim::OptimizerOptions& options, const torch::optim::OptimizerOptions& defaults) const override;
};

}  // namespace oxytorch::optim
