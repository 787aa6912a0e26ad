// What a search may spend on a run.
#include <algorithm>

#include "oxytorch/tune/policy.h"
#include "oxytorch/tune/search.h"

namespace oxytorch::tune {

SearchOptions SearchOptions::for_run(std::int64_t steps_planned, double step_seconds, double budget_seconds,
                                     std::uint64_t seed) {
  SearchOptions options{.steps_planned = steps_planned, .step_seconds = step_seconds, .seed = seed};
  const double most = kPolicy.short_run_trials * static_cast<double>(steps_planned);
  options.budget_seconds =
      budget_seconds > 0 ? budget_seconds
                         : std::max(kPolicy.least_trial_seconds, std::min(kPolicy.trial_steps, most) * step_seconds);
  options.repay_steps =
      budget_seconds > 0 ? 0
                         : std::min(kPolicy.repay_steps, kPolicy.short_run_repay * static_cast<double>(steps_planned));
  options.conclude_steps = kPolicy.conclude_steps;
  options.total_seconds =
      2 * budget_seconds +
      std::max(kPolicy.least_total_seconds, kPolicy.total_share * static_cast<double>(steps_planned) * step_seconds);
  return options;
}

}  // namespace oxytorch::tune
