/// What a StepTail is made of; its parts are in slot.h (state), work.cpp (gradients and the native plan), host_step.cpp
/// and device_step.cpp (a step where memory is the host's, and elsewhere).
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "optim/composite.h"
#include "optim/device_tail.h"
#include "optim/memory_ranges.h"
#include "optim/slot.h"
#include "oxytorch/backend_kernels.h"
#include "oxytorch/kernels/step_tail.h"
#include "oxytorch/optim/step_tail.h"

namespace oxytorch::optim {

constexpr double kClipEpsilon = 1e-6;  // torch.nn.utils.clip_grad_norm_

/// torch's own intra-op pool: all tensors of a pass run in one region of it.
kernels::Parallel intra_op_pool();

/// Under a loss scale, inf and NaN are handled by the scaler.
inline bool is_scaled(const StepInputs& in) { return in.grad_scale.defined() || in.found_inf.defined(); }

/// The slots that one call works on, divided into those with native kernels and the others.
struct Work {
  std::vector<std::size_t> members;
  std::optional<kernels::StepTailPlan> plan;  // on the CPU
  std::unique_ptr<DeviceTail> tail;           // elsewhere
  std::vector<std::size_t> planned;           // slots in the order of either
  std::vector<PlannedTensor> held;            // parameter and state of the planned slots, one slot after the other
  std::vector<std::size_t> held_end;          // of each planned slot
  bool watched = false;                       // some slot is
  bool grads_moved = false;                   // since they were last compared
  bool grads_shared = false;                  // some have memory in common; known with zero_grads alone
  Memory written;                             // parameters and state of the members
  bool in_order = false;                      // a gradient lies there: one parameter after the other, as torch does
  bool served = false;                        // the device has kernels that take these tensors
  std::vector<std::size_t> others;
  std::vector<CompositeParam> composite;  // of the others, those with a gradient in this step
  std::vector<std::size_t> composite_index;
  std::vector<std::int64_t> places_are;  // composite_index when `places` was made
  at::Tensor places;                     // the same on the device
  std::vector<double> known;             // for the plan's measure()
  std::uint64_t generation = 0;

  [[nodiscard]] std::span<kernels::TailTensor> native() {
    if (plan) return plan->tensors();
    return tail ? tail->tensors() : std::span<kernels::TailTensor>();
  }
};

/// What the native rounds of a device work with.
struct DeviceRound {
  bool looked = false;
  std::optional<backend::Device> device;  // whose backend has kernels
  std::shared_ptr<StreamQueue> queue;
  std::vector<oxy_tail_group> groups;
  std::vector<at::Tensor> rates;     // of groups whose learning rate is a tensor of another dtype
  std::array<at::Tensor, 4> inputs;  // likewise, of a step's inputs
  at::Tensor sums;                   // fp64 [slots]
  at::Tensor verdict;                // an oxy_tail_verdict: fp64 [4]
};

struct StepTail::Impl : Recipe {
  std::vector<Slot> slots;
  TailStats stats;
  Work all;
  std::map<std::size_t, Work> alone;  // of single slots, for step_in_backward
  std::vector<kernels::TailGroup> native_groups;
  std::vector<at::Tensor> displaced;  // the parameters' values while the averages stand in for them
  at::Tensor reported_norms;          // of gradients that grad_ready() used up
  NormReducer reducer;
  DeviceRound device_round;
  std::uint64_t generation = 1;  // advanced whenever plans no longer match the slots

  [[nodiscard]] at::Device device() const { return slots.front().device; }

  // ---- work.cpp

  /// Collects the gradients; nothing is changed that a failure would leave half done. True where state was made.
  bool gather(Work& work);
  bool prepare(Work& work);
  bool bind(Work& work);
  bool bind_native(Work& work);
  bool bind_gradient(Work& work, std::size_t at, kernels::TailTensor& native);
  bool bind_others(Work& work);
  void find_shared_grads(Work& work);
  void note_written(Work& work);
  /// A member whose gradient lies in memory that the step writes; null for none.
  [[nodiscard]] const Slot* reads_written(const Work& work) const;
  /// Throws where zeros over the gradients would be zeros over that.
  void refuse_zeros(const Work& work) const;
  /// Whether a run writes zeros over its gradients. With step_in_backward there is one for each parameter, and step()
  /// does it after the last: gradients may have memory in common.
  [[nodiscard]] bool zeroes() const { return options.zero_grads && !options.step_in_backward; }
  void bind_composite(Work& work, std::size_t index, const at::Tensor& grad);
  bool inspect(Slot& slot, const at::Tensor& grad, kernels::TailTensor& native);
  void note_tensors(Work& work);
  [[nodiscard]] bool can_be_native(const Slot& slot) const;
  [[nodiscard]] kernels::TailTensor tail_tensor(std::size_t index) const;
  void build_plan(Work& work);
  [[nodiscard]] bool device_serves();
  /// All but the learning rate.
  [[nodiscard]] kernels::TailGroup native_group(const GroupOptions& options) const;
  /// After the kernels ran.
  void note_native_writes(Work& work);
  /// With zero_grads: those that the kernels do not zero, or only a copy of.
  void zero_other_grads(const Work& work);

  // ---- host_step.cpp: memory of the device is memory of the host, so verdict and coefficient are plain numbers

  void step_on_host(Work& work, const StepInputs& in);
  double measure(Work& work, const kernels::Parallel& pool, double inverse);
  void collect_norms(Work& work);
  void fill_native_groups();
  [[nodiscard]] kernels::TailSettings base_settings() const;

  // ---- device_step.cpp: every value stays on the device

  void step_on_device(Work& work, const StepInputs& in);
  void step_natively(Work& work, const StepInputs& in);
  void fill_device_groups();
  [[nodiscard]] oxy_tail_settings device_settings(const Work& work, const StepInputs& in);
  [[nodiscard]] oxy_tail_results device_results() const;
  /// The slots of work.composite as an index tensor.
  const at::Tensor& places(Work& work);
  at::Tensor record_norms(Work& work, const at::Tensor& squares, const at::Tensor& inverse);

  // ---- both

  bool run(Work& work, const StepInputs& in);
  /// Whether the step needs the gradients' norms.
  [[nodiscard]] bool measures(const StepInputs& in) const {
    return is_scaled(in) || options.clip_norm > 0 || options.nonfinite != NonFinite::Propagate ||
           options.collect_stats || in.norm_limit.defined();
  }
  /// Whether another parameter's gradient, which may be yet to come, is to be summed into the memory of this one's.
  [[nodiscard]] bool shares_gradient(std::size_t index) const;
  /// A step of one parameter; with step_in_backward norms come one at a time and are shown together by step().
  bool run_alone(std::size_t index, const StepInputs& in);
  void run_composite(Work& work, CompositeStep& step);
  [[nodiscard]] at::Tensor reduced(const at::Tensor& sums) const;
  /// Norms of parameters and updates over all shards, from those that this step took of its own.
  void reduce_statistics(const Work& work);
  void create_stats();
  /// `norms`: of each slot's gradient, on any device.
  [[noreturn]] void raise_nonfinite(const at::Tensor& norms) const;
};

}  // namespace oxytorch::optim
