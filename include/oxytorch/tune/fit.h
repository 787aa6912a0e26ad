/// A training step within a budget of memory: blocks of a model are run again in backward, where that costs least.
///
/// ```cpp
/// auto plan = oxytorch::fit(*model, optimizer, loss, batch, "900MiB");   // the model calls oxytorch::memory::block
/// std::cout << plan.table();
/// ```
#pragma once

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <memory>
#include <string_view>

#include "oxytorch/api.h"
#include "oxytorch/memory/block.h"
#include "oxytorch/memory/recompute_plan.h"
#include "oxytorch/tune/batch.h"

namespace oxytorch {

/// Which blocks are run again, what that saves and what it costs. Active until revert() or its end. Movable.
class OXY_API MemoryPlan {
 public:
  explicit MemoryPlan(memory::BudgetSearch search);

  [[nodiscard]] const memory::BudgetSearch& figures() const noexcept { return search_; }
  [[nodiscard]] std::string table() const { return search_.table(); }
  [[nodiscard]] bool is_active() const noexcept { return active_ != nullptr; }
  /// Every block is kept again.
  void revert() { active_.reset(); }

 private:
  memory::BudgetSearch search_;
  std::unique_ptr<memory::RunAgain> active_;
};

/// Records a step (zero_grad, loss, backward, clip, optimizer step) on `batch`, chooses the blocks (memory::block())
/// that cost the least time within `budget` ("900MiB", or "50%" of the memory that this process may use), measures the
/// step with them, and chooses again by what the peak is above the budget. Bytes are those of tensors, parameters,
/// gradients and optimizer state included. About fifteen steps are taken; model, optimizer and random generators are
/// then what they were, bit for bit.
///
/// Errors: OutOfMemory, with the lowest peak, where no choice of blocks is within the budget; InvalidArgument for a
/// budget that is none, and for a model that calls no blocks; NotSupported on another device than a CPU.
[[nodiscard]] OXY_API MemoryPlan fit(torch::nn::Module& model, torch::optim::Optimizer& optimizer, LossFunction loss,
                                     const Batch& batch, std::string_view budget, double clip_norm = 0);

}  // namespace oxytorch
