/// What a change may do to the numbers of a training run, and which level allows it.
#pragma once

#include <string_view>

#include "oxytorch/api.h"

namespace oxytorch::tune {

/// Exact: no bit of loss, weights, buffers, optimizer state or random state changes.
/// Tolerance: sums and products are rounded in another order, at the same precision; verified in float64.
/// Precision: fewer bits (bf16, fp16, TF32); verified against stock PyTorch at the same precision.
/// Trade: something is given up and stated (8-bit optimizer state, memory for time); by request alone.
enum class Kind { Exact, Tolerance, Precision, Trade };

/// "exact", "tolerance", "precision", "trade"; Error(InvalidArgument) with the nearest word otherwise.
OXY_API Kind parse_kind(std::string_view text);
OXY_API std::string_view name(Kind kind) noexcept;

/// Level "basic" allows Exact; "advanced" Tolerance and Precision too; "ultra" all. Error(InvalidArgument) for another.
OXY_API bool allows(std::string_view level, Kind kind);

}  // namespace oxytorch::tune
