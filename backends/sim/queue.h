/// In-order queues of the simulated devices: one worker thread each, so that missing waits show as wrong data.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "backends/sim/device.h"
#include "oxytorch/backend.h"

namespace oxytorch::backend::sim {

/// A failure that travels: which status, and the sentence for whoever meets it.
struct Failure {
  oxy_status status = OXY_OK;
  std::string text;
};

/// Of work on memory that is not there.
Failure gone(const void* address);

/// A point in a queue. Recording an event again makes another mark, so earlier waits keep theirs.
class Mark {
 public:
  void reach(const Failure& failure);
  /// Waits up to `timeout_ns`; OXY_NOT_READY when the time is over first.
  oxy_status wait(std::uint64_t timeout_ns, std::uint64_t* time_ns);
  /// Waits without limit.
  Failure wait();

 private:
  std::mutex mutex_;
  std::condition_variable reached_condition_;
  bool reached_ = false;
  Failure failure_;
  std::uint64_t time_ns_ = 0;
};

struct Launch;

/// One piece of work.
struct Work {
  enum class Kind { Copy, Fill, Launch, Record, Wait } kind = Kind::Copy;
  void* to = nullptr;
  const void* from = nullptr;
  std::uint64_t bytes = 0;
  oxy_copy direction = OXY_COPY_HOST_TO_DEVICE;
  std::int32_t from_device = 0;
  std::uint8_t value = 0;
  bool fails = false;
  std::shared_ptr<Launch> launch;
  std::shared_ptr<Mark> mark;
};

/// Does one piece of work on the calling thread, with its latency.
Failure perform(std::int32_t device, const Work& work);

class QueueState {
 public:
  explicit QueueState(std::int32_t device) : device_(device) {}
  void start();
  /// Finishes the work, ends the thread and gives the queue's failure.
  oxy_status finish();

  /// Any thread. Gives the queue's failure instead of enqueuing where there is one.
  oxy_status enqueue(Work work);
  /// Waits for what was enqueued before.
  oxy_status synchronize();
  [[nodiscard]] std::int32_t device_index() const { return device_; }

 private:
  void run();

  const std::int32_t device_;
  std::mutex mutex_;
  std::condition_variable work_condition_, done_condition_;
  std::deque<Work> work_;
  std::uint64_t enqueued_ = 0, done_ = 0;
  bool ending_ = false;
  Failure failure_;
  std::thread worker_;
};

}  // namespace oxytorch::backend::sim
