#include "optim/composite.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "optim/fused.h"

namespace oxytorch::optim {
namespace {

at::Tensor as_real(const at::Tensor& tensor) { return tensor.is_complex() ? at::view_as_real(tensor) : tensor; }

// 16-bit parameters are updated in fp32 and rounded once, as torch's fused kernels do.
at::ScalarType compute_type(const at::Tensor& tensor) {
  const at::ScalarType type = tensor.scalar_type();
  return type == at::kHalf || type == at::kBFloat16 ? at::kFloat : type;
}

at::ScalarType wide_type(const at::Tensor& tensor) {
  return tensor.is_cpu() || tensor.is_cuda() ? at::kDouble : at::kFloat;
}

// Writes `value` over `target` except where the step is skipped; undefined `skip` means it never is.
void assign(at::Tensor target, const at::Tensor& value, const at::Tensor& skip) {
  target.copy_(skip.defined() ? at::where(skip, target, value.to(target.scalar_type())) : value);
}

struct Update {
  Algorithm algorithm;
  const TailOptions& options;
  const at::Tensor& multiplier;
  at::Tensor skip;  // 0-dim bool, or undefined

  [[nodiscard]] at::Tensor learning_rate(const CompositeParam& p, at::ScalarType type) const {
    return p.group->lr_tensor.defined() ? p.group->lr_tensor.to(p.param.device(), type).reshape({})
                                        : at::full({}, p.group->lr, p.param.options().dtype(type).requires_grad(false));
  }

  at::Tensor sgd(const CompositeParam& p, const at::Tensor& old, at::Tensor grad) const {
    const GroupOptions& g = *p.group;
    const at::ScalarType type = old.scalar_type();
    if (g.weight_decay != 0) grad = grad.add(old, g.weight_decay);
    if (g.momentum != 0) {
      const at::Tensor stored = as_real(p.state->momentum_buffer);
      const at::Tensor buffer = p.first ? grad : stored.to(type).mul(g.momentum).add(grad, 1 - g.dampening);
      assign(stored, buffer, skip);
      grad = g.nesterov ? grad.add(buffer, g.momentum) : buffer;
    }
    return old.sub(grad.mul(learning_rate(p, type)));
  }

  at::Tensor adam(const CompositeParam& p, at::Tensor old, at::Tensor grad) const {
    const GroupOptions& g = *p.group;
    const at::ScalarType type = old.scalar_type();
    const at::Tensor lr = learning_rate(p, type);
    if (g.decoupled_weight_decay) {
      old = old.sub(old.mul(lr * g.weight_decay));
    } else if (g.weight_decay != 0) {
      grad = grad.add(old, g.weight_decay);
    }
    const at::Tensor step = p.state->step.to(p.param.device(), wide_type(p.param)).add(1);
    assign(p.state->step, step, skip.defined() ? skip.to(p.state->step.device()) : skip);
    const at::Tensor exp_avg = as_real(p.state->exp_avg);
    const at::Tensor exp_avg_sq = as_real(p.state->exp_avg_sq);
    const at::Tensor average = exp_avg.to(type).lerp(grad, 1 - g.beta1);
    at::Tensor square = exp_avg_sq.to(type).mul(g.beta2).addcmul(grad, grad, 1 - g.beta2);
    assign(exp_avg, average, skip);
    assign(exp_avg_sq, square, skip);
    if (g.amsgrad) {
      const at::Tensor largest = as_real(p.state->max_exp_avg_sq);
      square = at::maximum(largest.to(type), square);
      assign(largest, square, skip);
    }
    const at::Tensor correction1 = at::rsub(at::pow(g.beta1, step), 1);
    const at::Tensor correction2 = at::rsub(at::pow(g.beta2, step), 1).sqrt();
    const at::Tensor denominator = square.sqrt().div(correction2.to(type)).add(g.eps);
    return old.sub(average.div(denominator).mul(lr.div(correction1).to(type)));
  }

  void run(const CompositeParam& p, at::Tensor param_norm, at::Tensor update_norm) const {
    at::Tensor param = as_real(p.param);
    const at::ScalarType type = compute_type(param);
    const at::Tensor old = param.to(type);
    at::Tensor grad = as_real(p.grad).to(type).mul(multiplier.to(type));
    if (p.group->maximize) grad = grad.neg();
    const at::Tensor updated =
        (algorithm == Algorithm::SGD ? sgd(p, old, grad) : adam(p, old, grad)).to(param.scalar_type());
    if (update_norm.defined()) {
      const at::Tensor difference = at::linalg_vector_norm(updated.sub(param), 2, std::nullopt, false);
      const at::Tensor kept = skip.defined() ? difference.masked_fill(skip, 0) : difference;
      update_norm.copy_(kept);
    }
    assign(param, updated, skip);
    if (param_norm.defined()) param_norm.copy_(at::linalg_vector_norm(param, 2, std::nullopt, false));
  }

  // What follows every update, whoever made it.
  void finish(const CompositeParam& p) const {
    if (p.state->ema.defined()) {
      const at::Tensor ema = as_real(p.state->ema);
      assign(ema, ema.lerp(as_real(p.param).to(ema.scalar_type()), 1 - options.ema_decay), skip);
    }
    if (options.zero_grads) p.grad.zero_();
  }
};

}  // namespace

at::Tensor composite_grad_norms(const std::vector<CompositeParam>& params) {
  std::vector<at::Tensor> grads;
  grads.reserve(params.size());
  for (const CompositeParam& p : params) grads.push_back(as_real(p.grad));
  const at::ScalarType wide = wide_type(grads.front());
  const bool one_dtype = std::all_of(grads.begin(), grads.end(), [&](const at::Tensor& grad) {
    return grad.scalar_type() == grads.front().scalar_type();
  });
  if (one_dtype) return at::stack(at::_foreach_norm(grads, 2, wide));
  std::vector<at::Tensor> norms;
  norms.reserve(grads.size());
  for (const at::Tensor& grad : grads) {
    norms.push_back(at::linalg_vector_norm(grad, 2, std::nullopt, false, wide));
  }
  return at::stack(norms);
}

void composite_update(Algorithm algorithm, const TailOptions& options, const std::vector<CompositeParam>& params,
                      const at::Tensor& multiplier, const at::Tensor& found_inf, const at::Tensor& param_norms,
                      const at::Tensor& update_norms) {
  const Update update{algorithm, options, multiplier, found_inf.defined() ? found_inf.ne(0) : at::Tensor()};
  // Statistics need the parameter before and after, which the fused kernels do not keep.
  const std::vector<CompositeParam> rest = param_norms.defined() || options.force_composite
                                               ? params
                                               : fused_update(algorithm, params, multiplier, found_inf);
  for (std::size_t i = 0; i < rest.size(); ++i) {
    const auto at = static_cast<std::int64_t>(i);
    update.run(rest[i], param_norms.defined() ? param_norms[at] : at::Tensor(),
               update_norms.defined() ? update_norms[at] : at::Tensor());
  }
  for (const CompositeParam& p : params) update.finish(p);
}

}  // namespace oxytorch::optim
