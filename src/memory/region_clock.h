/// The time that selective_checkpoint() or PackSavedTensors takes in a region.
#pragma once

#include <chrono>

namespace oxytorch::memory {

/// From construction to destruction, for the meter that records a timeline; nothing where there is none.
class RegionClock {
 public:
  /// `region`: as region() gave it in forward; -1: none.
  explicit RegionClock(int region);
  ~RegionClock();
  RegionClock(const RegionClock&) = delete;
  RegionClock& operator=(const RegionClock&) = delete;

  /// That this thread is in, or -1.
  [[nodiscard]] static int region();

 private:
  int region_;
  std::chrono::steady_clock::time_point began_{};
};

}  // namespace oxytorch::memory
