/// What followed layers that may wait: by it they learn whether to.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>

namespace oxytorch::tune {

/// How often what a layer may wait for came, and how often its values were asked for instead, by what tells layers
/// apart. Any thread may call.
template <class Key>
class WhatFollowed {
 public:
  struct Count {
    std::int64_t served = 0, values = 0;
  };

  [[nodiscard]] Count of(const Key& key) {
    const std::lock_guard lock(mutex_);
    return counts_[key];
  }
  void note_served(const Key& key) {
    const std::lock_guard lock(mutex_);
    ++counts_[key].served;
  }
  void note_values(const Key& key, std::int64_t times = 1) {
    const std::lock_guard lock(mutex_);
    counts_[key].values += times;
  }
  void forget() {
    const std::lock_guard lock(mutex_);
    counts_.clear();
  }

 private:
  std::mutex mutex_;
  std::map<Key, Count> counts_;
};

}  // namespace oxytorch::tune
