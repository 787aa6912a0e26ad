/// What a trainer did, as a document: settings with reasons, costs and gains, and where the time of a step went.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "oxytorch/api.h"
#include "oxytorch/monitor/report.h"

namespace oxytorch {

/// One line of a trainer's report.
struct SettingLine {
  std::string name;
  std::string state;  ///< "on", "off" (not asked for) or "refused" (asked for, and not done)
  std::string reason;
  std::string cost = {};
  std::optional<double> gain = {};  ///< seconds of a step without it over those with it, where measured
};

namespace monitor {

struct TrainingFigures {
  std::vector<std::pair<std::string, double>> timings = {};   ///< seconds of a step by phase; "step": of all of it
  std::vector<std::pair<std::string, double>> counters = {};  ///< steps, batches and others
  std::string verdict = {};                                   ///< where to look next, in a sentence
};

[[nodiscard]] OXY_API Report training_report(const std::string& level, const std::vector<SettingLine>& settings,
                                             const TrainingFigures& figures);

}  // namespace monitor
}  // namespace oxytorch
