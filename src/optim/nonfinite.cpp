#include "oxytorch/optim/nonfinite.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/stack.h>

#include "oxytorch/error.h"

namespace oxytorch {
namespace {

/// The numbers that a gradient holds; those of a sparse one are its values.
at::Tensor values_of(const at::Tensor& gradient) {
  return gradient.is_sparse() ? gradient._values() : gradient.layout() == at::kStrided ? gradient : gradient.values();
}

bool finite(const at::Tensor& values) { return at::isfinite(values).all().item<bool>(); }

}  // namespace

bool NonFiniteGuard::admits(const std::vector<at::Tensor>& gradients) {
  if (policy_ == optim::NonFinite::Propagate) return true;
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> values, norms;
  for (const auto& gradient : gradients) {
    if (gradient.defined()) values.push_back(values_of(gradient));
  }
  if (values.empty()) return true;
  for (const auto& norm : at::_foreach_norm(values)) norms.push_back(norm.to(values.front().device(), at::kFloat));
  if (finite(at::stack(norms))) return true;
  // A norm of finite numbers may overflow: only now each number is looked at.
  std::int64_t first = -1;
  for (std::size_t i = 0, seen = 0; i < gradients.size() && first < 0; ++i) {
    if (gradients[i].defined() && !finite(values[seen++])) first = static_cast<std::int64_t>(i);
  }
  if (first < 0) return true;
  OXY_CHECK(policy_ != optim::NonFinite::Raise, InvalidState, "inf or NaN in gradient ", first, " of ",
            gradients.size(),
            ", in the order of the optimizer's parameters; nothing was changed. Look at the loss and "
            "inputs of this step, or use nonfinite = 'skip'.");
  ++skipped_;
  return false;
}

}  // namespace oxytorch
