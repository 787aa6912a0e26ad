/// The strategies that come with the library.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "oxytorch/api.h"
#include "oxytorch/tune/strategy.h"

namespace oxytorch::tune {

/// In the order in which they are tried: exact ones first, what changes much before what changes little.
std::vector<RegisteredStrategy> own_strategies();
/// Those of the optimizer's step, which own_strategies() has among the others.
std::vector<RegisteredStrategy> optimizer_strategies();

template <class T>
RegisteredStrategy registered(const char* name, Kind kind, StrategyTraits traits) {
  return {name, kind, std::move(traits), [] { return std::make_unique<T>(); }};
}

/// Whether the run's model is on the CPU, and where else.
Applicability on_cpu(const Run& run);

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
