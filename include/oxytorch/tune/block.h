/// Blocks: how many whole steps are measured in a row, by how long one lasts. Pure arithmetic, for every driver.
#pragma once

#include "oxytorch/api.h"

namespace oxytorch::tune {

/// Blocks of which the median tells what a step as given takes.
inline constexpr int kBaselineBlocks = 3;

/// Steps in a row that last long enough for the clock: above a host's time slice, and on an accelerator above what the
/// host does alone before the first and waits for after the last, which in a training loop lies beside other steps. At
/// least 1, at most 64.
[[nodiscard]] OXY_API int block_steps(double step_seconds, bool on_host = true);

/// Of `wanted` steps that are not to be measured after a switch, those that are needed: of a step of over 50 ms, the
/// caches that one step fills are a small part, so one fewer.
[[nodiscard]] OXY_API int settle_steps(int wanted, double step_seconds);

}  // namespace oxytorch::tune
