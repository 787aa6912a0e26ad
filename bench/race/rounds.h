// Contenders of one process that take turns, and what a race in C++ prints: one JSON object with the seconds of each
// round, by case and contender, which the Python script of its name reads.
#pragma once

#include <torch/utils.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <random>
#include <string>
#include <vector>

#include "oxytorch/clock.h"

namespace race {

struct Contender {
  std::string name;
  std::function<void()> step;  // what is timed lives in the closure
  std::vector<double> seconds = {};
};

// Contenders are made when their case is raced, and gone when the next one is.
struct Case {
  std::string name;
  std::function<std::vector<Contender>()> contenders;
};

inline double timed(const Contender& contender, int repeats) {
  const auto began = std::chrono::steady_clock::now();
  for (int i = 0; i < repeats; ++i) contender.step();
  return oxytorch::seconds_since(began) / repeats;
}

inline void take_turns(std::vector<Contender>& contenders, double seconds) {
  constexpr int kWarmups = 3;
  std::vector<int> repeats;
  for (auto& contender : contenders) {
    for (int i = 0; i < kWarmups; ++i) contender.step();
    // Short steps are timed in groups of about a millisecond, so that reading the clock costs nothing.
    repeats.push_back(std::clamp(static_cast<int>(1e-3 / timed(contender, 1)), 1, 100));
  }
  std::mt19937 order(11);
  std::vector<std::size_t> turn(contenders.size());
  for (std::size_t i = 0; i < turn.size(); ++i) turn[i] = i;
  const auto began = std::chrono::steady_clock::now();
  constexpr int kLeastRounds = 7;
  constexpr int kMostRounds = 200;
  for (int round = 0; round < kMostRounds; ++round) {
    if (round >= kLeastRounds && oxytorch::seconds_since(began) > seconds) break;
    std::shuffle(turn.begin(), turn.end(), order);
    for (const auto i : turn) {
      if (repeats[i] > 1) contenders[i].step();  // warm caches, as the small cases state
      contenders[i].seconds.push_back(timed(contenders[i], repeats[i]));
    }
  }
}

// `main` of the race called `name`: --case (any number of times), --threads, --seconds.
inline int run(const std::string& name, const std::vector<Case>& cases, int argc, char** argv) {
  std::vector<std::string> wanted;
  int threads = 2;
  double seconds = 8.0;
  for (int i = 1; i < argc; ++i) {
    const std::string key = argv[i];
    if (i + 1 >= argc) {
      std::cerr << name << ": " << key << " needs a value\n";
      return 2;
    }
    const std::string value = argv[++i];
    if (key == "--case") {
      wanted.push_back(value);
    } else if (key == "--threads") {
      threads = std::atoi(value.c_str());
    } else if (key == "--seconds") {
      seconds = std::atof(value.c_str());
    } else {
      std::cerr << name << ": unknown argument " << key << ": use --case, --threads, --seconds\n";
      return 2;
    }
  }
  torch::set_num_threads(threads);
  std::cout << "{\"threads\": " << torch::get_num_threads() << ", \"cases\": {";
  bool first = true;
  for (const auto& one : cases) {
    if (!wanted.empty() && std::find(wanted.begin(), wanted.end(), one.name) == wanted.end()) continue;
    auto contenders = one.contenders();
    take_turns(contenders, seconds);
    std::cout << (first ? "" : ", ") << '"' << one.name << "\": {";
    first = false;
    for (std::size_t i = 0; i < contenders.size(); ++i) {
      std::cout << (i == 0 ? "" : ", ") << '"' << contenders[i].name << "\": [";
      for (std::size_t k = 0; k < contenders[i].seconds.size(); ++k) {
        std::cout << (k == 0 ? "" : ", ") << contenders[i].seconds[k];
      }
      std::cout << ']';
    }
    std::cout << '}' << std::flush;
  }
  std::cout << "}}\n";
  return 0;
}

}  // namespace race
