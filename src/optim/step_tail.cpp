#include "oxytorch/optim/step_tail.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "optim/dense.h"
#include "optim/formats.h"
#include "optim/step_tail_impl.h"
#include "oxytorch/error.h"

namespace oxytorch::optim {

kernels::Parallel intra_op_pool() {
  return {at::in_parallel_region() ? 1 : at::get_num_threads(),
          [](void*, int tasks, void (*task)(void*, int), void* context) {
            at::parallel_for(0, tasks, 1, [&](std::int64_t begin, std::int64_t end) {
              for (std::int64_t i = begin; i < end; ++i) task(context, static_cast<int>(i));
            });
          },
          nullptr};
}

void StepTail::Impl::create_stats() {
  const at::TensorOptions options32 = at::TensorOptions(at::kFloat).device(device());
  const auto n = static_cast<std::int64_t>(slots.size());
  stats.grad_norm = at::zeros({}, options32);
  stats.found_inf = at::zeros({}, options32);
  stats.applied = at::zeros({}, options32);
  stats.skipped = at::zeros({}, options32.dtype(at::kLong));
  stats.grad_norms = at::zeros({n}, options32);
  if (options.collect_stats) {
    stats.param_norms = at::zeros({n}, options32);
    stats.update_norms = at::zeros({n}, options32);
  }
}

void StepTail::Impl::raise_nonfinite(const at::Tensor& norms) const {
  const at::Tensor here = norms.to(at::kCPU, at::kDouble);
  const double* values = here.const_data_ptr<double>();
  std::string names;
  int count = 0;
  for (std::size_t i = 0; i < slots.size(); ++i) {
    if (std::isfinite(values[i])) continue;
    if (++count <= 5) names += (names.empty() ? "" : ", ") + slots[i].name;
  }
  if (count > 5) names += " and " + std::to_string(count - 5) + " more";
  detail::raise(ErrorCode::InvalidState, "inf or NaN in the gradient of ", names.empty() ? "a parameter" : names,
                "; nothing was changed. Look at the loss and inputs of this step, or use nonfinite=\"skip\".");
}

at::Tensor StepTail::Impl::reduced(const at::Tensor& sums) const {
  const at::Tensor result = reducer(sums);
  OXY_CHECK(result.defined() && result.sizes() == sums.sizes() && result.device() == sums.device(), InvalidArgument,
            "the norm reducer returned a tensor of shape ", result.defined() ? result.sizes() : at::IntArrayRef(),
            "; it must return one of shape ", sums.sizes(), " on ", sums.device(), ".");
  return result.to(sums.scalar_type()).contiguous();
}

void StepTail::Impl::reduce_statistics(const Work& work) {
  if (!reducer || !options.collect_stats) return;
  const at::NoGradGuard no_grad;
  std::vector<std::int64_t> stepped;
  for (std::size_t i : work.members) {
    if (slots[i].param.grad().defined()) stepped.push_back(static_cast<std::int64_t>(i));
  }
  const at::Tensor where = at::tensor(stepped, at::kLong).to(device());
  for (at::Tensor* norms : {&stats.param_norms, &stats.update_norms}) {
    at::Tensor sums = at::zeros(norms->sizes(), norms->options().dtype(wide_type(slots.front().param)));
    sums.index_copy_(0, where, norms->index_select(0, where).to(sums.scalar_type()).square());
    norms->index_copy_(0, where, reduced(sums).sqrt().to(at::kFloat).index_select(0, where));
  }
}

void StepTail::Impl::run_composite(Work& work, CompositeStep& step) {
  if (options.collect_stats) {
    step.param_norms =
        at::zeros({static_cast<std::int64_t>(work.composite.size())}, at::TensorOptions(at::kFloat).device(device()));
    step.update_norms = at::zeros_like(step.param_norms);
  }
  step.in_order = work.in_order;
  composite_update(step, work.composite);
  if (zeroes()) {
    for (CompositeParam& p : work.composite) p.grad.zero_();
  }
  for (std::size_t i = 0; i < work.composite.size(); ++i) {
    const auto at = static_cast<std::int64_t>(i);
    const auto to = static_cast<std::int64_t>(work.composite_index[i]);
    Slot& slot = slots[work.composite_index[i]];
    slot.first = false;
    note_own_write(slot);
    if (step.param_norms.defined()) {
      stats.param_norms[to].copy_(step.param_norms[at]);
      stats.update_norms[to].copy_(step.update_norms[at]);
    }
  }
}

bool StepTail::Impl::run(Work& work, const StepInputs& inputs) {
  const bool created = gather(work);
  if (device().is_cpu()) {
    step_on_host(work, inputs);
  } else {
    step_on_device(work, inputs);
  }
  return created;
}

bool StepTail::Impl::shares_gradient(std::size_t index) const {
  const at::Tensor& grad = slots[index].param.grad();
  // Autograd has just made one that was never written.
  if (!grad.is_inference() && grad._version() == 0) return false;
  const Range own = range_of(grad);
  for (std::size_t i = 0; i < slots.size(); ++i) {
    const at::Tensor& other = slots[i].param.grad();
    if (i != index && other.defined() && meet(own, range_of(other))) return true;
  }
  return false;
}

bool StepTail::Impl::run_alone(std::size_t index, const StepInputs& inputs) {
  Work& work = alone[index];
  if (work.members.empty()) work.members = {index};
  const bool created = run(work, inputs);
  if (!options.collect_stats) return created;
  const at::NoGradGuard no_grad;
  const auto at = static_cast<std::int64_t>(index);
  if (!reported_norms.defined() || reported_norms.numel() != stats.grad_norms.numel()) {
    reported_norms = at::zeros_like(stats.grad_norms);
  }
  reported_norms[at].copy_(stats.grad_norms[at]);
  return created;
}

StepTail::StepTail(Algorithm algorithm, TailOptions options) : impl_(std::make_unique<Impl>()) {
  check_options(algorithm, options);
  impl_->algorithm = algorithm;
  impl_->options = options;
}

StepTail::~StepTail() = default;

void StepTail::add_group(std::vector<at::Tensor> params, std::vector<std::string> names, const GroupOptions& options) {
  const std::size_t group = impl_->groups.size();
  check_group(impl_->algorithm, options, group);
  OXY_CHECK(names.empty() || names.size() == params.size(), InvalidArgument, "parameter group ", group, " has ",
            params.size(), " parameters but ", names.size(), " names; give one for each, or none.");
  std::vector<Slot> added;
  for (std::size_t i = 0; i < params.size(); ++i) {
    const at::Tensor& p = params[i];
    std::string label = names.empty() ? std::to_string(i) + " of group " + std::to_string(group) : names[i];
    OXY_CHECK(p.defined(), InvalidArgument, "parameter ", label, " is undefined; give a tensor.");
    OXY_CHECK(p.layout() == at::kStrided, NotSupported, "parameter ", label, " is sparse (layout ", p.layout(),
              "); only dense parameters can be optimized here.");
    OXY_CHECK(!p.key_set().has(c10::DispatchKey::Python), NotSupported, "parameter ", label,
              " is a tensor subclass with its own dispatch (such as DTensor or FakeTensor); use torch.optim for it.");
    const auto is_same = [&p](const Slot& slot) { return slot.param.is_same(p); };
    OXY_CHECK(std::none_of(added.begin(), added.end(), is_same) &&
                  std::none_of(impl_->slots.begin(), impl_->slots.end(), is_same),
              InvalidArgument, "parameter ", label, " was given twice; an optimizer updates each parameter once.");
    const at::Device first = !impl_->slots.empty() ? impl_->device() : params.front().device();
    OXY_CHECK(p.device() == first, NotSupported, "parameter ", label, " is on ", p.device(), " but the first one on ",
              first, "; give each device an optimizer of its own.");
    check_formats(*impl_, p, label);
    Slot slot{.param = p,
              .group = group,
              .name = std::move(label),
              .sizes = p.sizes().vec(),
              .type = p.scalar_type(),
              .device = p.device()};
    added.push_back(std::move(slot));
  }
  impl_->groups.push_back(options);
  for (Slot& slot : added) impl_->slots.push_back(std::move(slot));
  impl_->stats = {};
  impl_->all.members.resize(impl_->slots.size());
  std::iota(impl_->all.members.begin(), impl_->all.members.end(), std::size_t{0});
  ++impl_->generation;
}

void StepTail::set_group_options(std::size_t group, const GroupOptions& options) {
  OXY_CHECK(group < impl_->groups.size(), OutOfRange, "there is no parameter group ", group, "; there are ",
            impl_->groups.size(), ".");
  check_group(impl_->algorithm, options, group);
  GroupOptions& current = impl_->groups[group];
  // Which state takes part is written in the plan.
  for (std::size_t k = 0; k < kMoments; ++k) {
    if (wants_moment(impl_->algorithm, current, k) != wants_moment(impl_->algorithm, options, k)) ++impl_->generation;
  }
  current = options;
}

std::size_t StepTail::group_count() const noexcept { return impl_->groups.size(); }
std::size_t StepTail::param_count() const noexcept { return impl_->slots.size(); }
const at::Tensor& StepTail::param(std::size_t index) const { return impl_->slots.at(index).param; }
const std::string& StepTail::param_name(std::size_t index) const { return impl_->slots.at(index).name; }
const ParamState& StepTail::state(std::size_t index) const {
  const Slot& slot = impl_->slots.at(index);
  order_codes(slot);
  return slot.state;
}

ParamState StepTail::decoded_state(std::size_t index) const {
  ParamState state = impl_->slots.at(index).state;
  const at::NoGradGuard no_grad;
  for (std::size_t k = 0; k < kMoments; ++k) {
    if (!state.scales[k].defined()) continue;
    state.moments[k] = decoded_moment(*impl_, impl_->slots[index], k);
    state.scales[k] = at::Tensor();
  }
  at::Tensor& momentum = state.moments[0];
  if (impl_->algorithm == Algorithm::SGD && impl_->slots[index].sparse && momentum.defined()) {
    momentum = momentum.to_sparse(1);
  }
  return state;
}

void StepTail::set_state(std::size_t index, ParamState state) {
  OXY_CHECK(index < impl_->slots.size(), OutOfRange, "there is no parameter ", index, "; there are ",
            impl_->slots.size(), ".");
  adopt_state(*impl_, impl_->slots[index], std::move(state));
  ++impl_->generation;
}

namespace {

void check_divisor(const StepInputs& inputs) {
  OXY_CHECK(inputs.grad_divisor > 0 && std::isfinite(inputs.grad_divisor), InvalidArgument, "grad_divisor is ",
            inputs.grad_divisor, "; give the number of micro-batches, a finite number above 0.");
}

}  // namespace

bool StepTail::step(const StepInputs& inputs) {
  Impl& impl = *impl_;
  if (impl.slots.empty()) return false;
  OXY_CHECK(impl.displaced.empty(), InvalidState,
            "a step was asked for while the moving averages stand in for the parameters; leave ema_weights() first.");
  const auto check = [&](const at::Tensor& t, const char* what) {
    OXY_CHECK(!t.defined() || (t.numel() == 1 && t.device() == impl.device()), InvalidArgument, what,
              " must be a one-element tensor on ", impl.device(), "; it has ", t.numel(), " elements on ", t.device(),
              ".");
  };
  check(inputs.grad_scale, "grad_scale");
  check(inputs.found_inf, "found_inf");
  check(inputs.skip, "skip");
  check(inputs.norm_limit, "norm_limit");
  check_divisor(inputs);
  if (!impl.options.step_in_backward) return impl.run(impl.all, inputs);
  OXY_CHECK(!inputs.grad_scale.defined() && !inputs.found_inf.defined() && !inputs.skip.defined() &&
                !inputs.norm_limit.defined(),
            NotSupported,
            "step_in_backward cannot serve a loss scale or a condition on the whole step: the parameters were updated "
            "as their gradients arrived. Use an optimizer without it.");
  // What no hook reported, or what had to wait, is updated now.
  if (impl.options.zero_grads) {
    impl.note_written(impl.all);
    impl.refuse_zeros(impl.all);
  }
  bool created = false;
  for (std::size_t i = 0; i < impl.slots.size(); ++i) {
    if (impl.slots[i].param.grad().defined()) created = impl.run_alone(i, inputs) || created;
  }
  const at::NoGradGuard no_grad;
  for (Slot& slot : impl.slots) {
    const bool waited = std::exchange(slot.waits, false);
    if (!slot.param.grad().defined()) continue;
    if (impl.options.zero_grads) slot.param.mutable_grad().zero_();
    if (waited) slot.param.mutable_grad().reset();
  }
  if (impl.options.collect_stats && impl.reported_norms.defined()) {
    impl.stats.grad_norm.copy_(impl.reported_norms.norm());
    impl.stats.grad_norms.copy_(impl.reported_norms);
    impl.reported_norms.zero_();
  }
  return created;
}

bool StepTail::grad_ready(std::size_t index, double grad_divisor) {
  Impl& impl = *impl_;
  OXY_CHECK(index < impl.slots.size(), OutOfRange, "there is no parameter ", index, "; there are ", impl.slots.size(),
            ".");
  Slot& slot = impl.slots[index];
  const at::Tensor& grad = slot.param.grad();
  if (!grad.defined()) return false;
  if (impl.options.norm_in_backward) {
    slot.known.forget();
    if (impl.device().is_cpu() && readable(grad, slot.param)) slot.known.take(grad, intra_op_pool());
    return false;
  }
  OXY_CHECK(impl.options.step_in_backward, InvalidState,
            "grad_ready() was called on a tail without norm_in_backward or step_in_backward; set one of them.");
  OXY_CHECK(impl.displaced.empty(), InvalidState,
            "a step was asked for while the moving averages stand in for the parameters; leave ema_weights() first.");
  StepInputs inputs;
  inputs.grad_divisor = grad_divisor;
  check_divisor(inputs);
  slot.waits = impl.shares_gradient(index);
  if (slot.waits) return false;
  const bool created = impl.run_alone(index, inputs);
  slot.param.mutable_grad().reset();
  return created;
}

void StepTail::set_norm_reducer(NormReducer reducer) {
  OXY_CHECK(!impl_->options.norm_in_backward && !impl_->options.step_in_backward, NotSupported,
            "a norm over shards needs all gradients at once; use the optimizer without norm_in_backward and "
            "step_in_backward.");
  impl_->reducer = std::move(reducer);
}

const TailStats& StepTail::stats() const noexcept {
  if (!impl_->stats.grad_norm.defined() && !impl_->slots.empty()) impl_->create_stats();
  return impl_->stats;
}

const TailOptions& StepTail::options() const noexcept { return impl_->options; }

void StepTail::apply_ema() {
  OXY_CHECK(impl_->options.ema_decay != 0, InvalidState, "this optimizer keeps no moving average; set ema_decay.");
  OXY_CHECK(impl_->displaced.empty(), InvalidState, "the moving averages already stand in for the parameters.");
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> kept;
  for (const Slot& slot : impl_->slots) {
    kept.push_back(slot.state.ema.defined() ? slot.param.detach().clone() : at::Tensor());
  }
  impl_->displaced = std::move(kept);
  for (Slot& slot : impl_->slots) {
    if (!slot.state.ema.defined()) continue;
    slot.param.copy_(slot.state.ema);
    note_own_write(slot);
  }
}

void StepTail::restore_parameters() {
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < impl_->displaced.size(); ++i) {
    if (!impl_->displaced[i].defined()) continue;
    impl_->slots[i].param.copy_(impl_->displaced[i]);
    note_own_write(impl_->slots[i]);
  }
  impl_->displaced.clear();
}

bool StepTail::native() const noexcept {
  return impl_->all.generation == impl_->generation && impl_->all.others.empty();
}

std::int64_t StepTail::bytes_per_step() const noexcept {
  const TailOptions& o = impl_->options;
  const bool measured = !(o.norm_in_backward && impl_->all.plan) &&
                        (o.clip_norm > 0 || o.nonfinite != NonFinite::Propagate || o.collect_stats);
  const kernels::TailSettings settings = impl_->base_settings();
  std::int64_t bytes = 0;
  for (const kernels::TailTensor& t : impl_->all.native()) bytes += kernels::step_bytes(t, settings, measured);
  return bytes;
}

}  // namespace oxytorch::optim
