#include "backends/cuda/queue.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

#include "backends/last_error.h"

namespace oxytorch::backend::cuda {
namespace {

using std::chrono::steady_clock;

Address address_of(const void* memory) { return reinterpret_cast<Address>(memory); }

}  // namespace

bool pinned(const void* memory, std::uint64_t bytes) {
  const auto known = [](Address address) {
    unsigned type = 0;
    return driver().cuPointerGetAttribute(&type, kPointerMemoryType, address) == kSuccess;
  };
  return known(address_of(memory)) && known(address_of(memory) + bytes - 1);
}

Result enqueue_copy(Gpu& device, Stream stream, void* to, const void* from, std::uint64_t bytes, oxy_copy kind) {
  const Driver& cu = driver();
  if (kind == OXY_COPY_HOST_TO_DEVICE) return cu.cuMemcpyHtoDAsync_v2(address_of(to), from, bytes, stream);
  if (kind == OXY_COPY_DEVICE_TO_HOST) return cu.cuMemcpyDtoHAsync_v2(to, address_of(from), bytes, stream);
  int owner = device.index();
  if (installation().devices > 1) {
    const Result result = cu.cuPointerGetAttribute(&owner, kPointerDeviceOrdinal, address_of(from));
    if (result != kSuccess) return result;
  }
  if (owner == device.index()) return cu.cuMemcpyDtoDAsync_v2(address_of(to), address_of(from), bytes, stream);
  if (owner < 0 || owner >= installation().devices || gpu(owner).open() != OXY_OK) return kInvalidDevice;
  return cu.cuMemcpyPeerAsync(address_of(to), device.context(), address_of(from), gpu(owner).context(), bytes, stream);
}

oxy_status Mark::wait(std::uint64_t timeout_ns) {
  const Current current(gpu_);
  if (timeout_ns == UINT64_MAX) return gpu_.settle("cuEventSynchronize", driver().cuEventSynchronize(event_));
  const auto start = steady_clock::now();
  for (int turn = 0;; ++turn) {
    const Result result = driver().cuEventQuery(event_);
    if (result != kNotReady) return gpu_.settle("cuEventQuery", result);
    const auto waited = static_cast<std::uint64_t>((steady_clock::now() - start).count());
    if (waited >= timeout_ns) return OXY_NOT_READY;
    if (turn < 100) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::nanoseconds(std::min<std::uint64_t>(timeout_ns - waited, 20000)));
    }
  }
}

Queue::~Queue() {
  const Current current(gpu_);
  // finish() has waited, unless the stream was being captured.
  while (gpu_.alive() == OXY_OK && failure_.status == OXY_OK && !parts_.empty() && !parts_.back().done.load()) {
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
  if (staging_ != nullptr) gpu_.give_staging(staging_);
  if (owned_) driver().cuStreamDestroy_v2(stream_);
}

oxy_status Queue::settle(const char* call, Result result) {
  if (result == kSuccess) return OXY_OK;
  Failure failure = gpu_.failure_of(call, result);
  const oxy_status status = report(failure);
  if (status == OXY_DEVICE_ERROR) failure_ = std::move(failure);
  return status;
}

void Queue::move(void* data) {
  auto& part = *static_cast<Part*>(data);
  std::memcpy(part.to, part.from, part.bytes);
  part.done.store(true, std::memory_order_release);
}

bool Queue::capturing() {
  int status = kCaptureNone;
  return driver().cuStreamIsCapturing(stream_, &status) == kSuccess && status != kCaptureNone;
}

// For pageable memory the driver would wait for the stream (H2D) or for the copy itself (D2H), which T2 forbids. So the
// bytes go through pinned memory, moved by a host function that waits its turn in the stream like any other work. One
// piece of pinned memory is enough: the stream's order keeps the parts apart.
oxy_status Queue::stage(void* to, const void* from, std::uint64_t bytes, bool to_device) {
  if (capturing()) {
    return fail(OXY_NOT_SUPPORTED,
                "a copy of pageable host memory cannot be captured in a graph; copy from or to OXY_MEMORY_HOST");
  }
  if (staging_ == nullptr) {
    if (const oxy_status status = gpu_.take_staging(staging_); status != OXY_OK) return status;
  }
  while (!parts_.empty() && parts_.front().done.load(std::memory_order_acquire)) parts_.pop_front();
  const Driver& cu = driver();
  for (std::uint64_t offset = 0; offset < bytes; offset += kStagingBytes) {
    const std::size_t length = std::min<std::uint64_t>(kStagingBytes, bytes - offset);
    auto* target = static_cast<std::uint8_t*>(to) + offset;
    const auto* source = static_cast<const std::uint8_t*>(from) + offset;
    if (!to_device) {
      const Result result = cu.cuMemcpyDtoHAsync_v2(staging_, address_of(source), length, stream_);
      if (const oxy_status status = settle("cuMemcpyDtoHAsync", result); status != OXY_OK) return status;
    }
    Part& part =
        to_device ? parts_.emplace_back(staging_, source, length) : parts_.emplace_back(target, staging_, length);
    if (const Result result = cu.cuLaunchHostFunc(stream_, &Queue::move, &part); result != kSuccess) {
      parts_.pop_back();
      return settle("cuLaunchHostFunc", result);
    }
    if (to_device) {
      const Result result = cu.cuMemcpyHtoDAsync_v2(address_of(target), staging_, length, stream_);
      if (const oxy_status status = settle("cuMemcpyHtoDAsync", result); status != OXY_OK) return status;
    }
  }
  gpu_.tally.staged_bytes.fetch_add(bytes, std::memory_order_relaxed);
  return OXY_OK;
}

oxy_status Queue::copy(void* to, const void* from, std::uint64_t bytes, oxy_copy kind) {
  const std::lock_guard lock(mutex_);
  if (failure_.status != OXY_OK) return report(failure_);
  const bool to_device = kind == OXY_COPY_HOST_TO_DEVICE;
  if (kind != OXY_COPY_DEVICE_TO_DEVICE && !pinned(to_device ? from : to, bytes)) {
    return stage(to, from, bytes, to_device);
  }
  return settle("cuMemcpyAsync", enqueue_copy(gpu_, stream_, to, from, bytes, kind));
}

oxy_status Queue::fill(void* to, std::uint8_t value, std::uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  if (failure_.status != OXY_OK) return report(failure_);
  return settle("cuMemsetD8Async", driver().cuMemsetD8Async(address_of(to), value, bytes, stream_));
}

oxy_status Queue::record(std::shared_ptr<Mark>& mark) {
  const std::lock_guard lock(mutex_);
  if (failure_.status != OXY_OK) return report(failure_);
  Event event = nullptr;
  if (const oxy_status status = gpu_.take_event(event); status != OXY_OK) return status;
  auto made = std::make_shared<Mark>(gpu_, event);
  if (const oxy_status status = settle("cuEventRecord", driver().cuEventRecord(event, stream_)); status != OXY_OK) {
    return status;
  }
  mark = std::move(made);
  return OXY_OK;
}

oxy_status Queue::wait(const std::shared_ptr<Mark>& mark) {
  const std::lock_guard lock(mutex_);
  if (failure_.status != OXY_OK) return report(failure_);
  return settle("cuStreamWaitEvent", driver().cuStreamWaitEvent(stream_, mark->event(), 0));
}

oxy_status Queue::launch(Function function, unsigned blocks, unsigned threads, void** parameters) {
  const std::lock_guard lock(mutex_);
  if (failure_.status != OXY_OK) return report(failure_);
  gpu_.tally.launches.fetch_add(1, std::memory_order_relaxed);
  return settle("cuLaunchKernel",
                driver().cuLaunchKernel(function, blocks, 1, 1, threads, 1, 1, 0, stream_, parameters, nullptr));
}

oxy_status Queue::synchronize() {
  {
    const std::lock_guard lock(mutex_);
    if (failure_.status != OXY_OK) return report(failure_);
  }
  const Result result = driver().cuStreamSynchronize(stream_);
  const std::lock_guard lock(mutex_);
  return settle("cuStreamSynchronize", result);
}

oxy_status Queue::finish() {
  // To wait for a stream of torch's that is being captured would break the capture.
  return !owned_ && capturing() ? OXY_OK : synchronize();
}

}  // namespace oxytorch::backend::cuda
