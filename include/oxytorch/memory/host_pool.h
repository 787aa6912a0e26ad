/// A pool of host memory on huge pages. It knows no torch; memory.h puts it under torch's CPU tensors.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include "oxytorch/api.h"

namespace oxytorch {

/// Bytes and counts of a HostPool. Bytes of blocks include the 64 in front of each.
struct HostPoolStats {
  uint64_t live_bytes = 0;      ///< in blocks that are handed out
  uint64_t peak_bytes = 0;      ///< the most live_bytes has been
  uint64_t retained_bytes = 0;  ///< of pages that the pool keeps, beyond live_bytes; an upper bound on what is resident
  uint64_t limit_bytes = 0;     ///< above which free pages go back
  uint64_t hits = 0;            ///< blocks served from memory that had been used before
  uint64_t misses = 0;          ///< blocks that took fresh memory
  uint64_t returned_bytes = 0;  ///< given back to the kernel since the pool was made
};

/// Blocks of one reserved range of addresses, by two-level segregated fit (Masmano et al., "TLSF: a new dynamic memory
/// allocator for real-time systems", 2004): allocate and release take constant time, neighbours that are free are one
/// block. The range asks for 2 MiB pages (MADV_HUGEPAGE); what was once touched is kept for the next step.
///
/// Sizes are rounded up to one of 64 steps in each power of two, so that a step of training finds the blocks of the
/// step before. Every block is aligned to 64 bytes. All functions may be called from any thread.
class OXY_API HostPool {
 public:
  static constexpr size_t kAlignment = 64;
  static constexpr size_t kSmallest = 4096;  ///< bytes of the smallest block
  static constexpr size_t kHugePage = size_t{2} << 20;

  /// Reserves addresses, not memory, for `capacity` bytes; free pages above `retain_limit` bytes go back to the kernel.
  /// Error(OutOfMemory) where the kernel refuses the range.
  HostPool(uint64_t capacity, uint64_t retain_limit);
  /// Unmaps the range: no block may be in use.
  ~HostPool();
  HostPool(const HostPool&) = delete;
  HostPool& operator=(const HostPool&) = delete;

  /// At least `bytes` bytes, or nullptr where the range has no room.
  [[nodiscard]] void* allocate(size_t bytes) noexcept;
  /// Takes back what allocate() returned, on any thread.
  void release(void* memory) noexcept;
  [[nodiscard]] bool owns(const void* memory) const noexcept {
    return reinterpret_cast<uintptr_t>(memory) - base_ < capacity_;
  }

  /// Gives back what is above the new limit at once.
  void set_retain_limit(uint64_t bytes);
  [[nodiscard]] HostPoolStats stats() const;
  /// Bytes that lie on huge pages now. Reads /proc/self/smaps: not for the step path.
  [[nodiscard]] uint64_t huge_page_bytes() const;
  /// Whether the kernel took the wish for huge pages.
  [[nodiscard]] bool asks_for_huge_pages() const noexcept { return huge_; }

  /// Around fork(): before gives free pages back, so that parent and child do not copy them, and holds the lock that
  /// after lets go, in both.
  void before_fork() noexcept;
  void after_fork() noexcept { mutex_.unlock(); }

 private:
  struct Block;
  static constexpr int kSteps = 64;
  static constexpr int kFirstPower = 12;  // of kSmallest
  static constexpr int kPowers = 36;

  static Block* block_of(void* memory) noexcept;
  static int index_of(size_t size) noexcept;
  Block* find(size_t size) noexcept;
  Block* extend(size_t size) noexcept;
  void insert(Block* block) noexcept;
  void remove(Block* block) noexcept;
  void split(Block* block, size_t size) noexcept;
  void touch(uintptr_t begin, uintptr_t end) noexcept;
  void give_back(uint64_t target) noexcept;
  [[nodiscard]] uint64_t retained() const noexcept { return touched_pages_ * kHugePage - live_; }

  mutable std::mutex mutex_;
  uintptr_t mapping_ = 0;
  uintptr_t base_ = 0;
  uint64_t capacity_ = 0;
  uintptr_t top_ = 0;      // end of the last block; nothing above was ever used
  Block* last_ = nullptr;  // the block that ends at top_
  bool huge_ = false;
  std::vector<uint8_t> touched_;  // for each huge page of the range: may be resident
  uint64_t touched_pages_ = 0;
  uint64_t live_ = 0;
  uint64_t give_back_above_ = 0;
  HostPoolStats stats_;
  uint64_t powers_ = 0;                    // bit p: some list of power p has a block
  std::array<uint64_t, kPowers> steps_{};  // bit s of power p: list p * kSteps + s has a block
  std::array<Block*, size_t{kPowers} * kSteps> free_{};
};

}  // namespace oxytorch
