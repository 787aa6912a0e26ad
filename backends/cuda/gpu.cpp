#include "backends/cuda/gpu.h"

#include <algorithm>
#include <chrono>
#include <cinttypes>
#include <cmath>
#include <cstdio>

#include "backends/cuda/nvml.h"
#include "backends/cuda/queue.h"
#include "backends/last_error.h"

namespace oxytorch::backend::cuda {
namespace {

double steady_ns() {
  const auto since = std::chrono::steady_clock::now().time_since_epoch();
  return static_cast<double>(std::chrono::duration_cast<std::chrono::nanoseconds>(since).count());
}

oxy_status status_of(Result result) {
  switch (result) {
    case kSuccess: return OXY_OK;
    case kNotReady: return OXY_NOT_READY;
    case kOutOfMemory: return OXY_OUT_OF_MEMORY;
    case kInvalidValue:
    case kInvalidDevice:
    case kInvalidHandle: return OXY_INVALID_ARGUMENT;
    case kNotPermitted:
    case kNotSupported:
    case kInvalidImage:
    case kNoBinaryForGpu:
    case kInvalidPtx:
    case kUnsupportedPtx:
    case kJitCompilerNotFound:
    case kNotFound: return OXY_NOT_SUPPORTED;
    case kNotInitialized: return OXY_INVALID_STATE;
    // After these the context, and with it torch's, can do nothing more in this process.
    case kDeinitialized:
    case kDeviceUnavailable:
    case kNoDevice:
    case kInvalidContext:
    case kEccUncorrectable:
    case kNvlinkUncorrectable:
    case kIllegalAddress:
    case kLaunchTimeout:
    case kContextIsDestroyed:
    case kAssert:
    case kHardwareStackError:
    case kIllegalInstruction:
    case kMisalignedAddress:
    case kInvalidAddressSpace:
    case kInvalidPc:
    case kLaunchFailed:
    case kSystemNotReady:
    case kMpsConnectionFailed:
    case kMpsRpcFailure: return OXY_DEVICE_LOST;
    default: break;
  }
  // A stream that is being captured into a graph cannot do what was asked.
  if (result >= kCaptureUnsupported && result <= kCaptureWrongThread) return OXY_INVALID_STATE;
  // Tensor memory, contained and later faults of a running kernel.
  if (result > kLaunchFailed && result < kNotPermitted) return OXY_DEVICE_LOST;
  return OXY_DEVICE_ERROR;
}

}  // namespace

oxy_status report(const Failure& failure) {
  return failure.status == OXY_OK ? OXY_OK : fail(failure.status, "%s", failure.text.c_str());
}

// Never destroyed: work may still run when static objects go.
Gpu& gpu(int index) {
  static const std::vector<Gpu*>* const all = [] {
    auto* made = new std::vector<Gpu*>();
    for (int i = 0; i < installation().devices; ++i) made->push_back(new Gpu(i));
    return made;
  }();
  return *(*all)[static_cast<std::size_t>(index)];
}

Gpu::Gpu(int index) : index_(index) {
  const Driver& cu = driver();
  found_ = cu.cuDeviceGet(&device_, index);
  if (found_ != kSuccess) return;
  char text[256] = "";
  if (cu.cuDeviceGetName(text, sizeof(text), device_) == kSuccess && *text != '\0') name_ = text;
  if (cu.cuDeviceGetPCIBusId(text, sizeof(text), device_) == kSuccess) bus_id_ = text;
  std::size_t bytes = 0;
  found_ = cu.cuDeviceTotalMem_v2(&bytes, device_);
  total_bytes_ = bytes;
  int major = 0, minor = 0, multiprocessors = 0;
  if (found_ == kSuccess) found_ = cu.cuDeviceGetAttribute(&major, kAttributeMajor, device_);
  if (found_ == kSuccess) found_ = cu.cuDeviceGetAttribute(&minor, kAttributeMinor, device_);
  if (found_ == kSuccess) found_ = cu.cuDeviceGetAttribute(&multiprocessors, kAttributeMultiprocessors, device_);
  multiprocessors_ = static_cast<std::uint32_t>(multiprocessors);
  architecture_ = "sm_" + std::to_string(major) + std::to_string(minor);
}

oxy_status Gpu::open() {
  if (open_.load(std::memory_order_acquire)) return OXY_OK;
  const std::lock_guard lock(opening_);
  if (open_.load(std::memory_order_relaxed)) return OXY_OK;
  if (const oxy_status status = settle("cuDeviceGet", found_); status != OXY_OK) return status;
  if (context_ == nullptr) {
    Context context = nullptr;
    if (const oxy_status status =
            settle("cuDevicePrimaryCtxRetain", driver().cuDevicePrimaryCtxRetain(&context, device_));
        status != OXY_OK) {
      return status;
    }
    context_ = context;
  }
  if (const oxy_status status = start_clock(); status != OXY_OK) return status;
  open_.store(true, std::memory_order_release);
  return OXY_OK;
}

// Ties the device's events to the host's clock: one event, reached now.
oxy_status Gpu::start_clock() {
  const Current current(*this);
  Event event = nullptr;
  if (const oxy_status status = take_event(event); status != OXY_OK) return status;
  auto mark = std::make_shared<Mark>(*this, event);
  const oxy_status status =
      blocking("cuEventRecord", [&](Stream stream) { return driver().cuEventRecord(event, stream); });
  if (status != OXY_OK) return status;
  const std::lock_guard lock(clock_mutex_);
  clock_mark_ = std::move(mark);
  clock_ns_ = steady_ns();
  return OXY_OK;
}

std::uint64_t Gpu::time_of(const std::shared_ptr<Mark>& mark) {
  // The driver counts in float milliseconds: over more than some seconds the later mark becomes the new origin.
  constexpr double kLongestNs = 4e9;
  const std::lock_guard lock(clock_mutex_);
  if (mark->time_ns != 0) return mark->time_ns;
  float milliseconds = 0;
  if (driver().cuEventElapsedTime(&milliseconds, clock_mark_->event(), mark->event()) != kSuccess) return 0;
  const double elapsed_ns = static_cast<double>(milliseconds) * 1e6;
  const double time_ns = clock_ns_ + elapsed_ns;
  mark->time_ns = static_cast<std::uint64_t>(std::max(1.0, std::round(time_ns)));
  if (elapsed_ns > kLongestNs) {
    clock_mark_ = mark;
    clock_ns_ = time_ns;
  }
  return mark->time_ns;
}

oxy_status Gpu::properties(oxy_device_properties& properties) {
  if (const oxy_status status = settle("cuDeviceGetAttribute", found_); status != OXY_OK) return status;
  std::call_once(link_asked_, [this] { link_bytes_per_s_ = nvml_link_bytes_per_s(bus_id_); });
  properties.flags = OXY_DEVICE_CHECKS_POINTERS | OXY_DEVICE_PEER_COPY;
  properties.name = name_.c_str();
  properties.architecture = architecture_.c_str();
  properties.torch_device = "cuda";
  properties.memory_bytes = total_bytes_;
  properties.link_bytes_per_s = link_bytes_per_s_;
  properties.compute_units = multiprocessors_;
  properties.alignment = kAlignment;
  return OXY_OK;
}

Failure Gpu::failure_of(const char* call, Result result) {
  const oxy_status status = status_of(result);
  if (status == OXY_OK || status == OXY_NOT_READY) return {status, {}};
  const char* name = nullptr;
  const char* text = nullptr;
  driver().cuGetErrorName(result, &name);
  driver().cuGetErrorString(result, &text);
  char sentence[400];
  std::snprintf(sentence, sizeof(sentence), "%s on CUDA device %d failed: %s (%d), %s", call, index_,
                name == nullptr ? "unknown status" : name, result, text == nullptr ? "no text" : text);
  tally.failures.fetch_add(1, std::memory_order_relaxed);
  if (status == OXY_DEVICE_LOST) lose(sentence);
  return {status, sentence};
}

oxy_status Gpu::refuse(const char* call, Result result) {
  const Failure failure = failure_of(call, result);
  return failure.status == OXY_NOT_READY ? OXY_NOT_READY : report(failure);
}

void Gpu::lose(const std::string& why) {
  const std::string* none = nullptr;
  const auto* reason =
      new std::string("CUDA device " + std::to_string(index_) + " is lost for the rest of this process: " + why);
  if (!lost_.compare_exchange_strong(none, reason)) delete reason;
}

oxy_status Gpu::dead() const { return fail(OXY_DEVICE_LOST, "%s", lost_.load()->c_str()); }

oxy_status Gpu::alloc(oxy_memory kind, std::uint64_t bytes, void** out) {
  if (bytes == 0) return OXY_OK;
  // The driver rounds up, so the largest sizes never reach it.
  if (kind == OXY_MEMORY_DEVICE ? bytes > total_bytes_ : bytes > UINT64_MAX / 2) {
    return fail(OXY_OUT_OF_MEMORY, "cannot allocate %" PRIu64 " bytes: CUDA device %d has %" PRIu64, bytes, index_,
                total_bytes_);
  }
  if (const oxy_status status = open(); status != OXY_OK) return status;
  const Current current(*this);
  void* memory = nullptr;
  if (kind == OXY_MEMORY_HOST) {
    const Result result = driver().cuMemHostAlloc(&memory, bytes, kMemHostAllocPortable);
    if (const oxy_status status = settle("cuMemHostAlloc", result); status != OXY_OK) return status;
  } else {
    Address address = 0;
    const Result result = driver().cuMemAlloc_v2(&address, bytes);
    if (result == kOutOfMemory) {
      return fail(OXY_OUT_OF_MEMORY,
                  "cannot allocate %" PRIu64 " bytes on CUDA device %d, which has %" PRIu64
                  ": CUDA_ERROR_OUT_OF_MEMORY",
                  bytes, index_, total_bytes_);
    }
    if (const oxy_status status = settle("cuMemAlloc", result); status != OXY_OK) return status;
    memory = reinterpret_cast<void*>(address);
  }
  {
    const std::lock_guard lock(mutex_);
    blocks_.emplace(memory, Block{bytes, kind});
    if (kind == OXY_MEMORY_DEVICE) allocated_ += bytes;
  }
  tally.allocs.fetch_add(1, std::memory_order_relaxed);
  *out = memory;
  return OXY_OK;
}

oxy_status Gpu::free(void* memory) {
  if (memory == nullptr) return OXY_OK;
  oxy_memory kind = OXY_MEMORY_DEVICE;
  {
    const std::lock_guard lock(mutex_);
    const auto found = blocks_.find(memory);
    if (found == blocks_.end()) {
      return fail(OXY_INVALID_ARGUMENT, "free of %p, which is no live allocation of CUDA device %d; freed twice?",
                  memory, index_);
    }
    kind = found->second.kind;
    if (kind == OXY_MEMORY_DEVICE) allocated_ -= found->second.bytes;
    blocks_.erase(found);
  }
  tally.frees.fetch_add(1, std::memory_order_relaxed);
  const Current current(*this);
  const Result result = kind == OXY_MEMORY_HOST ? driver().cuMemFreeHost(memory)
                                                : driver().cuMemFree_v2(reinterpret_cast<Address>(memory));
  const oxy_status status = settle("cuMemFree", result);
  return status == OXY_DEVICE_LOST ? OXY_OK : status;  // Nothing is left to give back (F4).
}

oxy_status Gpu::memory_info(oxy_memory_info& info) {
  if (const oxy_status status = open(); status != OXY_OK) return status;
  std::size_t free_bytes = 0, total = 0;
  {
    const Current current(*this);
    const Result result = driver().cuMemGetInfo_v2(&free_bytes, &total);
    if (const oxy_status status = settle("cuMemGetInfo", result); status != OXY_OK) return status;
  }
  const std::lock_guard lock(mutex_);
  info.total_bytes = total;
  info.free_bytes = free_bytes;
  info.allocated_bytes = allocated_;
  return OXY_OK;
}

oxy_status Gpu::take_stream(Stream& stream) {
  {
    const std::lock_guard lock(mutex_);
    if (!streams_.empty()) {
      stream = streams_.back();
      streams_.pop_back();
      return OXY_OK;
    }
  }
  return settle("cuStreamCreate", driver().cuStreamCreateWithPriority(&stream, kStreamNonBlocking, 0));
}

void Gpu::give_stream(Stream stream, Result result) {
  if (result == kSuccess) {
    const std::lock_guard lock(mutex_);
    streams_.push_back(stream);
  } else {
    driver().cuStreamDestroy_v2(stream);
  }
}

oxy_status Gpu::take_event(Event& event) {
  {
    const std::lock_guard lock(mutex_);
    if (!events_.empty()) {
      event = events_.back();
      events_.pop_back();
      return OXY_OK;
    }
  }
  return settle("cuEventCreate", driver().cuEventCreate(&event, 0));
}

void Gpu::give_event(Event event) {
  const std::lock_guard lock(mutex_);
  events_.push_back(event);
}

oxy_status Gpu::take_staging(void*& memory) {
  {
    const std::lock_guard lock(mutex_);
    if (!staging_.empty()) {
      memory = staging_.back();
      staging_.pop_back();
      return OXY_OK;
    }
  }
  return settle("cuMemHostAlloc", driver().cuMemHostAlloc(&memory, kStagingBytes, kMemHostAllocPortable));
}

void Gpu::give_staging(void* memory) {
  const std::lock_guard lock(mutex_);
  staging_.push_back(memory);
}

void Gpu::add(const std::shared_ptr<Queue>& queue) {
  const std::lock_guard lock(mutex_);
  queues_.push_back(queue);
}

void Gpu::remove(const std::shared_ptr<Queue>& queue) {
  const std::lock_guard lock(mutex_);
  std::erase(queues_, queue);
}

std::vector<std::shared_ptr<Queue>> Gpu::queues() {
  const std::lock_guard lock(mutex_);
  return queues_;
}

}  // namespace oxytorch::backend::cuda
