/// Mixed precision for LibTorch: a scoped autocast, torch's loss scaler, and which dtype the hardware is good at.
#pragma once

#include <ATen/ThreadLocalState.h>
#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "oxytorch/api.h"
#include "oxytorch/system.h"

namespace oxytorch::amp {

/// Autocast for the end of the scope, as Python's `torch.autocast`.
///
/// Scopes nest; the innermost rules, and `Autocast(device, dtype, false)` switches it off inside another. The
/// previous state comes back at the end of the scope, also when an exception passes, and the cache of cast weights
/// is cleared as the outermost scope ends, so that weights written between two scopes are cast anew; weights written
/// inside a scope are not. The state is thread-local: a worker thread sees none of it unless its function came from
/// `with_autocast_state()`. Keep backward outside the scope. Not copyable, not movable. It does not ask whether the
/// dtype is fast here: see hardware_support().
///
/// Throws InvalidType for a dtype that is neither float16 nor bfloat16.
class OXY_API Autocast {
 public:
  Autocast(at::DeviceType device, at::ScalarType dtype, bool enabled = true, bool cache = true);
  ~Autocast();
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

 private:
  at::DeviceType device_;
  at::ScalarType previous_dtype_;
  bool previous_enabled_;
  bool previous_cache_;
};

namespace detail {
/// Counts as a scope of Autocast on this thread: the cache is cleared as the outermost one ends.
class OXY_API CacheScope {
 public:
  CacheScope();
  ~CacheScope();
  CacheScope(const CacheScope&) = delete;
  CacheScope& operator=(const CacheScope&) = delete;
};
}  // namespace detail

/// `function`, to be run on another thread with the autocast, grad and other thread-local state of this one. The
/// state is taken now, and put back on the other thread afterwards. The cache of cast weights, which all threads of a
/// process share, is cleared when the function ends.
template <class Function>
[[nodiscard]] auto with_autocast_state(Function&& function) {
  return [state = at::ThreadLocalState(), function = std::forward<Function>(function)](auto&&... args) mutable {
    at::ThreadLocalStateGuard guard(state);
    const detail::CacheScope scope;
    return function(std::forward<decltype(args)>(args)...);
  };
}

/// Whether a device multiplies a dtype natively, and the reason in one sentence that begins with the dtype's name.
struct HardwareSupport {
  bool native;
  std::string reason;
};

/// bfloat16: avx512_bf16 or amx_bf16 on a CPU, compute capability 8.0 on CUDA. float16: avx512_fp16 or amx_fp16 on a
/// CPU. float32 and float64 are native everywhere. `cpu` is the processor to ask about, for tests.
OXY_API HardwareSupport hardware_support(at::DeviceType device, at::ScalarType dtype,
                                         const CpuFeatures& cpu = cpu_features());

/// A dtype and the reason for it in one sentence.
struct DtypeAdvice {
  at::ScalarType dtype;
  std::string reason;
};

/// The dtype in which matrix products run best on `device`: bfloat16 where the hardware multiplies it natively, float16
/// on an older CUDA device, otherwise float32. On a CPU without such instructions bfloat16 is 2 to 3 times slower than
/// float32.
OXY_API DtypeAdvice recommend_dtype(at::DeviceType device, const CpuFeatures& cpu = cpu_features());

/// Settings of GradScaler, named and defaulted as in torch.
struct GradScalerOptions {
  double init_scale = 65536.0;
  double growth_factor = 2.0;   ///< above 1
  double backoff_factor = 0.5;  ///< below 1
  int64_t growth_interval = 2000;
  bool enabled = true;
  std::optional<double> min_scale = {};   ///< the scale never falls below this
  std::optional<double> max_scale = {};   ///< nor rises above this
  std::optional<at::Device> device = {};  ///< where scale and growth tracker live; where not given, with the first loss
};

/// torch.amp.GradScaler for C++: the same algorithm, the same state.
///
///     scaler.scale(loss).backward();
///     scaler.step(optimizer);
///     scaler.update();
///
/// With an optimizer of oxytorch::optim nothing is read on the host: unscale, finite check and skip happen inside
/// the step tail. With any other torch::optim::Optimizer, `step` unscales with torch's own op and reads one number
/// on the host to decide, as Python does. Optimizers that evaluate the loss several times a step (LBFGS) are refused
/// by having no closure to give. Borrows the optimizers. Not for use from several threads.
class OXY_API GradScaler {
 public:
  explicit GradScaler(GradScalerOptions options = {});

  /// `loss` times the scale; `loss` itself where the scaler is disabled.
  [[nodiscard]] at::Tensor scale(const at::Tensor& loss);
  [[nodiscard]] std::vector<at::Tensor> scale(const std::vector<at::Tensor>& losses);

  /// Divides the gradients of `optimizer` by the scale, once a step, to look at or change them before `step`.
  /// Throws InvalidState on a second call or before scale(), InvalidType for float16 gradients.
  void unscale_(torch::optim::Optimizer& optimizer);

  /// Steps `optimizer` with unscaled gradients unless one of them is not finite. Throws InvalidState on a second
  /// call before `update()` or before scale(). float16 gradients are served by the step tail only.
  void step(torch::optim::Optimizer& optimizer);

  /// Grows or shrinks the scale by what the steps since the last update found; throws InvalidState if none was taken.
  void update();
  /// Sets the scale instead; the tensor is one floating-point number and is copied, without a host read.
  void update(double new_scale);
  void update(const at::Tensor& new_scale);
  /// Forgets what was unscaled and stepped since the last update, for a step that was given up.
  void abandon();

  /// The scale as a 0-dim float32 tensor; no host read. Undefined where the scaler is disabled or before scale().
  [[nodiscard]] at::Tensor scale_tensor() const { return scale_; }
  /// 0-dim float32: above 0 where the last step of `optimizer` was skipped. Undefined before the first step.
  [[nodiscard]] at::Tensor found_inf(torch::optim::Optimizer& optimizer) const;
  /// The scale as a number. Reads the device: not for the step path.
  [[nodiscard]] double get_scale() const;
  [[nodiscard]] bool is_enabled() const noexcept { return options_.enabled; }

  /// As in torch, with checks: a factor of 1 stops growth or backoff.
  [[nodiscard]] double get_growth_factor() const noexcept { return options_.growth_factor; }
  [[nodiscard]] double get_backoff_factor() const noexcept { return options_.backoff_factor; }
  [[nodiscard]] int64_t get_growth_interval() const noexcept { return options_.growth_interval; }
  void set_growth_factor(double factor);
  void set_backoff_factor(double factor);
  void set_growth_interval(int64_t interval);

  /// Python's keys: scale, growth_factor, backoff_factor, growth_interval, _growth_tracker; empty where disabled. The
  /// bounds are settings, not state. Reads the device.
  [[nodiscard]] std::map<std::string, double> state_dict() const;
  /// A scale outside of this scaler's bounds is taken to the nearer one. A disabled scaler loads nothing. Throws
  /// InvalidArgument where a key is missing or a value cannot be meant; nothing is changed then.
  void load_state_dict(const std::map<std::string, double>& state);

 private:
  enum class Stage { Ready, Unscaled, Stepped };
  struct PerOptimizer {
    Stage stage = Stage::Ready;
    at::Tensor found_inf;
  };
  PerOptimizer& entry(torch::optim::Optimizer& optimizer);
  void unscale(torch::optim::Optimizer& optimizer, PerOptimizer& entry);
  void place(at::Device device);
  void check_placed(const char* method) const;
  void clamp_scale();

  GradScalerOptions options_;
  int64_t init_growth_tracker_ = 0;
  at::Tensor scale_;
  at::Tensor growth_tracker_;
  std::unordered_map<torch::optim::Optimizer*, PerOptimizer> optimizers_;
};

}  // namespace oxytorch::amp
