#include "optim/fused.h"

#include <ATen/ATen.h>

#include <map>
#include <optional>
#include <tuple>

namespace oxytorch::optim {
namespace {

// One launch: the parameters that share hyperparameters, dtype and, for SGD, a first step.
struct Launch {
  std::vector<at::Tensor> params, grads, averages, squares, largest, steps;
};

bool like(const at::Tensor& tensor, const at::Tensor& param) {
  return tensor.scalar_type() == param.scalar_type() && tensor.strides() == param.strides();
}

bool can_be_fused(const CompositeStep& step, const CompositeParam& p) {
  const Algorithm algorithm = step.algorithm;
  const TailOptions& o = step.options;
  if (algorithm != Algorithm::Adam && algorithm != Algorithm::SGD) return false;
  if (o.clip_value > 0 || o.agc > 0 || o.stochastic_rounding || p.state->master.defined() ||
      p.state->low_bits.defined()) {
    return false;
  }
  // The kernels take the gradient's multiplier in fp32, which is not what fp64 parameters are for.
  if (p.param.scalar_type() == at::kDouble) return false;
  if (!p.param.is_cuda() || p.grad.is_sparse() || p.param.is_complex() || !p.param.is_non_overlapping_and_dense() ||
      !like(p.grad, p.param)) {
    return false;
  }
  if (p.group->lr_tensor.defined() && !p.group->lr_tensor.is_cuda()) return false;
  if (algorithm == Algorithm::SGD) return p.group->momentum == 0 || like(p.state->moments[0], p.param);
  return like(p.state->moments[0], p.param) && like(p.state->moments[1], p.param) &&
         p.state->step.device() == p.param.device() && p.state->step.scalar_type() == at::kFloat &&
         (!p.group->amsgrad || like(p.state->moments[2], p.param));
}

void launch_adam(const Launch& l, const GroupOptions& g, const at::Tensor& scale,
                 const std::optional<at::Tensor>& found) {
  at::_foreach_add_(l.steps, 1);
  const auto call = [&](const auto& kernel, const auto& lr) {
    kernel(l.params, l.grads, l.averages, l.squares, l.largest, l.steps, lr, g.beta1, g.beta2, g.weight_decay, g.eps,
           g.amsgrad, g.maximize, scale, found);
  };
  const auto with_rate = [&](const auto& lr) {
    if (g.decoupled_weight_decay) {
      call([](const auto&... arguments) { at::_fused_adamw_(arguments...); }, lr);
    } else {
      call([](const auto&... arguments) { at::_fused_adam_(arguments...); }, lr);
    }
  };
  g.lr_tensor.defined() ? with_rate(g.lr_tensor) : with_rate(g.lr);
  // The kernel leaves a skipped step's tensors alone; its count is taken back.
  if (found) at::_foreach_sub_(l.steps, std::vector<at::Tensor>(l.steps.size(), *found));
}

void launch_sgd(const Launch& l, const GroupOptions& g, bool first, const at::Tensor& scale,
                const std::optional<at::Tensor>& found) {
  const auto with_rate = [&](const auto& lr) {
    at::_fused_sgd_(l.params, l.grads, l.averages, g.weight_decay, g.momentum, lr, g.dampening, g.nesterov, g.maximize,
                    first, scale, found);
  };
  g.lr_tensor.defined() ? with_rate(g.lr_tensor) : with_rate(g.lr);
}

}  // namespace

std::vector<CompositeParam> fused_update(const CompositeStep& step, const std::vector<CompositeParam>& params) {
  const Algorithm algorithm = step.algorithm;
  std::map<std::tuple<const GroupOptions*, at::ScalarType, bool>, Launch> launches;
  std::vector<CompositeParam> others;
  for (const CompositeParam& p : params) {
    if (!can_be_fused(step, p)) {
      others.push_back(p);
      continue;
    }
    const bool first = algorithm == Algorithm::SGD && p.first;
    Launch& l = launches[{p.group, p.param.scalar_type(), first}];
    l.params.push_back(p.param);
    l.grads.push_back(p.grad);
    if (algorithm == Algorithm::SGD) {
      if (p.group->momentum != 0) l.averages.push_back(p.state->moments[0]);
      continue;
    }
    l.averages.push_back(p.state->moments[0]);
    l.squares.push_back(p.state->moments[1]);
    if (p.group->amsgrad) l.largest.push_back(p.state->moments[2]);
    l.steps.push_back(p.state->step);
  }
  if (launches.empty()) return others;
  const at::Tensor scale = step.multiplier.reciprocal().to(at::kFloat);
  const std::optional<at::Tensor> found = step.skip.defined() ? std::optional(step.skip.to(at::kFloat)) : std::nullopt;
  for (const auto& [key, launch] : launches) {
    if (algorithm == Algorithm::SGD) {
      launch_sgd(launch, *std::get<0>(key), std::get<2>(key), scale, found);
    } else {
      launch_adam(launch, *std::get<0>(key), scale, found);
    }
  }
  return others;
}

}  // namespace oxytorch::optim
