/// Bytes of memory blocks that are in use, by address; the peak of any number of observers; a limit. Knows no torch.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <mutex>
#include <optional>
#include <unordered_map>

#include "oxytorch/api.h"

namespace oxytorch::memory {

/// Sees each block that is taken and released, on the thread that does it. Must not take or release blocks itself.
class BlockObserver {
 public:
  virtual void taken(const void* block, std::size_t bytes) = 0;
  virtual void released(const void* block, std::size_t bytes) = 0;

 protected:
  ~BlockObserver() = default;
};

/// All functions may be called from any thread. A block is reserved before it is allocated, so that what does not fit
/// in the limit is never allocated, and held once its address is known.
class OXY_API ByteCount {
 public:
  static constexpr std::int64_t kNoLimit = std::numeric_limits<std::int64_t>::max();

  /// False, and nothing is counted, where `bytes` more would pass the limit.
  [[nodiscard]] bool reserve(std::size_t bytes) noexcept;
  /// What was reserved could not be allocated.
  void cancel(std::size_t bytes) noexcept { live_.fetch_sub(static_cast<std::int64_t>(bytes)); }
  void hold(const void* block, std::size_t bytes);
  /// Of a block that is not counted it does nothing.
  void release(const void* block);

  /// In blocks that were held and not released. Not what was in use before counting began.
  [[nodiscard]] std::int64_t live() const noexcept { return live_.load(std::memory_order_relaxed); }
  [[nodiscard]] bool has_blocks() const noexcept { return blocks_.load(std::memory_order_relaxed) > 0; }
  [[nodiscard]] std::uint64_t taken() const noexcept { return taken_.load(std::memory_order_relaxed); }

  /// `live()` stays at or under `bytes` from here on; what lives above it stays.
  void set_limit(std::int64_t bytes) noexcept { limit_.store(bytes); }
  [[nodiscard]] std::int64_t limit() const noexcept { return limit_.load(); }

  /// One watermark of live(). Empty where all are in use.
  [[nodiscard]] std::optional<int> begin_peak() noexcept;
  void end_peak(int peak) noexcept;
  void reset_peak(int peak) noexcept;
  [[nodiscard]] std::int64_t peak(int peak) const noexcept {
    return peaks_[static_cast<std::size_t>(peak)].load(std::memory_order_relaxed);
  }

  /// Around fork(): the child finds no lock that a thread it lacks has taken.
  void before_fork() noexcept;
  void after_fork() noexcept;

  /// One at a time: false where another observes. unobserve() returns once no thread is inside the observer.
  [[nodiscard]] bool observe(BlockObserver* observer) noexcept;
  void unobserve() noexcept;

 private:
  static constexpr std::size_t kShards = 64;
  struct alignas(64) Shard {
    std::mutex mutex;
    std::unordered_map<const void*, std::size_t> blocks;
  };
  Shard& shard_of(const void* block) noexcept;
  template <class Call>
  void tell(const Call& call);

  alignas(64) std::atomic<std::int64_t> live_{0};
  std::atomic<std::int64_t> limit_{kNoLimit};
  std::atomic<std::int64_t> blocks_{0};
  std::atomic<std::uint64_t> taken_{0};
  std::atomic<std::uint32_t> peaks_in_use_{0};
  std::array<std::atomic<std::int64_t>, 32> peaks_{};
  std::atomic<BlockObserver*> observer_{nullptr};
  std::atomic<int> inside_observer_{0};
  std::array<Shard, kShards> shards_;
};

}  // namespace oxytorch::memory
