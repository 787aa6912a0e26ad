/// A training step within a budget of memory: of blocks of a model, what backward needs is made again instead of kept,
/// where that costs least.
///
/// ```cpp
/// auto plan = oxytorch::fit(*model, optimizer, loss, batch, "900MiB");   // the model calls oxytorch::memory::block
/// std::cout << plan.table();
/// ```
#pragma once

#include <torch/optim/optimizer.h>

#include <memory>
#include <string_view>

#include "oxytorch/api.h"
#include "oxytorch/memory/block.h"
#include "oxytorch/memory/budget_search.h"
#include "oxytorch/tune/batch.h"
#include "oxytorch/tune/models.h"

namespace oxytorch {

/// What of which blocks is made again, what that saves and what it costs. Active until revert() or its end. Movable.
class OXY_API MemoryPlan {
 public:
  explicit MemoryPlan(memory::BudgetSearch search);

  [[nodiscard]] const memory::BudgetSearch& figures() const noexcept { return search_; }
  [[nodiscard]] std::string table() const { return search_.table(); }
  /// The table, and the curve of peak against time as a plot: `plan.report().write_html("memory.html")`.
  [[nodiscard]] monitor::Report report() const { return search_.report(); }
  [[nodiscard]] bool is_active() const noexcept { return active_ != nullptr; }
  /// Every block is kept again.
  void revert() { active_.reset(); }

 private:
  memory::BudgetSearch search_;
  std::unique_ptr<memory::RecomputeBlocks> active_;
};

/// Records a step (zero_grad, loss, backward, clip, optimizer step) on `batch`, chooses for each block
/// (memory::block()) what is made again in backward, nothing, results of cheap operators or the whole block, at the
/// least time within `budget` ("900MiB", "50%" of the memory that this process may use, or "least": the lowest peak at
/// which a step takes at most `max_slowdown` times as long), measures the step with that, and chooses again by what the
/// peak is above the budget. Bytes are those of tensors, parameters, gradients and optimizer state included. About
/// twenty steps are taken; model, optimizer and random generators are then what they were, bit for bit.
///
/// Errors: OutOfMemory, with the lowest peak, where no choice is within the budget; InvalidArgument for a
/// budget that is none, and for a model that calls no blocks; NotSupported on another device than a CPU.
[[nodiscard]] OXY_API MemoryPlan fit(torch::nn::Module& model, torch::optim::Optimizer& optimizer, LossFunction loss,
                                     const Batch& batch, std::string_view budget, double clip_norm = 0,
                                     double max_slowdown = 1.25);

}  // namespace oxytorch
