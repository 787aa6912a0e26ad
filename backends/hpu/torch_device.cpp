// The torch half of the backend `hpu`: memory, copies, queues and events of torch's device `hpu`, by the generic
// interfaces of c10 alone. Whoever registered that device (Habana's bridge; in tests a fake) is behind them. The only
// file under backends/ that knows torch: docs/decisions/0007-hpu-through-torch.md.
//
// Older bridges leave much of the guard out: without events every queue is caught up with where an event would be
// recorded, without streams of its own every queue is the default one.
#include <ATen/ATen.h>
#include <c10/core/Allocator.h>
#include <c10/core/Event.h>
#include <c10/core/GradMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#if __has_include(<c10/core/CachingDeviceAllocator.h>)
#include <c10/core/CachingDeviceAllocator.h>
#endif

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cinttypes>
#include <exception>
#include <iterator>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>

#include "backends/last_error.h"
#include "oxytorch/backend.h"

namespace oxytorch::backend::hpu {
namespace {

constexpr c10::DeviceType kType = c10::DeviceType::HPU;
const c10::Device kDevice{kType, 0};
constexpr std::uint32_t kAlignment = 64;

const c10::impl::VirtualGuardImpl& guard() {
  static const c10::impl::VirtualGuardImpl instance(kType);
  return instance;
}

template <class Call>
oxy_status guarded(const char* what, Call call) {
  try {
    const c10::NoGradGuard no_grad;
    return call();
  } catch (const c10::OutOfMemoryError& error) {
    return fail(OXY_OUT_OF_MEMORY, "%s: %s", what, error.what_without_backtrace());
  } catch (const c10::Error& error) {
    return fail(OXY_DEVICE_ERROR, "%s: %s", what, error.what_without_backtrace());
  } catch (const std::bad_alloc&) {
    return fail(OXY_OUT_OF_MEMORY, "%s: no host memory left", what);
  } catch (const std::exception& error) {
    return fail(OXY_DEVICE_ERROR, "%s: %s", what, error.what());
  }
}

// Whether the device does `call`; a guard that leaves a function out throws.
template <class Call>
bool works(Call call) noexcept {
  try {
    call();
    return true;
  } catch (...) {
    return false;
  }
}

bool has_events() {
  static const bool found = works([] {
    c10::Event event(kType);
    event.record(guard().getStream(kDevice));
    event.synchronize();
  });
  return found;
}

void finish(const c10::Stream& stream) {
  if (has_events()) {
    c10::Event event(kType);
    event.record(stream);
    event.synchronize();
  } else if (!works([&] { guard().synchronizeStream(stream); })) {
    guard().synchronizeDevice(kDevice.index());
  }
}

// ---- memory: byte tensors, so that a copy is a copy of torch's

struct Block {
  at::Tensor bytes;
  oxy_memory kind;
};

struct Counts {
  std::atomic<std::uint64_t> allocs{0}, frees{0}, copies{0}, copied_bytes{0}, fills{0};
};

struct QueueState {
  explicit QueueState(const c10::Stream& on) : stream(on) {}
  const c10::Stream stream;
  std::mutex mutex;  // of enqueuing: work of two threads does not mix
  std::mutex failure_mutex;
  oxy_status failed = OXY_OK;
  std::string failure;

  oxy_status status() {
    const std::lock_guard lock(failure_mutex);
    return failed == OXY_OK ? OXY_OK : fail(failed, "%s", failure.c_str());
  }
  // The first failure stays (F3).
  oxy_status keep(oxy_status now) {
    const std::lock_guard lock(failure_mutex);
    if (now != OXY_OK && failed == OXY_OK) {
      failed = now;
      failure = last_error_text;
    }
    return failed == OXY_OK ? OXY_OK : fail(failed, "%s", failure.c_str());
  }
};
using QueuePointer = std::shared_ptr<QueueState>;

struct Device {
  std::mutex mutex;
  std::map<std::uintptr_t, Block> blocks;
  std::uint64_t allocated_bytes = 0;
  std::set<QueuePointer> queues;
  Counts counts;
};

// Never destroyed: buffers may be freed by static destructors.
Device& device() {
  static auto* const instance = new Device();
  return *instance;
}

// The bytes [address, address + bytes) as a tensor; undefined where they are no live allocation's.
at::Tensor range(const void* address, std::uint64_t bytes) {
  const auto start = reinterpret_cast<std::uintptr_t>(address);
  const std::lock_guard lock(device().mutex);
  auto after = device().blocks.upper_bound(start);
  if (after == device().blocks.begin()) return {};
  --after;
  const std::uint64_t offset = start - after->first, size = after->second.bytes.nbytes();
  if (after->second.kind != OXY_MEMORY_DEVICE || offset > size || bytes > size - offset) return {};
  return after->second.bytes.narrow(0, static_cast<std::int64_t>(offset), static_cast<std::int64_t>(bytes));
}

at::Tensor host_range(const void* address, std::uint64_t bytes) {
  return at::from_blob(const_cast<void*>(address), {static_cast<std::int64_t>(bytes)}, at::kByte);
}

oxy_status outside(const void* address, std::uint64_t bytes) {
  return fail(OXY_INVALID_ARGUMENT, "%" PRIu64 " bytes at %p do not lie in one live allocation of the HPU", bytes,
              address);
}

// ---- the table

std::int32_t score(const char** reason, std::int32_t* devices) {
  const bool registered = c10::impl::hasDeviceGuardImpl(kType);
  const bool there = registered && guard().deviceCount() > 0;
  if (reason != nullptr) {
    *reason = !registered ? "torch has no device 'hpu' in this process (import habana_frameworks.torch first)"
              : there     ? "torch has the device 'hpu'"
                          : "torch's device 'hpu' counts no HPU";
  }
  if (devices != nullptr) *devices = there ? 1 : 0;
  return there ? 1 : 0;
}

// What torch's allocator tells, which is nothing where it is a plain one or older.
struct Told {
  std::uint64_t free = 0, total = 0;
};
Told ask_allocator() {
  Told told;
#if __has_include(<c10/core/CachingDeviceAllocator.h>)
  if (auto* allocator = dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(kType)); allocator != nullptr) {
    const auto ask = [&told](auto& one) {
      if constexpr (requires { one.getMemoryInfo(kDevice.index()); }) {
        const auto [free, total] = one.getMemoryInfo(kDevice.index());
        told = {free, total};
      }
    };
    works([&] { ask(*allocator); });
  }
#endif
  return told;
}

oxy_status device_properties(std::int32_t, oxy_device_properties* properties) {
  if (properties == nullptr || properties->size < sizeof(*properties)) {
    return fail(OXY_INVALID_ARGUMENT, "properties is NULL or its size is under %zu", sizeof(*properties));
  }
  return guarded("device_properties", [&]() -> oxy_status {
    properties->flags = OXY_DEVICE_CHECKS_POINTERS;
    properties->name = "Gaudi";
    properties->architecture = "";
    properties->torch_device = "hpu";
    properties->memory_bytes = ask_allocator().total;
    properties->link_bytes_per_s = 0;
    properties->compute_units = 0;
    properties->alignment = kAlignment;
    return OXY_OK;
  });
}

oxy_status memory_info(std::int32_t, oxy_memory_info* info) {
  if (info == nullptr || info->size < sizeof(*info)) {
    return fail(OXY_INVALID_ARGUMENT, "info is NULL or its size is under %zu", sizeof(*info));
  }
  return guarded("memory_info", [&]() -> oxy_status {
    const Told told = ask_allocator();
    info->total_bytes = told.total;
    info->free_bytes = std::min(told.free, told.total);
    const std::lock_guard lock(device().mutex);
    info->allocated_bytes = device().allocated_bytes;
    return OXY_OK;
  });
}

oxy_status counters(std::int32_t, oxy_counter* table, std::uint32_t capacity, std::uint32_t* count) {
  if (count == nullptr) return fail(OXY_INVALID_ARGUMENT, "counters needs somewhere to write their number, got NULL");
  if (table == nullptr && capacity > 0) return fail(OXY_INVALID_ARGUMENT, "NULL for %u counters", capacity);
  const Counts& now = device().counts;
  const oxy_counter all[] = {
      {"allocs", "1", static_cast<double>(now.allocs)}, {"frees", "1", static_cast<double>(now.frees)},
      {"copies", "1", static_cast<double>(now.copies)}, {"copied_bytes", "B", static_cast<double>(now.copied_bytes)},
      {"fills", "1", static_cast<double>(now.fills)},
  };
  *count = static_cast<std::uint32_t>(std::size(all));
  std::copy_n(all, std::min(capacity, *count), table);
  return OXY_OK;
}

oxy_status alloc(std::int32_t, oxy_memory kind, std::uint64_t bytes, void** memory) {
  if (kind != OXY_MEMORY_DEVICE && kind != OXY_MEMORY_HOST) {
    return fail(OXY_INVALID_ARGUMENT, "there is no kind of memory %d", kind);
  }
  if (bytes == 0) return OXY_OK;
  const std::uint64_t total = ask_allocator().total;
  if (bytes > (std::uint64_t{1} << 62) || (total != 0 && bytes > total)) {
    return fail(OXY_OUT_OF_MEMORY, "cannot allocate %" PRIu64 " bytes; the HPU has %" PRIu64, bytes, total);
  }
  return guarded("alloc", [&]() -> oxy_status {
    const auto size = static_cast<std::int64_t>(bytes);
    Block block{{}, kind};
    if (kind == OXY_MEMORY_HOST) {
      if (!works([&] { block.bytes = at::empty({size}, at::TensorOptions(at::kByte).pinned_memory(true)); })) {
        return fail(OXY_NOT_SUPPORTED, "torch pins no host memory for the HPU here");
      }
    } else {
      block.bytes = at::empty({size}, at::TensorOptions(kDevice).dtype(at::kByte));
    }
    void* const address = block.bytes.mutable_data_ptr();
    if (address == nullptr || reinterpret_cast<std::uintptr_t>(address) % kAlignment != 0) {
      return fail(OXY_NOT_SUPPORTED,
                  "torch gives HPU memory at %p; this backend needs addresses aligned to %u (lazy mode has none: set "
                  "PT_HPU_LAZY_MODE=0)",
                  address, kAlignment);
    }
    Device& here = device();
    const std::lock_guard lock(here.mutex);
    here.blocks.emplace(reinterpret_cast<std::uintptr_t>(address), std::move(block));
    if (kind == OXY_MEMORY_DEVICE) here.allocated_bytes += bytes;
    here.counts.allocs.fetch_add(1, std::memory_order_relaxed);
    *memory = address;
    return OXY_OK;
  });
}

oxy_status free_memory(std::int32_t, void* memory) {
  if (memory == nullptr) return OXY_OK;
  return guarded("free", [&]() -> oxy_status {
    Block gone;  // is given back outside of the lock
    Device& here = device();
    const std::lock_guard lock(here.mutex);
    const auto found = here.blocks.find(reinterpret_cast<std::uintptr_t>(memory));
    if (found == here.blocks.end()) {
      return fail(OXY_INVALID_ARGUMENT, "free of %p, which is no live allocation of the HPU; freed twice?", memory);
    }
    gone = std::move(found->second);
    if (gone.kind == OXY_MEMORY_DEVICE) here.allocated_bytes -= gone.bytes.nbytes();
    here.blocks.erase(found);
    here.counts.frees.fetch_add(1, std::memory_order_relaxed);
    return OXY_OK;
  });
}

QueueState* queue_of(oxy_queue queue) { return reinterpret_cast<QueuePointer*>(queue)->get(); }

// Torch's current stream is the queue's while `work` runs; without a queue the work is done when this returns.
template <class Work>
oxy_status submit(const char* what, oxy_queue queue, Work work) {
  if (queue == nullptr) {
    return guarded(what, [&]() -> oxy_status {
      work();
      finish(guard().getStream(kDevice));
      return OXY_OK;
    });
  }
  QueueState& state = *queue_of(queue);
  const std::lock_guard lock(state.mutex);
  if (const oxy_status status = state.status(); status != OXY_OK) return status;
  return state.keep(guarded(what, [&]() -> oxy_status {
    const c10::StreamGuard current(state.stream);
    work();
    return OXY_OK;
  }));
}

oxy_status copy_async(std::int32_t, oxy_queue queue, void* to, const void* from, std::uint64_t bytes, oxy_copy kind) {
  if (kind < OXY_COPY_HOST_TO_DEVICE || kind > OXY_COPY_DEVICE_TO_DEVICE) {
    return fail(OXY_INVALID_ARGUMENT, "there is no kind of copy %d", kind);
  }
  if (bytes == 0) return OXY_OK;
  if (to == nullptr || from == nullptr) {
    return fail(OXY_INVALID_ARGUMENT, "copy of %" PRIu64 " bytes from %p to %p", bytes, from, to);
  }
  at::Tensor target, source;
  const oxy_status status = guarded("copy_async", [&]() -> oxy_status {
    target = kind == OXY_COPY_DEVICE_TO_HOST ? host_range(to, bytes) : range(to, bytes);
    source = kind == OXY_COPY_HOST_TO_DEVICE ? host_range(from, bytes) : range(from, bytes);
    if (!target.defined()) return outside(to, bytes);
    return source.defined() ? OXY_OK : outside(from, bytes);
  });
  if (status != OXY_OK) return status;
  device().counts.copies.fetch_add(1, std::memory_order_relaxed);
  device().counts.copied_bytes.fetch_add(bytes, std::memory_order_relaxed);
  return submit("copy_async", queue, [&] { target.copy_(source, /*non_blocking=*/queue != nullptr); });
}

oxy_status fill_async(std::int32_t, oxy_queue queue, void* to, std::uint8_t value, std::uint64_t bytes) {
  if (bytes == 0) return OXY_OK;
  if (to == nullptr) return fail(OXY_INVALID_ARGUMENT, "fill of %" PRIu64 " bytes at NULL", bytes);
  at::Tensor target;
  const oxy_status status = guarded("fill_async", [&]() -> oxy_status {
    target = range(to, bytes);
    return target.defined() ? OXY_OK : outside(to, bytes);
  });
  if (status != OXY_OK) return status;
  device().counts.fills.fetch_add(1, std::memory_order_relaxed);
  return submit("fill_async", queue, [&] { target.fill_(value); });
}

// ---- queues and events

// Torch knows streams by number; of native ones the current and the default can be told, from torch 2.10 on.
template <class Guard>
void* native_handle_of(const Guard& of, const c10::Stream& stream) {
  if constexpr (requires { of.getStreamNativeHandle(stream); }) {
    return of.getStreamNativeHandle(stream);
  } else {
    return nullptr;
  }
}

std::optional<c10::Stream> stream_of(void* native_handle) {
  const c10::Stream current = guard().getStream(kDevice);
  if (native_handle == nullptr) return guard().getDefaultStream(kDevice);
  void* handle = nullptr;
  if (works([&] { handle = native_handle_of(guard(), current); }) && handle == native_handle) return current;
  return std::nullopt;
}

oxy_status queue_create(std::int32_t, const oxy_queue_options* options, oxy_queue* queue) {
  if (options != nullptr && options->size < sizeof(*options)) {
    return fail(OXY_INVALID_ARGUMENT, "the size of the queue's options is under %zu", sizeof(*options));
  }
  return guarded("queue_create", [&]() -> oxy_status {
    std::optional<c10::Stream> stream;
    if (options != nullptr && (options->flags & OXY_QUEUE_WRAP_NATIVE) != 0) {
      works([&] { stream = stream_of(options->native_handle); });
      if (!stream) {
        return fail(OXY_NOT_SUPPORTED, "%p is no stream of the HPU that torch can name; wrap the current one",
                    options->native_handle);
      }
    } else if (!works([&] { stream = guard().getNewStream(kDevice, options == nullptr ? 0 : options->priority); })) {
      stream = guard().getStream(kDevice);
    }
    auto made = std::make_unique<QueuePointer>(std::make_shared<QueueState>(*stream));
    const std::lock_guard lock(device().mutex);
    device().queues.insert(*made);
    *queue = reinterpret_cast<oxy_queue>(made.release());
    return OXY_OK;
  });
}

oxy_status catch_up(QueueState& state) {
  return state.keep(guarded("synchronize", [&]() -> oxy_status {
    finish(state.stream);
    return OXY_OK;
  }));
}

oxy_status queue_destroy(oxy_queue queue) {
  if (queue == nullptr) return fail(OXY_INVALID_ARGUMENT, "queue_destroy of NULL");
  const std::unique_ptr<QueuePointer> gone(reinterpret_cast<QueuePointer*>(queue));
  const oxy_status status = catch_up(**gone);
  const std::lock_guard lock(device().mutex);
  device().queues.erase(*gone);
  return status;
}

// Every recording is an event of torch's anew, so that waits asked for earlier keep theirs (E1).
struct Mark {
  QueuePointer queue;
  std::optional<c10::Event> event;  // none: reached when recorded
};
struct HpuEvent {
  std::mutex mutex;
  std::shared_ptr<Mark> mark;
};
HpuEvent* event_of(oxy_event event) { return reinterpret_cast<HpuEvent*>(event); }

std::shared_ptr<Mark> mark_of(oxy_event event) {
  const std::lock_guard lock(event_of(event)->mutex);
  return event_of(event)->mark;
}

oxy_status event_record(oxy_queue queue, oxy_event* event) {
  if (queue == nullptr || event == nullptr) return fail(OXY_INVALID_ARGUMENT, "event_record with a NULL argument");
  auto mark = std::make_shared<Mark>(Mark{*reinterpret_cast<QueuePointer*>(queue), std::nullopt});
  const oxy_status status = submit("event_record", queue, [&] {
    if (has_events()) {
      mark->event.emplace(kType);
      mark->event->record(mark->queue->stream);
    } else {
      finish(mark->queue->stream);
    }
  });
  // An event behind failed work is an event: it tells of the failure.
  if (status != OXY_OK && mark->queue->status() == OXY_OK) return status;
  return guarded("event_record", [&]() -> oxy_status {
    std::unique_ptr<HpuEvent> made = *event == nullptr ? std::make_unique<HpuEvent>() : nullptr;
    HpuEvent* const target = made != nullptr ? made.get() : event_of(*event);
    {
      const std::lock_guard lock(target->mutex);
      target->mark = std::move(mark);
    }
    if (made != nullptr) *event = reinterpret_cast<oxy_event>(made.release());
    return status;
  });
}

// Torch cannot wait for a while, so that asks again and again.
bool reached(c10::Event& event, std::uint64_t timeout_ns) {
  using std::chrono::steady_clock;
  if (timeout_ns == std::numeric_limits<std::uint64_t>::max()) {
    event.synchronize();
    return true;
  }
  const auto start = steady_clock::now();
  while (!event.query()) {
    const auto spent = std::chrono::duration_cast<std::chrono::nanoseconds>(steady_clock::now() - start).count();
    if (static_cast<std::uint64_t>(spent) >= timeout_ns) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
  return true;
}

oxy_status event_wait(oxy_queue queue, oxy_event event, std::uint64_t timeout_ns, std::uint64_t* time_ns) {
  if (event == nullptr) return fail(OXY_INVALID_ARGUMENT, "event_wait for NULL");
  const std::shared_ptr<Mark> mark = mark_of(event);
  if (queue != nullptr) {
    if (const oxy_status failed = mark->queue->status(); failed != OXY_OK) return queue_of(queue)->keep(failed);
    if (!mark->event) return OXY_OK;
    return submit("event_wait", queue, [&] { mark->event->block(queue_of(queue)->stream); });
  }
  bool done = true;
  const oxy_status status = guarded("event_wait", [&]() -> oxy_status {
    done = !mark->event || reached(*mark->event, timeout_ns);
    return OXY_OK;
  });
  if (const oxy_status failed = mark->queue->keep(status); failed != OXY_OK) return failed;
  if (done && time_ns != nullptr) *time_ns = 0;  // torch tells times between events alone
  return done ? OXY_OK : OXY_NOT_READY;
}

oxy_status event_destroy(oxy_event event) {
  if (event == nullptr) return fail(OXY_INVALID_ARGUMENT, "event_destroy of NULL");
  delete event_of(event);
  return OXY_OK;
}

oxy_status synchronize(std::int32_t, oxy_queue queue) {
  if (queue != nullptr) return catch_up(*queue_of(queue));
  std::set<QueuePointer> all;
  {
    const std::lock_guard lock(device().mutex);
    all = device().queues;
  }
  oxy_status first = OXY_OK;
  for (const QueuePointer& one : all) {
    const oxy_status status = catch_up(*one);
    if (first == OXY_OK) first = status;
  }
  return first;
}

const char* last_error() { return last_error_text; }

constexpr oxy_backend kTable{
    .size = sizeof(oxy_backend),
    .api_version = OXY_BACKEND_API_VERSION,
    .name = "hpu-torch",
    .description = "The torch half of the backend hpu.",
    .kernels = nullptr,
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
    .last_error = last_error,
};

}  // namespace
}  // namespace oxytorch::backend::hpu

OXY_BACKEND_EXPORT const oxy_backend* oxy_backend_entry(uint32_t) { return &oxytorch::backend::hpu::kTable; }
