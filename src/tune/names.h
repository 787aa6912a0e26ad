/// Lists of names of strategies.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

namespace oxytorch::tune {

inline bool holds(const std::vector<std::string>& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

}  // namespace oxytorch::tune
