/// The native step behind the interface of torch's C++ optimizers.
#pragma once

#include <torch/optim/optimizer.h>

#include <memory>
#include <string>

namespace oxytorch::tune {

/// An optimizer that steps `original` natively, on its own options and state, which `original` goes on holding. Steps
/// whose state is still to be made, and sparse gradients, are `original`'s own. It is borrowed.
std::unique_ptr<torch::optim::Optimizer> native_optimizer(torch::optim::Optimizer& original);

/// Why that may not stand for `original`: its class, or a bit of a trial on small tensors that differs. Empty where it
/// may.
std::string native_optimizer_differs(torch::optim::Optimizer& original);

}  // namespace oxytorch::tune
