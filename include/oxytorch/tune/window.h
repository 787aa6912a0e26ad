/// How much of a window of accumulated batches a trial takes.
#pragma once

#include <algorithm>
#include <cstdint>

namespace oxytorch::tune {

/// Batches of a step that is tried, where a step of the run is of `accumulation`, which is at least 1: all, up to four.
[[nodiscard]] constexpr std::int64_t batches_of_trial(std::int64_t accumulation) {
  constexpr std::int64_t kMost = 4;
  return std::min(accumulation, kMost);
}

}  // namespace oxytorch::tune
