/// What a StepTail is made of; its parts are in slot.h (state), work.cpp (gradients and the native plan), host_step.cpp
/// and device_step.cpp (a step where memory is the host's, and elsewhere).
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "optim/composite.h"
#include "optim/slot.h"
#include "oxytorch/kernels/step_tail.h"
#include "oxytorch/optim/step_tail.h"

namespace oxytorch::optim {

constexpr double kClipEpsilon = 1e-6;  // torch.nn.utils.clip_grad_norm_

/// torch's own intra-op pool: all tensors of a pass run in one region of it.
kernels::Parallel intra_op_pool();

/// The slots that one call works on, divided into those with native kernels and the others.
struct Work {
  std::vector<std::size_t> members;
  std::optional<kernels::StepTailPlan> plan;
  std::vector<std::size_t> planned;  // slots in the order of the plan
  std::vector<std::size_t> others;
  std::vector<CompositeParam> composite;  // of the others, those with a gradient in this step
  std::vector<std::size_t> composite_index;
  std::vector<double> known;  // for the plan's measure()
  std::uint64_t generation = 0;
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
  std::uint64_t generation = 1;  // advanced whenever plans no longer match the slots

  [[nodiscard]] at::Device device() const { return slots.front().device; }

  // ---- work.cpp

  /// Collects the gradients; nothing is changed that a failure would leave half done. True where state was made.
  bool gather(Work& work);
  bool prepare(Work& work);
  bool bind(Work& work);
  void inspect(Slot& slot, const at::Tensor& grad, kernels::TailTensor& native);
  [[nodiscard]] bool can_be_native(const Slot& slot) const;
  [[nodiscard]] kernels::TailTensor tail_tensor(std::size_t index) const;
  void build_plan(Work& work);
  void fill_native_groups();
  /// Gradients that the kernels zeroed through a copy.
  void zero_copied_grads(const Work& work);

  // ---- host_step.cpp: memory of the device is memory of the host, so verdict and coefficient are plain numbers

  void step_on_host(Work& work, const StepInputs& in);
  double measure(Work& work, const kernels::Parallel& pool, double inverse);
  void finish_native(Work& work);
  [[nodiscard]] kernels::TailSettings base_settings() const;

  // ---- device_step.cpp: every value stays on the device

  void step_on_device(Work& work, const StepInputs& in);
  at::Tensor record_norms(Work& work, const at::Tensor& squares, const at::Tensor& inverse);

  // ---- both

  bool run(Work& work, const StepInputs& in);
  /// A step of one parameter; with step_in_backward norms come one at a time and are shown together by step().
  bool run_alone(std::size_t index, const StepInputs& in);
  void run_composite(Work& work, CompositeStep& step);
  [[nodiscard]] at::Tensor reduced(const at::Tensor& sums) const;
  /// Norms of parameters and updates over all shards, from those that this step took of its own.
  void reduce_statistics(const Work& work);
  void create_stats();
  [[noreturn]] void raise_nonfinite() const;
};

}  // namespace oxytorch::optim
