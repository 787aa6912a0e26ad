#include "ops/gradient_sum.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>

#include "ops/dispatch.h"

namespace oxytorch::ops {
namespace {

// A node's lock is protected.
struct Lock : torch::autograd::Node {
  static std::mutex& of(torch::autograd::Node& node) { return node.*(&Lock::mutex_); }
};

// Whether this is a backward() of all parameters; torch.autograd.grad() and a node that is called by hand give their
// gradients to somebody.
bool adds_to_every_leaf() {
  const auto* asked = torch::autograd::get_current_graph_task_exec_info();
  return asked != nullptr && asked->empty();
}

}  // namespace

GradientSum::GradientSum(const torch::autograd::Edge& edge, const at::Tensor& gradient) {
  auto* leaf = dynamic_cast<torch::autograd::AccumulateGrad*>(edge.function.get());
  if (leaf == nullptr || at::GradMode::is_enabled() || is_transformed() || !adds_to_every_leaf()) return;
  if (edge.function.use_count() > 1 || !is_ordinary(gradient)) return;
  if (torch::autograd::AnomalyMode::is_enabled()) return;  // it looks at what nodes give
  leaf_ = edge;
  lock_ = std::unique_lock(Lock::of(*leaf));
  const at::Tensor& variable = leaf->variable;
  if (!variable.defined() || !variable.requires_grad()) return;
  if (has_hooks(*leaf) || leaf->tensor_post_acc_grad_hooks() != nullptr) return;
  const at::Tensor& grad = variable.grad();
  if (!is_ordinary(grad) || !grad.is_contiguous() || grad.scalar_type() != variable.scalar_type() ||
      grad.sizes() != variable.sizes() || grad.requires_grad()) {
    return;
  }
  sum_ = grad;
}

GradientSum::~GradientSum() {
  if (sum_.defined()) torch::autograd::impl::bump_version(sum_);
}

}  // namespace oxytorch::ops
