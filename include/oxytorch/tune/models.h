/// The models and optimizers of one training step.
#pragma once

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <functional>
#include <vector>

namespace oxytorch {

/// Borrowed: `{*generator, *discriminator}`.
using Models = std::vector<std::reference_wrapper<torch::nn::Module>>;
/// Borrowed, in the order in which they step.
using Optimizers = std::vector<std::reference_wrapper<torch::optim::Optimizer>>;

}  // namespace oxytorch
