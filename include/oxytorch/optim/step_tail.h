/// StepTail: everything after backward as one call on LibTorch tensors.
///
/// One step: sum of squares and finite check of all gradients, unscale, clip, weight decay, the update of one of six
/// algorithms, exponential moving average, low-precision copy, zeroing, statistics. On CPU, fp32, bf16 and fp16
/// parameters go through the kernels of oxytorch/kernels/step_tail.h in two passes, all tensors in one parallel region;
/// where a device's backend has them, through those of oxytorch/backend_kernels.h on torch's current stream. Everything
/// else (other dtypes and devices, strided views, Muon) goes through LibTorch's own operators, same algorithm.
///
/// No host read of a device value: scale, found_inf and statistics stay on the device. No allocation after the first
/// step on the native path. A step that is skipped changes no byte of parameters, state or average.
///
/// Threads: one step at a time per object; runs on torch's intra-op pool. Holds references to the tensors it is given.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "oxytorch/api.h"

namespace oxytorch::optim {

/// Adam covers AdamW (GroupOptions::decoupled_weight_decay). Lion: Chen et al. 2023, arXiv 2302.06675. Muon: Jordan
/// 2024 as torch.optim.Muon defines it, for matrices alone. The others as in torch.optim.
enum class Algorithm { Adam, SGD, Lion, Adagrad, RMSprop, Muon };

/// What to do with a step whose gradients hold inf or NaN. A step under a loss scale is always skipped, as
/// torch's GradScaler does. Raise needs the verdict on the host: free on CPU, a synchronisation elsewhere.
enum class NonFinite { Skip, Raise, Propagate };

/// "skip", "raise" or "propagate"; Error(InvalidArgument) for another text.
OXY_API NonFinite parse_nonfinite(const std::string& text);
OXY_API const char* name(NonFinite policy) noexcept;

/// How an algorithm's running averages are kept. Auto: in the parameter's dtype, as torch does, or in fp32 where there
/// are master weights. Int8: one byte an element and a scale for 32; see oxytorch/kernels/codec.h for the error.
enum class StateFormat { Auto, Float32, BFloat16, Int8 };

/// "auto", "fp32", "bf16" or "int8"; Error(InvalidArgument) for another text.
OXY_API StateFormat parse_state_format(const std::string& text);
OXY_API const char* name(StateFormat format) noexcept;

/// What is kept beside 16-bit parameters so that small updates are not lost. Float32: whole fp32 weights. Int8: the
/// next 8 bits of a bf16 weight; with Int8 state this is the layout of 7 bytes a parameter, a bf16 gradient included.
enum class MasterFormat { None, Float32, Int8 };

/// "none", "fp32" or "int8"; Error(InvalidArgument) for another text.
OXY_API MasterFormat parse_master_format(const std::string& text);
OXY_API const char* name(MasterFormat format) noexcept;

/// Options of the whole tail. At most one of clip_norm, clip_value and agc may be set.
struct TailOptions {
  double clip_norm = 0;   ///< largest global L2 norm of the unscaled gradients; 0: no clipping
  double clip_value = 0;  ///< largest magnitude of an unscaled gradient's element; 0: no limit
  double agc = 0;         ///< adaptive clipping: largest ratio of gradient norm to weight norm, by row; 0: none
  double agc_eps = 1e-3;  ///< least weight norm that adaptive clipping counts with
  double ema_decay = 0;   ///< in [0, 1); 0: no moving average
  NonFinite nonfinite = NonFinite::Skip;
  StateFormat state_dtype = StateFormat::Auto;
  MasterFormat master_weights = MasterFormat::None;
  std::optional<at::ScalarType> copy_dtype = {};  ///< also keep the weights rounded to bfloat16 or float16
  bool stochastic_rounding = false;  ///< bf16 parameters without masters, bf16 and int8 state: unbiased rounding
  std::uint64_t seed = 0;            ///< of the stochastic rounding; same bits on every device
  bool collect_stats = false;        ///< parameter and update norms for each parameter, in the same pass
  bool zero_grads = false;           ///< write zeros over the gradients in the same pass
  bool norm_in_backward = false;     ///< the caller reports each gradient by grad_ready(); on CPU saves the first pass
  bool step_in_backward = false;     ///< grad_ready() updates its parameter at once and frees the gradient
  bool force_composite = false;      ///< use LibTorch's operators also where native kernels exist
};

/// How Muon's learning rate follows a matrix's shape, as torch.optim.Muon's adjust_lr_fn.
enum class AdjustLr { Original, MatchRmsAdamW };

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
  double alpha = 0.99;                                                ///< RMSprop
  double lr_decay = 0;                                                ///< Adagrad
  double initial_accumulator_value = 0;                               ///< Adagrad
  std::array<double, 3> ns_coefficients = {3.4445, -4.7750, 2.0315};  ///< Muon
  std::int64_t ns_steps = 5;                                          ///< Muon
  AdjustLr adjust_lr = AdjustLr::Original;                            ///< Muon
  bool nesterov = false;
  bool centered = false;                ///< RMSprop
  bool decoupled_weight_decay = false;  ///< Adam: decay the parameter itself (AdamW), not through the gradient
  bool amsgrad = false;
  bool maximize = false;
  OXY_API bool operator==(const GroupOptions& other) const;  ///< the learning-rate tensor by identity
};

/// State of one parameter. Undefined until the parameter's first step.
struct ParamState {
  at::Tensor step;                    ///< 0-dim float, number of updates; where the algorithm or the rounding counts
  std::array<at::Tensor, 3> moments;  ///< like the parameter; int8 or uint8 with StateFormat::Int8; see moment_names()
  std::array<at::Tensor, 3> scales;   ///< bf16 [ceil(numel / 32)] with StateFormat::Int8
  at::Tensor master;                  ///< fp32 weights, like the parameter
  at::Tensor low_bits;                ///< int8, the weight's next 8 bits, like the parameter
  at::Tensor ema;                     ///< fp32 (fp64 for fp64 parameters), laid out as the parameter
  at::Tensor copy;                    ///< the weights in copy_dtype
};

/// torch's names of ParamState::moments for an algorithm; null where it has none. Adam: exp_avg, exp_avg_sq,
/// max_exp_avg_sq. SGD, Muon: momentum_buffer. Lion: exp_avg. Adagrad: -, sum. RMSprop: momentum_buffer, square_avg,
/// grad_avg.
OXY_API std::array<const char*, 3> moment_names(Algorithm algorithm) noexcept;

/// Results of the last step; the tensors live as long as the tail and are written in place by each step.
struct TailStats {
  at::Tensor grad_norm;     ///< 0-dim fp32: global norm of the unscaled gradients, before clipping
  at::Tensor found_inf;     ///< 0-dim fp32: 1 where the step was skipped for inf or NaN
  at::Tensor applied;       ///< 0-dim fp32: 0 where the step was skipped for any reason, else 1
  at::Tensor skipped;       ///< 0-dim int64: steps skipped so far
  at::Tensor grad_norms;    ///< fp32 [parameters]: norm of each unscaled gradient, 0 without gradient
  at::Tensor param_norms;   ///< fp32 [parameters], with collect_stats
  at::Tensor update_norms;  ///< fp32 [parameters], with collect_stats: norm of (new - old)
};

/// What one step is given from outside.
struct StepInputs {
  /// Undefined, or a one-element tensor on the parameters' device by which gradients are divided.
  at::Tensor grad_scale;
  /// Undefined, or a one-element fp32 tensor there; a value other than 0 skips the step, and the tail writes 1 where it
  /// finds inf or NaN itself.
  at::Tensor found_inf;
  /// Undefined, or a one-element tensor there; a value other than 0 skips the step without a word in found_inf.
  at::Tensor skip;
  /// Undefined, or a one-element tensor there; a norm of the unscaled gradients above it skips the step likewise.
  at::Tensor norm_limit;
  /// Gradients are divided by this too: the micro-batches that were summed into them.
  double grad_divisor = 1;
};

/// Sums of squares, one for each parameter, over all shards; given those of this process. Same shape, dtype (fp64, or
/// fp32 on devices without it) and device.
using NormReducer = std::function<at::Tensor(const at::Tensor& sums)>;

class OXY_API StepTail {
 public:
  /// Throws Error(InvalidArgument) for options out of their range or that cannot be served together, with the reason.
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

  /// The same in torch's forms: int8 moments as fp32 copies without scales, the momentum of sparse gradients sparse.
  /// They can be cut anywhere. Given back by set_state() they make the same bytes again.
  [[nodiscard]] ParamState decoded_state(std::size_t index) const;

  /// Gives a parameter its state, for example from torch's state_dict; tensors are kept, not copied, where they
  /// already have the parameter's device and layout. Throws Error naming the parameter for a wrong shape or dtype.
  void set_state(std::size_t index, ParamState state);

  /// One step over the parameters that have a gradient. A gradient in the memory of a parameter is read as torch's loop
  /// over the parameters reads it: those of them that come before have been stepped.
  /// Returns true if some parameter got its state in this call. Throws before anything is changed, naming the
  /// parameter: shape, dtype or device changed, storage freed, sparse gradient; with NonFinite::Raise also for a
  /// gradient that is not finite; with zero_grads for one in memory that the step writes.
  bool step(const StepInputs& inputs = {});

  /// With norm_in_backward: takes the sum of squares of the parameter's gradient while it is in the cache; a gradient
  /// that is written again before step() is measured there anew. (Writes through Tensor::data() leave no trace in
  /// torch: scaling and clipping all of a gradient are noticed, a write of a few elements is not.) With
  /// step_in_backward: updates the parameter by its gradient over `grad_divisor` and frees the gradient; step() does so
  /// for gradients with memory in common. To be called when it is complete, from a post-accumulate-grad hook.
  /// Returns true if the parameter got its state in this call.
  bool grad_ready(std::size_t index, double grad_divisor = 1);

  /// For parameters that are shards of larger ones: norms are taken over what `reducer` returns. It is called once in
  /// each step that needs the gradient norm, and with collect_stats twice more in each that is not skipped; in the same
  /// order on every process.
  void set_norm_reducer(NormReducer reducer);

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
