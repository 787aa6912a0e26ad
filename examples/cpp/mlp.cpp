// A small network on two interleaved spirals: what changes in a LibTorch program that takes Oxytorch's optimizer.
#include <torch/torch.h>

#include <cstdlib>
#include <iostream>

#include "oxytorch/amp.h"
#include "oxytorch/optim.h"

namespace {

// Two spirals: 2-D points and which spiral they lie on.
std::pair<torch::Tensor, torch::Tensor> spirals(int64_t count) {
  const auto label = torch::randint(2, {count});
  const auto turn = torch::rand({count}).sqrt() * 9.0;
  const auto angle = turn + label * 3.14159265;
  const auto points = torch::stack({turn * angle.cos(), turn * angle.sin()}, 1) / 5.0;
  return {points + 0.02 * torch::randn_like(points), label};
}

}  // namespace

int main(int argc, char** argv) {
  const int steps = argc > 1 ? std::atoi(argv[1]) : 1000;
  torch::manual_seed(0);
  torch::nn::Sequential model(torch::nn::Linear(2, 256), torch::nn::SiLU(), torch::nn::Linear(256, 256),
                              torch::nn::SiLU(), torch::nn::Linear(256, 2));

  // Clipping, the update and the moving average are one pass over memory each way.
  oxytorch::optim::AdamW optimizer(model->parameters(),
                                   oxytorch::optim::AdamWOptions(3e-3).clip_norm(1.0).ema_decay(0.99));
  const auto dtype = oxytorch::amp::recommend_dtype(torch::kCPU);
  std::cout << "precision: " << dtype.reason << '\n';

  for (int step = 0; step < steps; ++step) {
    const auto [points, label] = spirals(256);
    torch::Tensor loss;
    {
      const oxytorch::amp::Autocast autocast(torch::kCPU, torch::kBFloat16, dtype.dtype == torch::kBFloat16);
      loss = torch::nn::functional::cross_entropy(model->forward(points).to(torch::kFloat), label);
    }
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    if (step % 200 == 0 || step + 1 == steps) std::cout << "step " << step << " loss " << loss.item<float>() << '\n';
  }

  optimizer.apply_ema();  // the averaged weights, for evaluation; restore_parameters() brings the others back
  model->eval();
  const torch::NoGradGuard no_grad;
  const auto [points, label] = spirals(4096);
  const auto right = model->forward(points).argmax(1).eq(label).to(torch::kFloat).mean();
  std::cout << "accuracy of the averaged weights: " << right.item<float>() << '\n';
  return 0;
}
