/// Memory, faults and counters of the simulated devices.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "oxytorch/backend.h"
#include "oxytorch/backend/sim.h"

namespace oxytorch::backend::sim {

class QueueState;

constexpr int kMaxDevices = 16;
constexpr std::uint64_t kAlignment = 256;

/// A live allocation. `bytes` of host memory stand in for the device's.
struct Block {
  std::uint64_t address = 0;
  std::uint64_t bytes = 0;
  oxy_memory kind = OXY_MEMORY_DEVICE;
  std::unique_ptr<std::uint8_t[]> storage;  // of device memory; host memory is its own storage
};

/// Where a range of device memory really lies; holds the block alive while it is used.
struct Range {
  std::shared_ptr<Block> block;
  std::uint8_t* data = nullptr;
  std::uint64_t left = 0;  // bytes from `data` to the end of the block
};

struct Counters {
  std::atomic<std::uint64_t> allocs{0}, frees{0}, copies{0}, copied_bytes{0}, fills{0}, failures{0}, launches{0};
};

/// One simulated device. All members may be called from any thread.
class SimDevice {
 public:
  oxy_status alloc(oxy_memory kind, std::uint64_t bytes, void** out);
  oxy_status free(void* memory);
  /// The live range at `address`, or an empty one where [address, address + bytes) lies in no single live block.
  Range find(const void* address, std::uint64_t bytes);
  std::uint64_t allocated_bytes();

  void add(const std::shared_ptr<QueueState>& queue);
  void remove(const std::shared_ptr<QueueState>& queue);
  std::vector<std::shared_ptr<QueueState>> queues();

  std::atomic<bool> lost{false};
  Counters counters;

 private:
  std::uint64_t reserve(std::uint64_t bytes);

  std::mutex mutex_;
  std::map<std::uint64_t, std::shared_ptr<Block>> blocks_;  // by address
  std::uint64_t base_ = 0;
  std::uint64_t next_ = 0;
  std::uint64_t allocated_ = 0;
  std::vector<std::shared_ptr<QueueState>> queues_;
};

/// The active settings. Read on every call, so they are atomics.
struct Settings {
  std::atomic<int> devices{1};
  std::atomic<std::uint64_t> memory_bytes{0};
  std::atomic<double> latency_us{0}, link_gbps{0}, slow_event_us{0};
  std::atomic<std::int64_t> fail_alloc{0}, fail_copy{0}, lose_device{0};  // count down to the failure
};

Settings& settings();
SimDevice& device(std::int32_t index);

/// Counts one event of a fault down; true for the one that fails.
inline bool strikes(std::atomic<std::int64_t>& countdown) {
  return countdown.load(std::memory_order_relaxed) > 0 && countdown.fetch_sub(1, std::memory_order_relaxed) == 1;
}

/// Whether this process is a fork of one that used the simulator: its worker threads are not here.
bool forked();

}  // namespace oxytorch::backend::sim
