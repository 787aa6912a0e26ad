/// What no choice within a budget is below in time, and choices near that: for tapes of many blocks.
#pragma once

#include <array>
#include <cstdint>
#include <utility>
#include <vector>

#include "oxytorch/api.h"
#include "oxytorch/memory/block_plan.h"

namespace oxytorch::memory {

/// Spans over the budget are priced instead of forbidden, so that each block chooses by itself; prices rise where spans
/// are over it and fall where they are not (M. L. Fisher, "The Lagrangian Relaxation Method for Solving Integer
/// Programming Problems", Management Science 27, 1981).
class OXY_API Relaxation {
 public:
  /// `seconds`: of blocks by action; infinite where a block lacks it.
  Relaxation(std::vector<std::array<double, kBlockActions>> seconds, const std::vector<Span>& spans,
             std::int64_t budget);

  /// The choice at the prices so far, which need not be within the budget, and then new prices. `reached`: seconds of a
  /// choice that is within it.
  std::vector<BlockAction> next(double reached);

  /// Seconds that every choice within the budget takes at least.
  [[nodiscard]] double bound() const { return bound_; }

 private:
  struct Row {
    double over = 0;  ///< with every block kept, as a part of the budget
    std::vector<std::pair<std::size_t, std::array<double, kBlockActions>>> lowered;
    double price = 0;  ///< seconds
  };
  [[nodiscard]] static double left_over(const Row& row, const std::vector<BlockAction>& choice);

  std::vector<std::array<double, kBlockActions>> seconds_;
  std::vector<Row> rows_;
  double bound_ = 0, step_scale_ = 1;
  int rounds_without_gain_ = 0;  ///< of the bound
};

}  // namespace oxytorch::memory
