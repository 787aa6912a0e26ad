/// The seconds of a search: what trials have taken of a run, and what they may still take.
#pragma once

#include <algorithm>
#include <limits>

#include "oxytorch/tune/policy.h"
#include "oxytorch/tune/search.h"

namespace oxytorch::tune {

struct SearchTime {
  SearchOptions options;
  double step_seconds = options.step_seconds;  ///< with what is active, as far as known
  double elapsed = 0;                          ///< of trials without a one-off cost
  double paid = 0;                             ///< one-off costs of trials
  double used = options.used_seconds;          ///< of all that the search may take

  /// Seconds that trials without a one-off cost may take in all; 0: no bound.
  [[nodiscard]] double budget() const {
    if (options.budget_seconds <= 0) return 0;
    return std::max(options.budget_seconds, repaid());
  }

  /// Seconds that the saving so far repays soon, concluding included.
  [[nodiscard]] double repaid() const {
    const double saved = std::max(0.0, options.step_seconds - step_seconds);
    return options.repay_steps * saved - options.conclude_steps * options.step_seconds;
  }

  [[nodiscard]] bool out_of_budget() const { return options.budget_seconds > 0 && elapsed >= budget(); }

  /// For trials. Once something was `found`, what concluding takes is kept back.
  [[nodiscard]] double left(bool found) const {
    const double kept_back =
        found ? std::min(options.conclude_steps * step_seconds, options.conclude_share * options.total_seconds) : 0;
    return to_conclude() - kept_back;
  }

  [[nodiscard]] double to_conclude() const {
    return options.total_seconds > 0 ? options.total_seconds - used : std::numeric_limits<double>::infinity();
  }

  [[nodiscard]] double planned_run() const { return step_seconds * static_cast<double>(options.steps_planned); }

  /// Seconds that a gain saves in that share of the run.
  [[nodiscard]] double saved_in(double share, double gain) const {
    return share * planned_run() * (1 - 1 / std::max(1.0, gain));
  }

  /// Whether a gain is likely to save its trial's time in a part of the run, of which trials have taken little.
  [[nodiscard]] bool repays_trial(double gain) const {
    const double as_given = options.step_seconds * static_cast<double>(options.steps_planned);
    return options.repay_steps > 0 && saved_in(kPolicy.trial_share, gain) > one_trial() &&
           elapsed < kPolicy.likely_trials * as_given;
  }

  /// Whether what was on trial may be again: a first turn has the whole budget, a second must be repaid.
  [[nodiscard]] bool may_try_again() const {
    return options.budget_seconds <= 0 ||
           elapsed < (options.repay_steps > 0 ? kPolicy.again_share * repaid() : budget());
  }

  /// Seconds that a trial may take where what is spent must be repaid soon.
  [[nodiscard]] double one_trial() const {
    return std::max(kPolicy.one_trial_steps * step_seconds, kPolicy.one_trial_seconds);
  }

  /// Seconds that the next trial may take, of what promises that gain; `is_second`: of what trials left open.
  [[nodiscard]] double next_trial(double gain, bool is_second) const {
    double share = kPolicy.one_trial_share * budget();
    if (options.repay_steps > 0 && step_seconds > 0) {
      if (is_second) return one_trial();
      // What promises much may be looked at again where the first pairs were disturbed.
      const double promised = 1 - 1 / std::max(1.0, gain);
      share = std::max(share, kPolicy.one_trial_share * options.repay_steps * promised * step_seconds);
      share = std::min(share, one_trial());
    }
    return out_of_budget() ? share : std::min(budget() - elapsed, share);
  }

  [[nodiscard]] double cost_budget() const { return options.cost_share * planned_run(); }

  [[nodiscard]] bool can_afford(double cost, bool found) const {
    return step_seconds <= 0 || cost <= 0 || (paid + cost <= cost_budget() && cost < left(found));
  }

  /// What a trial must gain to be gone through with.
  [[nodiscard]] double least_gain() const {
    return options.repay_steps > 0 ? kPolicy.worth : options.paired_test.threshold;
  }

  /// The step as given takes that; a budget of so many steps that was made of a slower one shrinks with it.
  void know_step(double seconds) {
    const auto shrink = [&](double& bound, double least) {
      if (bound > least) bound = std::max(least, bound * seconds / options.step_seconds);
    };
    if (options.repay_steps > 0 && seconds < options.step_seconds) {
      shrink(options.budget_seconds, kPolicy.least_trial_seconds);
      shrink(options.total_seconds, kPolicy.least_total_seconds);
    }
    options.step_seconds = seconds;
  }
};

}  // namespace oxytorch::tune
