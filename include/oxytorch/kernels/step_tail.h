/// The step tail on raw host memory: gradient norm, unscale, clip, update, EMA, copy-out, zero and statistics in two
/// passes.
///
/// Torch-free: pointers in, pointers out. `oxytorch::optim` builds on it; a program without LibTorch may use it alone.
///
/// Numbers. Sums of squares are taken in fp64 over fixed chunks and lanes and added in a fixed order (those of weights
/// and updates in fp32 over 32 at a time first: exact to 4e-6), and every
/// elementwise operation is a correctly rounded fp32 one with fused multiply-add where written so. The result is
/// therefore the same, bit for bit, for any number of threads and any instruction set. Against an fp64 evaluation of
/// the same step, an fp32 parameter is within 4 ulp and a 16-bit parameter within 1 ulp of its own type. Moving
/// averages below 1.2e-38, the least normal number, are kept as 0 (of squares where eps is 1e-15 or more; never those
/// of Lion, whose sign counts): where a gradient stays 0, they would stay at the least denormal one for good. Formats
/// narrower than that are defined, with their errors, in oxytorch/kernels/codec.h.
///
/// Threads. A StepTailPlan is used by one thread at a time; it runs its chunks on the `Parallel` it is given.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "oxytorch/api.h"
#include "oxytorch/kernels/element_type.h"

namespace oxytorch::kernels {

/// Update rules, as torch.optim defines those it has.
/// AdamW: Loshchilov and Hutter 2019, decoupled decay. Adam: Kingma and Ba 2015, L2 decay added to the gradient.
/// Sgd: momentum, dampening, Nesterov. Lion: Chen et al. 2023, decoupled decay. Adagrad: Duchi et al. 2011.
/// RmsProp: Hinton 2012, with torch's momentum and centering.
enum class Rule : std::uint8_t { AdamW, Adam, Sgd, Lion, Adagrad, RmsProp };

/// A running quantity of the rule. Int8 state has one bf16 scale for each `kStateGroup` elements.
struct TailState {
  void* data = nullptr;
  std::uint16_t* scale = nullptr;
};

/// One parameter. Memory belongs to the caller and must stay valid during each call. Arrays hold `numel` elements.
struct TailTensor {
  void* param = nullptr;            ///< of `type`
  void* grad = nullptr;             ///< of `grad_type`; null: this parameter takes no part in the step
  float* master = nullptr;          ///< fp32 weights that the update works on; `param` gets them rounded; null: none
  std::int8_t* low_bits = nullptr;  ///< BF16 only: the weight's next 8 bits (codec.h, SplitWeight); null: none
  void* copy = nullptr;             ///< receives the new weights rounded to `copy_type`; null: none
  /// state[0]: exp_avg (AdamW, Adam, Lion) or momentum buffer (Sgd, RmsProp); null where there is no momentum.
  /// state[1]: exp_avg_sq (AdamW, Adam), sum (Adagrad), square_avg (RmsProp).
  /// state[2]: max_exp_avg_sq (AdamW, Adam with amsgrad), grad_avg (RmsProp, centered); null where not wanted.
  TailState state[3];
  float* ema = nullptr;      ///< fp32 running average of the parameter; null: none
  float* step = nullptr;     ///< whole number of updates so far; read and, when the step is applied, incremented
  std::int64_t numel = 0;    ///< elements; zero is allowed
  std::int64_t rows = 1;     ///< units of adaptive clipping: equal runs of memory; divides numel
  std::uint32_t group = 0;   ///< index into the groups given to apply()
  std::uint32_t stream = 0;  ///< identity of the parameter for stochastic rounding
  ElementType type = ElementType::F32;
  ElementType grad_type = ElementType::F32;
  ElementType state_type = ElementType::F32;
  ElementType copy_type = ElementType::BF16;
  bool first = false;  ///< Sgd: the momentum buffer is not yet filled; cleared when the step is applied
};

/// Hyperparameters of one group, as torch names them.
struct TailGroup {
  Rule rule = Rule::AdamW;
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;  ///< RmsProp: alpha
  double eps = 1e-8;
  double weight_decay = 0;
  double momentum = 0;
  double dampening = 0;
  double lr_decay = 0;  ///< Adagrad
  bool nesterov = false;
  bool maximize = false;
};

/// What apply() does beside the update.
struct TailSettings {
  double grad_multiplier = 1;  ///< each gradient element is multiplied by this: 1/scale times the clip coefficient
  double clip_value = 0;       ///< and limited to [-clip_value, clip_value]; 0: no limit
  double agc = 0;              ///< before that, each row's norm is limited to agc * max(norm of its weights, agc_eps)
  double agc_eps = 1e-3;       ///< Brock et al. 2021, "High-performance large-scale image recognition"
  double ema_decay = 0;        ///< used where a tensor has `ema`
  bool zero_grad = false;      ///< write zeros over the gradients in the same pass
  bool collect = false;        ///< fill param_sum_squares() and update_sum_squares()
  bool stochastic = false;     ///< round parameters and state narrower than fp32 stochastically (codec.h)
  std::uint64_t seed = 0;      ///< key of the random bits; the counter is (element, operand, stream, step)
};

/// How to run `tasks` independent calls; `run` returns when all are done. `threads` is how many can run at once.
struct Parallel {
  int threads = 1;
  void (*run)(void* pool, int tasks, void (*task)(void* context, int index), void* context) = nullptr;
  void* pool = nullptr;
  std::int64_t grain = 64 * 1024;  ///< elements below which one more thread costs more than it brings
};

/// Bytes that one step of `tensor` moves between memory and processor, both passes counted.
OXY_API std::int64_t step_bytes(const TailTensor& tensor, const TailSettings& settings, bool measured) noexcept;

/// Sum of squares of one array, the same bits as StepTailPlan::measure gives for it. `type`: not Int8.
OXY_API double sum_squares(const void* data, ElementType type, std::int64_t numel, const Parallel& parallel);

/// The chunk table of a set of tensors, made once; sizes and types are fixed, pointers may change between calls.
class OXY_API StepTailPlan {
 public:
  /// Elements per chunk; fixed, since it decides the order of summation.
  static constexpr std::int64_t kChunk = 16384;
  /// Chunks of a tensor whose sums are added one after another before the next such run begins; fixed likewise.
  static constexpr std::int64_t kRun = 128;

  explicit StepTailPlan(std::span<const TailTensor> tensors);
  ~StepTailPlan();
  StepTailPlan(StepTailPlan&&) noexcept;
  StepTailPlan& operator=(StepTailPlan&&) noexcept;
  StepTailPlan(const StepTailPlan&) = delete;
  StepTailPlan& operator=(const StepTailPlan&) = delete;

  /// The tensors of the plan, for refreshing pointers, groups and `first`. Do not change sizes or types.
  [[nodiscard]] std::span<TailTensor> tensors() noexcept;

  /// Pass one: sum of squares of all gradients (fp64); inf or NaN if and only if some element is not finite.
  /// `known`: empty, or one value for each tensor, the result of sum_squares() on its gradient; negative: not known.
  double measure(const Parallel& parallel, std::span<const double> known = {});

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
