/// Values that are made when they are first asked for, and kept.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

namespace oxytorch::data {

/// A fixed number of values. at() may be called by several threads at once: each value is made once, and where making
/// it throws, the next call tries again.
template <class T>
class LazyTable {
 public:
  explicit LazyTable(std::size_t size) : values_(size) {}
  LazyTable(const LazyTable&) = delete;
  LazyTable& operator=(const LazyTable&) = delete;
  ~LazyTable() {
    for (auto& value : values_) delete value.load(std::memory_order_relaxed);
  }

  [[nodiscard]] std::size_t size() const noexcept { return values_.size(); }

  /// `make(index)` gives a std::unique_ptr<T>.
  template <class Make>
  const T& at(std::size_t index, const Make& make) {
    if (const T* made = peek(index)) return *made;
    const std::lock_guard lock(mutexes_[index % mutexes_.size()]);
    if (const T* made = peek(index)) return *made;
    const T* made = make(index).release();
    values_[index].store(made, std::memory_order_release);
    return *made;
  }
  /// Null where at() has not made the value yet.
  [[nodiscard]] const T* peek(std::size_t index) const noexcept {
    return values_[index].load(std::memory_order_acquire);
  }

 private:
  std::vector<std::atomic<const T*>> values_;
  std::array<std::mutex, 16> mutexes_;  // several, since making a value may wait for a network
};

}  // namespace oxytorch::data
