// A GAN: two models and two optimizers in one step, which `accelerate` tries, verifies and makes faster as a whole.
// The generator learns to turn noise into points on a circle.
#include <torch/torch.h>

#include <cmath>
#include <cstdlib>
#include <iostream>
#include <vector>

#include "oxytorch/tune.h"

namespace nn = torch::nn;

namespace {

constexpr int64_t kRows = 256, kNoise = 8, kHidden = 128;

oxytorch::Batch points() {  // real points, and noise to make others of
  const auto angle = torch::rand({kRows, 1}) * 6.2831853;
  return {torch::cat({angle.cos(), angle.sin()}, 1), torch::randn({kRows, kNoise})};
}

at::Tensor judged_as(const at::Tensor& judged, double truth) {
  return nn::functional::binary_cross_entropy_with_logits(judged, torch::full_like(judged, truth));
}

}  // namespace

int main(int argc, char** argv) {
  const int steps = argc > 1 ? std::atoi(argv[1]) : 2000;
  torch::manual_seed(0);
  nn::Sequential generator(nn::Linear(kNoise, kHidden), nn::ReLU(), nn::Linear(kHidden, kHidden), nn::ReLU(),
                           nn::Linear(kHidden, 2));
  nn::Sequential discriminator(nn::Linear(2, kHidden), nn::LeakyReLU(), nn::Linear(kHidden, kHidden), nn::LeakyReLU(),
                               nn::Linear(kHidden, 1));
  const auto options = torch::optim::AdamOptions(1e-3).betas({0.5, 0.999});
  torch::optim::Adam of_generator(generator->parameters(), options);
  torch::optim::Adam of_discriminator(discriminator->parameters(), options);

  // A loss for each optimizer, in the order in which they step; each calls the models itself.
  const auto loss_of_discriminator = [&](const oxytorch::Batch& batch) {
    return judged_as(discriminator->forward(batch.input), 1) +
           judged_as(discriminator->forward(generator->forward(batch.target).detach()), 0);
  };
  const auto loss_of_generator = [&](const oxytorch::Batch& batch) {
    return judged_as(discriminator->forward(generator->forward(batch.target)), 1);
  };

  auto plan = oxytorch::accelerate({*generator, *discriminator}, {of_discriminator, of_generator},
                                   {loss_of_discriminator, loss_of_generator}, {points(), points(), points(), points()},
                                   oxytorch::AccelerateOptions().steps_planned(steps));
  for (int step = 0; step < steps; ++step) {
    const auto loss = plan.step(points());
    if (step % 500 == 0) std::cout << "step " << step << ": loss " << loss.item<float>() << '\n';
  }
  plan.revert();

  const torch::NoGradGuard no_grad;
  const auto radius = generator->forward(torch::randn({kRows, kNoise})).norm(2, 1);
  std::cout << plan.report() << "radius of the points made: " << radius.mean().item<float>()
            << " on average, 1 is right\n";
  return std::isfinite(radius.mean().item<float>()) ? 0 : 1;
}
