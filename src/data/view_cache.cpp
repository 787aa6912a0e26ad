#include "data/view_cache.h"

#include <exception>
#include <utility>

namespace oxytorch::data {

View ViewCache::get(std::uint64_t key, const std::function<View()>& make) {
  std::unique_lock lock(mutex_);
  if (const auto found = entries_.find(key); found != entries_.end()) {
    uses_.splice(uses_.begin(), uses_, found->second.use);
    const auto view = found->second.view;
    lock.unlock();
    return view.get();
  }
  std::promise<View> promise;
  const auto view = promise.get_future().share();
  uses_.push_front(key);
  entries_.emplace(key, Entry{view, uses_.begin()});
  if (entries_.size() > capacity_) {
    entries_.erase(uses_.back());
    uses_.pop_back();
  }
  lock.unlock();
  try {
    promise.set_value(make());
  } catch (...) {
    promise.set_exception(std::current_exception());
    lock.lock();
    if (const auto found = entries_.find(key); found != entries_.end()) {
      uses_.erase(found->second.use);
      entries_.erase(found);
    }
  }
  return view.get();
}

bool ViewCache::contains(std::uint64_t key) {
  const std::lock_guard lock(mutex_);
  return entries_.contains(key);
}

}  // namespace oxytorch::data
