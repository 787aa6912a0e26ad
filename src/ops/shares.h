/// Tasks that threads share: each does a part of its own in order, then what others have not begun of theirs.
///
/// Equal parts take unequal times where one core is slower than another: something else runs there, its other hardware
/// thread is somebody else's, or the processor has two kinds of cores. What a part works on is often in the cache of
/// its core already, so others take from its end. Who does a task changes nothing that it computes.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

namespace oxytorch::ops {

class Shares {
 public:
  /// Of the tasks from each number in `first`, which are below 2^32, to the next.
  explicit Shares(const std::vector<std::int64_t>& first) : shares_(first.size() - 1) {
    for (std::size_t i = 0; i < shares_.size(); ++i) shares_[i].left = packed(first[i], first[i + 1]);
  }

  /// The next task of who began with the share `own`; -1 where none is left.
  std::int64_t take(std::int64_t own) noexcept {
    for (std::size_t i = 0; i < shares_.size(); ++i) {
      auto& left = shares_[(static_cast<std::size_t>(own) + i) % shares_.size()].left;
      std::uint64_t now = left.load(std::memory_order_relaxed);
      for (;;) {
        const auto begin = static_cast<std::int64_t>(now >> 32), end = static_cast<std::int64_t>(now & 0xFFFFFFFF);
        if (begin == end) break;
        const bool is_own = i == 0;
        const std::uint64_t rest = is_own ? packed(begin + 1, end) : packed(begin, end - 1);
        if (left.compare_exchange_weak(now, rest, std::memory_order_relaxed)) return is_own ? begin : end - 1;
      }
    }
    return -1;
  }

 private:
  struct alignas(64) Share {
    std::atomic<std::uint64_t> left = 0;  // the first task that nobody has begun, and in the lower half the end
  };
  static std::uint64_t packed(std::int64_t begin, std::int64_t end) {
    return static_cast<std::uint64_t>(begin) << 32 | static_cast<std::uint64_t>(end);
  }

  std::vector<Share> shares_;
};

/// Tasks from each number in `first` to the next are a share. `work(take)` runs on a thread for each share; `take()`
/// gives it its next task, and -1 where none is left.
template <class Work>
void share_out(const std::vector<std::int64_t>& first, const Work& work) {
  Shares shares(first);
  at::parallel_for(0, static_cast<std::int64_t>(first.size()) - 1, 1,
                   [&](std::int64_t own, std::int64_t) { work([&] { return shares.take(own); }); });
}

/// The same of `tasks` alike, on so many threads that each has `grain` of them, at most all.
template <class Work>
void share_out(std::int64_t tasks, std::int64_t grain, const Work& work) {
  if (tasks < 1) return;
  const std::int64_t count =
      std::clamp<std::int64_t>((tasks - 1) / std::max<std::int64_t>(1, grain) + 1, 1, at::get_num_threads());
  std::vector<std::int64_t> first;
  for (std::int64_t i = 0; i <= count; ++i) first.push_back(tasks * i / count);
  share_out(first, work);
}

}  // namespace oxytorch::ops
