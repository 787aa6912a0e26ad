/// A world in which the true seconds of a step under every combination are known, for the search to explore.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "normal.h"
#include "oxytorch/random.h"
#include "oxytorch/tune/search.h"

namespace oxytorch::tune {

using Names = std::vector<std::string>;

/// True seconds of a step under a combination.
using Landscape = std::function<double(const Names&)>;

inline bool has(const Names& names, const char* name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

struct World {
  Landscape seconds;
  double noise = 0.02;
  std::map<std::string, double> cost = {};  ///< one-off seconds
  Names broken = {};                        ///< fail
  Names wrong = {};                         ///< the verifier finds other numbers
};

struct Spent {
  Names best;
  int trials = 0;
  int removals = 0;
  double steps = 0;  ///< measured
  std::vector<Trial> all = {};
};

inline Spent explore(Search& search, const World& world, std::uint64_t seed = 1) {
  Spent spent;
  PhiloxStream random(seed, 13);
  while (const auto trial = search.ask()) {
    EXPECT_LT(++spent.trials, 1000) << "no end";
    if (spent.trials >= 1000) break;
    spent.removals += trial->removal;
    spent.all.push_back(*trial);
    TrialOutcome outcome;
    const auto either = [&](const Names& list) {
      return std::any_of(list.begin(), list.end(),
                         [&](const std::string& name) { return has(trial->challenger, name.c_str()); });
    };
    outcome.failed = either(world.broken);
    if (outcome.failed) {
      outcome.reason = "it threw";
    } else {
      PairedTest paired_test(trial->paired_test);
      const double times[] = {world.seconds(trial->incumbent), world.seconds(trial->challenger)};
      while (const auto side = paired_test.next()) {
        paired_test.record(*side, times[static_cast<int>(*side)] * std::exp(world.noise * normal(random)));
        ++spent.steps;
      }
      outcome.paired_test = paired_test.result();
      outcome.verified = !either(world.wrong);
      if (!outcome.verified) outcome.reason = "the loss differs";
      for (const std::string& name : trial->challenger) {
        if (!has(trial->incumbent, name.c_str()) && world.cost.contains(name))
          outcome.cost_seconds += world.cost.at(name);
      }
    }
    search.tell(outcome);
  }
  spent.best = search.best();
  return spent;
}

/// Names of the trials in their order.
inline Names tried(const Spent& spent) {
  Names names;
  for (const Trial& trial : spent.all) names.push_back(trial.strategy);
  return names;
}

inline std::vector<StrategyFacts> cnn_strategies() {
  return {{.name = "allocator"},
          {.name = "channels_last", .kind = Kind::Tolerance, .interacts = {"bf16", "compile"}},
          {.name = "math_attention", .kind = Kind::Tolerance, .group = "attention", .interacts = {"bf16"}},
          {.name = "bf16", .kind = Kind::Precision, .interacts = {"compile"}},
          {.name = "compile", .kind = Kind::Tolerance, .group = "compile", .interacts = {"bf16"}},
          {.name = "compile_max", .kind = Kind::Tolerance, .group = "compile", .interacts = {"bf16"}}};
}

/// As measured on a convolutional network: a layout that helps until the compiler chooses its own.
inline double cnn(const Names& on) {
  double seconds = has(on, "allocator") ? 0.47 : 1;
  const bool compiled = has(on, "compile") || has(on, "compile_max");
  const bool bf16 = has(on, "bf16");
  if (compiled) seconds *= bf16 ? 0.42 : 0.75;
  if (has(on, "compile_max")) seconds *= 1.02;
  if (!compiled && bf16) seconds *= 0.57;
  if (has(on, "channels_last")) seconds *= compiled ? (bf16 ? 1.5 : 1.2) : (bf16 ? 0.9 : 0.71);
  if (has(on, "math_attention")) seconds *= bf16 ? 0.87 : 1.3;
  return seconds * 0.4;
}

}  // namespace oxytorch::tune
