#include <atomic>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>

#include "suite.h"

namespace conformance {
namespace {

// Runs `work` on `count` threads at once and throws what the first of them threw.
void on_threads(int count, const std::function<void(int)>& work) {
  std::atomic<int> waiting{count};
  std::mutex mutex;
  std::exception_ptr first;
  std::vector<std::thread> threads;
  for (int index = 0; index < count; ++index) {
    threads.emplace_back([&, index] {
      waiting.fetch_sub(1);
      while (waiting.load() > 0) std::this_thread::yield();
      try {
        work(index);
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (first == nullptr) first = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  if (first != nullptr) std::rethrow_exception(first);
}

void allocations(const Subject& subject) {
  const std::uint64_t start = subject.memory().allocated_bytes;
  on_threads(8, [&](int index) {
    for (int turn = 0; turn < 40; ++turn) {
      const Memory memory(subject, 1000 + static_cast<std::uint64_t>(turn));
      const Bytes mine = pattern(memory.size(), static_cast<std::uint32_t>(index * 1000 + turn));
      memory.write(mine);
      expect_same(memory.read(memory.size()), mine, "memory of thread " + std::to_string(index));
    }
  });
  const std::uint64_t end = subject.memory().allocated_bytes;
  expect(end == start, "allocated_bytes back at " + std::to_string(start) + " after 8 threads", std::to_string(end));
}

void shared_queue(const Subject& subject) {
  const Queue queue(subject);
  constexpr int kThreads = 6;
  constexpr std::uint64_t kBytes = 5003;
  const Memory memory(subject, kBytes * kThreads);
  std::vector<Bytes> seen(kThreads, Bytes(kBytes, 0xEE));
  on_threads(kThreads, [&](int index) {
    std::uint8_t* mine = memory.at(static_cast<std::uint64_t>(index) * kBytes);
    Bytes& host = seen[static_cast<std::size_t>(index)];
    for (int turn = 0; turn < 30; ++turn) {
      const auto value = static_cast<std::uint8_t>(index * 31 + turn);
      queue.fill(mine, value, kBytes);
      queue.copy(host.data(), mine, kBytes, OXY_COPY_DEVICE_TO_HOST);
      if (turn % 10 != 9) continue;
      queue.synchronize();
      expect_same(host, Bytes(kBytes, value), "thread " + std::to_string(index) + " on a shared queue");
    }
  });
}

void own_queues(const Subject& subject) {
  subject.need_queues();
  on_threads(6, [&](int index) {
    for (int turn = 0; turn < 5; ++turn) {
      const Queue queue(subject);
      const Memory memory(subject, 10007);
      const Bytes source = pattern(10007, static_cast<std::uint32_t>(index * 100 + turn));
      Bytes seen(10007, 0xEE);
      Event event(subject);
      queue.copy(memory.at(), source.data(), source.size(), OXY_COPY_HOST_TO_DEVICE);
      queue.copy(seen.data(), memory.at(), seen.size(), OXY_COPY_DEVICE_TO_HOST);
      queue.record(&event.handle);
      if (turn % 2 == 0) expect_ok(subject, subject.table.synchronize(0, nullptr), "synchronize of the device");
      expect_ok(subject, event.wait(), "event_wait by the host");
      expect_same(seen, source, "thread " + std::to_string(index) + " on its own queue");
    }
  });
}

void shared_event(const Subject& subject) {
  const Queue queue(subject);
  Event event(subject);
  queue.record(&event.handle);
  on_threads(6, [&](int index) {
    for (int turn = 0; turn < 50; ++turn) {
      if (index == 0) {
        queue.record(&event.handle);
      } else {
        const oxy_status status = event.wait(index % 2 == 0 ? 0 : UINT64_MAX);
        if (status != OXY_NOT_READY || index % 2 != 0) expect_ok(subject, status, "event_wait from several threads");
      }
    }
  });
}

void questions(const Subject& subject) {
  on_threads(8, [&](int) {
    for (int turn = 0; turn < 100; ++turn) {
      const char* reason = nullptr;
      std::int32_t devices = 0;
      expect(subject.table.score(&reason, &devices) == subject.score, "score " + std::to_string(subject.score),
             "another one in a thread");
      static_cast<void>(subject.memory());
      static_cast<void>(subject.properties());
      std::uint32_t count = 0;
      if (subject.table.counters != nullptr) {
        expect_ok(subject, subject.table.counters(0, nullptr, 0, &count), "counters from several threads");
      }
    }
  });
}

}  // namespace

void add_thread_checks(std::vector<Check>& checks) {
  const char* any = "every slot may be called from any thread at any time";
  checks.insert(checks.end(), {
                                  {"threads.allocations", "T1", any, allocations},
                                  {"threads.shared_queue", "T1", any, shared_queue},
                                  {"threads.own_queues", "T1", any, own_queues},
                                  {"threads.shared_event", "T1", any, shared_event},
                                  {"threads.questions", "C5", any, questions},
                              });
}

}  // namespace conformance
