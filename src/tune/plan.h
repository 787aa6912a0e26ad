/// What a Plan holds: the run, its certificate, and the watch over it.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "oxytorch/config.h"
#include "oxytorch/host.h"
#include "oxytorch/memory/budget_search.h"
#include "oxytorch/memory/pack_saved_tensors.h"
#include "oxytorch/tune/accelerate.h"
#include "oxytorch/tune/asked.h"
#include "oxytorch/tune/run.h"
#include "oxytorch/tune/strategy.h"
#include "oxytorch/tune/tuner.h"
#include "oxytorch/tune/watch.h"

namespace oxytorch {

/// Settings of the process that a configuration names; taken back in the reverse order, at the latest at its end.
class NamedSettings {
 public:
  NamedSettings() = default;
  explicit NamedSettings(const PerformanceConfig& config, tune::AskedBy by = tune::AskedBy::Loop);
  NamedSettings(NamedSettings&&) noexcept = default;
  NamedSettings& operator=(NamedSettings&&) = delete;
  ~NamedSettings() { revert(); }

  [[nodiscard]] const std::vector<HostSetting>& all() const noexcept { return settings_; }
  void add(HostSetting setting);
  void take_back(std::string_view name);
  void revert();

 private:
  std::vector<HostSetting> settings_;
};

/// Tells a run's strategies what was named for them.
void name_settings(const PerformanceConfig& config, tune::AskedBy by, tune::Run& run);

/// What is tried on a run, with its batches and with what is active as the step as given.
struct Trials {
  std::vector<tune::RegisteredStrategy> strategies;
  std::map<std::string, std::string> skipped;  ///< of them, why they are not tried
  tune::TunerOptions options;
  std::string key;  ///< what decides which strategies are kept beside the level, for the certificate's key
};

/// A plan on which nothing was tried takes steps too: what is active on its run, unwatched.
struct Plan::Impl : tune::Watched {
  Impl(std::unique_ptr<tune::Run> run, NamedSettings named, std::optional<tune::CertificateStore> store = {});
  ~Impl() override;
  /// Reverts the last plan of each of these models, where it still lives: the next one begins with the step as given.
  static void take_back_of(const Models& models);
  static std::map<const torch::nn::Module*, Impl*>& last_plans();  ///< under a lock

  /// Tries, measures, verifies; makes active what pays, and what options require, and watches it. What the step as
  /// given throws passes through, with everything restored. accelerate() and Trainer both call it.
  void tune(Trials trials);
  /// Has blocks of the model run again as `checkpointing` says, for the step as it is now. What the step throws passes
  /// through, and OutOfMemory where no choice is within the budget; none is run again then.
  /// `why`: what the setting's line begins with; `tighter`: to less than the plan before took, which was too much.
  void fit_memory(const std::string& why = "", bool tighter = false);
  at::Tensor step(const Batch& batch);
  void update(std::size_t part);
  void revert();
  /// Found to pay, also while a step is taken without it, to compare; and what an earlier run had found.
  [[nodiscard]] std::vector<std::string> found() const;
  void withdraw();  ///< takes back what was found to pay; what settings ask for stays

  void activate(const std::vector<std::string>& strategies) override { run->set_active(strategies); }
  tune::BothWays compare(const std::vector<std::string>& first) override;
  bool has_budget() override { return tune::has_budget(goal, checkpointing, recomputes); }

  NamedSettings named;  // first, so that it outlives the run
  std::unique_ptr<tune::Run> run;
  tune::Certificate certificate;
  std::string checkpointing = "off";  // checkpointing_of() its settings
  memory::SavedFormat saved_tensors = memory::SavedFormat::Lossless;
  bool can_repeat = false;     // each step has a StepStart beside it
  double max_slowdown = 1.25;  // with "least", times as long as now
  tune::Goal goal = tune::Goal::Speed;
  std::optional<bool> recomputes;              // whether blocks are run again, where that was planned
  std::optional<memory::BudgetSearch> fitted;  // the figures of that plan
  std::optional<tune::CertificateStore> store;
  std::optional<tune::Watch> watch;
  const Batch* batch = nullptr;  // of the window under way, the first; valid while it is taken
  bool watched = false;          // the window under way
  double window_seconds = 0;
  std::optional<double> updated;  // when the last update() of a watched loop of the caller's ended
  std::size_t updates = 0;
};

}  // namespace oxytorch
