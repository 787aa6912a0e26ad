/// Streams and marks in them, with what failed behind the caller's back.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>

#include "backends/cuda/gpu.h"

namespace oxytorch::backend::cuda {

/// A point in a stream. Recording an event again makes another mark, so earlier waits keep theirs (E1).
class Mark {
 public:
  Mark(Gpu& gpu, Event event) : gpu_(gpu), event_(event) {}
  ~Mark() { gpu_.give_event(event_); }
  Mark(const Mark&) = delete;
  Mark& operator=(const Mark&) = delete;

  /// Waits up to `timeout_ns`; OXY_NOT_READY when the time is over first.
  oxy_status wait(std::uint64_t timeout_ns);
  [[nodiscard]] Event event() const { return event_; }
  [[nodiscard]] Gpu& gpu() const { return gpu_; }

  std::uint64_t time_ns = 0;  ///< guarded by the device's clock

 private:
  Gpu& gpu_;
  const Event event_;
};

/// Any thread; the device's context is current.
class Queue {
 public:
  /// A stream of its own is destroyed with the queue.
  Queue(Gpu& gpu, Stream stream, bool owned) : gpu_(gpu), stream_(stream), owned_(owned) {}
  ~Queue();
  Queue(const Queue&) = delete;
  Queue& operator=(const Queue&) = delete;

  oxy_status copy(void* to, const void* from, std::uint64_t bytes, oxy_copy kind);
  oxy_status fill(void* to, std::uint8_t value, std::uint64_t bytes);
  oxy_status record(std::shared_ptr<Mark>& mark);
  oxy_status wait(const std::shared_ptr<Mark>& mark);
  oxy_status launch(Function function, unsigned blocks, unsigned threads, void** parameters);
  oxy_status synchronize();
  /// Finishes the work and gives the queue's failure (Q5).
  oxy_status finish();
  [[nodiscard]] Gpu& gpu() const { return gpu_; }

 private:
  // A part of a copy that the driver's own thread moves between pageable and pinned memory.
  struct Part {
    Part(void* to, const void* from, std::size_t bytes) : to(to), from(from), bytes(bytes) {}
    void* to;
    const void* from;
    std::size_t bytes;
    std::atomic<bool> done{false};
  };
  static void move(void* data);
  oxy_status stage(void* to, const void* from, std::uint64_t bytes, bool to_device);
  bool capturing();
  // Keeps what fails the queue (F3), and gives the status.
  oxy_status settle(const char* call, Result result);

  Gpu& gpu_;
  const Stream stream_;
  const bool owned_;
  std::mutex mutex_;
  Failure failure_;
  void* staging_ = nullptr;
  std::deque<Part> parts_;
};

/// Whether the driver knows all of the range, so that it copies it without making the caller wait.
bool pinned(const void* memory, std::uint64_t bytes);
/// One copy, enqueued; the driver takes its own time with pageable memory.
Result enqueue_copy(Gpu& device, Stream stream, void* to, const void* from, std::uint64_t bytes, oxy_copy kind);

}  // namespace oxytorch::backend::cuda
