/// Interned names: small numbers for the step path, texts for everyone else.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>

#include "oxytorch/error.h"

namespace oxytorch::monitor {

class Names {
 public:
  explicit Names(std::size_t capacity) : capacity_(capacity) {}

  [[nodiscard]] std::size_t capacity() const noexcept { return capacity_; }
  /// Ids below this are valid.
  [[nodiscard]] std::uint32_t count() const noexcept { return count_.load(std::memory_order_acquire); }

  std::uint32_t intern(std::string_view name, const char* kind, const char* option) {
    OXY_CHECK(!name.empty(), InvalidArgument, "a ", kind, " needs a name; got an empty one.");
    const std::lock_guard lock(mutex_);
    if (const auto found = ids_.find(name); found != ids_.end()) return found->second;
    OXY_CHECK(names_.size() < capacity_, OutOfRange, "no room for ", kind, " '", name, "': the monitor was made for ",
              capacity_, "; raise ", option, ", and do not put step numbers or values into names.");
    const auto id = static_cast<std::uint32_t>(names_.size());
    names_.emplace_back(name);
    ids_.emplace(names_.back(), id);
    count_.store(id + 1, std::memory_order_release);
    return id;
  }

  /// Valid as long as this object.
  [[nodiscard]] std::string_view operator[](std::uint32_t id) const {
    const std::lock_guard lock(mutex_);
    return names_[id];
  }

 private:
  std::size_t capacity_;
  mutable std::mutex mutex_;
  std::deque<std::string> names_;  // a deque keeps the texts where they are
  std::unordered_map<std::string_view, std::uint32_t> ids_;
  std::atomic<std::uint32_t> count_{0};
};

}  // namespace oxytorch::monitor
