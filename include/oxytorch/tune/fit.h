/// A training step within a budget of memory: of blocks of a model, what backward needs is made again or packed instead
/// of kept, where that costs least.
///
/// ```cpp
/// auto plan = oxytorch::fit(*model, optimizer, loss, batch, "900MiB");   // the model calls oxytorch::memory::block
/// std::cout << plan.table();
/// ```
#pragma once

#include <torch/optim/optimizer.h>

#include <memory>
#include <string_view>
#include <vector>

#include "oxytorch/api.h"
#include "oxytorch/memory/block.h"
#include "oxytorch/memory/budget_search.h"
#include "oxytorch/memory/pack_saved_tensors.h"
#include "oxytorch/tune/batch.h"
#include "oxytorch/tune/models.h"

namespace oxytorch {

/// What is done with which blocks, what that saves and what it costs. Active until revert() or its end. Movable.
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
  std::unique_ptr<memory::PlannedBlocks> active_;
};

struct FitOptions {
  double clip_norm = 0;
  double max_slowdown = 1.25;  ///< times as long as a plain step, with the budget "least"
  /// How what a block saves may be kept instead. Lossless and File keep every bit; File writes to TMPDIR in each step.
  std::vector<memory::SavedFormat> formats = {memory::SavedFormat::Lossless};
};

/// Records a step (zero_grad, loss, backward, clip, optimizer step) on `batch`, chooses for each block
/// (memory::block()) what is done with what its backward needs: it is kept, results of cheap operators are made again,
/// the whole block is run again, or what it saves is packed in one of `formats`. The choice takes the least time within
/// `budget` ("900MiB", "50%" of the memory that this process may use or that another device has, or "least": the lowest
/// peak at which a step takes at most `max_slowdown` times as long). Measures the step with that, and chooses again by
/// what the peak is above the budget. Bytes are those of tensors, parameters, gradients and optimizer state included.
/// About twenty steps are taken, and three for each format; model, optimizer and random generators are then what they
/// were, bit for bit. Where a step runs out of memory with every block kept, the last blocks are kept, as many as
/// measured steps allow.
///
/// Errors: OutOfMemory, with the lowest peak, where no choice is within the budget; InvalidArgument for a
/// budget that is none, and for a model that calls no blocks; NotSupported where memory::timeline_refusal() says why.
[[nodiscard]] OXY_API MemoryPlan fit(torch::nn::Module& model, torch::optim::Optimizer& optimizer, LossFunction loss,
                                     const Batch& batch, std::string_view budget, const FitOptions& options = {});

}  // namespace oxytorch
