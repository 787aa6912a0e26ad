/// The step tail on raw host memory: gradient norm, unscale, clip, update, EMA, zero and statistics in two passes.
///
/// Torch-free: pointers in, pointers out. `oxytorch::optim` builds on it; a program without LibTorch may use it alone.
///
/// Numbers. Sums of squares are taken in fp64 over fixed chunks and lanes and added in a fixed order, and every
/// elementwise operation is a correctly rounded fp32 one with fused multiply-add where written so. The result is
/// therefore the same, bit for bit, for any number of threads and any instruction set. Against an fp64 evaluation of
/// the same step, an fp32 parameter is within 4 ulp and a bf16 parameter within 1 ulp of its own type.
///
/// Threads. A StepTailPlan is used by one thread at a time; it runs its chunks on the `Parallel` it is given.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "oxytorch/api.h"

namespace oxytorch::kernels {

/// Element type of a parameter (and its gradient) or of its state.
enum class ElementType : std::uint8_t { F32, BF16 };

/// Update rules. AdamW: Loshchilov and Hutter 2019, decoupled decay. Adam: Kingma and Ba 2015, with L2 decay added to
/// the gradient. Sgd: with momentum, dampening and Nesterov as torch.optim.SGD defines them.
enum class Rule : std::uint8_t { AdamW, Adam, Sgd };

/// One parameter. Memory belongs to the caller and must stay valid during each call.
struct TailTensor {
  void* param = nullptr;    ///< numel elements of `type`
  void* grad = nullptr;     ///< numel elements of `type`; null: this parameter takes no part in the step
  void* state0 = nullptr;   ///< exp_avg or momentum buffer, `state_type`; may be null for Sgd without momentum
  void* state1 = nullptr;   ///< exp_avg_sq, `state_type`
  void* state2 = nullptr;   ///< max_exp_avg_sq, `state_type`; null: no amsgrad
  float* ema = nullptr;     ///< fp32 running average of the parameter; null: none
  float* step = nullptr;    ///< number of updates so far; read and, when the step is applied, incremented
  std::int64_t numel = 0;   ///< elements; zero is allowed
  std::uint32_t group = 0;  ///< index into the groups given to apply()
  ElementType type = ElementType::F32;
  ElementType state_type = ElementType::F32;
  bool first = false;  ///< Sgd: the momentum buffer is not yet filled; cleared when the step is applied
};

/// Hyperparameters of one group, as torch names them.
struct TailGroup {
  Rule rule = Rule::AdamW;
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0;
  double momentum = 0;
  double dampening = 0;
  bool nesterov = false;
  bool maximize = false;
};

/// What apply() does beside the update.
struct TailSettings {
  double grad_multiplier = 1;  ///< each gradient element is multiplied by this: 1/scale times the clip coefficient
  double ema_decay = 0;        ///< used where a tensor has `ema`
  bool zero_grad = false;      ///< write zeros over the gradients in the same pass
  bool collect = false;        ///< fill param_sum_squares() and update_sum_squares()
};

/// How to run `tasks` independent calls; `run` returns when all are done. `threads` is how many can run at once.
struct Parallel {
  int threads = 1;
  void (*run)(void* pool, int tasks, void (*task)(void* context, int index), void* context) = nullptr;
  void* pool = nullptr;
};

/// Bytes that one step of `tensor` moves between memory and processor, both passes counted.
OXY_API std::int64_t step_bytes(const TailTensor& tensor, const TailSettings& settings, bool measured) noexcept;

/// The chunk table of a set of tensors, made once; sizes and types are fixed, pointers may change between calls.
class OXY_API StepTailPlan {
 public:
  /// Elements per chunk; fixed, since it decides the order of summation.
  static constexpr std::int64_t kChunk = 16384;

  explicit StepTailPlan(std::span<const TailTensor> tensors);
  ~StepTailPlan();
  StepTailPlan(StepTailPlan&&) noexcept;
  StepTailPlan& operator=(StepTailPlan&&) noexcept;
  StepTailPlan(const StepTailPlan&) = delete;
  StepTailPlan& operator=(const StepTailPlan&) = delete;

  /// The tensors of the plan, for refreshing pointers, groups and `first`. Do not change sizes or types.
  [[nodiscard]] std::span<TailTensor> tensors() noexcept;

  /// Pass one: sum of squares of all gradients (fp64); inf or NaN if and only if some element is not finite.
  double measure(const Parallel& parallel);

  /// Pass two. `groups` is indexed by TailTensor::group. No allocation.
  void apply(std::span<const TailGroup> groups, const TailSettings& settings, const Parallel& parallel);

  /// Writes zeros over the gradients, for a step that is skipped.
  void zero_gradients(const Parallel& parallel);

  /// Per tensor, from the last measure() or apply() with `collect`; zero where the gradient was null.
  [[nodiscard]] std::span<const double> grad_sum_squares() const noexcept;
  [[nodiscard]] std::span<const double> param_sum_squares() const noexcept;
  [[nodiscard]] std::span<const double> update_sum_squares() const noexcept;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace oxytorch::kernels
