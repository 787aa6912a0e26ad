#include "memory/byte_count.h"

#include <bit>
#include <thread>
#include <utility>

namespace oxytorch::memory {

ByteCount::Shard& ByteCount::shard_of(const void* block) noexcept {
  // Blocks are aligned to 64 bytes, large ones to pages.
  const auto address = reinterpret_cast<std::uintptr_t>(block);
  return shards_[(address >> 6 ^ address >> 12 ^ address >> 20) % kShards];
}

bool ByteCount::reserve(std::size_t bytes) noexcept {
  const auto more = static_cast<std::int64_t>(bytes);
  auto live = live_.load(std::memory_order_relaxed);
  do {
    if (more > limit_.load(std::memory_order_relaxed) - live) return false;
  } while (!live_.compare_exchange_weak(live, live + more, std::memory_order_relaxed));
  live += more;
  for (auto left = peaks_in_use_.load(std::memory_order_relaxed); left != 0; left &= left - 1) {
    auto& peak = peaks_[static_cast<std::size_t>(std::countr_zero(left))];
    auto highest = peak.load(std::memory_order_relaxed);
    while (live > highest && !peak.compare_exchange_weak(highest, live, std::memory_order_relaxed)) {
    }
  }
  return true;
}

template <class Call>
void ByteCount::tell(const Call& call) {
  if (observer_.load(std::memory_order_relaxed) == nullptr) return;
  inside_observer_.fetch_add(1);
  // Asked again: unobserve() waits for those who are inside by now.
  if (auto* observer = observer_.load()) call(*observer);
  inside_observer_.fetch_sub(1);
}

void ByteCount::hold(const void* block, std::size_t bytes) {
  std::size_t stale = 0;
  {
    auto& shard = shard_of(block);
    const std::lock_guard lock(shard.mutex);
    const auto [found, is_new] = shard.blocks.try_emplace(block, bytes);
    // Freed past us, by the allocator that was there at the time.
    if (!is_new) stale = std::exchange(found->second, bytes);
    if (is_new) blocks_.fetch_add(1, std::memory_order_relaxed);
  }
  if (stale != 0) cancel(stale);
  taken_.fetch_add(1, std::memory_order_relaxed);
  tell([&](BlockObserver& observer) {
    if (stale != 0) observer.released(block, stale);
    observer.taken(block, bytes);
  });
}

void ByteCount::release(const void* block) {
  std::size_t bytes = 0;
  {
    auto& shard = shard_of(block);
    const std::lock_guard lock(shard.mutex);
    const auto found = shard.blocks.find(block);
    if (found == shard.blocks.end()) return;
    bytes = found->second;
    shard.blocks.erase(found);
    blocks_.fetch_sub(1, std::memory_order_relaxed);
  }
  cancel(bytes);
  tell([&](BlockObserver& observer) { observer.released(block, bytes); });
}

std::optional<int> ByteCount::begin_peak() noexcept {
  auto in_use = peaks_in_use_.load();
  while (~in_use != 0) {
    const int peak = std::countr_one(in_use);
    if (!peaks_in_use_.compare_exchange_weak(in_use, in_use | std::uint32_t{1} << peak)) continue;
    reset_peak(peak);
    return peak;
  }
  return std::nullopt;
}

void ByteCount::end_peak(int peak) noexcept { peaks_in_use_.fetch_and(~(std::uint32_t{1} << peak)); }

void ByteCount::reset_peak(int peak) noexcept { peaks_[static_cast<std::size_t>(peak)].store(live()); }

void ByteCount::before_fork() noexcept {
  for (auto& shard : shards_) shard.mutex.lock();
}

void ByteCount::after_fork() noexcept {
  for (auto& shard : shards_) shard.mutex.unlock();
}

bool ByteCount::observe(BlockObserver* observer) noexcept {
  BlockObserver* none = nullptr;
  return observer_.compare_exchange_strong(none, observer);
}

void ByteCount::unobserve() noexcept {
  observer_.store(nullptr);
  while (inside_observer_.load() != 0) std::this_thread::yield();
}

}  // namespace oxytorch::memory
