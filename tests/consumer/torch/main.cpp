// Trains a small model with the native optimizer, as a user's program would.
#include <torch/torch.h>

#include <cstdio>

#include "oxytorch/optim.h"
#include "oxytorch/version.h"

int main() {
  torch::manual_seed(0);
  torch::nn::Linear model(4, 1);
  const auto inputs = torch::randn({64, 4});
  const auto targets = inputs.matmul(torch::tensor({{1.0F}, {-2.0F}, {0.5F}, {3.0F}}));
  oxytorch::optim::AdamW optimizer(model->parameters(), oxytorch::optim::AdamWOptions(0.05).clip_norm(10.0));

  double first = 0;
  double last = 0;
  for (int step = 0; step < 200; ++step) {
    optimizer.zero_grad();
    const auto loss = torch::mse_loss(model->forward(inputs), targets);
    loss.backward();
    optimizer.step();
    last = loss.item<double>();
    if (step == 0) first = last;
  }
  std::printf("oxytorch %s beside torch %s: loss %.4f to %.4f\n", OXYTORCH_VERSION, TORCH_VERSION, first, last);
  return last < 0.1 * first ? 0 : 1;
}
