// The step tail from C++: torch::optim::AdamW with clip_grad_norm_ and an averaging loop, against oxytorch's AdamW.
//
//   step_tail_race [--case NAME]... [--threads N] [--seconds S]
//
// All contenders run in this process, in turn, on tensors of equal size and content. step_tail.py runs it and shows the
// figures.
#include <torch/torch.h>

#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "oxytorch/optim.h"
#include "rounds.h"

namespace {

constexpr double kLr = 1e-4;
constexpr double kWeightDecay = 0.01;
constexpr double kMaxNorm = 1.0;
constexpr double kEmaDecay = 0.999;

struct Tensors {
  std::string name;
  std::vector<std::int64_t> sizes;
};

std::vector<Tensors> all_tensors() {
  std::vector<Tensors> cases;
  cases.push_back({"16 x 4M", std::vector<std::int64_t>(16, std::int64_t{4} << 20)});
  cases.push_back({"200 x 1,000", std::vector<std::int64_t>(200, 1000)});
  cases.push_back({"200 x 64", std::vector<std::int64_t>(200, 64)});
  std::vector<std::int64_t> small;
  std::mt19937 sizes(7);
  for (int i = 0; i < 1000; ++i) small.push_back(1 + static_cast<std::int64_t>(sizes() % 512));
  cases.push_back({"1,000 x up to 512", std::move(small)});
  return cases;
}

std::vector<torch::Tensor> make_params(const Tensors& which) {
  torch::manual_seed(1);
  std::vector<torch::Tensor> params;
  for (const auto size : which.sizes) {
    auto param = (torch::randn({size}) * 0.02).requires_grad_();
    param.mutable_grad() = torch::randn({size}) * 0.01;
    params.push_back(std::move(param));
  }
  return params;
}

race::Contender make_torch(const Tensors& which) {
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
  return {"torch::optim", [state] {
            torch::nn::utils::clip_grad_norm_(state->params, kMaxNorm);
            state->optimizer->step();
            const torch::NoGradGuard no_grad;
            for (std::size_t i = 0; i < state->params.size(); ++i)
              state->ema[i].lerp_(state->params[i], 1.0 - kEmaDecay);
          }};
}

race::Contender make_oxytorch(const Tensors& which) {
  auto params = make_params(which);
  auto optimizer = std::make_shared<oxytorch::optim::AdamW>(
      std::move(params),
      oxytorch::optim::AdamWOptions(kLr).weight_decay(kWeightDecay).clip_norm(kMaxNorm).ema_decay(kEmaDecay));
  return {"oxytorch", [optimizer] { optimizer->step(); }};
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<race::Case> cases;
  for (const auto& which : all_tensors()) {
    cases.push_back({which.name, [which] { return std::vector{make_torch(which), make_oxytorch(which)}; }});
  }
  return race::run("step_tail_race", cases, argc, argv);
}
