/// The search behind plan_recomputation(), for those who look several times at one tape.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "oxytorch/memory/recompute_plan.h"

namespace oxytorch::memory {

[[nodiscard]] std::int64_t peak_of(const std::vector<Span>& spans, const std::vector<Recompute>& choice);

/// Empty where no choice was found within the budget.
[[nodiscard]] std::optional<RecomputePlan> find_plan(const StepTape& tape, const std::vector<Span>& spans,
                                                     std::int64_t budget);
[[nodiscard]] RecomputePlan find_lowest(const StepTape& tape, const std::vector<Span>& spans);

}  // namespace oxytorch::memory
