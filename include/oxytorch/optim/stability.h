/// Numerical stability: spikes in the loss and in the gradient norm are found, and skipped, backed off from or rolled
/// back.
///
/// ```cpp
/// oxytorch::optim::NumericalStabilityManager guard(opt, {.policy = oxytorch::optim::StabilityPolicy::Skip});
/// loss.backward();
/// guard.step(loss);  // in place of opt.step()
/// ```
///
/// The detector compares each value with a rolling window of those before it, all in device tensors: on the step path
/// the host reads nothing of a device and waits for nothing. The measure is robust, since the spikes themselves must
/// not teach it: the median of the window, and as spread the larger of 1.4826 times the median and 1.2533 times the
/// mean of the deviations above it (both are one standard deviation for normal values; Iglewicz and Hoaglin 1993). It
/// is one-sided, since a loss that falls is no spike; and taken of logarithms where the whole window is positive, as
/// losses and norms spread by factors.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "oxytorch/api.h"
#include "oxytorch/optim/optimizer.h"

namespace oxytorch::optim {

/// What counts as a spike.
struct SpikeOptions {
  std::int64_t window = 128;     ///< values looked back on
  double threshold = 6;          ///< spreads above the median
  double floor = 0.02;           ///< least spread as a share of the median, so that a flat history does not trip
  std::int64_t warmup = 32;      ///< values before anything but inf and NaN is judged
  std::int64_t patience = 16;    ///< spikes in a row after which they are the new normal: the window starts anew
  bool force_composite = false;  ///< use LibTorch's operators on CPU too, for comparison
};

/// One step in which something was a spike.
struct Spike {
  std::int64_t step = 0;
  bool loss = false;       ///< the loss was above its limit, or not finite
  bool grad_norm = false;  ///< likewise
  double loss_value = 0;   ///< NaN where no loss was given
  double loss_limit = 0;   ///< inf during warm-up
  double grad_norm_value = 0;
  double grad_norm_limit = 0;
};

/// Judges two series, the loss and the gradient norm.
///
/// A value that is not finite is always a spike. Spikes stay out of the window. Called around one step:
///
///     detector.judge(loss);              // then loss_flag() and norm_limit() stand for this step
///     ... the step, which measures the norm ...
///     detector.record(step, grad_norm);
///
/// One thread at a time; work goes to the device's current stream.
class OXY_API SpikeDetector {
 public:
  /// Throws Error(InvalidArgument) naming the option that is out of its range.
  SpikeDetector(const SpikeOptions& options, at::Device device);
  ~SpikeDetector();
  SpikeDetector(const SpikeDetector&) = delete;
  SpikeDetector& operator=(const SpikeDetector&) = delete;

  /// Takes the loss of the coming step, a one-element tensor on any device; undefined where there is none.
  void judge(const at::Tensor& loss);

  /// Takes the step's gradient norm, a one-element tensor on the detector's device, judges it, and moves the window on.
  /// `scaled`: the gradients came from a scaled loss, so an overflow is handled by the scaler and is no spike.
  void record(std::int64_t step, const at::Tensor& grad_norm, bool scaled = false);

  /// 0-dim fp32: 1 where the loss given last is a spike. Written in place.
  [[nodiscard]] const at::Tensor& loss_flag() const noexcept;
  /// 0-dim fp32: a gradient norm above it is a spike; inf during warm-up. Written in place.
  [[nodiscard]] const at::Tensor& norm_limit() const noexcept;
  /// 0-dim fp32: the same of the loss.
  [[nodiscard]] const at::Tensor& loss_limit() const noexcept;

  /// Spikes that the host has come to know since the last call. On CPU those up to the last record(). Elsewhere, with
  /// `wait`, those up to the step before it, for which it waits: the same on every process of a group. Without `wait`,
  /// those whose copies have arrived.
  std::vector<Spike> arrived(bool wait);

  /// All spikes that arrived() has not told yet, the last 256 at most. Reads the device: not for the step path.
  std::vector<Spike> drain();

  /// What the next verdict depends on, for snapshots and checkpoints: window, streaks, limits.
  [[nodiscard]] std::vector<at::Tensor> state() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// What to do about a step with a spike, beside leaving it out. Skip: nothing. Backoff: the steps after it are taken
/// with a reduced learning rate. Rollback: training goes back to a snapshot. Warn: it is not left out either, only
/// noted.
enum class StabilityPolicy { Skip, Backoff, Rollback, Warn };

/// "skip", "backoff", "rollback" or "warn"; Error(InvalidArgument) for another text.
OXY_API StabilityPolicy parse_stability_policy(const std::string& text);
OXY_API const char* name(StabilityPolicy policy) noexcept;

struct StabilityOptions {
  StabilityPolicy policy = StabilityPolicy::Skip;
  SpikeOptions spikes = {};
  double backoff_factor = 0.1;       ///< in (0, 1): of the learning rate after a spike
  std::int64_t backoff_steps = 100;  ///< over which it returns to 1
  std::int64_t every = 100;          ///< steps between snapshots
  std::int64_t keep = 2;             ///< snapshots kept, each as large as parameters and state
  std::int64_t max_rollbacks = 3;    ///< without progress past the step that spiked
};

/// A spike and what was done about it: "noted", "skipped", "rolled back to step 300" ...
struct StabilityEvent {
  Spike spike;
  std::string action;
};

/// Steps an optimizer only where loss and gradient norm are as they were before.
///
/// The verdict stays on the device, and the optimizer's own tail leaves out the step. On CPU the reaction of Backoff
/// and Rollback comes within the step; elsewhere a step later, when the verdict of the step before has reached the
/// host.
///
/// A rollback restores, bit for bit: parameters, optimizer state with masters and averages, group options, torch's
/// random generators of the CPU and of the parameters' device, the detector, and what restore_also() was given. It
/// takes the last snapshot before the spike; where the same stretch spikes again, an older one.
///
/// In a process group give step() the mean of the loss over its processes, so that all decide the same. Borrows the
/// optimizer. Not for use from several threads.
class OXY_API NumericalStabilityManager {
 public:
  /// Throws Error(InvalidArgument) for an option out of its range, or for an optimizer that cannot leave out a step.
  explicit NumericalStabilityManager(TailOptimizer& optimizer, const StabilityOptions& options = {});
  ~NumericalStabilityManager();
  NumericalStabilityManager(const NumericalStabilityManager&) = delete;
  NumericalStabilityManager& operator=(const NumericalStabilityManager&) = delete;

  /// Takes the optimizer's step, unless it is left out. `loss`: one number, not scaled; undefined where there is none.
  /// `take`: takes the step in place of optimizer.step(), such as `[&] { scaler.step(optimizer); }`; with `scaled`, an
  /// overflow of gradients is no spike.
  ///
  /// Throws Error(InvalidState) after max_rollbacks rollbacks that led nowhere, and what the step throws.
  void step(const at::Tensor& loss = {}, const std::function<void()>& take = {}, bool scaled = false);

  /// Tensors to roll back as well, such as a model's buffers.
  void restore_also(std::vector<at::Tensor> tensors);
  /// Other state: `capture` is called for each snapshot and returns what brings that state back.
  void restore_also(std::function<std::function<void()>()> capture);

  /// Whether the last step() ended in a rollback.
  [[nodiscard]] bool rolled_back() const noexcept;
  [[nodiscard]] std::int64_t rollbacks() const noexcept;

  /// Whether the coming batch spiked before a rollback; it then counts as done and is to be left out. For loops whose
  /// data is rolled back too.
  bool skip_batch();

  /// Everything that happened, oldest first. Off the CPU this waits for the device.
  [[nodiscard]] const std::vector<StabilityEvent>& events();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace oxytorch::optim
