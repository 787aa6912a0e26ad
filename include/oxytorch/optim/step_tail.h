/// StepTail: everything after backward as one call on LibTorch tensors.
///
/// One step: sum of squares and finite check of all gradients, unscale, clip by global norm, weight decay, Adam, AdamW
/// or SGD update, exponential moving average, zeroing, statistics. On CPU, fp32 and bf16 parameters go through the
/// kernels of oxytorch/kernels/step_tail.h in two passes over memory, all tensors in one parallel region. Everything
/// else (other dtypes, other devices, strided views) goes through LibTorch's own operators with the same algorithm.
///
/// No host read of a device value: scale, found_inf and statistics stay on the device. No allocation after the first
/// step on the native path. A step that is skipped changes no byte of parameters, state or average.
///
/// Threads: one step at a time per object; runs on torch's intra-op pool. Holds references to the tensors it is given.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "oxytorch/api.h"

namespace oxytorch::optim {

enum class Algorithm { Adam, SGD };

/// What to do with a step whose gradients hold inf or NaN. A step under a loss scale is always skipped, as
/// torch's GradScaler does. Raise needs the verdict on the host: free on CPU, a synchronisation elsewhere.
enum class NonFinite { Skip, Raise, Propagate };

/// "skip", "raise" or "propagate"; Error(InvalidArgument) for another text.
OXY_API NonFinite parse_nonfinite(const std::string& text);
OXY_API const char* name(NonFinite policy) noexcept;

/// Options of the whole tail.
struct TailOptions {
  double clip_norm = 0;  ///< largest global L2 norm of the unscaled gradients; 0: no clipping
  double ema_decay = 0;  ///< in [0, 1); 0: no moving average
  NonFinite nonfinite = NonFinite::Skip;
  bool collect_stats = false;    ///< parameter and update norms for each parameter, in the same pass
  bool zero_grads = false;       ///< write zeros over the gradients in the same pass
  bool force_composite = false;  ///< use LibTorch's operators also where native kernels exist
};

/// Hyperparameters of one parameter group, named as torch names them.
struct GroupOptions {
  double lr = 1e-3;
  at::Tensor lr_tensor;  ///< if defined, a one-element tensor that replaces `lr`; read on its device
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0;
  double momentum = 0;
  double dampening = 0;
  bool nesterov = false;
  bool decoupled_weight_decay = false;  ///< Adam: decay the parameter itself (AdamW), not through the gradient
  bool amsgrad = false;
  bool maximize = false;
};

/// State of one parameter, with torch.optim's names. Undefined until the parameter's first step.
struct ParamState {
  at::Tensor step;             ///< 0-dim float, number of updates; AdamW and Adam
  at::Tensor exp_avg;          ///< like the parameter
  at::Tensor exp_avg_sq;       ///< like the parameter
  at::Tensor max_exp_avg_sq;   ///< like the parameter, with amsgrad
  at::Tensor momentum_buffer;  ///< like the parameter, SGD with momentum
  at::Tensor ema;              ///< fp32 (fp64 for fp64 parameters), laid out as the parameter
};

/// Results of the last step; the tensors live as long as the tail and are written in place by each step.
struct TailStats {
  at::Tensor grad_norm;     ///< 0-dim fp32: global norm of the unscaled gradients, before clipping
  at::Tensor found_inf;     ///< 0-dim fp32: 1 where the step was skipped for inf or NaN
  at::Tensor skipped;       ///< 0-dim int64: steps skipped so far
  at::Tensor grad_norms;    ///< fp32 [parameters]: norm of each unscaled gradient, 0 without gradient
  at::Tensor param_norms;   ///< fp32 [parameters], with collect_stats
  at::Tensor update_norms;  ///< fp32 [parameters], with collect_stats: norm of (new - old)
};

class OXY_API StepTail {
 public:
  /// Throws Error(InvalidArgument) for a clip_norm below 0 or not finite, or an ema_decay outside [0, 1).
  StepTail(Algorithm algorithm, TailOptions options);
  ~StepTail();
  StepTail(const StepTail&) = delete;
  StepTail& operator=(const StepTail&) = delete;

  /// Adds a group; parameters are numbered through all groups in the order of adding.
  /// Throws Error naming the parameter that is undefined, sparse, of a tensor subclass with its own dispatch, or on
  /// another device than the first. `names` may be empty.
  void add_group(std::vector<at::Tensor> params, std::vector<std::string> names, const GroupOptions& options);

  /// Replaces a group's hyperparameters. Throws Error(InvalidArgument) naming group and value for one that is NaN,
  /// negative where torch refuses it, or a learning-rate tensor of more than one element.
  void set_group_options(std::size_t group, const GroupOptions& options);

  [[nodiscard]] std::size_t group_count() const noexcept;
  [[nodiscard]] std::size_t param_count() const noexcept;
  [[nodiscard]] const at::Tensor& param(std::size_t index) const;
  [[nodiscard]] const std::string& param_name(std::size_t index) const;
  [[nodiscard]] const ParamState& state(std::size_t index) const;

  /// Gives a parameter its state, for example from torch's state_dict; tensors are kept, not copied, where they
  /// already have the parameter's device and layout. Throws Error naming the parameter for a wrong shape or dtype.
  void set_state(std::size_t index, ParamState state);

  /// One step over the parameters that have a gradient.
  ///
  /// `grad_scale`: undefined, or a one-element tensor on the parameters' device by which gradients are divided.
  /// `found_inf`: undefined, or a one-element fp32 tensor there; a value other than 0 skips the step, and the tail
  /// writes 1 where it finds inf or NaN itself.
  /// Returns true if some parameter got its state in this call. Throws before anything is changed, naming the
  /// parameter: shape, dtype or device changed, storage freed, sparse gradient; with NonFinite::Raise also for a
  /// gradient that is not finite.
  bool step(const at::Tensor& grad_scale = {}, const at::Tensor& found_inf = {});

  [[nodiscard]] const TailStats& stats() const noexcept;
  [[nodiscard]] const TailOptions& options() const noexcept;

  /// Puts the running averages in the parameters' place; restore_parameters() brings the parameters back, bit for bit.
  /// Between the two a step is refused. Throws Error(InvalidState) without ema_decay, or when called twice.
  void apply_ema();
  void restore_parameters();

  /// True where all parameters go through the native kernels; known after the first step.
  [[nodiscard]] bool native() const noexcept;

  /// Bytes the native kernels move between memory and processor in one step; 0 before the first.
  [[nodiscard]] std::int64_t bytes_per_step() const noexcept;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace oxytorch::optim
