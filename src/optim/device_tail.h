/// The step tail by the native kernels of a device's backend (oxytorch/backend_kernels.h), in the order of torch's
/// current stream.
#pragma once

#include <c10/core/Device.h>

#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "oxytorch/backend/device.h"
#include "oxytorch/backend_kernels.h"
#include "oxytorch/kernels/step_tail.h"

namespace oxytorch::optim {

/// The backend device that a torch device is, where its backend has kernels of the step tail.
std::optional<backend::Device> device_with_kernels(c10::Device device);

/// Where kernels are enqueued: torch's current stream as a queue of the backend. Where the backend or torch cannot do
/// that, a queue of the backend's own, with a wait of the host at each change of sides.
class StreamQueue {
 public:
  /// Throws c10::Error where torch can neither tell the stream's native handle nor wait for it.
  StreamQueue(const backend::Device& device, c10::Device torch_device);

  /// The queue behind all that torch was asked for so far.
  oxy_queue after_torch();
  /// What torch is asked for from here on comes behind the kernels.
  void before_torch();
  /// Waits for the kernels; for use before their memory goes.
  void finish() noexcept;

 private:
  backend::Device device_;
  c10::Device torch_device_;
  bool wraps_ = true;
  std::map<void*, backend::Queue> queues_;  // by native handle; one under null where nothing is wrapped
  oxy_queue current_ = nullptr;
};

/// The tables of a set of tensors on a device. Failures throw what backend::detail::check does.
class DeviceTail {
 public:
  /// Nothing, and a line in the log, where the backend answers that it cannot serve these tensors.
  static std::unique_ptr<DeviceTail> make(const backend::Device& device, std::shared_ptr<StreamQueue> queue,
                                          std::vector<kernels::TailTensor> tensors);
  ~DeviceTail();
  DeviceTail(const DeviceTail&) = delete;
  DeviceTail& operator=(const DeviceTail&) = delete;

  /// For refreshing pointers and types of gradients, as StepTailPlan::tensors().
  [[nodiscard]] std::span<kernels::TailTensor> tensors() noexcept { return tensors_; }

  // A round: each part is enqueued between enter() and leave().
  void enter() { at_ = queue_->after_torch(); }
  void leave() { queue_->before_torch(); }
  /// Hands over what has changed since the last call.
  void configure(std::span<const oxy_tail_group> groups);
  void measure(double* sums);
  void judge(const double* sums, const oxy_tail_settings& settings, const oxy_tail_results& results,
             oxy_tail_verdict* verdict);
  void apply(const oxy_tail_verdict* verdict, const oxy_tail_settings& settings, const oxy_tail_results& results);

 private:
  DeviceTail(const backend::Device& device, std::shared_ptr<StreamQueue> queue,
             std::vector<kernels::TailTensor> tensors);
  void check(oxy_status status, const char* call) const { backend::detail::check(device_.table(), status, call); }
  [[nodiscard]] const oxy_kernels& kernels() const { return *device_.table().kernels; }

  backend::Device device_;
  std::shared_ptr<StreamQueue> queue_;
  std::vector<kernels::TailTensor> tensors_;
  std::vector<oxy_tail_tensor> given_, next_;  // what the tail was configured with, and will be
  std::vector<oxy_tail_group> given_groups_;
  oxy_tail tail_ = nullptr;
  oxy_queue at_ = nullptr;
};

}  // namespace oxytorch::optim
