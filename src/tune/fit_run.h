/// A memory plan for a run as it stands, with what is active on it.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "oxytorch/tune/fit.h"
#include "oxytorch/tune/run.h"

namespace oxytorch::tune {

/// What a step is fitted to.
struct FitTarget {
  /// Bytes on the run's device; without it, what the run's tensors take and memory::available_bytes().
  std::optional<std::int64_t> budget = {};
  /// Above which no budget goes.
  std::optional<std::int64_t> most = {};
  /// Above 0, in place of a budget: the smallest peak at which a step takes at most so many times as long as now.
  double max_slowdown = 0;
  /// Whether each step has a StepStart beside it, as that of a Trainer, which takes memory too.
  bool can_repeat = false;
  /// As FitOptions::formats.
  std::vector<memory::SavedFormat> formats = {memory::SavedFormat::Lossless};
};

/// What fit() does, on the first of the run's batches. A window of several batches is measured with the gradients of
/// the ones before. No memory limit holds back the steps that it takes. Nothing where the step calls no blocks.
[[nodiscard]] std::optional<MemoryPlan> fit_run(Run& run, const FitTarget& target);

/// What is said of such a step.
inline constexpr const char* kNoBlocks =
    "the model calls no blocks. Call its parts by oxytorch::memory::block(name, function, inputs...).";

}  // namespace oxytorch::tune
