/// A memory plan for a run as it stands, with what is active on it.
#pragma once

#include <cstdint>
#include <optional>

#include "oxytorch/tune/fit.h"
#include "oxytorch/tune/run.h"

namespace oxytorch::tune {

/// What fit() does, on the first of the run's batches. A window of several batches is measured with the gradients of
/// the ones before. `budget` in bytes; without one it is what the run's tensors take and memory::available_bytes(). No
/// memory limit holds back the steps that it takes. Nothing where the step calls no blocks.
[[nodiscard]] std::optional<MemoryPlan> fit_run(Run& run, std::optional<std::int64_t> budget);

/// What is said of such a step.
inline constexpr const char* kNoBlocks =
    "the model calls no blocks. Call its parts by oxytorch::memory::block(name, function, inputs...).";

}  // namespace oxytorch::tune
