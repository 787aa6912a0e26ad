/// Lists of names of strategies.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

namespace oxytorch::tune {

inline bool holds(const std::vector<std::string>& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

inline bool holds_any(const std::vector<std::string>& names, const std::vector<std::string>& some) {
  return std::any_of(some.begin(), some.end(), [&](const auto& name) { return holds(names, name); });
}

}  // namespace oxytorch::tune
