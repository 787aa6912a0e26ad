/// Workload: what a tuner must be given: a training step that it can take, time, change, put back and verify.
///
/// The tuner (oxytorch/tune/tuner.h) decides what is tried and what is kept; a workload takes the steps. There is one
/// for training steps in C++ and one for those in Python. Knows no torch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "oxytorch/api.h"
#include "oxytorch/tune/kind.h"

namespace oxytorch::tune {

/// Yes, or why not: `return true;`, `return false;` or `return "the model has no convolution.";`.
struct Applicability {
  Applicability(bool yes) : holds(yes) {}                     // NOLINT(google-explicit-constructor)
  Applicability(const char* why) : reason(why) {}             // NOLINT(google-explicit-constructor)
  Applicability(std::string why) : reason(std::move(why)) {}  // NOLINT(google-explicit-constructor)
  bool holds = false;
  std::string reason = "it does not apply to this run.";
};

/// What the tuner knows of a strategy beside name and kind.
struct StrategyTraits {
  std::string group = {};                   ///< at most one strategy of a group is active
  std::vector<std::string> requires_ = {};  ///< tried only where these are active
  std::vector<std::string> interacts = {};  ///< judged again, on or off, after one of these has been accepted
  std::vector<std::string> part_of = {};    ///< not tried where one of these is active: they do all that it does
  /// Of one with an expected cost: it takes that cost anew where one of these is turned on or off; empty: interacts.
  std::vector<std::string> renewed_by = {};
  int settle = 1;                  ///< steps not measured after it was switched; of over 50 ms, one fewer
  std::string cost = {};           ///< what it costs beside time, one sentence; empty where nothing
  double max_speedup = 3;          ///< a speedup that it cannot exceed
  double expected_speedup = 1.05;  ///< where it pays at all; the highest is tried first
  bool feeds = false;              ///< it changes what batches are drawn from, and nothing of the step
  bool needs_loop = false;         ///< it changes how a batch is stepped with, so the plan must take the steps
};

/// Whether strategies of a group change the optimizer's update alone, and neither loss nor gradients.
[[nodiscard]] OXY_API bool acts_on_update(std::string_view group) noexcept;

/// A strategy that a workload has.
struct Offer {
  std::string name;
  Kind kind = Kind::Exact;
  StrategyTraits traits = {};
  std::string refused = {};  ///< why it may not be tried, by the caller's settings; empty where it may
};

/// What the verifier found of a combination.
struct Ruling {
  bool held = false;
  std::string reason;
  std::map<std::string, double> evidence;
};

/// Seconds that some steps took.
struct StepTimes {
  double seconds = 0;                ///< of all of them, with the wait for a device at the end
  std::vector<double> updates = {};  ///< of the optimizer's part of each, where that was asked for
};

/// A training step under changes. What a member throws is that combination's failure where told() says so, else it
/// passes through the tuner. Called from one thread.
class OXY_API Workload {
 public:
  Workload() = default;
  virtual ~Workload();
  Workload(const Workload&) = delete;
  Workload& operator=(const Workload&) = delete;

  // -- what may be tried ----------------------------------------------------------------------------------------------

  [[nodiscard]] virtual std::vector<Offer> offers() = 0;  ///< in the order in which equals are tried
  /// Asked once, after the first steps as given: why nothing at all can be tried; empty where something can.
  [[nodiscard]] virtual std::string hindrance();
  [[nodiscard]] virtual Applicability applies(const std::string& strategy) = 0;
  /// Seconds that turning it on takes once (compiling), as far as one can tell beforehand.
  [[nodiscard]] virtual double expected_cost(const std::string& strategy) = 0;
  /// Of one with an expected cost, with what was accepted so far active: what it is likely to make of the step, by a
  /// look at where its time goes; empty: no idea.
  [[nodiscard]] virtual std::optional<double> likely_speedup(const std::string& strategy);

  // -- changes and the way back ---------------------------------------------------------------------------------------

  [[nodiscard]] virtual std::vector<std::string> active() = 0;
  /// Makes exactly these active: others are reverted, the last first, then the missing ones applied. Where one cannot
  /// be applied, those of this call are reverted again; where one cannot be reverted, the others are and nothing is
  /// applied; its exception passes through.
  virtual void activate(const std::vector<std::string>& strategies) = 0;
  /// Puts back all that steps change as it was when tuning began, bit for bit. May be called with any active.
  virtual void restore() = 0;
  /// After something threw: lets go of memory that only the failure held.
  virtual void let_go();
  /// What was put back after the trials and is proven by hash, and what is not covered: check -> outcome.
  [[nodiscard]] virtual std::map<std::string, std::string> covered() = 0;

  // -- steps ----------------------------------------------------------------------------------------------------------

  /// Of the example batches, the first of each shape.
  [[nodiscard]] virtual std::vector<std::size_t> shapes() = 0;
  /// Takes `count` whole steps in a row on the example batches from `first` on, which come round, or on the next ones
  /// that are drawn, and times them; with `updates`, the optimizer's part of each as well.
  virtual StepTimes steps(std::size_t first, int count, bool updates, bool drawn) = 0;
  /// Whether the optimizer's part can be taken by itself.
  [[nodiscard]] virtual bool has_update();
  /// Seconds of the optimizer's part of a step, with the gradients that there are.
  virtual double update() = 0;
  /// Whether steps run where this thread does: on an accelerator, timing an update waits and would lengthen the step.
  [[nodiscard]] virtual bool on_host() = 0;
  /// Where the run draws its batches from data whose own work is to be measured: seconds that drawing one takes,
  /// beside a step of `step_seconds`; 0 where there is nothing to measure.
  virtual double drawing(double step_seconds);
  /// Between draw(true) and draw(false), steps() may be asked to draw its batches from the run's data.
  virtual void draw(bool on);

  // -- numbers --------------------------------------------------------------------------------------------------------

  /// Whether what is active leaves the numbers as its kind promises; `glance`: by one step. State is as restore()
  /// leaves it before and after.
  virtual Ruling verify(Kind kind, bool glance) = 0;

  /// The most that tensors take in a step with what is active, model, optimizer and batch included; empty where that
  /// cannot be measured. State is as restore() leaves it before; two steps are taken, after which it is restored.
  virtual std::optional<std::int64_t> step_bytes();
  /// The most bytes of this process that are in memory in a step with what is active; empty where that cannot be
  /// measured. State is as restore() leaves it before; steps are taken, after which it is restored.
  virtual std::optional<std::int64_t> step_resident();
  /// The most that tensors have taken since tuning began, model, optimizer and a batch included, where timed steps are
  /// not counted; empty where that cannot be measured.
  virtual std::optional<std::int64_t> tuning_bytes();

  // -- saying ---------------------------------------------------------------------------------------------------------

  /// One line of what was thrown; empty where it is no failure of a strategy (an interrupt) and must pass through.
  [[nodiscard]] virtual std::optional<std::string> told(const std::exception& error);
  virtual void say(const std::string& what);  ///< what is being done, for a progress line
  virtual double seconds();                   ///< a clock
  virtual double processor_seconds();         ///< of this thread
  virtual double page_faults();               ///< of this process so far
};

}  // namespace oxytorch::tune
