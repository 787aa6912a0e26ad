/// The models and optimizers of one training step.
#pragma once

#include <torch/optim/optimizer.h>

#include <functional>
#include <vector>

// torch/nn/module.h takes a compiler 9 s; who has a model has included it.
namespace torch::nn {
class Module;
}

namespace oxytorch {

/// Borrowed: `{*generator, *discriminator}`.
using Models = std::vector<std::reference_wrapper<torch::nn::Module>>;
/// Borrowed, in the order in which they step.
using Optimizers = std::vector<std::reference_wrapper<torch::optim::Optimizer>>;

}  // namespace oxytorch
