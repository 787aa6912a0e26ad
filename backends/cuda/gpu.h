/// One CUDA device: its primary context, which torch uses too, its allocations, and what became of it.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "backends/cuda/driver.h"
#include "oxytorch/backend.h"

namespace oxytorch::backend::cuda {

class Queue;
class Mark;

/// A failure that is kept: which status, and the sentence for whoever meets it.
struct Failure {
  oxy_status status = OXY_OK;
  std::string text;
};
/// Leaves the sentence for the calling thread.
oxy_status report(const Failure& failure);

constexpr std::uint32_t kAlignment = 256;                    // what cuMemAlloc promises
constexpr std::size_t kStagingBytes = std::size_t{4} << 20;  // of pinned memory, per queue that copies pageable memory

/// What this backend itself did on a device.
struct Tally {
  std::atomic<std::uint64_t> allocs{0}, frees{0}, copies{0}, copied_bytes{0}, staged_bytes{0}, fills{0}, launches{0},
      failures{0};
};

/// All members may be called from any thread. Lives as long as the process.
class Gpu {
 public:
  explicit Gpu(int index);
  Gpu(const Gpu&) = delete;
  Gpu& operator=(const Gpu&) = delete;

  /// Makes the context current to nobody yet, the first time; later nothing.
  oxy_status open();
  [[nodiscard]] Context context() const { return context_; }
  [[nodiscard]] int index() const { return index_; }
  [[nodiscard]] const std::string& bus_id() const { return bus_id_; }
  oxy_status properties(oxy_device_properties& properties);

  /// The status for a driver's answer. An answer after which a context is dead loses the device for good (F4).
  Failure failure_of(const char* call, Result result);
  oxy_status settle(const char* call, Result result) { return result == kSuccess ? OXY_OK : refuse(call, result); }
  void lose(const std::string& why);
  /// OXY_DEVICE_LOST with its reason once the device is lost.
  oxy_status alive() const { return lost_.load(std::memory_order_acquire) == nullptr ? OXY_OK : dead(); }

  oxy_status alloc(oxy_memory kind, std::uint64_t bytes, void** out);
  oxy_status free(void* memory);
  oxy_status memory_info(oxy_memory_info& info);

  /// Work on a stream of nobody else's, done when this returns (Q4). `work` gives what the driver answered.
  template <class Work>
  oxy_status blocking(const char* call, Work work) {
    Stream stream = nullptr;
    if (const oxy_status status = take_stream(stream); status != OXY_OK) return status;
    Result result = work(stream);
    if (result == kSuccess) result = driver().cuStreamSynchronize(stream);
    give_stream(stream, result);
    return settle(call, result);
  }

  oxy_status take_event(Event& event);
  void give_event(Event event);
  oxy_status take_staging(void*& memory);
  void give_staging(void* memory);
  /// Nanoseconds of the host's steady clock at a mark that was reached; 0 where the driver has no time for it.
  std::uint64_t time_of(const std::shared_ptr<Mark>& mark);

  void add(const std::shared_ptr<Queue>& queue);
  void remove(const std::shared_ptr<Queue>& queue);
  std::vector<std::shared_ptr<Queue>> queues();

  Tally tally;

 private:
  struct Block {
    std::uint64_t bytes;
    oxy_memory kind;
  };
  __attribute__((cold)) oxy_status refuse(const char* call, Result result);
  __attribute__((cold)) oxy_status dead() const;
  oxy_status take_stream(Stream& stream);
  void give_stream(Stream stream, Result result);
  oxy_status start_clock();

  const int index_;
  Device device_ = 0;
  Result found_ = kSuccess;  // what the driver said to the questions of the constructor
  std::string name_ = "CUDA device", architecture_, bus_id_;
  std::uint64_t total_bytes_ = 0;
  std::uint32_t multiprocessors_ = 0;
  std::once_flag link_asked_;
  std::uint64_t link_bytes_per_s_ = 0;

  std::mutex opening_;
  std::atomic<bool> open_{false};
  Context context_ = nullptr;
  std::atomic<const std::string*> lost_{nullptr};

  std::mutex mutex_;
  std::unordered_map<void*, Block> blocks_;
  std::uint64_t allocated_ = 0;
  std::vector<Stream> streams_;
  std::vector<Event> events_;
  std::vector<void*> staging_;
  std::vector<std::shared_ptr<Queue>> queues_;

  std::mutex clock_mutex_;
  std::shared_ptr<Mark> clock_mark_;
  double clock_ns_ = 0;
};

/// The device's context, current to this thread until the end of the scope.
class Current {
 public:
  explicit Current(const Gpu& gpu) {
    Context now = nullptr;
    driver().cuCtxGetCurrent(&now);
    pushed_ = now != gpu.context() && driver().cuCtxPushCurrent_v2(gpu.context()) == kSuccess;
  }
  ~Current() {
    Context popped = nullptr;
    if (pushed_) driver().cuCtxPopCurrent_v2(&popped);
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;

 private:
  bool pushed_;
};

/// The device of an index that is in range.
Gpu& gpu(int index);
}  // namespace oxytorch::backend::cuda
