// NVIDIA cards through the driver's own interface; oxytorch/backend.h says what each slot does.
#include <algorithm>
#include <array>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <utility>

#include "backends/cuda/driver.h"
#include "backends/cuda/gpu.h"
#include "backends/cuda/handles.h"
#include "backends/cuda/kernels.h"
#include "backends/cuda/nvml.h"
#include "backends/cuda/queue.h"
#include "backends/last_error.h"

namespace oxytorch::backend::cuda {

oxy_status check(std::int32_t index) {
  const Installation& here = installation();
  if (here.devices == 0) return fail(OXY_INVALID_STATE, "%s", here.reason);
  if (forked()) {
    return fail(OXY_INVALID_STATE,
                "this process was forked from one that used CUDA, which does not work in it; start it by spawn");
  }
  if (index < 0 || index >= here.devices) {
    return fail(OXY_INVALID_ARGUMENT, "there is no CUDA device %d; there are %d", index, here.devices);
  }
  return OXY_OK;
}

oxy_status check_alive(std::int32_t index) {
  const oxy_status status = check(index);
  return status != OXY_OK ? status : gpu(index).alive();
}

oxy_status check_open(std::int32_t index) {
  const oxy_status status = check_alive(index);
  return status != OXY_OK ? status : gpu(index).open();
}

namespace {

std::int32_t score(const char** reason, std::int32_t* devices) {
  const Installation& here = installation();
  if (reason != nullptr) *reason = here.reason;
  if (devices != nullptr) *devices = here.devices;
  return here.devices > 0 ? 90 : 0;
}

oxy_status device_properties(std::int32_t index, oxy_device_properties* properties) {
  if (const oxy_status status = check_alive(index); status != OXY_OK) return status;
  if (properties == nullptr) return fail(OXY_INVALID_ARGUMENT, "properties is NULL");
  if (properties->size < sizeof(*properties)) {
    return fail(OXY_INVALID_ARGUMENT, "properties has size %u, version 1 has %zu", properties->size,
                sizeof(*properties));
  }
  return guarded([&] { return gpu(index).properties(*properties); });
}

oxy_status memory_info(std::int32_t index, oxy_memory_info* info) {
  if (const oxy_status status = check_alive(index); status != OXY_OK) return status;
  if (info == nullptr) return fail(OXY_INVALID_ARGUMENT, "info is NULL");
  if (info->size < sizeof(*info)) {
    return fail(OXY_INVALID_ARGUMENT, "info has size %u, version 1 has %zu", info->size, sizeof(*info));
  }
  return guarded([&] { return gpu(index).memory_info(*info); });
}

oxy_status counters(std::int32_t index, oxy_counter* counters, std::uint32_t capacity, std::uint32_t* count) {
  if (const oxy_status status = check_alive(index); status != OXY_OK) return status;
  if (count == nullptr) return fail(OXY_INVALID_ARGUMENT, "counters needs somewhere to write their number, got NULL");
  if (counters == nullptr && capacity > 0) {
    return fail(OXY_INVALID_ARGUMENT, "counters is NULL with capacity %u", capacity);
  }
  return guarded([&]() -> oxy_status {
    Gpu& self = gpu(index);
    const Tally& tally = self.tally;
    const auto number = [](const std::atomic<std::uint64_t>& value) { return static_cast<double>(value.load()); };
    const std::array own{oxy_counter{"allocations", "1", number(tally.allocs)},
                         oxy_counter{"frees", "1", number(tally.frees)},
                         oxy_counter{"copies", "1", number(tally.copies)},
                         oxy_counter{"copied_bytes", "B", number(tally.copied_bytes)},
                         oxy_counter{"staged_bytes", "B", number(tally.staged_bytes)},
                         oxy_counter{"fills", "1", number(tally.fills)},
                         oxy_counter{"launches", "1", number(tally.launches)},
                         oxy_counter{"failures", "1", number(tally.failures)}};
    const auto names = nvml_counters();
    *count = static_cast<std::uint32_t>(own.size() + names.size());
    std::array<double, 32> values{};
    if (nvml_sample(self.bus_id(), {values.data(), names.size()})) {
      self.lose("NVML says NVML_ERROR_GPU_IS_LOST (15), the card has fallen off the bus");
      return self.alive();
    }
    for (std::uint32_t i = 0; i < std::min(capacity, *count); ++i) {
      const std::size_t there = i - own.size();
      counters[i] = i < own.size() ? own[i] : oxy_counter{names[there].name, names[there].unit, values[there]};
    }
    return OXY_OK;
  });
}

oxy_status alloc(std::int32_t index, oxy_memory kind, std::uint64_t bytes, void** memory) {
  if (memory == nullptr) return fail(OXY_INVALID_ARGUMENT, "alloc needs somewhere to write the pointer, got NULL");
  *memory = nullptr;
  if (const oxy_status status = check_alive(index); status != OXY_OK) return status;
  if (kind != OXY_MEMORY_DEVICE && kind != OXY_MEMORY_HOST) {
    return fail(OXY_INVALID_ARGUMENT, "there is no kind of memory %d", kind);
  }
  return guarded([&] { return gpu(index).alloc(kind, bytes, memory); });
}

oxy_status free_memory(std::int32_t index, void* memory) {
  if (const oxy_status status = check(index); status != OXY_OK) return status;
  return guarded([&] { return gpu(index).free(memory); });
}

oxy_status copy_async(std::int32_t index, oxy_queue queue, void* to, const void* from, std::uint64_t bytes,
                      oxy_copy kind) {
  if (const oxy_status status = check_alive(index); status != OXY_OK) return status;
  if (kind < OXY_COPY_HOST_TO_DEVICE || kind > OXY_COPY_DEVICE_TO_DEVICE) {
    return fail(OXY_INVALID_ARGUMENT, "there is no kind of copy %d", kind);
  }
  if (bytes == 0) return OXY_OK;
  if (to == nullptr || from == nullptr) {
    return fail(OXY_INVALID_ARGUMENT, "copy of %llu bytes from %p to %p", static_cast<unsigned long long>(bytes), from,
                to);
  }
  return guarded([&]() -> oxy_status {
    Gpu& self = gpu(index);
    if (const oxy_status status = self.open(); status != OXY_OK) return status;
    if (const oxy_status status = check_owner(index, queue); status != OXY_OK) return status;
    const Current current(self);
    const oxy_status status = queue != nullptr ? queue_of(queue).copy(to, from, bytes, kind)
                                               : self.blocking("cuMemcpyAsync", [&](Stream stream) {
                                                   return enqueue_copy(self, stream, to, from, bytes, kind);
                                                 });
    if (status == OXY_OK) {
      self.tally.copies.fetch_add(1, std::memory_order_relaxed);
      self.tally.copied_bytes.fetch_add(bytes, std::memory_order_relaxed);
    }
    return status;
  });
}

oxy_status fill_async(std::int32_t index, oxy_queue queue, void* to, std::uint8_t value, std::uint64_t bytes) {
  if (const oxy_status status = check_alive(index); status != OXY_OK) return status;
  if (bytes == 0) return OXY_OK;
  if (to == nullptr) {
    return fail(OXY_INVALID_ARGUMENT, "fill of %llu bytes at NULL", static_cast<unsigned long long>(bytes));
  }
  return guarded([&]() -> oxy_status {
    Gpu& self = gpu(index);
    if (const oxy_status status = self.open(); status != OXY_OK) return status;
    if (const oxy_status status = check_owner(index, queue); status != OXY_OK) return status;
    const Current current(self);
    const oxy_status status =
        queue != nullptr ? queue_of(queue).fill(to, value, bytes)
                         : self.blocking("cuMemsetD8Async", [&](Stream stream) {
                             return driver().cuMemsetD8Async(reinterpret_cast<Address>(to), value, bytes, stream);
                           });
    if (status == OXY_OK) self.tally.fills.fetch_add(1, std::memory_order_relaxed);
    return status;
  });
}

// A stream that someone else made must be one of this device.
oxy_status check_native(Gpu& self, Stream stream) {
  Context theirs = nullptr;
  if (const oxy_status status = self.settle("cuStreamGetCtx", driver().cuStreamGetCtx(stream, &theirs));
      status != OXY_OK) {
    return status;
  }
  if (theirs == self.context()) return OXY_OK;
  // Contexts that share the primary one's device (green contexts) are as good.
  Device mine = -1, other = -2;
  Context popped = nullptr;
  driver().cuCtxGetDevice(&mine);
  if (driver().cuCtxPushCurrent_v2(theirs) == kSuccess) {
    driver().cuCtxGetDevice(&other);
    driver().cuCtxPopCurrent_v2(&popped);
  }
  if (mine == other) return OXY_OK;
  return fail(OXY_INVALID_ARGUMENT, "the native stream %p is not one of CUDA device %d", static_cast<void*>(stream),
              self.index());
}

oxy_status queue_create(std::int32_t index, const oxy_queue_options* options, oxy_queue* queue) {
  if (queue == nullptr) return fail(OXY_INVALID_ARGUMENT, "queue_create needs somewhere to write the queue, got NULL");
  *queue = nullptr;
  if (const oxy_status status = check_alive(index); status != OXY_OK) return status;
  if (options != nullptr && options->size < sizeof(*options)) {
    return fail(OXY_INVALID_ARGUMENT, "the queue's options have size %u, version 1 has %zu", options->size,
                sizeof(*options));
  }
  return guarded([&]() -> oxy_status {
    Gpu& self = gpu(index);
    if (const oxy_status status = self.open(); status != OXY_OK) return status;
    const Current current(self);
    const bool wraps = options != nullptr && (options->flags & OXY_QUEUE_WRAP_NATIVE) != 0;
    Stream stream = wraps ? static_cast<Stream>(options->native_handle) : nullptr;
    const oxy_status status = wraps ? check_native(self, stream)
                                    : self.settle("cuStreamCreate", driver().cuStreamCreateWithPriority(
                                                                        &stream, kStreamNonBlocking,
                                                                        options == nullptr ? 0 : options->priority));
    if (status != OXY_OK) return status;
    auto made = std::make_unique<QueueHandle>(QueueHandle{std::make_shared<Queue>(self, stream, !wraps)});
    self.add(made->queue);
    *queue = reinterpret_cast<oxy_queue>(made.release());
    return OXY_OK;
  });
}

oxy_status queue_destroy(oxy_queue queue) {
  if (queue == nullptr) return fail(OXY_INVALID_ARGUMENT, "queue_destroy of NULL");
  if (forked()) return fail(OXY_INVALID_STATE, "queue_destroy after fork: CUDA does not work in this process");
  return guarded([&]() -> oxy_status {
    const std::unique_ptr<QueueHandle> owned(reinterpret_cast<QueueHandle*>(queue));
    Gpu& self = owned->queue->gpu();
    const Current current(self);
    oxy_status status = self.alive();
    if (status == OXY_OK) status = owned->queue->finish();
    self.remove(owned->queue);
    return status;
  });
}

oxy_status event_record(oxy_queue queue, oxy_event* event) {
  if (queue == nullptr || event == nullptr) return fail(OXY_INVALID_ARGUMENT, "event_record with a NULL argument");
  Gpu& self = queue_of(queue).gpu();
  if (const oxy_status status = check_alive(self.index()); status != OXY_OK) return status;
  return guarded([&]() -> oxy_status {
    const Current current(self);
    std::unique_ptr<EventHandle> made;
    if (*event == nullptr) made = std::make_unique<EventHandle>();
    EventHandle& target = made != nullptr ? *made : event_of(*event);
    std::shared_ptr<Mark> mark;
    if (const oxy_status status = queue_of(queue).record(mark); status != OXY_OK) return status;
    target.set(std::move(mark));
    if (made != nullptr) *event = reinterpret_cast<oxy_event>(made.release());
    return OXY_OK;
  });
}

oxy_status event_wait(oxy_queue queue, oxy_event event, std::uint64_t timeout_ns, std::uint64_t* time_ns) {
  if (event == nullptr) return fail(OXY_INVALID_ARGUMENT, "event_wait for NULL");
  return guarded([&]() -> oxy_status {
    const std::shared_ptr<Mark> mark = event_of(event).get();
    Gpu& self = queue != nullptr ? queue_of(queue).gpu() : mark->gpu();
    if (const oxy_status status = check_alive(self.index()); status != OXY_OK) return status;
    const Current current(self);
    if (queue != nullptr) return queue_of(queue).wait(mark);
    const oxy_status status = mark->wait(timeout_ns);
    if (status == OXY_OK && time_ns != nullptr) *time_ns = self.time_of(mark);
    return status;
  });
}

oxy_status event_destroy(oxy_event event) {
  if (event == nullptr) return fail(OXY_INVALID_ARGUMENT, "event_destroy of NULL");
  if (forked()) return fail(OXY_INVALID_STATE, "event_destroy after fork: CUDA does not work in this process");
  delete reinterpret_cast<EventHandle*>(event);
  return OXY_OK;
}

oxy_status synchronize(std::int32_t index, oxy_queue queue) {
  if (const oxy_status status = check_open(index); status != OXY_OK) return status;
  return guarded([&]() -> oxy_status {
    const Current current(gpu(index));
    if (queue != nullptr) {
      const oxy_status status = check_owner(index, queue);
      return status != OXY_OK ? status : queue_of(queue).synchronize();
    }
    oxy_status first = OXY_OK;
    for (const auto& each : gpu(index).queues()) {
      const oxy_status status = each->synchronize();
      if (first == OXY_OK) first = status;
    }
    return first;
  });
}

constexpr oxy_backend kTable{
    .size = sizeof(oxy_backend),
    .api_version = OXY_BACKEND_API_VERSION,
    .name = "cuda",
    .description = "NVIDIA cards through the CUDA driver.",
    .kernels = kKernels,
    .score = score,
    .device_properties = device_properties,
    .memory_info = memory_info,
    .counters = counters,
    .alloc = alloc,
    .free = free_memory,
    .copy_async = copy_async,
    .fill_async = fill_async,
    .queue_create = queue_create,
    .queue_destroy = queue_destroy,
    .event_record = event_record,
    .event_wait = event_wait,
    .event_destroy = event_destroy,
    .synchronize = synchronize,
    .last_error = [] { return static_cast<const char*>(last_error_text); },
};

}  // namespace
}  // namespace oxytorch::backend::cuda

OXY_BACKEND_EXPORT const oxy_backend* oxy_backend_entry(uint32_t) { return &oxytorch::backend::cuda::kTable; }
