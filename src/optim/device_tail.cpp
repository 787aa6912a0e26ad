#include "optim/device_tail.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <cstddef>
#include <cstring>
#include <string>
#include <utility>

#include "optim/torch_versions.h"
#include "oxytorch/error.h"
#include "oxytorch/logging.h"

namespace oxytorch::optim {
namespace {

using kernels::ElementType;
using kernels::Rule;

static_assert(int{OXY_F32} == static_cast<int>(ElementType::F32) &&
              int{OXY_BF16} == static_cast<int>(ElementType::BF16) &&
              int{OXY_F16} == static_cast<int>(ElementType::F16) &&
              int{OXY_INT8} == static_cast<int>(ElementType::Int8));
static_assert(int{OXY_RULE_ADAMW} == static_cast<int>(Rule::AdamW) &&
              int{OXY_RULE_ADAM} == static_cast<int>(Rule::Adam) && int{OXY_RULE_SGD} == static_cast<int>(Rule::Sgd) &&
              int{OXY_RULE_LION} == static_cast<int>(Rule::Lion) &&
              int{OXY_RULE_ADAGRAD} == static_cast<int>(Rule::Adagrad) &&
              int{OXY_RULE_RMSPROP} == static_cast<int>(Rule::RmsProp));

// Tensors are compared as bytes.
static_assert(std::has_unique_object_representations_v<oxy_tail_tensor>);

bool has_step_tail(const oxy_kernels* kernels) {
  return kernels != nullptr && kernels->size >= offsetof(oxy_kernels, tail_apply) + sizeof(kernels->tail_apply) &&
         kernels->tail_create != nullptr && kernels->tail_destroy != nullptr && kernels->tail_configure != nullptr &&
         kernels->tail_measure != nullptr && kernels->tail_judge != nullptr && kernels->tail_apply != nullptr;
}

oxy_tail_tensor as_given(const kernels::TailTensor& t) {
  oxy_tail_tensor given{};
  given.param = t.param;
  given.grad = t.grad;
  given.master = t.master;
  given.low_bits = t.low_bits;
  given.copy = t.copy;
  for (int k = 0; k < 3; ++k) {
    given.state[k] = t.state[k].data;
    given.scale[k] = t.state[k].scale;
  }
  given.ema = t.ema;
  given.step = t.step;
  given.numel = t.numel;
  given.rows = t.rows;
  given.group = t.group;
  given.stream = t.stream;
  given.type = static_cast<oxy_element>(t.type);
  given.grad_type = static_cast<oxy_element>(t.grad_type);
  given.state_type = static_cast<oxy_element>(t.state_type);
  given.copy_type = static_cast<oxy_element>(t.copy_type);
  given.first = t.first ? 1 : 0;
  return given;
}

bool same(const oxy_tail_group& a, const oxy_tail_group& b) {
  return a.lr == b.lr && a.lr_tensor == b.lr_tensor && a.beta1 == b.beta1 && a.beta2 == b.beta2 && a.eps == b.eps &&
         a.weight_decay == b.weight_decay && a.momentum == b.momentum && a.dampening == b.dampening &&
         a.lr_decay == b.lr_decay && a.rule == b.rule && a.lr_type == b.lr_type && a.nesterov == b.nesterov &&
         a.maximize == b.maximize;
}

c10::impl::VirtualGuardImpl guard_of(c10::Device device) { return c10::impl::VirtualGuardImpl(device.type()); }

}  // namespace

std::optional<backend::Device> device_with_kernels(c10::Device device) {
  const std::string type = c10::DeviceTypeName(device.type(), /*lower_case=*/true);
  backend::Registry& registry = backend::Registry::instance();
  registry.discover();
  for (const backend::Backend* candidate : registry.backends()) {
    if (!has_step_tail(candidate->table().kernels)) continue;
    // The torch device of index i is the backend's i-th of that type.
    int before = 0;
    const std::vector<backend::DeviceInfo> devices = candidate->info().devices;
    for (std::size_t i = 0; i < devices.size(); ++i) {
      if (devices[i].torch_device != type) continue;
      if (before++ == std::max<int>(device.index(), 0)) return backend::Device(*candidate, static_cast<int>(i));
    }
  }
  return std::nullopt;
}

StreamQueue::StreamQueue(const backend::Device& device, c10::Device torch_device)
    : device_(device), torch_device_(torch_device) {
  const auto guard = guard_of(torch_device_);
  try {
    void* const handle = native_stream(guard, guard.getStream(torch_device_));
    queues_.emplace(handle, backend::Queue::wrap(device_, handle));
    return;
  } catch (const c10::Error&) {
    wraps_ = false;
  } catch (const Error& refused) {
    if (refused.code() != ErrorCode::NotSupported) throw;
    wraps_ = false;
  }
  guard.synchronizeStream(guard.getStream(torch_device_));
  queues_.emplace(nullptr, backend::Queue(device_));
  log_once(LogLevel::Info, "streams of " + device_.backend().name(),
           "backend '" + device_.backend().name() + "' cannot wrap torch's streams: its kernels run on a queue of " +
               "their own, and the host waits between them and torch's operators",
           "optim");
}

oxy_queue StreamQueue::after_torch() {
  const auto guard = guard_of(torch_device_);
  const c10::Stream stream = guard.getStream(torch_device_);
  if (!wraps_) {
    guard.synchronizeStream(stream);
    return current_ = queues_.begin()->second.handle();
  }
  void* const handle = native_stream(guard, stream);
  auto found = queues_.find(handle);
  if (found == queues_.end()) found = queues_.emplace(handle, backend::Queue::wrap(device_, handle)).first;
  return current_ = found->second.handle();
}

void StreamQueue::before_torch() {
  if (!wraps_ && current_ != nullptr) queues_.begin()->second.synchronize();
}

void StreamQueue::finish() noexcept {
  if (current_ != nullptr) device_.table().synchronize(device_.index(), current_);
}

DeviceTail::DeviceTail(const backend::Device& device, std::shared_ptr<StreamQueue> queue,
                       std::vector<kernels::TailTensor> tensors)
    : device_(device), queue_(std::move(queue)), tensors_(std::move(tensors)) {
  for (const kernels::TailTensor& tensor : tensors_) next_.push_back(as_given(tensor));
}

std::unique_ptr<DeviceTail> DeviceTail::make(const backend::Device& device, std::shared_ptr<StreamQueue> queue,
                                             std::vector<kernels::TailTensor> tensors) {
  std::unique_ptr<DeviceTail> made(new DeviceTail(device, std::move(queue), std::move(tensors)));
  const oxy_status status = made->kernels().tail_create(device.index(), made->next_.data(),
                                                        static_cast<std::uint32_t>(made->next_.size()), &made->tail_);
  if (status != OXY_NOT_SUPPORTED) {
    made->check(status, "tail_create");
    return made;
  }
  log_once(LogLevel::Warn, "step tail of " + device.backend().name(),
           "backend '" + device.backend().name() + "' does not serve these parameters with its own kernels (" +
               device.table().last_error() + "); the step runs as torch's operators",
           "optim");
  return nullptr;
}

DeviceTail::~DeviceTail() {
  if (tail_ == nullptr) return;
  queue_->finish();
  kernels().tail_destroy(tail_);
}

void DeviceTail::configure(std::span<const oxy_tail_group> groups) {
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    next_[i] = as_given(tensors_[i]);
    // The tail keeps `first` itself, from when it was told about this buffer.
    if (!given_.empty() && next_[i].state[0] == given_[i].state[0]) next_[i].first = given_[i].first;
  }
  const bool same_tensors = next_.size() == given_.size() &&
                            std::memcmp(next_.data(), given_.data(), next_.size() * sizeof(oxy_tail_tensor)) == 0;
  if (same_tensors && std::equal(groups.begin(), groups.end(), given_groups_.begin(), given_groups_.end(), same)) {
    return;
  }
  // Forgotten until the call has succeeded, so that a failing one is made again.
  std::vector<oxy_tail_tensor> before = std::exchange(given_, {});
  check(kernels().tail_configure(tail_, at_, next_.data(), static_cast<std::uint32_t>(next_.size()), groups.data(),
                                 static_cast<std::uint32_t>(groups.size())),
        "tail_configure");
  before.assign(next_.begin(), next_.end());
  given_ = std::move(before);
  given_groups_.assign(groups.begin(), groups.end());
}

void DeviceTail::measure(double* sums) { check(kernels().tail_measure(tail_, at_, sums), "tail_measure"); }

void DeviceTail::judge(const double* sums, const oxy_tail_settings& settings, const oxy_tail_results& results,
                       oxy_tail_verdict* verdict) {
  check(kernels().tail_judge(tail_, at_, sums, &settings, &results, verdict), "tail_judge");
}

void DeviceTail::apply(const oxy_tail_verdict* verdict, const oxy_tail_settings& settings,
                       const oxy_tail_results& results) {
  check(kernels().tail_apply(tail_, at_, verdict, &settings, &results), "tail_apply");
}

}  // namespace oxytorch::optim
