#include <algorithm>
#include <chrono>
#include <deque>
#include <thread>

#include "suite.h"

namespace conformance {
namespace {

constexpr std::uint64_t kBytes = 100001;

// A chain of copies on one queue: every link overwrites what the next one reads.
void one_queue(const Subject& subject) {
  const Queue queue(subject);
  const Memory first(subject, kBytes);
  const Memory second(subject, kBytes);
  constexpr std::uint32_t kLinks = 40;
  std::deque<Bytes> sources, results;
  for (std::uint32_t link = 0; link < kLinks; ++link) {
    const Bytes& source = sources.emplace_back(pattern(kBytes, link));
    Bytes& result = results.emplace_back(kBytes, 0xEE);
    queue.copy(first.at(), source.data(), kBytes, OXY_COPY_HOST_TO_DEVICE);
    queue.copy(second.at(), first.at(), kBytes, OXY_COPY_DEVICE_TO_DEVICE);
    queue.fill(first.at(), 0, kBytes);
    queue.copy(result.data(), second.at(), kBytes, OXY_COPY_DEVICE_TO_HOST);
  }
  queue.synchronize();
  for (std::uint32_t link = 0; link < kLinks; ++link) {
    expect_same(results[link], sources[link], "link " + std::to_string(link) + " of a chain of copies on one queue");
  }
}

void fills_in_order(const Subject& subject) {
  const Queue queue(subject);
  const Memory memory(subject, 4096);
  Bytes seen(256 * 16, 0xEE);
  Bytes wanted(seen.size());
  for (std::uint32_t turn = 0; turn < 256; ++turn) {
    queue.fill(memory.at(), static_cast<std::uint8_t>(turn), 4096);
    queue.copy(seen.data() + turn * 16, memory.at(turn), 16, OXY_COPY_DEVICE_TO_HOST);
    std::fill_n(wanted.begin() + turn * 16, 16, static_cast<std::uint8_t>(turn));
  }
  queue.synchronize();
  expect_same(seen, wanted, "fills and copies in turn on one queue");
}

void event_host_wait(const Subject& subject) {
  const Load load(subject);
  const Queue queue(subject);
  const Memory memory(subject, kBytes);
  for (std::uint32_t turn = 1; turn <= 3; ++turn) {
    Event event(subject);
    const Bytes source = pattern(kBytes, turn);
    Bytes seen(kBytes, 0xEE);
    load.enqueue(queue);
    queue.copy(memory.at(), source.data(), kBytes, OXY_COPY_HOST_TO_DEVICE);
    queue.copy(seen.data(), memory.at(), kBytes, OXY_COPY_DEVICE_TO_HOST);
    queue.record(&event.handle);
    expect_ok(subject, event.wait(), "event_wait by the host");
    expect_same(seen, source, "work before the event, once the host waited");
    expect_ok(subject, event.wait(0), "event_wait with timeout 0 for an event that was reached");
  }
}

void event_query(const Subject& subject) {
  const Load load(subject);
  const Queue queue(subject);
  const Memory memory(subject, kBytes);
  for (std::uint32_t turn = 1; turn <= 3; ++turn) {
    Event event(subject);
    const Bytes source = pattern(kBytes, turn);
    Bytes seen(kBytes, 0xEE);
    load.enqueue(queue);
    queue.copy(memory.at(), source.data(), kBytes, OXY_COPY_HOST_TO_DEVICE);
    queue.copy(seen.data(), memory.at(), kBytes, OXY_COPY_DEVICE_TO_HOST);
    queue.record(&event.handle);
    // Half of the turns ask, half wait in slices; a slice that ends early says so.
    oxy_status status = OXY_NOT_READY;
    while ((status = event.wait(turn % 2 == 0 ? 0 : 10000)) == OXY_NOT_READY) std::this_thread::yield();
    expect_ok(subject, status, "event_wait that is not early");
    expect_same(seen, source, "work before the event, once event_wait gave OXY_OK");
    queue.synchronize();
  }
}

void cross_queue(const Subject& subject) {
  const Load load(subject);
  const Queue producer(subject), consumer(subject);
  const Memory memory(subject, kBytes);
  for (std::uint32_t turn = 1; turn <= 4; ++turn) {
    Event event(subject);
    const Bytes source = pattern(kBytes, turn);
    Bytes seen(kBytes, 0xEE);
    load.enqueue(producer);
    producer.copy(memory.at(), source.data(), kBytes, OXY_COPY_HOST_TO_DEVICE);
    producer.record(&event.handle);
    consumer.wait(event.handle);
    consumer.copy(seen.data(), memory.at(), kBytes, OXY_COPY_DEVICE_TO_HOST);
    // Destroying the event leaves the wait as it was (E3).
    if (turn % 2 == 0) event.destroy();
    consumer.synchronize();
    expect_same(seen, source, "a second queue that waited for the first one's event");
  }
}

void event_moves(const Subject& subject) {
  const Load load(subject);
  const Queue producer(subject), consumer(subject);
  const Memory memory(subject, kBytes);
  Event event(subject);
  producer.record(&event.handle);
  expect_ok(subject, event.wait(), "event_wait by the host");
  const oxy_event before = event.handle;
  for (std::uint32_t turn = 1; turn <= 4; ++turn) {
    const Bytes source = pattern(kBytes, turn);
    Bytes seen(kBytes, 0xEE);
    load.enqueue(producer);
    producer.copy(memory.at(), source.data(), kBytes, OXY_COPY_HOST_TO_DEVICE);
    producer.record(&event.handle);
    expect(event.handle == before, "recording again keeps the event " + hex(before), hex(event.handle));
    if (turn % 2 == 0) {
      consumer.wait(event.handle);
    } else {
      expect_ok(subject, event.wait(), "event_wait by the host");
    }
    consumer.copy(seen.data(), memory.at(), kBytes, OXY_COPY_DEVICE_TO_HOST);
    consumer.synchronize();
    expect_same(seen, source, "work before an event that was recorded again");
  }
}

// Would wait for ever if the earlier wait followed the event to its new mark.
void wait_keeps_mark(const Subject& subject) {
  const Load first_load(subject), second_load(subject);
  const Queue first(subject), second(subject);
  Event moved(subject), answer(subject);
  first_load.enqueue(first);
  first.record(&moved.handle);
  second_load.enqueue(second);
  second.wait(moved.handle);
  second.record(&answer.handle);
  first.wait(answer.handle);
  first.record(&moved.handle);
  expect_ok(subject, answer.wait(UINT64_C(20000000000)), "event_wait of up to 20 s behind a wait for an earlier mark");
  expect_ok(subject, moved.wait(), "event_wait by the host");
}

// A wait for an event that was reached cannot block: if the load is over after one, it says nothing about the other.
void wait_does_not_block(const Subject& subject) {
  Load load(subject);
  const Queue producer(subject), consumer(subject);
  Event reached(subject);
  producer.record(&reached.handle);
  producer.synchronize();
  const auto is_ahead_after_wait = [&](bool for_reached) {
    Event event(subject);
    load.enqueue(producer);
    producer.record(&event.handle);
    consumer.wait(for_reached ? reached.handle : event.handle);
    const bool ahead = event.wait(0) == OXY_NOT_READY;
    producer.synchronize();
    consumer.synchronize();
    return ahead;
  };
  int could_tell = 0;
  constexpr int kTurns = 8;
  for (int turn = 0; turn < kTurns; ++turn, load.lengthen()) {
    if (is_ahead_after_wait(false)) return;
    could_tell += is_ahead_after_wait(true) ? 1 : 0;
  }
  if (could_tell < kTurns / 2)
    throw NotApplicable{"work is done before the calls return, so nothing can be waited for"};
  expect(false, "a queue's wait returns while the event lies ahead",
         "it returned after the event, " + std::to_string(kTurns) + " times of " + std::to_string(kTurns));
}

void event_time(const Subject& subject) {
  const Load load(subject);
  const Queue queue(subject);
  Event first(subject), second(subject);
  queue.record(&first.handle);
  load.enqueue(queue);
  queue.record(&second.handle);
  std::uint64_t from = 0, to = 0;
  expect_ok(subject, second.wait(UINT64_MAX, &to), "event_wait by the host");
  expect_ok(subject, first.wait(UINT64_MAX, &from), "event_wait by the host");
  if (from == 0 && to == 0) throw NotApplicable{"the device has no clock"};
  expect(to > from, "a later time than " + std::to_string(from) + " ns at the later event", std::to_string(to) + " ns");
}

void synchronize_queue(const Subject& subject) {
  const Load load(subject);
  const Queue queue(subject);
  const Memory memory(subject, kBytes);
  for (std::uint32_t turn = 1; turn <= 3; ++turn) {
    const Bytes source = pattern(kBytes, turn);
    Bytes seen(kBytes, 0xEE);
    load.enqueue(queue);
    queue.copy(memory.at(), source.data(), kBytes, OXY_COPY_HOST_TO_DEVICE);
    queue.copy(seen.data(), memory.at(), kBytes, OXY_COPY_DEVICE_TO_HOST);
    queue.synchronize();
    expect_same(seen, source, "work before synchronize of the queue");
  }
}

void synchronize_device(const Subject& subject) {
  std::deque<Load> loads;
  std::deque<Queue> queues;
  std::deque<Memory> memories;
  std::deque<Bytes> sources, seen;
  for (std::uint32_t index = 0; index < 3; ++index) {
    const Queue& queue = queues.emplace_back(subject);
    const Memory& memory = memories.emplace_back(subject, kBytes);
    const Bytes& source = sources.emplace_back(pattern(kBytes, index));
    // The later queues are the busier ones; two queues never write the same memory.
    const Load& load = loads.emplace_back(subject);
    for (std::uint32_t turn = 0; turn < index; ++turn) load.enqueue(queue);
    queue.copy(memory.at(), source.data(), kBytes, OXY_COPY_HOST_TO_DEVICE);
    queue.copy(seen.emplace_back(kBytes, 0xEE).data(), memory.at(), kBytes, OXY_COPY_DEVICE_TO_HOST);
  }
  expect_ok(subject, subject.table.synchronize(0, nullptr), "synchronize of the device");
  for (std::size_t index = 0; index < seen.size(); ++index) {
    expect_same(seen[index], sources[index], "queue " + std::to_string(index) + " after synchronize of the device");
  }
}

void destroy_finishes(const Subject& subject) {
  const Load load(subject);
  const Memory memory(subject, kBytes);
  const Bytes source = pattern(kBytes, 9);
  Bytes seen(kBytes, 0xEE);
  Queue queue(subject);
  load.enqueue(queue);
  queue.copy(memory.at(), source.data(), kBytes, OXY_COPY_HOST_TO_DEVICE);
  queue.copy(seen.data(), memory.at(), kBytes, OXY_COPY_DEVICE_TO_HOST);
  expect_ok(subject, subject.table.queue_destroy(queue.release()), "queue_destroy");
  expect_same(seen, source, "work before queue_destroy");
}

void cross_device(const Subject& subject) {
  subject.need_queues();
  subject.need_devices(2);
  const Load load(subject, 0);
  const Queue producer(subject, 0), consumer(subject, 1);
  const Memory from(subject, kBytes, 0), to(subject, kBytes, 1);
  const Bytes source = pattern(kBytes, 11);
  Bytes through(kBytes, 0), seen(kBytes, 0xEE);
  Event event(subject);
  load.enqueue(producer);
  producer.copy(from.at(), source.data(), kBytes, OXY_COPY_HOST_TO_DEVICE);
  producer.copy(through.data(), from.at(), kBytes, OXY_COPY_DEVICE_TO_HOST);
  producer.record(&event.handle);
  consumer.wait(event.handle);
  consumer.copy(to.at(), through.data(), kBytes, OXY_COPY_HOST_TO_DEVICE);
  consumer.copy(seen.data(), to.at(), kBytes, OXY_COPY_DEVICE_TO_HOST);
  consumer.synchronize();
  expect_same(seen, source, "a queue of device 1 that waited for an event of device 0");
}

void many_objects(const Subject& subject) {
  subject.need_queues();
  for (int turn = 0; turn < 50; ++turn) {
    const Queue queue(subject);
    Event event(subject);
    queue.record(&event.handle);
    expect_ok(subject, event.wait(), "event_wait by the host");
  }
  const Queue queue(subject);
  for (int turn = 0; turn < 2000; ++turn) {
    Event event(subject);
    queue.record(&event.handle);
  }
  queue.synchronize();
}

void native_stream(const Subject& subject) {
  subject.need_queues();
  oxy_queue_options options{};
  options.size = 4;
  oxy_queue queue = nullptr;
  expect_status(subject, subject.table.queue_create(0, &options, &queue), OXY_INVALID_ARGUMENT,
                "queue_create with options of 4 bytes");
  options.size = sizeof(options);
  options.priority = -1;
  expect_ok(subject, subject.table.queue_create(0, &options, &queue), "queue_create with a priority");
  expect_ok(subject, subject.table.queue_destroy(queue), "queue_destroy");
}

}  // namespace

void add_order_checks(std::vector<Check>& checks) {
  checks.insert(
      checks.end(),
      {
          {"order.one_queue", "Q1", "work on one queue is done in the order of the calls", one_queue},
          {"order.fills_in_order", "Q1", "work on one queue is done in the order of the calls", fills_in_order},
          {"order.event_host_wait", "E3", "the host's wait returns when the mark is reached", event_host_wait},
          {"order.event_query", "E3", "OXY_NOT_READY until the mark is reached", event_query},
          {"order.cross_queue", "E2", "a queue that waits starts nothing before the mark", cross_queue},
          {"order.event_moves", "E1", "recording again moves the mark", event_moves},
          {"order.wait_keeps_mark", "E1", "a wait asked for earlier keeps the mark it saw", wait_keeps_mark},
          {"order.wait_does_not_block", "E2", "the caller of a queue's wait does not block", wait_does_not_block},
          {"order.event_time", "E3", "the device's clock does not run backwards", event_time},
          {"order.synchronize_queue", "Q3", "synchronize returns when the queue's work is done", synchronize_queue},
          {"order.synchronize_device", "Q3", "synchronize waits for all queues of the device", synchronize_device},
          {"order.destroy_finishes", "Q5", "queue_destroy finishes the queue's work first", destroy_finishes},
          {"order.cross_device", "E2", "event and queue may be of different devices", cross_device},
          {"order.many_objects", "E3", "queues and events come and go", many_objects},
          {"order.queue_options", "C4", "options are read by their size", native_stream},
      });
}

}  // namespace conformance
