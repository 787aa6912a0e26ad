/// The search behind plan_blocks(), for those who look several times at one tape.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "oxytorch/memory/block_plan.h"

namespace oxytorch::memory {

[[nodiscard]] constexpr std::size_t index_of(BlockAction action) { return static_cast<std::size_t>(action); }

/// The most that can be live in it, whatever is chosen.
[[nodiscard]] std::int64_t most_live(const Span& span);
[[nodiscard]] std::int64_t peak_of(const std::vector<Span>& spans, const std::vector<BlockAction>& choice);

/// Empty where no choice was found within the budget.
[[nodiscard]] std::optional<BlockPlan> find_plan(const StepTape& tape, const std::vector<Span>& spans,
                                                 std::int64_t budget);
[[nodiscard]] BlockPlan find_lowest(const StepTape& tape, const std::vector<Span>& spans);

}  // namespace oxytorch::memory
