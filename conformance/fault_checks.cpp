#include <cstring>
#include <thread>

#include "suite.h"

namespace conformance {
namespace {

// A refused call must say why (F1).
void refused(const Subject& subject, oxy_status status, const std::string& call,
             oxy_status wanted = OXY_INVALID_ARGUMENT) {
  expect_status(subject, status, wanted, call);
  const char* error = subject.table.last_error();
  expect(error != nullptr && *error != '\0', call + " leaves a sentence in last_error",
         error == nullptr ? "NULL" : "an empty text");
}

void bad_device(const Subject& subject) {
  const oxy_backend& table = subject.table;
  Bytes host(64);
  const Memory memory(subject, 64);
  for (const std::int32_t device : {-1, subject.devices, subject.devices + 1000, INT32_MAX, INT32_MIN}) {
    const std::string of = " of device " + std::to_string(device);
    oxy_device_properties properties{};
    properties.size = sizeof(properties);
    refused(subject, table.device_properties(device, &properties), "device_properties" + of);
    oxy_memory_info info{};
    info.size = sizeof(info);
    refused(subject, table.memory_info(device, &info), "memory_info" + of);
    void* pointer = nullptr;
    refused(subject, table.alloc(device, OXY_MEMORY_DEVICE, 64, &pointer), "alloc" + of);
    expect(pointer == nullptr, "a failed alloc gives NULL", hex(pointer));
    refused(subject, table.free(device, memory.at()), "free" + of);
    refused(subject, table.copy_async(device, nullptr, memory.at(), host.data(), 64, OXY_COPY_HOST_TO_DEVICE),
            "copy_async" + of);
    refused(subject, table.fill_async(device, nullptr, memory.at(), 0, 64), "fill_async" + of);
    std::uint32_t count = 0;
    if (table.counters != nullptr) refused(subject, table.counters(device, nullptr, 0, &count), "counters" + of);
    if (!subject.has_queues()) continue;
    oxy_queue queue = nullptr;
    refused(subject, table.queue_create(device, nullptr, &queue), "queue_create" + of);
    refused(subject, table.synchronize(device, nullptr), "synchronize" + of);
  }
}

void null_arguments(const Subject& subject) {
  const oxy_backend& table = subject.table;
  Bytes host(64);
  const Memory memory(subject, 64);
  refused(subject, table.device_properties(0, nullptr), "device_properties to NULL");
  refused(subject, table.memory_info(0, nullptr), "memory_info to NULL");
  refused(subject, table.alloc(0, OXY_MEMORY_DEVICE, 64, nullptr), "alloc to NULL");
  refused(subject, table.copy_async(0, nullptr, nullptr, host.data(), 64, OXY_COPY_HOST_TO_DEVICE), "copy to NULL");
  refused(subject, table.copy_async(0, nullptr, memory.at(), nullptr, 64, OXY_COPY_HOST_TO_DEVICE), "copy from NULL");
  refused(subject, table.fill_async(0, nullptr, nullptr, 0, 64), "fill of NULL");
  if (!subject.has_queues()) return;
  const Queue queue(subject);
  Event event(subject);
  refused(subject, table.queue_create(0, nullptr, nullptr), "queue_create to NULL");
  refused(subject, table.queue_destroy(nullptr), "queue_destroy of NULL");
  refused(subject, table.event_record(nullptr, &event.handle), "event_record on NULL");
  refused(subject, table.event_record(queue.handle(), nullptr), "event_record to NULL");
  refused(subject, table.event_wait(nullptr, nullptr, 0, nullptr), "the host's wait for NULL");
  refused(subject, table.event_wait(queue.handle(), nullptr, 0, nullptr), "a queue's wait for NULL");
  refused(subject, table.event_destroy(nullptr), "event_destroy of NULL");
}

void bad_kinds(const Subject& subject) {
  Bytes host(64);
  const Memory memory(subject, 64);
  for (const std::int32_t kind : {-1, 3, 77}) {
    const std::string named = " of kind " + std::to_string(kind);
    refused(subject, subject.table.copy_async(0, nullptr, memory.at(), host.data(), 64, kind), "copy_async" + named);
    void* pointer = nullptr;
    refused(subject, subject.table.alloc(0, kind, 64, &pointer), "alloc" + named);
  }
}

void foreign_queue(const Subject& subject) {
  subject.need_queues();
  subject.need_devices(2);
  const Queue queue(subject, 1);
  const Memory memory(subject, 64, 0);
  Bytes host(64);
  refused(subject, subject.table.fill_async(0, queue.handle(), memory.at(), 0, 64),
          "fill_async on another device's queue");
  refused(subject, subject.table.copy_async(0, queue.handle(), memory.at(), host.data(), 64, OXY_COPY_HOST_TO_DEVICE),
          "copy_async on another device's queue");
  refused(subject, subject.table.synchronize(0, queue.handle()), "synchronize of another device's queue");
}

void message_per_thread(const Subject& subject) {
  refused(subject, subject.table.memory_info(-1, nullptr), "memory_info of device -1");
  const std::string mine = subject.table.last_error();
  std::string fresh, theirs;
  std::thread([&] {
    fresh = subject.table.last_error();
    subject.table.alloc(0, 77, 64, nullptr);
    theirs = subject.table.last_error();
  }).join();
  expect(fresh.empty(), "last_error is \"\" in a thread without a failure", "\"" + fresh + "\"");
  expect(!theirs.empty(), "last_error of the failing thread is a sentence", "an empty text");
  // A success in between leaves it too.
  static_cast<void>(subject.memory());
  expect(subject.table.last_error() == mine, "last_error stays \"" + mine + "\"",
         std::string("\"") + subject.table.last_error() + "\"");
}

void survives(const Subject& subject) {
  for (int turn = 0; turn < 100; ++turn) {
    void* memory = nullptr;
    subject.table.alloc(0, OXY_MEMORY_DEVICE, UINT64_MAX, &memory);
    subject.table.memory_info(-1, nullptr);
    subject.table.copy_async(0, nullptr, nullptr, nullptr, 1, OXY_COPY_DEVICE_TO_DEVICE);
  }
  const Memory memory(subject, 5000);
  memory.write(pattern(5000, 2));
  expect_same(memory.read(5000), pattern(5000, 2), "the device after refused calls");
}

// --- injected faults ---

void injected_alloc(const Subject& subject) {
  const std::uint64_t start = subject.memory().allocated_bytes;
  subject.inject("fault=alloc:2");
  {
    const Memory first(subject, 1000);
    void* second = &second;
    refused(subject, subject.table.alloc(0, OXY_MEMORY_DEVICE, 1000, &second), "the allocation that is to fail",
            OXY_OUT_OF_MEMORY);
    expect(second == nullptr, "a failed alloc gives NULL", hex(second));
    const Memory third(subject, 1000);
  }
  const std::uint64_t end = subject.memory().allocated_bytes;
  expect(end == start, "allocated_bytes back at " + std::to_string(start), std::to_string(end));
}

// A queue whose first copy failed behind the caller's back.
struct FailedQueue {
  FailedQueue(const Subject& subject, Event& event) : memory(subject, 4096), source(pattern(4096, 1)), queue(subject) {
    subject.inject("fault=copy:1");
    queue.copy(memory.at(), source.data(), 4096, OXY_COPY_HOST_TO_DEVICE);
    // Either the event is made behind the failure, or the failure is told here already.
    subject.table.event_record(queue.handle(), &event.handle);
  }
  Memory memory;
  Bytes source;
  Queue queue;
};

void injected_copy(const Subject& subject) {
  subject.need_queues();
  Event event(subject);
  FailedQueue failed(subject, event);
  const oxy_queue handle = failed.queue.handle();
  for (int turn = 0; turn < 3; ++turn) {
    refused(subject, subject.table.synchronize(0, handle),
            "synchronize, time " + std::to_string(turn + 1) + ", of a queue with a failed copy", OXY_DEVICE_ERROR);
  }
  refused(subject, subject.table.synchronize(0, nullptr), "synchronize of the device with a failed queue",
          OXY_DEVICE_ERROR);
  refused(subject, subject.table.fill_async(0, handle, failed.memory.at(), 0, 64), "a fill on a failed queue",
          OXY_DEVICE_ERROR);
  {
    const Queue healthy(subject);
    healthy.fill(failed.memory.at(), 7, 4096);
    healthy.synchronize();
    expect_same(failed.memory.read(4096), Bytes(4096, 7), "another queue of the device");
  }
  refused(subject, subject.table.queue_destroy(failed.queue.release()), "queue_destroy of a failed queue",
          OXY_DEVICE_ERROR);
  expect_ok(subject, subject.table.synchronize(0, nullptr), "synchronize of the device once the failed queue is gone");
}

void injected_event(const Subject& subject) {
  subject.need_queues();
  for (int turn = 0; turn < 5; ++turn) {
    Event event(subject);
    const FailedQueue failed(subject, event);
    if (event.handle == nullptr) continue;
    refused(subject, event.wait(), "the host's wait for an event behind a failed copy", OXY_DEVICE_ERROR);
    const Queue other(subject);
    subject.table.event_wait(other.handle(), event.handle, 0, nullptr);
    refused(subject, subject.table.synchronize(0, other.handle()),
            "synchronize of a queue that waited for such an event", OXY_DEVICE_ERROR);
    return;
  }
  throw NotApplicable{"the failure is told before an event can be recorded behind it"};
}

void injected_blocking(const Subject& subject) {
  const Memory memory(subject, 64);
  Bytes host(64);
  subject.inject("fault=copy:2");
  memory.write(host);
  refused(subject, subject.table.copy_async(0, nullptr, memory.at(), host.data(), 64, OXY_COPY_HOST_TO_DEVICE),
          "the blocking copy that is to fail", OXY_DEVICE_ERROR);
  memory.write(host);
}

void injected_loss(const Subject& subject) {
  subject.need_queues();
  // Whether the fault is known at all is asked before anything is made that a skipped check would leave behind.
  subject.inject("fault=lost:1000000000");
  subject.inject("");
  const oxy_backend& table = subject.table;
  void* memory = nullptr;
  expect_ok(subject, table.alloc(0, OXY_MEMORY_DEVICE, 64, &memory), "alloc");
  oxy_queue queue = nullptr;
  expect_ok(subject, table.queue_create(0, nullptr, &queue), "queue_create");
  oxy_event event = nullptr;
  expect_ok(subject, table.event_record(queue, &event), "event_record");
  expect_ok(subject, table.event_wait(nullptr, event, UINT64_MAX, nullptr), "event_wait");
  subject.inject("fault=lost:1");
  table.fill_async(0, queue, memory, 0, 64);
  refused(subject, table.synchronize(0, queue), "synchronize of a queue whose device went", OXY_DEVICE_LOST);
  const auto lost = [&](oxy_status status, const char* call) {
    refused(subject, status, std::string(call) + " of a lost device", OXY_DEVICE_LOST);
  };
  oxy_memory_info info{};
  info.size = sizeof(info);
  lost(table.memory_info(0, &info), "memory_info");
  oxy_device_properties properties{};
  properties.size = sizeof(properties);
  lost(table.device_properties(0, &properties), "device_properties");
  void* more = nullptr;
  lost(table.alloc(0, OXY_MEMORY_DEVICE, 64, &more), "alloc");
  expect(more == nullptr, "a failed alloc gives NULL", hex(more));
  Bytes host(64);
  lost(table.copy_async(0, nullptr, memory, host.data(), 64, OXY_COPY_HOST_TO_DEVICE), "a blocking copy");
  lost(table.copy_async(0, queue, memory, host.data(), 64, OXY_COPY_HOST_TO_DEVICE), "a copy on a queue");
  lost(table.fill_async(0, queue, memory, 0, 64), "fill_async");
  oxy_queue another = nullptr;
  lost(table.queue_create(0, nullptr, &another), "queue_create");
  lost(table.event_record(queue, &event), "event_record");
  lost(table.event_wait(nullptr, event, 0, nullptr), "event_wait");
  lost(table.synchronize(0, nullptr), "synchronize");
  expect_ok(subject, table.free(0, memory), "free of a lost device's memory");
  expect_ok(subject, table.event_destroy(event), "event_destroy of a lost device's event");
  const oxy_status destroyed = table.queue_destroy(queue);
  expect(destroyed == OXY_OK || destroyed == OXY_DEVICE_LOST, "queue_destroy gives OXY_OK or OXY_DEVICE_LOST",
         std::to_string(destroyed));
  const char* reason = nullptr;
  std::int32_t devices = 0;
  expect(table.score(&reason, &devices) == subject.score, "score is what it was, " + std::to_string(subject.score),
         std::to_string(table.score(&reason, &devices)));
}

}  // namespace

void add_fault_checks(std::vector<Check>& checks) {
  checks.insert(
      checks.end(),
      {
          {"faults.bad_device", "F2", "a bad device index: OXY_INVALID_ARGUMENT", bad_device},
          {"faults.null_arguments", "F2", "a NULL handle or output: OXY_INVALID_ARGUMENT", null_arguments},
          {"faults.bad_kinds", "F2", "an unknown kind: OXY_INVALID_ARGUMENT", bad_kinds},
          {"faults.foreign_queue", "F2", "a queue of another device: OXY_INVALID_ARGUMENT", foreign_queue},
          {"faults.message_per_thread", "F1", "last_error is the calling thread's own", message_per_thread},
          {"faults.survives", "C6", "every failure is a status", survives},
          {"faults.injected_alloc", "M3", "out of memory: a status, NULL, and the device stays usable", injected_alloc},
          {"faults.injected_copy", "F3", "work that fails later fails its queue until the queue is gone",
           injected_copy},
          {"faults.injected_event", "F3", "an event behind failed work carries its status", injected_event},
          {"faults.injected_blocking", "F3", "a blocking call gives its failure itself", injected_blocking},
          {"faults.injected_loss", "F4", "a lost device gives OXY_DEVICE_LOST", injected_loss},
      });
}

}  // namespace conformance
