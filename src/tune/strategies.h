/// The strategies that come with the library.
#pragma once

#include <vector>

#include "oxytorch/api.h"
#include "oxytorch/tune/strategy.h"

namespace oxytorch::tune {

/// In the order in which they are tried: exact ones first, what changes much before what changes little.
std::vector<RegisteredStrategy> own_strategies();

/// These are all that are registered, as long as it lives: for tests of what takes all that there are.
class OXY_API ScopedStrategies {
 public:
  explicit ScopedStrategies(std::vector<RegisteredStrategy> only);
  ~ScopedStrategies();
  ScopedStrategies(const ScopedStrategies&) = delete;
  ScopedStrategies& operator=(const ScopedStrategies&) = delete;

 private:
  std::vector<RegisteredStrategy> others_;
};

}  // namespace oxytorch::tune
