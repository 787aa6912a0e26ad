#include "oxytorch/tune/strategy.h"

#include <algorithm>
#include <mutex>
#include <utility>

#include "base/spelling.h"
#include "oxytorch/error.h"
#include "tune/strategies.h"

namespace oxytorch::tune {
namespace {

struct Register {
  std::mutex mutex;
  std::vector<RegisteredStrategy> all = own_strategies();
};

Register& the_register() {
  static Register instance;
  return instance;
}

}  // namespace

Strategy::~Strategy() = default;
Applicability Strategy::applies(Run& /*run*/) { return true; }
void Strategy::settle_in(Run& /*run*/) {}
double Strategy::expected_cost(Run& /*run*/) { return 0; }

void register_strategy(RegisteredStrategy strategy) {
  auto& known = the_register();
  const std::scoped_lock lock(known.mutex);
  OXY_CHECK(!strategy.name.empty(), InvalidArgument, "a strategy needs a name.");
  OXY_CHECK(std::none_of(known.all.begin(), known.all.end(), [&](const auto& s) { return s.name == strategy.name; }),
            InvalidArgument, "a strategy '", strategy.name, "' is registered already; choose another name.");
  known.all.push_back(std::move(strategy));
}

ScopedStrategies::ScopedStrategies(std::vector<RegisteredStrategy> only) : others_(std::move(only)) {
  const std::scoped_lock lock(the_register().mutex);
  the_register().all.swap(others_);
}

ScopedStrategies::~ScopedStrategies() {
  const std::scoped_lock lock(the_register().mutex);
  the_register().all.swap(others_);
}

std::vector<RegisteredStrategy> strategies() {
  auto& known = the_register();
  const std::scoped_lock lock(known.mutex);
  return known.all;
}

RegisteredStrategy find_strategy(const std::string& name) {
  std::vector<std::string> names;
  for (auto& strategy : strategies()) {
    if (strategy.name == name) return strategy;
    names.push_back(strategy.name);
  }
  OXY_CHECK(false, InvalidArgument, "there is no strategy ", in_quotes(name), "; ", did_you_mean(name, names),
            "there are ", list_of(names, false), ".");
}

}  // namespace oxytorch::tune
