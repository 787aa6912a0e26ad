/// Gradients of parameters, added up where they are made.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/edge.h>

#include <mutex>

namespace oxytorch::ops {

/// The `grad` of a parameter for a node that adds to it itself, which saves a tensor of the parameter's size and passes
/// over memory: torch's AccumulateGrad, at the other end of `edge`, then gets no gradient, and does nothing.
///
/// There is one while backward() adds to a dense gradient that nobody watches. There is none
/// - for the first gradient, which AccumulateGrad keeps without a copy;
/// - where the parameter has another part in a graph, since AccumulateGrad adds the sum of all parts: bits stay
/// torch's;
/// - where somebody waits for the gradient: under torch.autograd.grad, create_graph and anomaly detection, and where
/// the
///   parameter has hooks, as of DistributedDataParallel or of an optimizer that steps in backward;
/// - under transforms and dispatch modes, and for tensors that are no parameters.
///
/// Holds the lock that AccumulateGrad adds under.
class GradientSum {
 public:
  /// `gradient`: what the node was given.
  GradientSum(const torch::autograd::Edge& edge, const at::Tensor& gradient);
  ~GradientSum();
  GradientSum(const GradientSum&) = delete;
  GradientSum& operator=(const GradientSum&) = delete;

  /// Contiguous, on the CPU, in sizes and dtype of the parameter; undefined where there is none.
  [[nodiscard]] const at::Tensor& tensor() const noexcept { return sum_; }

 private:
  torch::autograd::Edge leaf_;  // whose lock it is
  std::unique_lock<std::mutex> lock_;
  at::Tensor sum_;
};

}  // namespace oxytorch::ops
