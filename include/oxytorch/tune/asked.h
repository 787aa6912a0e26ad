/// What a configuration asks of a tuner: strategies that are not tried, and those of which one is active whatever it
/// gains. One table for both languages.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "oxytorch/api.h"
#include "oxytorch/config.h"
#include "oxytorch/tune/tuner.h"
#include "oxytorch/tune/workload.h"

namespace oxytorch::tune {

struct Asked {
  std::map<std::string, std::string> skipped;  ///< strategy -> why it is not tried
  std::vector<Requirement> required;           ///< those of a setting that was given by value
};

/// A file or the caller gave it, be it the level's default.
[[nodiscard]] OXY_API bool is_named(const PerformanceConfig& config, std::string_view key);

/// `excluded`: names that the caller does not want tried. Error(NotSupported) for a value that no strategy brings
/// about; Error(InvalidArgument) for one whose strategies are all excluded, not offered or above the level.
[[nodiscard]] OXY_API Asked asked_of(const PerformanceConfig& config, const std::vector<Offer>& offers,
                                     const std::vector<std::string>& excluded);

}  // namespace oxytorch::tune
