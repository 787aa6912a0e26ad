/// What a trainer's settings came to: what is named at once, what is on "auto" by the tuner at the first batch.
#pragma once

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "oxytorch/config.h"
#include "oxytorch/tune/asked.h"
#include "oxytorch/tune/batch.h"
#include "oxytorch/tune/setting_lines.h"
#include "tune/plan.h"

namespace oxytorch {

/// Brings the settings of a trainer about on its run, and says what came of each.
class Decisions {
 public:
  /// Of a trainer of one's own: makes active what is named, without a trial.
  Decisions(torch::nn::Module& model, torch::optim::Optimizer& optimizer, LossFunction loss, double clip_norm,
            const PerformanceConfig& config, bool calibrate);
  /// Of a trainer on a plan: nothing is decided again.
  explicit Decisions(Plan::Impl& plan, const PerformanceConfig& config);
  Decisions(const Decisions&) = delete;
  Decisions& operator=(const Decisions&) = delete;

  /// What is active on the run, and why.
  [[nodiscard]] Plan::Impl& plan() const noexcept { return plan_; }
  /// Whether the first batch has been seen, or a run is continued that had seen it.
  [[nodiscard]] bool are_made() const noexcept { return are_made_; }
  /// Whether begin() has something to do with the next batch.
  [[nodiscard]] bool await_batch() const noexcept { return !are_made_ || fits_memory_; }
  /// Lets the tuner decide what is on "auto", where trials on this batch are possible; null: of a closure. What the
  /// loss function throws passes through, with everything as it was.
  void begin(const Batch* batch);

  /// Whether a step that runs out of memory can be taken again: gradient_checkpointing is in effect, and a window is
  /// one batch.
  [[nodiscard]] bool can_repeat() const;
  /// Whether such a step is fitted once more after `fits` times.
  [[nodiscard]] bool may_fit_again(int fits) const { return tune::may_fit_again(plan_.checkpointing, fits); }
  /// Fits the step to its budget anew, by a batch that ran out of memory; to less than before, where `fits` plans have
  /// not been enough. OutOfMemory where no choice is within it.
  void fit_again(const Batch& batch, const std::string& why, int fits);

  /// What was found, for a continued run to use again.
  [[nodiscard]] std::vector<std::string> found() const { return plan_.found(); }
  /// Calls `load` with model and optimizer as given: layouts, and formats of the optimizer's state, follow what is
  /// loaded. Then what is named is active again.
  void while_as_given(const std::function<void()>& load);
  /// Makes active what an earlier run had found; nothing is tried any more.
  void resume(const std::vector<std::string>& found);
  /// Takes back what was made active here.
  void revert();

  [[nodiscard]] std::vector<SettingLine> lines() const;
  /// What gradient_checkpointing found; empty where nothing was planned.
  [[nodiscard]] const std::optional<memory::BudgetSearch>& fitted() const { return plan_.fitted; }

  std::int64_t steps = 0;  ///< of the run, where the settings do not say it and something else does; 0: not known

 private:
  static std::unique_ptr<Plan::Impl> plan_of_own(torch::nn::Module& model, torch::optim::Optimizer& optimizer,
                                                 LossFunction loss, double clip_norm, const PerformanceConfig& config);
  void decide(const Batch* batch);
  void fit_memory(const Batch* batch, const std::string& why = "", bool tighter = false);
  [[nodiscard]] std::vector<SettingLine> lines_of_plan() const;
  [[nodiscard]] std::vector<SettingLine> of_optimizer(const tune::SettingLines& made_of) const;

  const PerformanceConfig& config_;
  bool calibrate_ = false;
  std::unique_ptr<Plan::Impl> own_;  // where no plan was given
  Plan::Impl& plan_;
  tune::Asked asked_;
  bool are_made_ = false;
  bool fits_memory_ = false;  // gradient_checkpointing is to be brought about
  std::string untried_;
  std::vector<std::string> not_resumed_;
};

}  // namespace oxytorch
