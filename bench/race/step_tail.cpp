// The step tail from C++: torch::optim::AdamW with clip_grad_norm_ and an averaging loop, against oxytorch's AdamW.
//
//   step_tail_race [--case NAME]... [--threads N] [--seconds S]
//
// All contenders run in this process, in turn, on tensors of equal size and content. Prints one JSON object: for each
// case and contender the seconds of each round. step_tail.py runs it and shows the figures.
#include <sys/resource.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "oxytorch/clock.h"
#include "oxytorch/optim.h"

namespace {

constexpr double kLr = 1e-4;
constexpr double kWeightDecay = 0.01;
constexpr double kMaxNorm = 1.0;
constexpr double kEmaDecay = 0.999;

using Clock = std::chrono::steady_clock;

struct Case {
  std::string name;
  std::vector<std::int64_t> sizes;
};

std::vector<Case> all_cases() {
  std::vector<Case> cases;
  cases.push_back({"16 x 4M", std::vector<std::int64_t>(16, std::int64_t{4} << 20)});
  cases.push_back({"200 x 1,000", std::vector<std::int64_t>(200, 1000)});
  cases.push_back({"200 x 64", std::vector<std::int64_t>(200, 64)});
  std::vector<std::int64_t> small;
  std::mt19937 sizes(7);
  for (int i = 0; i < 1000; ++i) small.push_back(1 + static_cast<std::int64_t>(sizes() % 512));
  cases.push_back({"1,000 x up to 512", std::move(small)});
  return cases;
}

std::vector<torch::Tensor> make_params(const Case& which) {
  torch::manual_seed(1);
  std::vector<torch::Tensor> params;
  for (const auto size : which.sizes) {
    auto param = (torch::randn({size}) * 0.02).requires_grad_();
    param.mutable_grad() = torch::randn({size}) * 0.01;
    params.push_back(std::move(param));
  }
  return params;
}

// One contender: its tensors live in the closure.
struct Contender {
  std::string name;
  std::function<void()> step;
  std::vector<double> seconds;
};

Contender make_torch(const Case& which) {
  struct State {
    std::vector<torch::Tensor> params;
    std::vector<torch::Tensor> ema;
    std::unique_ptr<torch::optim::AdamW> optimizer;
  };
  auto state = std::make_shared<State>();
  state->params = make_params(which);
  for (const auto& param : state->params) state->ema.push_back(param.detach().clone());
  state->optimizer =
      std::make_unique<torch::optim::AdamW>(state->params, torch::optim::AdamWOptions(kLr).weight_decay(kWeightDecay));
  return {"torch::optim",
          [state] {
            torch::nn::utils::clip_grad_norm_(state->params, kMaxNorm);
            state->optimizer->step();
            const torch::NoGradGuard no_grad;
            for (std::size_t i = 0; i < state->params.size(); ++i)
              state->ema[i].lerp_(state->params[i], 1.0 - kEmaDecay);
          },
          {}};
}

Contender make_oxytorch(const Case& which) {
  auto params = make_params(which);
  auto optimizer = std::make_shared<oxytorch::optim::AdamW>(
      std::move(params),
      oxytorch::optim::AdamWOptions(kLr).weight_decay(kWeightDecay).clip_norm(kMaxNorm).ema_decay(kEmaDecay));
  return {"oxytorch", [optimizer] { optimizer->step(); }, {}};
}

double timed(const Contender& contender, int repeats) {
  const auto began = Clock::now();
  for (int i = 0; i < repeats; ++i) contender.step();
  return oxytorch::seconds_since(began) / repeats;
}

void race(std::vector<Contender>& contenders, double seconds) {
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
  const auto began = Clock::now();
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

}  // namespace

int main(int argc, char** argv) {
  std::vector<std::string> wanted;
  int threads = 2;
  double seconds = 8.0;
  for (int i = 1; i < argc; ++i) {
    const std::string key = argv[i];
    if (i + 1 >= argc) {
      std::cerr << "step_tail_race: " << key << " needs a value\n";
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
      std::cerr << "step_tail_race: unknown argument " << key << ": use --case, --threads, --seconds\n";
      return 2;
    }
  }
  torch::set_num_threads(threads);
  std::cout << "{\"threads\": " << torch::get_num_threads() << ", \"cases\": {";
  bool first = true;
  for (const auto& which : all_cases()) {
    if (!wanted.empty() && std::find(wanted.begin(), wanted.end(), which.name) == wanted.end()) continue;
    std::vector<Contender> contenders;
    contenders.push_back(make_torch(which));
    contenders.push_back(make_oxytorch(which));
    race(contenders, seconds);
    std::cout << (first ? "" : ", ") << '"' << which.name << "\": {";
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
