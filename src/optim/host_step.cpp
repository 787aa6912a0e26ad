#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <cmath>
#include <span>

#include "optim/host_scalar.h"
#include "optim/step_tail_impl.h"

namespace oxytorch::optim {

void StepTail::Impl::step_on_host(Work& work, const StepInputs& in) {
  const bool scaled = is_scaled(in);
  const double scale = (in.grad_scale.defined() ? host_scalar(in.grad_scale, "grad_scale") : 1.0) * in.grad_divisor;
  fill_native_groups();
  const kernels::Parallel pool = intra_op_pool();
  double sum = 0;
  if (measures(in)) sum = measure(work, pool, 1.0 / scale);
  const bool finite = std::isfinite(sum) && std::isfinite(1.0 / scale);
  const bool told = in.found_inf.defined() && host_scalar(in.found_inf, "found_inf") != 0;
  const double norm = std::sqrt(sum) / scale;
  *stats.grad_norm.mutable_data_ptr<float>() = static_cast<float>(norm);
  if (!finite && !scaled && options.nonfinite == NonFinite::Raise) raise_nonfinite(stats.grad_norms);
  const bool bad = told || (!finite && (scaled || options.nonfinite != NonFinite::Propagate));
  const bool skip = bad || (in.skip.defined() && host_scalar(in.skip, "skip") != 0) ||
                    (in.norm_limit.defined() && norm > host_scalar(in.norm_limit, "norm_limit"));
  *stats.found_inf.mutable_data_ptr<float>() = bad ? 1.0F : 0.0F;
  *stats.applied.mutable_data_ptr<float>() = skip ? 0.0F : 1.0F;
  if (bad && in.found_inf.defined()) set_host_scalar(in.found_inf, 1.0);
  if (skip) {
    *stats.skipped.mutable_data_ptr<std::int64_t>() += 1;
    if (zeroes()) {
      work.plan->zero_gradients(pool);
      const at::NoGradGuard no_grad;
      for (CompositeParam& p : work.composite) p.grad.zero_();
    }
    zero_other_grads(work);
    return;
  }
  // Written so that a NaN norm, where it is let through, reaches every gradient as in torch.
  double clip = options.clip_norm > 0 ? options.clip_norm / (norm + kClipEpsilon) : 1.0;
  if (clip > 1.0) clip = 1.0;
  kernels::TailSettings settings = base_settings();
  settings.grad_multiplier = clip / scale;
  settings.zero_grad = zeroes() && !work.grads_shared;
  work.plan->apply(native_groups, settings, pool);
  note_native_writes(work);
  if (options.collect_stats) collect_norms(work);
  if (!work.composite.empty()) {
    const at::NoGradGuard no_grad;
    CompositeStep step{algorithm, options, at::scalar_tensor(settings.grad_multiplier, at::kDouble), {}, {}, {}};
    run_composite(work, step);
  }
  reduce_statistics(work);
  zero_other_grads(work);
}

kernels::TailSettings StepTail::Impl::base_settings() const {
  kernels::TailSettings s;
  s.clip_value = options.clip_value;
  s.agc = options.agc;
  s.agc_eps = options.agc_eps;
  s.ema_decay = options.ema_decay;
  s.zero_grad = zeroes();
  s.collect = options.collect_stats;
  s.stochastic = options.stochastic_rounding;
  s.seed = options.seed;
  return s;
}

double StepTail::Impl::measure(Work& work, const kernels::Parallel& pool, double inverse) {
  double sum = work.plan->measure(
      pool, options.norm_in_backward ? std::span<const double>(work.known) : std::span<const double>());
  float* norms = stats.grad_norms.mutable_data_ptr<float>();
  const auto sums = work.plan->grad_sum_squares();
  for (std::size_t i = 0; i < work.planned.size(); ++i) {
    norms[work.planned[i]] = static_cast<float>(std::sqrt(sums[i]) * inverse);
  }
  for (std::size_t i : work.others) norms[i] = 0;
  at::Tensor wide;
  if (!work.composite.empty()) {
    const at::NoGradGuard no_grad;
    wide = composite_grad_norms(work.composite).contiguous();
    const double* values = wide.const_data_ptr<double>();
    for (std::size_t i = 0; i < work.composite.size(); ++i) {
      sum += values[i] * values[i];
      norms[work.composite_index[i]] = static_cast<float>(values[i] * inverse);
    }
  }
  if (!reducer) return sum;
  const at::Tensor own = at::zeros({static_cast<std::int64_t>(slots.size())}, at::kDouble);
  double* of_slots = own.mutable_data_ptr<double>();
  for (std::size_t i = 0; i < work.planned.size(); ++i) of_slots[work.planned[i]] = sums[i];
  for (std::size_t i = 0; i < work.composite.size(); ++i) {
    const double value = wide.const_data_ptr<double>()[i];
    of_slots[work.composite_index[i]] = value * value;
  }
  const at::Tensor everywhere = reduced(own);
  sum = 0;
  for (std::size_t i = 0; i < slots.size(); ++i) {
    const double value = everywhere.const_data_ptr<double>()[i];
    sum += value;
    norms[i] = static_cast<float>(std::sqrt(value) * inverse);
  }
  return sum;
}

void StepTail::Impl::fill_native_groups() {
  for (std::size_t i = 0; i < groups.size(); ++i) {
    const GroupOptions& o = groups[i];
    native_groups[i] = native_group(o);
    double& lr = native_groups[i].lr;
    lr = o.lr_tensor.defined() ? host_scalar(o.lr_tensor, "a learning-rate tensor") : o.lr;
    OXY_CHECK(!std::isnan(lr), InvalidArgument, "parameter group ", i,
              " has a learning-rate tensor that holds NaN; set it to a number.");
  }
}

void StepTail::Impl::collect_norms(Work& work) {
  float* param_norms = stats.param_norms.mutable_data_ptr<float>();
  float* update_norms = stats.update_norms.mutable_data_ptr<float>();
  for (std::size_t i = 0; i < work.planned.size(); ++i) {
    param_norms[work.planned[i]] = static_cast<float>(std::sqrt(work.plan->param_sum_squares()[i]));
    update_norms[work.planned[i]] = static_cast<float>(std::sqrt(work.plan->update_sum_squares()[i]));
  }
}

}  // namespace oxytorch::optim
