#include <ATen/ATen.h>

#include "optim/step_tail_impl.h"

namespace oxytorch::optim {

void StepTail::Impl::step_on_device(Work& work, const StepInputs& in) {
  if (work.composite.empty() && !reducer) return;
  const at::NoGradGuard no_grad;
  const bool scaled = in.grad_scale.defined() || in.found_inf.defined();
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
  if (!scaled && options.nonfinite == NonFinite::Raise && bad.item<float>() != 0) raise_nonfinite();
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
}

at::Tensor StepTail::Impl::record_norms(Work& work, const at::Tensor& squares, const at::Tensor& inverse) {
  at::Tensor of_slots = squares;
  if (work.composite.size() != slots.size()) {
    std::vector<std::int64_t> positions(work.composite_index.begin(), work.composite_index.end());
    const at::Tensor where = at::tensor(positions, at::kLong).to(squares.device());
    of_slots = at::zeros({static_cast<std::int64_t>(slots.size())}, squares.options());
    of_slots.index_copy_(0, where, squares);
  }
  if (reducer) of_slots = reduced(of_slots);
  const at::Tensor norms = of_slots.sqrt().mul(inverse);
  stats.grad_norms.copy_(norms);
  return of_slots.sum();
}

}  // namespace oxytorch::optim
