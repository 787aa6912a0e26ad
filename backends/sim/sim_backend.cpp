#include "backends/sim/sim_backend.h"

#include <algorithm>
#include <atomic>
#include <cinttypes>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <iterator>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <thread>
#include <utility>

#include "backends/last_error.h"
#include "backends/sim/device.h"
#include "backends/sim/kernels.h"
#include "backends/sim/mutants.h"
#include "backends/sim/queue.h"
#include "oxytorch/backend/sim.h"

namespace oxytorch::backend {
namespace sim {
namespace {

struct SimQueue {
  std::shared_ptr<QueueState> state;
};
struct SimEvent {
  explicit SimEvent(std::int32_t device) : device(device) {}
  const std::int32_t device;
  std::mutex mutex;
  std::shared_ptr<Mark> mark;
};

SimQueue* queue_of(oxy_queue queue) { return reinterpret_cast<SimQueue*>(queue); }
SimEvent* event_of(oxy_event event) { return reinterpret_cast<SimEvent*>(event); }

void apply(const SimOptions& options) {
  Settings& now = settings();
  now.devices = options.devices;
  now.memory_bytes = options.memory_bytes;
  now.latency_us = options.latency_us;
  now.link_gbps = options.link_gbps;
  now.slow_event_us = options.slow_event_us;
  now.fail_alloc = static_cast<std::int64_t>(options.fail_alloc);
  now.fail_copy = static_cast<std::int64_t>(options.fail_copy);
  now.lose_device = static_cast<std::int64_t>(options.lose_device);
  for (std::int32_t index = 0; index < kMaxDevices; ++index) {
    device(index).lost = false;
    Counters& counters = device(index).counters;
    for (auto* counter : {&counters.allocs, &counters.frees, &counters.copies, &counters.copied_bytes, &counters.fills,
                          &counters.failures, &counters.launches}) {
      counter->store(0);
    }
  }
}

// Reads OXYTORCH_SIM once; what is wrong with it is the reason of score 0.
const std::string& environment_error() {
  static const std::string* const error = [] {
    try {
      const char* text = std::getenv("OXYTORCH_SIM");
      apply(parse_sim_options(text == nullptr ? "" : text));
      return new std::string();
    } catch (const std::exception& wrong) {
      return new std::string(wrong.what());
    }
  }();
  return *error;
}

// What every call but score asks first. F2, F4 and a process that forked.
oxy_status check(std::int32_t index) {
  if (const std::string& error = environment_error(); !error.empty()) {
    return fail(OXY_INVALID_STATE, "%s", error.c_str());
  }
  if (forked()) {
    return fail(OXY_INVALID_STATE,
                "this process was forked from one that used the simulator; its threads are not here");
  }
  const int devices = settings().devices.load(std::memory_order_relaxed);
  if (mutant("accepts_bad_device") && (index < 0 || index >= devices)) return OXY_OK;
  if (index < 0 || index >= devices) {
    return fail(OXY_INVALID_ARGUMENT, "there is no simulated device %d; there are %d", index, devices);
  }
  return OXY_OK;
}

}  // namespace

oxy_status check_alive(std::int32_t index) {
  const oxy_status status = check(index);
  if (status != OXY_OK || mutant("lost_device_works")) return status;
  return device(index < 0 || index >= kMaxDevices ? 0 : index).lost.load(std::memory_order_relaxed)
             ? fail(OXY_DEVICE_LOST, "simulated device %d is lost", index)
             : OXY_OK;
}

namespace {

// Nothing may be thrown across the border (C6).
template <class Call>
oxy_status guarded(Call call) {
  try {
    return call();
  } catch (const std::bad_alloc&) {
    return fail(OXY_OUT_OF_MEMORY, "no host memory left for the simulator");
  } catch (const std::exception& error) {
    return fail(OXY_INTERNAL, "the simulator failed: %s", error.what());
  }
}

std::int32_t score(const char** reason, std::int32_t* devices) {
  const std::string& error = environment_error();
  const bool usable = error.empty();
  if (reason != nullptr) *reason = usable ? "a simulated device, for tests and rehearsals" : error.c_str();
  if (devices != nullptr) *devices = usable ? settings().devices.load() : 0;
  static std::atomic<int> calls{0};
  if (mutant("score_wanders")) return 1 + calls++ % 2;
  return usable ? 1 : 0;
}

oxy_status device_properties(std::int32_t index, oxy_device_properties* properties) {
  if (const oxy_status status = check_alive(index); status != OXY_OK) return status;
  if (properties == nullptr) return fail(OXY_INVALID_ARGUMENT, "properties is NULL");
  if (properties->size < sizeof(*properties) && !mutant("ignores_struct_size")) {
    return fail(OXY_INVALID_ARGUMENT, "properties has size %u, version 1 has %zu", properties->size,
                sizeof(*properties));
  }
  properties->flags = OXY_DEVICE_CHECKS_POINTERS | OXY_DEVICE_PEER_COPY | OXY_DEVICE_SIMULATED;
  properties->name = "Oxytorch simulator";
  properties->architecture = mutant("null_text") ? nullptr : "sim";
  properties->torch_device = "sim";
  properties->memory_bytes = settings().memory_bytes.load();
  properties->link_bytes_per_s = static_cast<std::uint64_t>(settings().link_gbps.load() * 1e9 / 8);
  properties->compute_units = 1;
  properties->alignment = kAlignment;
  return OXY_OK;
}

oxy_status memory_info(std::int32_t index, oxy_memory_info* info) {
  if (const oxy_status status = check_alive(index); status != OXY_OK) return status;
  if (info == nullptr) return fail(OXY_INVALID_ARGUMENT, "info is NULL");
  if (info->size < sizeof(*info)) {
    return fail(OXY_INVALID_ARGUMENT, "info has size %u, version 1 has %zu", info->size, sizeof(*info));
  }
  const std::uint64_t total = settings().memory_bytes.load();
  info->allocated_bytes = device(index).allocated_bytes();
  info->total_bytes = total;
  info->free_bytes = mutant("free_bytes_wrong") ? total + 1 : total - std::min(total, info->allocated_bytes);
  return OXY_OK;
}

oxy_status counters(std::int32_t index, oxy_counter* table, std::uint32_t capacity, std::uint32_t* count) {
  if (const oxy_status status = check_alive(index); status != OXY_OK) return status;
  if (count == nullptr) return fail(OXY_INVALID_ARGUMENT, "counters needs somewhere to write their number, got NULL");
  if (table == nullptr && capacity > 0) return fail(OXY_INVALID_ARGUMENT, "NULL for %u counters", capacity);
  const Counters& now = device(index).counters;
  const oxy_counter all[] = {
      {"allocs", "1", static_cast<double>(now.allocs.load())},
      {"frees", "1", static_cast<double>(now.frees.load())},
      {"copies", "1", static_cast<double>(now.copies.load())},
      {"copied_bytes", "B", static_cast<double>(now.copied_bytes)},
      {"fills", "1", static_cast<double>(now.fills.load())},
      {"failures", "1", static_cast<double>(now.failures)},
      {"launches", "1", static_cast<double>(now.launches.load())},
  };
  *count = static_cast<std::uint32_t>(std::size(all));
  const std::uint32_t room = mutant("counters_overrun") ? *count : std::min(capacity, *count);
  for (std::uint32_t i = 0; i < room && table != nullptr; ++i) table[i] = all[i];
  return OXY_OK;
}

oxy_status alloc(std::int32_t index, oxy_memory kind, std::uint64_t bytes, void** memory) {
  if (memory == nullptr) return fail(OXY_INVALID_ARGUMENT, "alloc needs somewhere to write the pointer, got NULL");
  if (!mutant("oom_leaves_pointer")) *memory = nullptr;
  if (const oxy_status status = check_alive(index); status != OXY_OK) return status;
  if (kind != OXY_MEMORY_DEVICE && kind != OXY_MEMORY_HOST) {
    return fail(OXY_INVALID_ARGUMENT, "there is no kind of memory %d", kind);
  }
  return guarded([&]() -> oxy_status { return device(std::max(index, 0)).alloc(kind, bytes, memory); });
}

oxy_status free_memory(std::int32_t index, void* memory) {
  if (const oxy_status status = check(index); status != OXY_OK) return status;
  return guarded([&]() -> oxy_status { return device(std::max(index, 0)).free(memory); });
}

}  // namespace

oxy_status submit(std::int32_t index, oxy_queue queue, Work work) {
  return guarded([&]() -> oxy_status {
    if (queue != nullptr) {
      QueueState& state = *queue_of(queue)->state;
      if (state.device_index() != index && !mutant("accepts_foreign_queue")) {
        return fail(OXY_INVALID_ARGUMENT, "a queue of device %d cannot work for device %d", state.device_index(),
                    index);
      }
      return state.enqueue(std::move(work));
    }
    if (mutant("null_queue_lags")) {
      std::thread([index, work = std::move(work)] { perform(index, work); }).detach();
      return OXY_OK;
    }
    const Failure failure = perform(index, work);
    return failure.status == OXY_OK ? OXY_OK : fail(failure.status, "%s", failure.text.c_str());
  });
}

namespace {

oxy_status outside(std::int32_t index, const void* address, std::uint64_t bytes) {
  return fail(OXY_INVALID_ARGUMENT, "%" PRIu64 " bytes at %p do not lie in one live allocation of device %d", bytes,
              address, index);
}

// The device that owns the source of a device to device copy; -1 where none does.
std::int32_t owner_of(std::int32_t first, const void* from, std::uint64_t bytes) {
  if (device(first).find(from, bytes).data != nullptr) return first;
  for (std::int32_t other = 0; other < settings().devices.load(); ++other) {
    if (other != first && device(other).find(from, bytes).data != nullptr) return other;
  }
  return -1;
}

oxy_status copy_async(std::int32_t index, oxy_queue queue, void* to, const void* from, std::uint64_t bytes,
                      oxy_copy kind) {
  if (const oxy_status status = check_alive(index); status != OXY_OK) return status;
  if (kind < OXY_COPY_HOST_TO_DEVICE || kind > OXY_COPY_DEVICE_TO_DEVICE) {
    return fail(OXY_INVALID_ARGUMENT, "there is no kind of copy %d", kind);
  }
  if (bytes == 0) return mutant("zero_bytes_refused") ? fail(OXY_INVALID_ARGUMENT, "copy of no bytes") : OXY_OK;
  if (to == nullptr || from == nullptr) {
    return fail(OXY_INVALID_ARGUMENT, "copy of %" PRIu64 " bytes from %p to %p", bytes, from, to);
  }
  const bool to_device = kind != OXY_COPY_DEVICE_TO_HOST;
  if (to_device && device(index).find(to, bytes).data == nullptr) return outside(index, to, bytes);
  Work work;
  work.kind = Work::Kind::Copy;
  work.from_device = index;
  if (kind != OXY_COPY_HOST_TO_DEVICE) {
    work.from_device = kind == OXY_COPY_DEVICE_TO_DEVICE
                           ? owner_of(index, from, bytes)
                           : (device(index).find(from, bytes).data != nullptr ? index : -1);
    if (work.from_device < 0) return outside(index, from, bytes);
  }
  work.to = to;
  work.from = from;
  work.bytes = bytes;
  work.direction = kind;
  work.fails = strikes(settings().fail_copy);
  return submit(index, queue, std::move(work));
}

oxy_status fill_async(std::int32_t index, oxy_queue queue, void* to, std::uint8_t value, std::uint64_t bytes) {
  if (const oxy_status status = check_alive(index); status != OXY_OK) return status;
  if (bytes == 0) return OXY_OK;
  if (to == nullptr) return fail(OXY_INVALID_ARGUMENT, "fill of %" PRIu64 " bytes at NULL", bytes);
  if (device(index).find(to, bytes).data == nullptr) return outside(index, to, bytes);
  Work work;
  work.kind = Work::Kind::Fill;
  work.to = to;
  work.value = value;
  work.bytes = bytes;
  return submit(index, queue, std::move(work));
}

oxy_status queue_create(std::int32_t index, const oxy_queue_options* options, oxy_queue* queue) {
  if (queue == nullptr) return fail(OXY_INVALID_ARGUMENT, "queue_create needs somewhere to write the queue, got NULL");
  *queue = nullptr;
  if (const oxy_status status = check_alive(index); status != OXY_OK) return status;
  if (options != nullptr && options->size < sizeof(*options)) {
    return fail(OXY_INVALID_ARGUMENT, "the queue's options have size %u, version 1 has %zu", options->size,
                sizeof(*options));
  }
  if (options != nullptr && (options->flags & OXY_QUEUE_WRAP_NATIVE) != 0) {
    return fail(OXY_NOT_SUPPORTED, "the simulator has no native streams to wrap");
  }
  return guarded([&]() -> oxy_status {
    auto made = std::make_unique<SimQueue>(SimQueue{std::make_shared<QueueState>(index)});
    made->state->start();
    device(index).add(made->state);
    *queue = reinterpret_cast<oxy_queue>(made.release());
    return OXY_OK;
  });
}

oxy_status queue_destroy(oxy_queue queue) {
  if (queue == nullptr) return fail(OXY_INVALID_ARGUMENT, "queue_destroy of NULL");
  if (forked()) return fail(OXY_INVALID_STATE, "queue_destroy after fork: the queue's thread is not here");
  return guarded([&]() -> oxy_status {
    const std::unique_ptr<SimQueue> owned(queue_of(queue));
    const oxy_status status = owned->state->finish();
    device(owned->state->device_index()).remove(owned->state);
    return status;
  });
}

oxy_status event_record(oxy_queue queue, oxy_event* event) {
  if (queue == nullptr || event == nullptr) return fail(OXY_INVALID_ARGUMENT, "event_record with a NULL argument");
  QueueState& state = *queue_of(queue)->state;
  if (const oxy_status status = check_alive(state.device_index()); status != OXY_OK) return status;
  return guarded([&]() -> oxy_status {
    std::unique_ptr<SimEvent> made;
    if (*event == nullptr) made = std::make_unique<SimEvent>(state.device_index());
    SimEvent* target = made != nullptr ? made.get() : event_of(*event);
    Work work;
    work.kind = Work::Kind::Record;
    work.mark = std::make_shared<Mark>();
    const std::shared_ptr<Mark> mark = work.mark;
    if (mutant("event_too_early")) mark->reach({});
    if (const oxy_status status = state.enqueue(std::move(work)); status != OXY_OK) return status;
    {
      const std::lock_guard lock(target->mutex);
      if (target->mark == nullptr || !mutant("stale_event")) target->mark = mark;
    }
    if (made != nullptr) *event = reinterpret_cast<oxy_event>(made.release());
    return OXY_OK;
  });
}

oxy_status event_wait(oxy_queue queue, oxy_event event, std::uint64_t timeout_ns, std::uint64_t* time_ns) {
  if (event == nullptr) return fail(OXY_INVALID_ARGUMENT, "event_wait for NULL");
  const std::int32_t owner = queue != nullptr ? queue_of(queue)->state->device_index() : event_of(event)->device;
  if (const oxy_status status = check_alive(owner); status != OXY_OK) return status;
  return guarded([&]() -> oxy_status {
    std::shared_ptr<Mark> mark;
    {
      const std::lock_guard lock(event_of(event)->mutex);
      mark = event_of(event)->mark;
    }
    if (queue == nullptr) return mark->wait(timeout_ns, time_ns);
    if (mutant("queue_wait_ignored")) return OXY_OK;
    if (mutant("queue_wait_blocks")) mark->wait();
    Work work;
    work.kind = Work::Kind::Wait;
    work.mark = std::move(mark);
    return queue_of(queue)->state->enqueue(std::move(work));
  });
}

oxy_status event_destroy(oxy_event event) {
  if (event == nullptr) return fail(OXY_INVALID_ARGUMENT, "event_destroy of NULL");
  delete event_of(event);
  return OXY_OK;
}

oxy_status synchronize(std::int32_t index, oxy_queue queue) {
  if (const oxy_status status = check_alive(index); status != OXY_OK) return status;
  return guarded([&]() -> oxy_status {
    if (queue != nullptr) {
      QueueState& state = *queue_of(queue)->state;
      if (state.device_index() != index) {
        return fail(OXY_INVALID_ARGUMENT, "a queue of device %d is no queue of device %d", state.device_index(), index);
      }
      return state.synchronize();
    }
    oxy_status first = OXY_OK;
    for (const auto& state : device(index).queues()) {
      const oxy_status status = state->synchronize();
      if (first == OXY_OK) first = status;
      if (mutant("sync_one_queue")) break;
    }
    return first;
  });
}

const char* last_error() {
  if (mutant("silent_errors")) return "";
  if (mutant("null_error")) return nullptr;
  if (mutant("error_shared")) {
    static char shared[kLastErrorBytes] = "";
    if (*last_error_text != '\0') std::memcpy(shared, last_error_text, sizeof(shared));
    return shared;
  }
  return last_error_text;
}

constexpr oxy_backend kTable{
    .size = sizeof(oxy_backend),
    .api_version = OXY_BACKEND_API_VERSION,
#if defined(OXY_SIM_MUTANTS)
    .name = "sim-mutant",
#else
    .name = "sim",
#endif
    .description = "A simulated device with settable size, speed and faults.",
    .kernels = &kTailKernels,
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
}  // namespace sim

const oxy_backend* sim_backend_table() { return &sim::kTable; }

oxy_status sim_backend_configure(const char* settings) {
  return sim::guarded([&]() -> oxy_status {
    sim::environment_error();
    try {
      // "" is as freshly started: the environment's settings, without their faults being used up.
      const bool fresh = settings == nullptr || *settings == '\0';
      const char* environment = std::getenv("OXYTORCH_SIM");
      sim::apply(parse_sim_options(fresh ? (environment == nullptr ? "" : environment) : settings));
      return OXY_OK;
    } catch (const std::exception& wrong) {
      return fail(OXY_INVALID_ARGUMENT, "%s", wrong.what());
    }
  });
}

void configure_sim(const SimOptions& options) {
  sim::environment_error();
  sim::apply(options);
}

void* sim_host_address(int device, const void* address) { return sim::device(device).find(address, 0).data; }

}  // namespace oxytorch::backend

#if defined(OXY_SIM_MUTANTS)
OXY_BACKEND_EXPORT const oxy_backend* oxy_backend_entry(uint32_t) { return oxytorch::backend::sim_backend_table(); }
OXY_BACKEND_EXPORT oxy_status oxy_backend_configure(const char* settings) {
  return oxytorch::backend::sim_backend_configure(settings);
}
#endif
