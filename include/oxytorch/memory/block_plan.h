/// Which blocks of a model are kept, packed or run again in backward, so that a step stays within a budget of memory at
/// the least cost in time. Knows no torch.
#pragma once

#include <cstdint>
#include <vector>

#include "oxytorch/api.h"
#include "oxytorch/memory/step_tape.h"

namespace oxytorch::memory {

struct BlockPlan {
  std::vector<BlockAction> choice;  ///< one for each of StepTape::names
  std::int64_t peak_bytes = 0;      ///< predicted
  double seconds = 0;               ///< that it adds to a step, predicted
  bool is_optimal = false;          ///< no other choice is faster within the budget
};

/// The choice that adds the least time with a peak of at most `budget` bytes. Branch and bound over the replayed
/// timeline, and where that is cut off, descents from what it found and from choices of a Lagrangian relaxation: under
/// a second for 200 blocks. is_optimal tells whether nothing was cut off, or the relaxation's bound was reached.
///
/// Error(OutOfMemory) where no choice is within the budget: its message has the lowest peak.
[[nodiscard]] OXY_API BlockPlan plan_blocks(const StepTape& tape, std::int64_t budget);

/// The lowest peak that a choice reaches, to a 2,000th of it, and that choice.
[[nodiscard]] OXY_API BlockPlan lowest_peak(const StepTape& tape);

}  // namespace oxytorch::memory
