#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>

#include "optim/host_scalar.h"
#include "optim/step_tail_impl.h"
#include "oxytorch/error.h"

namespace oxytorch::optim {

void StepTail::Impl::step_on_device(Work& work, const StepInputs& in) {
  if (work.tail != nullptr) return step_natively(work, in);
  const at::NoGradGuard no_grad;
  const bool scaled = is_scaled(in);
  const at::Tensor norms = work.composite.empty()
                               ? at::empty({0}, at::TensorOptions(wide_type(slots.front().param)).device(device()))
                               : composite_grad_norms(work.composite);
  at::Tensor inverse = in.grad_scale.defined() ? in.grad_scale.to(norms.scalar_type()).reshape({}).reciprocal()
                                               : at::ones({}, norms.options());
  if (in.grad_divisor != 1) inverse = inverse.div(in.grad_divisor);
  const at::Tensor sum = record_norms(work, norms.square(), inverse);
  const at::Tensor norm = sum.sqrt().mul(inverse);
  at::Tensor bad = sum.mul(inverse).isfinite().logical_not().to(at::kFloat);
  stats.grad_norm.copy_(norm);
  if (!scaled && options.nonfinite == NonFinite::Raise && bad.item<float>() != 0) raise_nonfinite(stats.grad_norms);
  at::Tensor skip;
  if (scaled || options.nonfinite != NonFinite::Propagate) {
    skip = bad;
    if (in.found_inf.defined()) {
      in.found_inf.copy_(at::maximum(in.found_inf, bad.reshape_as(in.found_inf)));
      skip = in.found_inf.reshape({});
    }
    stats.found_inf.copy_(skip);
  }
  const auto also = [&skip](const at::Tensor& reason) {
    const at::Tensor more = reason.to(at::kFloat).reshape({});
    skip = skip.defined() ? at::maximum(skip, more) : more;
  };
  if (in.skip.defined()) also(in.skip.ne(0));
  if (in.norm_limit.defined()) also(norm.gt(in.norm_limit.reshape({})));
  if (skip.defined()) {
    stats.skipped.add_(skip.ne(0));
    stats.applied.copy_(skip.eq(0));
  } else {
    stats.applied.fill_(1);
  }
  at::Tensor multiplier = inverse;
  if (options.clip_norm > 0) {
    multiplier = norm.add(kClipEpsilon).reciprocal().mul(options.clip_norm).clamp_max(1.0).mul(inverse);
  }
  CompositeStep step{algorithm, options, multiplier, skip, {}, {}};
  if (!work.composite.empty()) run_composite(work, step);
  reduce_statistics(work);
  zero_other_grads(work);
}

at::Tensor StepTail::Impl::record_norms(Work& work, const at::Tensor& squares, const at::Tensor& inverse) {
  at::Tensor of_slots = squares;
  if (work.composite.size() != slots.size()) {
    of_slots = at::zeros({static_cast<std::int64_t>(slots.size())}, squares.options());
    of_slots.index_copy_(0, places(work), squares);
  }
  if (reducer) of_slots = reduced(of_slots);
  const at::Tensor norms = of_slots.sqrt().mul(inverse);
  stats.grad_norms.copy_(norms);
  return of_slots.sum();
}

const at::Tensor& StepTail::Impl::places(Work& work) {
  if (!work.places.defined() || !std::equal(work.composite_index.begin(), work.composite_index.end(),
                                            work.places_are.begin(), work.places_are.end())) {
    work.places_are.assign(work.composite_index.begin(), work.composite_index.end());
    work.places = at::tensor(work.places_are, at::kLong).to(device());
  }
  return work.places;
}

namespace {

// `tensor` itself where it is fp32, else its value in `buffer`.
const at::Tensor& as_fp32(const at::Tensor& tensor, at::Tensor& buffer) {
  if (!tensor.defined() || tensor.scalar_type() == at::kFloat) return tensor;
  if (!buffer.defined()) buffer = at::empty({}, tensor.options().dtype(at::kFloat).requires_grad(false));
  return buffer.copy_(tensor.reshape({}));
}

float* data_or_null(const at::Tensor& tensor) { return tensor.defined() ? tensor.mutable_data_ptr<float>() : nullptr; }

}  // namespace

void StepTail::Impl::fill_device_groups() {
  DeviceRound& round = device_round;
  round.groups.assign(groups.size(), {});
  round.rates.resize(groups.size());
  for (std::size_t i = 0; i < groups.size(); ++i) {
    const GroupOptions& o = groups[i];
    const kernels::TailGroup native = native_group(o);
    oxy_tail_group& g = round.groups[i];
    g.lr = o.lr;
    if (o.lr_tensor.defined() && o.lr_tensor.is_cpu()) {
      g.lr = host_scalar(o.lr_tensor, "a learning-rate tensor");
      OXY_CHECK(!std::isnan(g.lr), InvalidArgument, "parameter group ", i,
                " has a learning-rate tensor that holds NaN; set it to a number.");
    } else if (o.lr_tensor.defined()) {
      const bool wide = o.lr_tensor.scalar_type() == at::kDouble;
      g.lr_tensor = wide ? o.lr_tensor.const_data_ptr() : as_fp32(o.lr_tensor, round.rates[i]).const_data_ptr();
      g.lr_type = wide ? OXY_F64 : OXY_F32;
    }
    g.beta1 = native.beta1;
    g.beta2 = native.beta2;
    g.eps = native.eps;
    g.weight_decay = native.weight_decay;
    g.momentum = native.momentum;
    g.dampening = native.dampening;
    g.lr_decay = native.lr_decay;
    g.rule = static_cast<oxy_tail_rule>(native.rule);
    g.nesterov = native.nesterov ? 1 : 0;
    g.maximize = native.maximize ? 1 : 0;
  }
}

oxy_tail_settings StepTail::Impl::device_settings(const Work& work, const StepInputs& in) {
  auto& [scale, found, skip, limit] = device_round.inputs;
  oxy_tail_settings s{};
  s.size = sizeof(s);
  const auto flag = [&s](bool set, std::uint32_t bit) { s.flags |= set ? bit : 0; };
  flag(zeroes() && !work.grads_shared, OXY_TAIL_ZERO_GRAD);
  flag(options.collect_stats, OXY_TAIL_COLLECT);
  flag(options.stochastic_rounding, OXY_TAIL_STOCHASTIC);
  flag(options.nonfinite == NonFinite::Propagate, OXY_TAIL_PROPAGATE);
  s.grad_divisor = in.grad_divisor;
  s.clip_norm = options.clip_norm;
  s.clip_value = options.clip_value;
  s.agc = options.agc;
  s.agc_eps = options.agc_eps;
  s.ema_decay = options.ema_decay;
  s.seed = options.seed;
  s.grad_scale = data_or_null(as_fp32(in.grad_scale, scale));
  s.found_inf = data_or_null(as_fp32(in.found_inf, found));
  s.skip = data_or_null(as_fp32(in.skip, skip));
  s.norm_limit = data_or_null(as_fp32(in.norm_limit, limit));
  return s;
}

oxy_tail_results StepTail::Impl::device_results() const {
  oxy_tail_results r{};
  r.size = sizeof(r);
  r.count = static_cast<std::uint32_t>(slots.size());
  r.grad_norm = data_or_null(stats.grad_norm);
  r.found_inf = data_or_null(stats.found_inf);
  r.applied = data_or_null(stats.applied);
  r.skipped = stats.skipped.mutable_data_ptr<std::int64_t>();
  r.grad_norms = data_or_null(stats.grad_norms);
  r.param_norms = data_or_null(stats.param_norms);
  r.update_norms = data_or_null(stats.update_norms);
  return r;
}

// The backend's kernels for most, torch's operators for the others, one verdict for all.
void StepTail::Impl::step_natively(Work& work, const StepInputs& in) {
  const at::NoGradGuard no_grad;
  DeviceRound& round = device_round;
  DeviceTail& tail = *work.tail;
  if (!round.sums.defined() || round.sums.numel() != stats.grad_norms.numel()) {
    round.sums = at::zeros(stats.grad_norms.sizes(), stats.grad_norms.options().dtype(at::kDouble));
    round.verdict = at::zeros({4}, round.sums.options());
  }
  const bool measured = measures(in);
  fill_device_groups();
  const oxy_tail_settings settings = device_settings(work, in);
  const oxy_tail_results results = device_results();
  auto* const sums = round.sums.mutable_data_ptr<double>();
  auto* const verdict = static_cast<oxy_tail_verdict*>(round.verdict.mutable_data_ptr());
  // Places that the kernels do not write.
  if (!measured || work.planned.size() != slots.size()) round.sums.zero_();
  if (measured && !work.composite.empty()) {
    round.sums.index_copy_(0, places(work), composite_grad_norms(work.composite).to(at::kDouble).square());
  }

  tail.enter();
  tail.configure(round.groups);
  if (measured) tail.measure(sums);
  if (reducer && measured) {
    tail.leave();
    round.sums.copy_(reduced(round.sums));
    tail.enter();
  }
  if (options.nonfinite == NonFinite::Raise && !is_scaled(in)) {
    tail.leave();
    if (!std::isfinite(round.sums.cpu().sum().item<double>())) raise_nonfinite(round.sums);
    tail.enter();
  }
  tail.judge(sums, settings, results, verdict);
  tail.apply(verdict, settings, results);
  tail.leave();

  note_native_writes(work);
  if (in.found_inf.defined() && in.found_inf.scalar_type() != at::kFloat) {
    in.found_inf.copy_(round.inputs[1].reshape_as(in.found_inf));
  }
  if (!work.composite.empty()) {
    CompositeStep step{algorithm, options, round.verdict.select(0, 0), round.verdict.select(0, 3), {}, {}};
    run_composite(work, step);
  }
  reduce_statistics(work);
  zero_other_grads(work);
}

}  // namespace oxytorch::optim
