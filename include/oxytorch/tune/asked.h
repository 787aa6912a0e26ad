/// What a configuration asks of a tuner: strategies that are not tried, and those of which one is active whatever it
/// gains. One table for both languages.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "oxytorch/api.h"
#include "oxytorch/config.h"
#include "oxytorch/tune/tuner.h"
#include "oxytorch/tune/workload.h"

namespace oxytorch::tune {

/// Whose configuration it is.
enum class AskedBy {
  Loop,    ///< one that accelerate() is to speed up: named is what a file or the caller gave
  Trainer  ///< one of our own: named is every value but "auto", and is made active at any level, without a trial
};

struct Asked {
  std::map<std::string, std::string> skipped;  ///< strategy -> why it is not tried
  std::vector<Requirement> required;           ///< those of a setting that was given by value
  std::map<std::string, std::string> refused;  ///< setting -> why it cannot be, by another one or activate()
};

[[nodiscard]] OXY_API bool is_named(const PerformanceConfig& config, std::string_view key, AskedBy by = AskedBy::Loop);

/// `excluded`: names that the caller does not want tried. For a loop, Error(NotSupported) for a value that no strategy
/// brings about; Error(InvalidArgument) for one whose strategies are all excluded, not offered or above the level.
[[nodiscard]] OXY_API Asked asked_of(const PerformanceConfig& config, const std::vector<Offer>& offers,
                                     const std::vector<std::string>& excluded, AskedBy by = AskedBy::Loop);

/// Makes active what a trainer's settings require, for good and without a trial: of each requirement the first that
/// `put` can, unless one `is_active` already. Others of its kind are then skipped; where none can be, the setting is
/// refused. `put` returns why it cannot, empty where it has.
OXY_API void activate(Asked& asked, const PerformanceConfig& config, const std::vector<Offer>& offers,
                      const std::function<bool(const std::string&)>& is_active,
                      const std::function<std::string(const std::string&)>& put);

/// Why `gradient_checkpointing` can have no effect on steps that are closures.
[[nodiscard]] OXY_API std::string closures_unplanned();
/// What the setting's line begins with once a step has run out of memory and was fitted anew.
[[nodiscard]] OXY_API std::string fitted_anew(std::int64_t step);
/// Whether a step that ran out of memory is fitted again, after `fits` times. `checkpointing`: checkpointing_of() the
/// configuration. What is "least" is no less the second time.
[[nodiscard]] OXY_API bool may_fit_again(std::string_view checkpointing, int fits);
/// Bytes to fit a step to which ran out of memory although its plan had been measured to peak at `peak`: what the
/// process takes beside tensors has grown since.
[[nodiscard]] OXY_API std::int64_t tighter_budget(std::int64_t peak);

/// Whether steps are held to a budget of memory, which a copy of them would exceed: what `gradient_checkpointing`
/// names, or what was found for the goal memory. `checkpointing`: checkpointing_of() the configuration; `recomputes`:
/// whether blocks of the model are run again, without a value where that was not planned.
[[nodiscard]] OXY_API bool has_budget(Goal goal, std::string_view checkpointing, std::optional<bool> recomputes);

/// What a configuration says of `goal`, `max_slowdown` and `max_growth`.
OXY_API void set_goal(const PerformanceConfig& config, TunerOptions& options);

/// How many times as long as now a step may take, where it may take `max_slowdown` times as long as given: what a
/// certificate's strategies have made faster may be slower by more. At least 1: an accepted step can have been measured
/// to take a little longer than may be.
[[nodiscard]] OXY_API double slowdown_left(const Certificate& certificate, double max_slowdown);

/// Length of the run, as far as the configuration says it; else `otherwise`, where that is above 0.
[[nodiscard]] OXY_API std::int64_t planned_steps(const PerformanceConfig& config, std::int64_t otherwise = 0);

/// What decides which strategies are kept, for a certificate's key: names of those offered, the length of the run, and
/// settings that were named and are of consequence.
[[nodiscard]] OXY_API std::string decided_by(const PerformanceConfig& config,
                                             const std::vector<std::string>& strategies, std::int64_t steps_planned,
                                             AskedBy by = AskedBy::Loop);

/// What a trainer asks of a tuner at its first batch: `tune_seconds` for everything, or a second, or 15 % of the
/// planned run where that is more. `length` of the run, where the configuration does not say it; 0: not known.
/// Strategies that cut a batch are excluded: one batch does not tell how the loss of others is made up of that of their
/// rows.
[[nodiscard]] OXY_API TunerOptions tuning_of_trainer(const PerformanceConfig& config, std::int64_t length,
                                                     const std::vector<Offer>& offers);

/// The setting that a strategy belongs to; empty where there is none.
[[nodiscard]] OXY_API std::string_view setting_of(const std::string& name, Kind kind, const std::string& group);

}  // namespace oxytorch::tune
