/// What a tier of the cache holds, by size and by which goes first. Not for use from several threads.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace oxytorch::data {

class EvictionOrder {
 public:
  explicit EvictionOrder(std::int64_t limit) : limit_(limit) {}

  /// Adds a key of `bytes`, and lets others go where the limit asks for it; those with the largest `cost` go first, and
  /// only those with a larger one than this. The keys that went, or empty where it does not fit.
  std::optional<std::vector<std::string>> add(const std::string& key, std::int64_t bytes, std::int64_t cost) {
    erase(key);
    std::vector<std::string> gone;
    std::int64_t left = bytes_ + bytes;
    for (auto victim = by_cost_.rbegin(); left > limit_; ++victim) {
      if (victim == by_cost_.rend() || victim->first <= cost) return std::nullopt;
      gone.push_back(victim->second);
      left -= held_.at(victim->second).first;
    }
    for (const auto& victim : gone) erase(victim);
    held_[key] = {bytes, cost};
    by_cost_.emplace(cost, key);
    bytes_ += bytes;
    return gone;
  }

  void erase(const std::string& key) {
    const auto found = held_.find(key);
    if (found == held_.end()) return;
    by_cost_.erase({found->second.second, key});
    bytes_ -= found->second.first;
    held_.erase(found);
  }

  /// Gives what is held another cost.
  void set_cost(const std::string& key, std::int64_t cost) {
    const auto found = held_.find(key);
    if (found == held_.end()) return;
    by_cost_.erase({found->second.second, key});
    found->second.second = cost;
    by_cost_.emplace(cost, key);
  }

  void clear() {
    held_.clear();
    by_cost_.clear();
    bytes_ = 0;
  }
  [[nodiscard]] bool holds(const std::string& key) const { return held_.contains(key); }
  [[nodiscard]] std::int64_t bytes() const noexcept { return bytes_; }
  [[nodiscard]] std::int64_t limit() const noexcept { return limit_; }
  [[nodiscard]] std::int64_t entries() const noexcept { return static_cast<std::int64_t>(held_.size()); }

 private:
  std::int64_t limit_, bytes_ = 0;
  std::unordered_map<std::string, std::pair<std::int64_t, std::int64_t>> held_;  // bytes and cost
  std::set<std::pair<std::int64_t, std::string>> by_cost_;
};

}  // namespace oxytorch::data
