#include "backends/cpu/cpu_backend.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cinttypes>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <mutex>
#include <new>
#include <string>
#include <unordered_map>
#include <utility>

#include "backends/last_error.h"
#include "oxytorch/system.h"

namespace oxytorch::backend {
namespace {

constexpr std::uint32_t kHostAlignment = 64;
constexpr std::uint64_t kLargest = std::uint64_t{1} << 62;

// The work of a queue is done in the calling thread, so a queue is a name and every event is already reached.
struct CpuQueue {
  std::int32_t device;
};
struct CpuEvent {
  std::atomic<std::uint64_t> time_ns{0};
};

struct Block {
  std::uint64_t bytes;
  oxy_memory kind;
};

struct Memory {
  std::mutex mutex;
  std::unordered_map<void*, Block> blocks;
  std::uint64_t allocated_bytes = 0;
};

// Never destroyed: buffers may be freed by static destructors.
Memory& memory() {
  static Memory* const instance = new Memory();
  return *instance;
}

// What this process may use at most; a machine that does not tell gets no limit.
std::uint64_t total_bytes() {
  static const std::uint64_t bytes = read_memory().limit.value_or(kLargest);
  return bytes;
}

std::uint64_t now_ns() {
  const auto since = std::chrono::steady_clock::now().time_since_epoch();
  return static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(since).count());
}

const char* model_name() {
  static const std::string* const name = [] {
    std::string found = processor_name();
    return new std::string(found.empty() ? "host processor" : std::move(found));
  }();
  return name->c_str();
}

// Nothing may be thrown across the border (C6); reading the machine's files may run out of memory.
template <class Call>
oxy_status without_throwing(Call call) {
  try {
    return call();
  } catch (const std::exception& error) {
    return fail(OXY_INTERNAL, "cannot read this machine's facts: %s", error.what());
  }
}

oxy_status bad_device(std::int32_t device) {
  return fail(OXY_INVALID_ARGUMENT, "there is no cpu device %d; the only one is 0", device);
}

std::int32_t score(const char** reason, std::int32_t* devices) {
  if (reason != nullptr) *reason = "the host processor is always there";
  if (devices != nullptr) *devices = 1;
  return 10;
}

oxy_status device_properties(std::int32_t device, oxy_device_properties* properties) {
  if (device != 0) return bad_device(device);
  if (properties == nullptr || properties->size < sizeof(*properties)) {
    return fail(OXY_INVALID_ARGUMENT, "properties is NULL or its size is under %zu", sizeof(*properties));
  }
  return without_throwing([&]() -> oxy_status {
    properties->flags = OXY_DEVICE_HOST_VISIBLE | OXY_DEVICE_CHECKS_POINTERS;
    properties->name = model_name();
#if defined(__x86_64__)
    properties->architecture = "x86_64";
#elif defined(__aarch64__)
    properties->architecture = "aarch64";
#else
    properties->architecture = "";
#endif
    properties->torch_device = "cpu";
    properties->memory_bytes = total_bytes();
    properties->link_bytes_per_s = 0;
    properties->compute_units = static_cast<std::uint32_t>(read_cores().usable);
    properties->alignment = kHostAlignment;
    return OXY_OK;
  });
}

oxy_status memory_info(std::int32_t device, oxy_memory_info* info) {
  if (device != 0) return bad_device(device);
  if (info == nullptr || info->size < sizeof(*info)) {
    return fail(OXY_INVALID_ARGUMENT, "info is NULL or its size is under %zu", sizeof(*info));
  }
  return without_throwing([&]() -> oxy_status {
    const std::uint64_t total = total_bytes();
    info->total_bytes = total;
    info->free_bytes = std::min(total, read_memory().available.value_or(total));
    const std::lock_guard lock(memory().mutex);
    info->allocated_bytes = memory().allocated_bytes;
    return OXY_OK;
  });
}

oxy_status alloc(std::int32_t device, oxy_memory kind, std::uint64_t bytes, void** out) {
  if (out == nullptr) return fail(OXY_INVALID_ARGUMENT, "alloc needs somewhere to write the pointer, got NULL");
  *out = nullptr;
  if (device != 0) return bad_device(device);
  if (kind != OXY_MEMORY_DEVICE && kind != OXY_MEMORY_HOST) {
    return fail(OXY_INVALID_ARGUMENT, "there is no kind of memory %d", kind);
  }
  if (bytes == 0) return OXY_OK;
  const std::uint64_t total = total_bytes();
  void* block = nullptr;
  // The kernel may promise more than it has; what can never be there is refused here.
  if (bytes < kLargest && bytes <= total) {
    const std::uint64_t rounded = (bytes + kHostAlignment - 1) / kHostAlignment * kHostAlignment;
    block = std::aligned_alloc(kHostAlignment, rounded);
  }
  if (block == nullptr) {
    return fail(OXY_OUT_OF_MEMORY, "cannot allocate %" PRIu64 " bytes of host memory; this process may use %" PRIu64,
                bytes, total);
  }
  const std::lock_guard lock(memory().mutex);
  try {
    memory().blocks.emplace(block, Block{bytes, kind});
  } catch (const std::bad_alloc&) {
    std::free(block);
    return fail(OXY_OUT_OF_MEMORY, "no host memory left to note an allocation");
  }
  if (kind == OXY_MEMORY_DEVICE) memory().allocated_bytes += bytes;
  *out = block;
  return OXY_OK;
}

oxy_status free_memory(std::int32_t device, void* block) {
  if (device != 0) return bad_device(device);
  if (block == nullptr) return OXY_OK;
  {
    const std::lock_guard lock(memory().mutex);
    const auto found = memory().blocks.find(block);
    if (found == memory().blocks.end()) {
      return fail(OXY_INVALID_ARGUMENT, "free of %p, which is no live allocation; freed twice?", block);
    }
    if (found->second.kind == OXY_MEMORY_DEVICE) memory().allocated_bytes -= found->second.bytes;
    memory().blocks.erase(found);
  }
  std::free(block);
  return OXY_OK;
}

oxy_status copy_async(std::int32_t device, oxy_queue queue, void* to, const void* from, std::uint64_t bytes,
                      oxy_copy kind) {
  if (device != 0) return bad_device(device);
  if (kind < OXY_COPY_HOST_TO_DEVICE || kind > OXY_COPY_DEVICE_TO_DEVICE) {
    return fail(OXY_INVALID_ARGUMENT, "there is no kind of copy %d", kind);
  }
  if (bytes == 0) return OXY_OK;
  if (to == nullptr || from == nullptr) {
    return fail(OXY_INVALID_ARGUMENT, "copy of %" PRIu64 " bytes from %p to %p", bytes, from, to);
  }
  std::memcpy(to, from, bytes);
  return OXY_OK;
}

oxy_status fill_async(std::int32_t device, oxy_queue queue, void* to, std::uint8_t value, std::uint64_t bytes) {
  if (device != 0) return bad_device(device);
  if (bytes == 0) return OXY_OK;
  if (to == nullptr) return fail(OXY_INVALID_ARGUMENT, "fill of %" PRIu64 " bytes at NULL", bytes);
  std::memset(to, value, bytes);
  return OXY_OK;
}

oxy_status queue_create(std::int32_t device, const oxy_queue_options* options, oxy_queue* queue) {
  if (queue == nullptr) return fail(OXY_INVALID_ARGUMENT, "queue_create needs somewhere to write the queue, got NULL");
  *queue = nullptr;
  if (device != 0) return bad_device(device);
  if (options != nullptr && options->size < sizeof(*options)) {
    return fail(OXY_INVALID_ARGUMENT, "the size of the queue's options is under %zu", sizeof(*options));
  }
  if (options != nullptr && (options->flags & OXY_QUEUE_WRAP_NATIVE) != 0) {
    return fail(OXY_NOT_SUPPORTED, "the host processor has no native streams to wrap");
  }
  *queue = reinterpret_cast<oxy_queue>(new (std::nothrow) CpuQueue{device});
  return *queue != nullptr ? OXY_OK : fail(OXY_OUT_OF_MEMORY, "no host memory left for a queue");
}

oxy_status queue_destroy(oxy_queue queue) {
  if (queue == nullptr) return fail(OXY_INVALID_ARGUMENT, "queue_destroy of NULL");
  delete reinterpret_cast<CpuQueue*>(queue);
  return OXY_OK;
}

oxy_status event_record(oxy_queue queue, oxy_event* event) {
  if (queue == nullptr || event == nullptr) return fail(OXY_INVALID_ARGUMENT, "event_record with a NULL argument");
  if (*event == nullptr) *event = reinterpret_cast<oxy_event>(new (std::nothrow) CpuEvent{});
  if (*event == nullptr) return fail(OXY_OUT_OF_MEMORY, "no host memory left for an event");
  reinterpret_cast<CpuEvent*>(*event)->time_ns.store(now_ns(), std::memory_order_release);
  return OXY_OK;
}

oxy_status event_wait(oxy_queue queue, oxy_event event, std::uint64_t timeout_ns, std::uint64_t* time_ns) {
  if (event == nullptr) return fail(OXY_INVALID_ARGUMENT, "event_wait for NULL");
  const std::uint64_t recorded = reinterpret_cast<CpuEvent*>(event)->time_ns.load(std::memory_order_acquire);
  if (queue == nullptr && time_ns != nullptr) *time_ns = recorded;
  return OXY_OK;
}

oxy_status event_destroy(oxy_event event) {
  if (event == nullptr) return fail(OXY_INVALID_ARGUMENT, "event_destroy of NULL");
  delete reinterpret_cast<CpuEvent*>(event);
  return OXY_OK;
}

oxy_status synchronize(std::int32_t device, oxy_queue queue) { return device == 0 ? OXY_OK : bad_device(device); }

const char* last_error() { return last_error_text; }

constexpr oxy_backend kTable{
    .size = sizeof(oxy_backend),
    .api_version = OXY_BACKEND_API_VERSION,
    .name = "cpu",
    .description = "The host processor and its memory.",
    .kernels = nullptr,
    .score = score,
    .device_properties = device_properties,
    .memory_info = memory_info,
    .counters = nullptr,
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

const oxy_backend* cpu_backend_table() { return &kTable; }

}  // namespace oxytorch::backend
