/// The state of any optimizer: walked where its class is known, serialised where it is not.
#pragma once

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "oxytorch/api.h"
#include "tune/digest.h"

namespace oxytorch::tune {

using EachTensor = std::function<void(const char* name, at::Tensor& value)>;
using EachCount = std::function<void(std::int64_t& steps)>;

/// Visits the entries of a state of torch's AdamW, Adam, SGD, Adagrad or RMSprop; false for another class.
bool each_entry(torch::optim::OptimizerParamState& state, const EachTensor& tensor, const EachCount& count);

/// Visits every state tensor of `optimizer` with its parameter; false where a class is not known. What was visited
/// until then may have been changed.
OXY_API bool each_state_tensor(torch::optim::Optimizer& optimizer,
                               const std::function<void(const at::Tensor& param, at::Tensor& value)>& visit);

/// Whether an optimizer is known to step each of its parameters by itself.
bool is_by_parameter(const torch::optim::Optimizer& optimizer);

/// An optimizer's groups hold these of its parameters alone meanwhile, for a step of them.
class NarrowedOptimizer {
 public:
  NarrowedOptimizer(torch::optim::Optimizer& optimizer, const std::vector<at::Tensor>& parameters);
  ~NarrowedOptimizer();
  NarrowedOptimizer(const NarrowedOptimizer&) = delete;
  NarrowedOptimizer& operator=(const NarrowedOptimizer&) = delete;

 private:
  torch::optim::Optimizer& optimizer_;
  std::vector<std::vector<at::Tensor>> held_;
};

/// The optimizer's part of a Snapshot: its state and options.
class HeldOptimizer {
 public:
  explicit HeldOptimizer(torch::optim::Optimizer& optimizer);
  ~HeldOptimizer();
  HeldOptimizer(const HeldOptimizer&) = delete;
  HeldOptimizer& operator=(const HeldOptimizer&) = delete;
  void restore() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Adds the options of an optimizer's groups to a digest, which names it `called`.
void digest_options(const torch::optim::Optimizer& optimizer, const std::string& called, Digest& digest);
/// Adds what an optimizer holds now to a digest, which names it `called`.
void digest_optimizer(torch::optim::Optimizer& optimizer, const std::string& called, Digest& digest);

}  // namespace oxytorch::tune
