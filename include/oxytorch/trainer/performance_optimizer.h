/// PerformanceOptimizer: one call that prepares a training run, and a trainer on what was found to pay.
///
/// ```cpp
/// auto run = oxytorch::PerformanceOptimizer("advanced").prepare(*model, optimizer, batches,
///                                                               oxytorch::supervised(model,
///                                                               torch::nn::CrossEntropyLoss()));
/// run.trainer.fit(*loader, /*epochs=*/3);
/// std::cout << run.plan.report();
/// ```
#pragma once

#include <torch/optim/optimizer.h>

#include <memory>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "oxytorch/accelerator.h"
#include "oxytorch/api.h"
#include "oxytorch/config.h"
#include "oxytorch/memory/manager.h"
#include "oxytorch/trainer.h"
#include "oxytorch/tune/accelerate.h"
#include "oxytorch/tune/batch.h"
#include "oxytorch/tune/models.h"

namespace oxytorch {

/// A run that is ready. Movable; its end takes everything back, as revert() does.
struct PreparedRun {
  accelerator::Applied gpu;               ///< settings of the accelerator, where some were given
  std::unique_ptr<MemoryManager> memory;  ///< looked at after each step of `trainer`
  Plan plan;
  Trainer trainer;  ///< takes the steps of `plan`, with what the configuration says of the loop
  PerformanceConfig settings;

  /// Takes everything back: objects and settings are as before prepare(); what was trained since stays.
  void revert() {
    plan.revert();
    gpu.revert();
    memory->revert();
  }
};

/// What accelerate() does, under a configuration, with a trainer on the result.
class OXY_API PerformanceOptimizer {
 public:
  /// `gpu`: settings of the accelerator, applied before anything is measured. `memory`: of PreparedRun::memory, whose
  /// limit holds from then on too.
  explicit PerformanceOptimizer(PerformanceConfig config = PerformanceConfig("advanced"),
                                std::optional<accelerator::GPUConfig> gpu = {}, MemoryConfig memory = {})
      : config_(std::move(config)), gpu_(std::move(gpu)), memory_(std::move(memory)) {}
  explicit PerformanceOptimizer(std::string_view level) : PerformanceOptimizer(PerformanceConfig(level)) {}

  /// Tries, measures, verifies, makes active; nothing of the run has changed but its speed. Arguments are those of
  /// accelerate(); `options` without level and config, which are this object's. Model and optimizer are borrowed and
  /// must outlive what is returned.
  ///
  /// Errors: those of accelerate(); before anything ran, NotSupported for a setting that neither the search nor the
  /// trainer can honour, InvalidArgument for settings that contradict each other or the optimizer's own options.
  [[nodiscard]] PreparedRun prepare(torch::nn::Module& model, torch::optim::Optimizer& optimizer,
                                    std::vector<Batch> batches, LossFunction loss,
                                    AccelerateOptions options = {}) const;

 private:
  PerformanceConfig config_;
  std::optional<accelerator::GPUConfig> gpu_;
  MemoryConfig memory_;
};

}  // namespace oxytorch
