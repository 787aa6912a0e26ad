#include "optim/composite.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "optim/algorithm.h"
#include "optim/formats.h"
#include "optim/fused.h"
#include "optim/muon.h"

namespace oxytorch::optim {
namespace {

at::Tensor as_real(const at::Tensor& tensor) { return tensor.is_complex() ? at::view_as_real(tensor) : tensor; }

// Backward may leave a gradient whose conjugate or sign is yet to be taken.
at::Tensor real_grad(const CompositeParam& p) {
  const at::Tensor grad = p.grad.is_sparse() ? p.grad.values() : p.grad;  // coalesced
  return as_real(grad.resolve_conj().resolve_neg());
}

at::Tensor norm_of(const at::Tensor& tensor) { return at::linalg_vector_norm(tensor, 2, std::nullopt, false); }

// Norm of each row (the first dimension) of a parameter of `param_dim` dimensions, or of the whole where there are no
// rows; shaped to multiply with `values`, which have one dimension more where the parameter is complex.
at::Tensor row_norms(const at::Tensor& values, std::int64_t param_dim) {
  if (param_dim < 2) return norm_of(values);
  std::vector<std::int64_t> dims;
  for (std::int64_t d = 1; d < values.dim(); ++d) dims.push_back(d);
  return at::linalg_vector_norm(values, 2, dims, /*keepdim=*/true);
}

// The update of one parameter.
class Update {
 public:
  Update(const CompositeStep& step, const CompositeParam& p) : step_(step), p_(p), g_(*p.group) {}

  // The gradient as the rule sees it: unscaled, clipped, in the sign of descent.
  [[nodiscard]] at::Tensor gradient(const at::Tensor& old) const {
    const TailOptions& o = step_.options;
    at::Tensor grad = real_grad(p_).to(old.scalar_type()).mul(step_.multiplier.to(old.scalar_type()));
    if (o.clip_value > 0) grad = grad.clamp(-o.clip_value, o.clip_value);
    if (o.agc > 0) {
      const at::Tensor norm = row_norms(grad, p_.param.dim());
      const at::Tensor most = row_norms(old, p_.param.dim()).clamp_min(o.agc_eps).mul(o.agc);
      grad = grad.mul(at::where(norm.gt(most), most.div(norm.clamp_min(1e-6)), at::ones({}, norm.options())));
    }
    return g_.maximize ? grad.neg() : grad;
  }

  [[nodiscard]] at::Tensor moment(std::size_t index, at::ScalarType type) const {
    const at::Tensor stored = as_real(p_.state->moments[index]);
    if (!p_.state->scales[index].defined()) return stored.to(type);
    return decode_int8(stored, p_.state->scales[index], code(index)).to(type);
  }

  void put_moment(std::size_t index, const at::Tensor& value) const {
    const at::Tensor stored = as_real(p_.state->moments[index]);
    const auto operand = static_cast<kernels::RoundingOperand>(index + 1);
    if (at::Tensor& scale = p_.state->scales[index]; scale.defined()) {
      const auto [codes, scales] = encode_int8(value, code(index), stored, rounding(operand));
      assign(stored, codes);
      assign(scale, scales);
    } else if (stored.scalar_type() == at::kBFloat16 && step_.options.stochastic_rounding) {
      assign(stored, round_bf16(value, stored, *rounding(operand)));
    } else {
      assign(stored, value);
    }
  }

  // The count of updates after this one, wide; the stored count is advanced at the end.
  [[nodiscard]] at::Tensor count() const { return p_.state->step.to(p_.param.device(), wide_type(p_.param)).add(1); }

  // 1 - beta^count, to the last digits also in fp32, where 0.999 itself is off by 3e-5 of 1 - 0.999.
  [[nodiscard]] at::Tensor one_less_power(double beta) const { return count().mul(std::log(beta)).expm1().neg(); }

  [[nodiscard]] at::Tensor learning_rate(at::ScalarType type) const {
    return g_.lr_tensor.defined() ? g_.lr_tensor.to(p_.param.device(), type).reshape({})
                                  : at::full({}, g_.lr, p_.param.options().dtype(type).requires_grad(false));
  }

  // The rules of kernels/update_rule-inl.h once more, in operators: devices, dtypes and complex numbers without kernels
  // have nothing else.

  at::Tensor sgd(const at::Tensor& old, at::Tensor grad) const {
    if (g_.weight_decay != 0) grad = grad.add(old, g_.weight_decay);
    if (g_.momentum != 0) {
      const at::Tensor buffer =
          p_.first ? grad : moment(0, old.scalar_type()).mul(g_.momentum).add(grad, 1 - g_.dampening);
      put_moment(0, buffer);
      grad = g_.nesterov ? grad.add(buffer, g_.momentum) : buffer;
    }
    return old.sub(grad.mul(learning_rate(old.scalar_type())));
  }

  at::Tensor adam(at::Tensor old, at::Tensor grad) const {
    const at::ScalarType type = old.scalar_type();
    const at::Tensor lr = learning_rate(type);
    if (g_.decoupled_weight_decay) {
      old = old.sub(old.mul(lr * g_.weight_decay));
      // torch writes what it decays before it reads such a gradient, unless it has negated it first.
      if (p_.reads_itself && !g_.maximize) grad = grad.sub(grad.mul(lr * g_.weight_decay));
    } else if (g_.weight_decay != 0) {
      grad = grad.add(old, g_.weight_decay);
    }
    const at::Tensor average = moment(0, type).lerp(grad, 1 - g_.beta1);
    at::Tensor square = moment(1, type).mul(g_.beta2).addcmul(grad, grad, 1 - g_.beta2);
    put_moment(0, average);
    put_moment(1, square);
    if (g_.amsgrad) {
      square = at::maximum(moment(2, type), square);
      put_moment(2, square);
    }
    const at::Tensor correction1 = one_less_power(g_.beta1);
    const at::Tensor correction2 = one_less_power(g_.beta2).sqrt();
    const at::Tensor denominator = square.sqrt().div(correction2.to(type)).add(g_.eps);
    return old.sub(average.div(denominator).mul(lr.div(correction1).to(type)));
  }

  at::Tensor lion(at::Tensor old, const at::Tensor& grad) const {
    const at::Tensor lr = learning_rate(old.scalar_type());
    old = old.sub(old.mul(lr * g_.weight_decay));
    const at::Tensor average = moment(0, old.scalar_type());
    const at::Tensor direction = average.lerp(grad, 1 - g_.beta1).sign();
    put_moment(0, average.lerp(grad, 1 - g_.beta2));  // writes the memory of `average` where nothing is converted
    return old.sub(direction.mul(lr));
  }

  at::Tensor adagrad(const at::Tensor& old, at::Tensor grad) const {
    const at::ScalarType type = old.scalar_type();
    if (g_.weight_decay != 0) grad = grad.add(old, g_.weight_decay);
    const at::Tensor sum = moment(1, type).addcmul(grad, grad);
    put_moment(1, sum);
    const at::Tensor rate = learning_rate(count().scalar_type()).div(count().sub(1).mul(g_.lr_decay).add(1));
    return old.sub(grad.div(sum.sqrt().add(g_.eps)).mul(rate.to(type)));
  }

  at::Tensor rmsprop(const at::Tensor& old, at::Tensor grad) const {
    const at::ScalarType type = old.scalar_type();
    if (g_.weight_decay != 0) grad = grad.add(old, g_.weight_decay);
    const at::Tensor square = moment(1, type).mul(g_.alpha).addcmul(grad, grad, 1 - g_.alpha);
    put_moment(1, square);
    at::Tensor spread = square;
    if (g_.centered) {
      const at::Tensor average = moment(2, type).lerp(grad, 1 - g_.alpha);
      put_moment(2, average);
      spread = square.addcmul(average, average, -1).clamp_min(0);
    }
    at::Tensor step = grad.div(spread.sqrt().add(g_.eps));
    if (g_.momentum != 0) {
      step = moment(0, type).mul(g_.momentum).add(step);
      put_moment(0, step);
    }
    return old.sub(step.mul(learning_rate(type)));
  }

  // The momentum of Muon, before it is made orthogonal.
  at::Tensor muon_direction(const at::Tensor& old) const {
    const at::Tensor grad = gradient(old);
    const at::Tensor buffer = moment(0, old.scalar_type()).lerp(grad, 1 - g_.momentum);
    put_moment(0, buffer);
    return g_.nesterov ? grad.lerp(buffer, g_.momentum) : buffer;
  }

  at::Tensor muon(const at::Tensor& old, const at::Tensor& orthogonal) const {
    const at::Tensor lr = learning_rate(old.scalar_type());
    const double factor = muon_rate_factor(g_.adjust_lr, old.size(0), old.size(1));
    return old.sub(old.mul(lr * g_.weight_decay)).sub(orthogonal.to(old.scalar_type()).mul(lr * factor));
  }

  // The weights before the update: a copy where they will be compared with those after.
  [[nodiscard]] at::Tensor old_weights() const {
    const at::Tensor old = best_weights(p_.param, *p_.state);
    return step_.param_norms.defined() ? old.clone() : old;
  }

  [[nodiscard]] at::Tensor updated(const at::Tensor& old) const {
    const at::Tensor grad = gradient(old);
    switch (step_.algorithm) {
      case Algorithm::Adam: return adam(old, grad);
      case Algorithm::SGD: return sgd(old, grad);
      case Algorithm::Lion: return lion(old, grad);
      case Algorithm::Adagrad: return adagrad(old, grad);
      case Algorithm::RMSprop: return rmsprop(old, grad);
      case Algorithm::Muon: break;
    }
    return muon(old, orthogonalized({muon_direction(old)}, g_).front());
  }

  // Stores the new weights in all their forms, advances the count and takes the statistics.
  void store(const at::Tensor& old, const at::Tensor& updated, std::int64_t index) const {
    const at::Tensor param = as_real(p_.param);
    const auto stochastic = rounding(kernels::RoundingOperand::Param);
    if (p_.state->master.defined()) {
      assign(p_.state->master, updated);
      assign(param, updated);
    } else if (p_.state->low_bits.defined()) {
      const auto [weights, low_bits] = split_weights(updated, param, stochastic);
      assign(param, weights);
      assign(p_.state->low_bits, low_bits);
    } else if (stochastic && param.scalar_type() == at::kBFloat16) {
      assign(param, round_bf16(updated, param, *stochastic));
    } else {
      assign(param, updated);
    }
    if (p_.state->step.defined()) assign(p_.state->step, p_.state->step.add(1));
    if (step_.param_norms.defined()) {
      const at::Tensor now = best_weights(p_.param, *p_.state);
      step_.update_norms[index].copy_(norm_of(now.sub(old)));
      step_.param_norms[index].copy_(norm_of(now));
    }
  }

  // Plain SGD in the rows of a sparse gradient.
  void update_rows() const {
    const at::Tensor rows = p_.grad.indices().select(0, 0);
    const at::Tensor old = p_.param.index_select(0, rows);
    const at::Tensor wide = old.to(compute_type(old.scalar_type()));
    at::Tensor now = sgd(wide, gradient(wide)).to(old.scalar_type());
    if (step_.skip.defined()) now = at::where(step_.skip.to(old.device()).ne(0), old, now);
    p_.param.detach().index_copy_(0, rows, now);
  }

  // What follows every update, whoever made it.
  void finish() const {
    ParamState& s = *p_.state;
    if (s.ema.defined()) {
      const at::Tensor ema = as_real(s.ema);
      assign(ema, ema.lerp(best_weights(p_.param, s).to(ema.scalar_type()), 1 - step_.options.ema_decay));
    }
    if (s.copy.defined()) s.copy.copy_(best_weights(p_.param, s));
  }

 private:
  [[nodiscard]] kernels::StateCode code(std::size_t index) const { return traits(step_.algorithm).moments[index].code; }

  [[nodiscard]] std::optional<Rounding> rounding(kernels::RoundingOperand operand) const {
    if (!step_.options.stochastic_rounding) return std::nullopt;
    return Rounding{step_.options.seed, p_.stream, operand, p_.state->step.add(1)};
  }

  // Writes `value` over `target` except where the step is skipped.
  void assign(at::Tensor target, const at::Tensor& value) const {
    if (!step_.skip.defined()) {
      target.copy_(value);
      return;
    }
    const at::Tensor skip = step_.skip.to(target.device()).ne(0);
    target.copy_(at::where(skip, target, value.to(target.scalar_type())));
  }

  const CompositeStep& step_;
  const CompositeParam& p_;
  const GroupOptions& g_;
};

// Matrices of one group, shape and dtype are made orthogonal together: few large products in place of many small ones.
void muon_update(const CompositeStep& step, const std::vector<CompositeParam>& params) {
  std::map<std::tuple<const GroupOptions*, std::int64_t, std::int64_t>, std::vector<std::size_t>> batches;
  for (std::size_t i = 0; i < params.size(); ++i) {
    batches[{params[i].group, params[i].param.size(0), params[i].param.size(1)}].push_back(i);
  }
  for (const auto& [key, members] : batches) {
    std::vector<at::Tensor> old, directions;
    for (std::size_t i : members) {
      const Update update(step, params[i]);
      old.push_back(update.old_weights());
      directions.push_back(update.muon_direction(old.back()));
    }
    const std::vector<at::Tensor> orthogonal = orthogonalized(directions, *std::get<0>(key));
    for (std::size_t k = 0; k < members.size(); ++k) {
      const Update update(step, params[members[k]]);
      update.store(old[k], update.muon(old[k], orthogonal[k]), static_cast<std::int64_t>(members[k]));
    }
  }
}

}  // namespace

at::ScalarType compute_type(at::ScalarType type) noexcept {
  return type == at::kHalf || type == at::kBFloat16 ? at::kFloat : type;
}

// Not every device has fp64; one that holds fp64 tensors has.
at::ScalarType wide_type(const at::Tensor& tensor) noexcept {
  return tensor.is_cpu() || tensor.is_cuda() || at::toRealValueType(tensor.scalar_type()) == at::kDouble ? at::kDouble
                                                                                                         : at::kFloat;
}

at::Tensor best_weights(const at::Tensor& param, const ParamState& state) {
  if (state.master.defined()) return state.master;
  const at::Tensor real = as_real(param);
  if (state.low_bits.defined()) return join_weights(real, state.low_bits);
  return real.to(compute_type(real.scalar_type()));
}

at::Tensor composite_grad_norms(const std::vector<CompositeParam>& params) {
  std::vector<at::Tensor> grads;
  grads.reserve(params.size());
  for (const CompositeParam& p : params) grads.push_back(real_grad(p));
  at::ScalarType wide = at::kFloat;
  for (const at::Tensor& grad : grads) wide = at::promoteTypes(wide, wide_type(grad));
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

void composite_update(const CompositeStep& step, const std::vector<CompositeParam>& params) {
  if (step.algorithm == Algorithm::Muon && !step.in_order) {
    muon_update(step, params);
  } else {
    // Statistics need the parameter before and after, which the fused kernels do not keep.
    const bool by_operators = step.in_order || step.param_norms.defined() || step.options.force_composite;
    const std::vector<CompositeParam> rest = by_operators ? params : fused_update(step, params);
    for (std::size_t i = 0; i < rest.size(); ++i) {
      const Update update(step, rest[i]);
      if (rest[i].grad.is_sparse()) {
        update.update_rows();
        continue;
      }
      const at::Tensor old = update.old_weights();
      update.store(old, update.updated(old), static_cast<std::int64_t>(i));
    }
  }
  for (const CompositeParam& p : params) Update(step, p).finish();
}

}  // namespace oxytorch::optim
