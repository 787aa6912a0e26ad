/// A ring of records of 64-bit words: one writer that never waits, one reader at a time that learns what it missed.
#pragma once

#include <atomic>
#include <cstdint>
#include <span>
#include <vector>

namespace oxytorch::monitor {

class Ring {
 public:
  /// Takes all its memory here.
  Ring(std::size_t records, std::size_t max_words)
      : records_(records), stride_(max_words + 2), words_(records * stride_) {}

  [[nodiscard]] std::size_t records() const noexcept { return records_; }
  /// Number of records ever pushed.
  [[nodiscard]] std::uint64_t pushed() const noexcept { return pushed_.load(std::memory_order_acquire); }

  /// Overwrites the oldest record when full.
  void push(std::span<const std::uint64_t> record) noexcept {
    const std::uint64_t number = pushed_.load(std::memory_order_relaxed);
    Word* slot = &words_[number % records_ * stride_];
    // Odd while the words change. Release on each word keeps it behind this mark; plain stores on x86.
    slot[0].store(2 * number + 1, std::memory_order_relaxed);
    slot[1].store(record.size(), std::memory_order_release);
    for (std::size_t i = 0; i < record.size(); ++i) slot[2 + i].store(record[i], std::memory_order_release);
    slot[0].store(2 * number + 2, std::memory_order_release);
    pushed_.store(number + 1, std::memory_order_release);
  }

  /// Copies record `number` (below pushed()) into `record`; false if it was overwritten.
  bool read(std::uint64_t number, std::vector<std::uint64_t>& record) const {
    const Word* slot = &words_[number % records_ * stride_];
    if (slot[0].load(std::memory_order_acquire) != 2 * number + 2) return false;
    const std::uint64_t size = slot[1].load(std::memory_order_acquire);
    if (size > stride_ - 2) return false;
    record.resize(size);
    for (std::size_t i = 0; i < size; ++i) record[i] = slot[2 + i].load(std::memory_order_acquire);
    return slot[0].load(std::memory_order_relaxed) == 2 * number + 2;
  }

 private:
  using Word = std::atomic<std::uint64_t>;
  std::size_t records_, stride_;
  std::vector<Word> words_;
  std::atomic<std::uint64_t> pushed_{0};
};

}  // namespace oxytorch::monitor
