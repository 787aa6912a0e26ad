/// When a process draws a sample again.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "oxytorch/api.h"
#include "oxytorch/data/loader.h"
#include "oxytorch/data/order.h"

namespace oxytorch::data {

/// The next draws of a process, by which a cache keeps what is used again soonest (L. Belady, "A study of replacement
/// algorithms for a virtual-storage computer", 1966). Of a sampler that does not know where a sample comes next, as
/// many epochs are drawn ahead as are looked at, at 4 bytes a draw and 4 a sample, and 128 MiB at most. Methods may be
/// called by several threads at once.
class OXY_API NextUse {
 public:
  static constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();

  /// `options` have a sampler, and outlive this; `samples`: of the dataset.
  NextUse(const LoaderOptions& options, std::int64_t samples);
  ~NextUse();

  /// How many of its draws after `draw` this process draws the sample again; kNever where that is far away or
  /// not known. Where processes take batches of different sizes, the next draw of any of them.
  [[nodiscard]] std::int64_t draws_until(std::int64_t sample, const Draw& draw, std::uint64_t seed) const;

 private:
  struct DrawnEpoch;

  /// The first draw at or after `from`, by drawing the epoch `now` and those ahead.
  [[nodiscard]] std::optional<Draw> next_drawn(std::int64_t sample, Draw from, std::uint64_t now,
                                               std::uint64_t seed) const;
  [[nodiscard]] std::shared_ptr<const DrawnEpoch> drawn(std::uint64_t epoch, std::uint64_t seed) const;
  [[nodiscard]] bool is_ours(std::int64_t position) const;

  const LoaderOptions& options_;
  std::int64_t samples_, epochs_ahead_;
  mutable std::mutex mutex_;
  mutable std::vector<std::shared_ptr<DrawnEpoch>> drawn_;  // that asked for last first
};

}  // namespace oxytorch::data
