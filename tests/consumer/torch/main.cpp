#include <torch/torch.h>

#include <cstdio>

#include "oxytorch/error.h"
#include "oxytorch/version.h"

int main() {
  torch::manual_seed(0);
  const auto loss = torch::nn::functional::mse_loss(torch::ones({2}), torch::zeros({2})).item<double>();
  std::printf("oxytorch %s beside torch %s: loss %.4f\n", OXYTORCH_VERSION, TORCH_VERSION, loss);
  return 0;
}
