/// The last few of many views that are expensive to make, shared by threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <future>
#include <list>
#include <mutex>
#include <unordered_map>

#include "oxytorch/data/value.h"

namespace oxytorch::data {

/// Keeps the `capacity` views used last. A view that was dropped here lives on with those who hold it.
class ViewCache {
 public:
  explicit ViewCache(std::size_t capacity) : capacity_(capacity) {}

  /// The view of `key`, made where it is not kept. Threads that ask for a view being made wait for it; what `make`
  /// throws all of them get, and the next call makes it anew.
  View get(std::uint64_t key, const std::function<View()>& make);
  [[nodiscard]] bool contains(std::uint64_t key);

 private:
  struct Entry {
    std::shared_future<View> view;
    std::list<std::uint64_t>::iterator use;
  };

  const std::size_t capacity_;
  std::mutex mutex_;
  std::list<std::uint64_t> uses_;  // the last used first
  std::unordered_map<std::uint64_t, Entry> entries_;
};

}  // namespace oxytorch::data
