#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "optim/dense.h"
#include "optim/memory_ranges.h"
#include "optim/param_state.h"
#include "optim/step_tail_impl.h"
#include "oxytorch/error.h"
#include "oxytorch/logging.h"

namespace oxytorch::optim {
namespace {

// True where two tensors have memory in common. Kernels take tensors together and in any order; torch one after the
// other.
bool overlap(const std::vector<PlannedTensor>& held) {
  Memory memory;
  for (const PlannedTensor& t : held) memory.add(t.range());
  return memory.finish();
}

}  // namespace

bool StepTail::Impl::can_be_native(const Slot& slot) const {
  const at::Tensor& p = slot.param;
  const ParamState& s = slot.state;
  if (p.sizes() != at::IntArrayRef(slot.sizes) || p.scalar_type() != slot.type || p.device() != slot.device)
    return false;
  if (algorithm == Algorithm::Muon || !element_type(p) || !p.is_non_overlapping_and_dense() || p.is_neg() ||
      p.is_conj() || (options.agc > 0 && !rows_are_runs(p))) {
    return false;
  }
  std::optional<kernels::ElementType> state_type;
  for (std::size_t k = 0; k < kMoments; ++k) {
    if (!s.moments[k].defined()) continue;
    const auto found = element_type(s.moments[k]);
    if (!found || !same_layout(s.moments[k], p) || (state_type && *state_type != *found)) return false;
    if (s.scales[k].defined() &&
        (!s.scales[k].is_contiguous() || s.moments[k].strides() != at::IntArrayRef(slot.code_strides[k]))) {
      return false;
    }
    state_type = found;
  }
  if (s.step.defined() && (s.step.device() != p.device() || s.step.scalar_type() != at::kFloat)) return false;
  return absent_or_like(s.ema, at::kFloat, p) && absent_or_like(s.master, at::kFloat, p) &&
         absent_or_like(s.low_bits, at::kChar, p) &&
         (!s.copy.defined() || (element_type(s.copy) && same_layout(s.copy, p)));
}

kernels::TailTensor StepTail::Impl::tail_tensor(std::size_t index) const {
  const Slot& slot = slots[index];
  const ParamState& s = slot.state;
  kernels::TailTensor t;
  t.numel = slot.param.numel();
  t.rows = slot.param.dim() < 2 || t.numel == 0 ? 1 : slot.param.size(0);
  t.group = static_cast<std::uint32_t>(slot.group);
  t.stream = static_cast<std::uint32_t>(index);
  t.param = address(slot.param);
  t.type = t.grad_type = t.state_type = *element_type(slot.param);
  t.master = address_or_null<float>(s.master);
  t.low_bits = address_or_null<std::int8_t>(s.low_bits);
  t.ema = address_or_null<float>(s.ema);
  t.copy = address_or_null<void>(s.copy);
  if (s.copy.defined()) t.copy_type = *element_type(s.copy);
  if (s.step.defined()) t.step = s.step.mutable_data_ptr<float>();
  for (std::size_t k = 0; k < kMoments; ++k) {
    if (!wants(*this, slot, k) || !s.moments[k].defined()) continue;
    t.state_type = *element_type(s.moments[k]);
    t.state[k] = {address(s.moments[k]), address_or_null<std::uint16_t>(s.scales[k])};
  }
  t.first = slot.first;
  return t;
}

// Whether there are kernels for the parameters' device at all; finds them the first time.
bool StepTail::Impl::device_serves() {
  if (device().is_cpu()) return true;
  DeviceRound& round = device_round;
  if (std::exchange(round.looked, true)) return round.queue != nullptr;
  round.device = device_with_kernels(device());
  if (!round.device) return false;
  try {
    round.queue = std::make_shared<StreamQueue>(*round.device, device());
  } catch (const c10::Error& error) {
    log_once(LogLevel::Warn, "stream of " + device().str(),
             "torch can neither name nor wait for its stream of " + device().str() + " (" +
                 error.what_without_backtrace() + "); the step runs as torch's operators",
             "optim");
  }
  return round.queue != nullptr;
}

void StepTail::Impl::build_plan(Work& work) {
  std::vector<kernels::TailTensor> tensors;
  work.planned.clear();
  work.others.clear();
  work.watched = false;
  work.served = !options.force_composite && device_serves();
  for (std::size_t i : work.members) {
    Slot& slot = slots[i];
    slot.complete = complete(*this, slot);
    slot.watched = has_masters(slot);
    work.watched = work.watched || slot.watched;
    slot.signature.forget();
    if (work.served && can_be_native(slot)) {
      work.planned.push_back(i);
      tensors.push_back(tail_tensor(i));
    } else {
      work.others.push_back(i);
    }
  }
  const auto leave_to_torch = [&] {
    work.served = false;
    work.planned.clear();
    work.others = work.members;
    work.held_end.clear();
    tensors.clear();
  };
  note_tensors(work);
  note_written(work);
  work.in_order = reads_written(work) != nullptr;
  if (work.in_order || overlap(work.held)) leave_to_torch();
  work.known.assign(tensors.size(), -1);
  work.tail.reset();
  if (device().is_cpu()) {
    work.plan.emplace(tensors);
  } else if (!tensors.empty()) {
    work.tail = DeviceTail::make(*device_round.device, device_round.queue, std::move(tensors));
    if (work.tail == nullptr) {
      leave_to_torch();
      work.held.clear();
    }
  }
  work.composite.reserve(work.others.size());
  work.composite_index.reserve(work.others.size());
  native_groups.resize(groups.size());
  if (!stats.grad_norm.defined()) create_stats();
  work.generation = generation;
}

void StepTail::Impl::note_tensors(Work& work) {
  work.held.clear();
  work.held_end.clear();
  for (std::size_t i : work.planned) {
    const Slot& slot = slots[i];
    const ParamState& s = slot.state;
    const auto note = [&](const at::Tensor& tensor, bool like_param) {
      if (tensor.defined()) work.held.emplace_back(tensor, like_param);
    };
    note(slot.param, true);
    for (std::size_t k = 0; k < kMoments; ++k) {
      if (!wants(*this, slot, k)) continue;
      note(s.moments[k], true);
      note(s.scales[k], false);
    }
    for (const at::Tensor* entry : {&s.master, &s.low_bits, &s.ema, &s.copy}) note(*entry, true);
    note(s.step, false);
    work.held_end.push_back(work.held.size());
  }
}

void StepTail::Impl::note_written(Work& work) {
  work.written.clear();
  for (std::size_t i : work.members) {
    work.written.add(slots[i].param);
    for (const at::Tensor* entry : fields(slots[i].state)) work.written.add(*entry);
  }
  work.written.finish();
}

const Slot* StepTail::Impl::reads_written(const Work& work) const {
  for (std::size_t i : work.members) {
    const at::Tensor& grad = slots[i].param.grad();
    if (grad.defined() && work.written.has(grad)) return &slots[i];
  }
  return nullptr;
}

void StepTail::Impl::refuse_zeros(const Work& work) const {
  const Slot* const found = reads_written(work);
  OXY_CHECK(found == nullptr, InvalidState, "the gradient of parameter ", found->name,
            " lies in the memory of a parameter or of state, where zero_grads would write zeros; give it memory of its "
            "own, as by clone(), or use the optimizer without zero_grads.");
}

// State for every parameter with a gradient, laid out as it, and a plan that matches.
bool StepTail::Impl::prepare(Work& work) {
  bool created = false;
  for (std::size_t i : work.members) {
    Slot& slot = slots[i];
    const at::Tensor& grad = slot.param.grad();
    if (!grad.defined()) continue;
    check_param(*this, slot, grad);
    conform_state(*this, slot);
    if (complete(*this, slot)) continue;
    create_state(*this, slot);
    ++generation;
    created = true;
  }
  build_plan(work);
  return created;
}

// All that may have changed about a parameter and its gradient; false where the plan cannot serve them as they are.
bool StepTail::Impl::inspect(Slot& slot, const at::Tensor& grad, kernels::TailTensor& native) {
  check_param(*this, slot, grad);
  note_sparse(*this, slot, grad);
  if (!can_be_native(slot)) return false;
  const at::Tensor* source = &grad;
  if (!readable(grad, slot.param)) {
    slot.signature.forget();
    const at::NoGradGuard no_grad;
    if (!slot.grad_copy.defined() || slot.grad_copy.strides() != slot.param.strides()) {
      slot.grad_copy = at::empty_like(slot.param, {}, at::MemoryFormat::Preserve);
    }
    slot.grad_copy.copy_(grad.is_sparse() ? grad.to_dense() : grad);
    source = &slot.grad_copy;
  } else {
    slot.signature.remember(slot.param, grad);
  }
  native.grad = address(*source);
  native.grad_type = *element_type(*source);
  return true;
}

bool StepTail::Impl::bind_gradient(Work& work, std::size_t at, kernels::TailTensor& native) {
  Slot& slot = slots[work.planned[at]];
  c10::TensorImpl& param = *slot.param.unsafeGetTensorImpl();
  const at::Tensor& grad = param.grad();
  if (options.norm_in_backward) work.known[at] = slot.known.spend(grad);
  if (!grad.defined()) {
    native.grad = nullptr;
    return true;
  }
  if (!slot.complete) return false;
  native.first = slot.first;
  const void* const last = native.grad;
  native.grad = slot.signature.elements(param, *grad.unsafeGetTensorImpl());
  work.grads_moved = work.grads_moved || native.grad == nullptr || native.grad != last;
  if (native.grad != nullptr) return true;
  if (grad.is_sparse() && changes_rows_alone(*this, slot, grad)) {
    check_param(*this, slot, grad);
    bind_composite(work, work.planned[at], grad);
    return true;
  }
  return inspect(slot, grad, native);
}

bool StepTail::Impl::bind_native(Work& work) {
  const std::span<kernels::TailTensor> native = work.native();
  for (std::size_t at = 0; at < native.size(); ++at) {
    if (!bind_gradient(work, at, native[at])) return false;
  }
  // In a loop of their own, so that the processor looks at many at once: each lies elsewhere.
  for (std::size_t at = 0, held = 0; at < native.size(); held = work.held_end[at++]) {
    if (native[at].grad == nullptr) continue;
    c10::TensorImpl& param = *work.held[held].tensor;
    for (std::size_t t = held; t < work.held_end[at]; ++t) {
      if (!work.held[t].unchanged(param)) return false;
    }
    if (work.watched && slots[work.planned[at]].watched) follow_outside_writes(slots[work.planned[at]]);
  }
  return true;
}

void StepTail::Impl::bind_composite(Work& work, std::size_t index, const at::Tensor& grad) {
  Slot& slot = slots[index];
  note_sparse(*this, slot, grad);
  const at::NoGradGuard no_grad;
  const at::Tensor source = !grad.is_sparse()                       ? grad
                            : changes_rows_alone(*this, slot, grad) ? grad.coalesce()
                                                                    : grad.to_dense();
  const bool reads_itself = work.in_order && meet(range_of(slot.param), range_of(grad));
  work.composite.push_back({slot.param, source, &slot.state, &groups[slot.group], static_cast<std::uint32_t>(index),
                            slot.first, reads_itself});
  work.composite_index.push_back(index);
}

bool StepTail::Impl::bind_others(Work& work) {
  if (work.planned.empty()) {
    // What had memory in common may have been parted.
    for (const PlannedTensor& t : work.held) {
      if (!t.unchanged(*t.tensor)) return false;
    }
  }
  for (std::size_t i : work.others) {
    Slot& slot = slots[i];
    const at::Tensor& grad = slot.param.grad();
    if (!grad.defined()) continue;
    if (!slot.complete) return false;
    check_param(*this, slot, grad);
    conform_state(*this, slot);
    if (work.served && can_be_native(slot)) return false;
    if (slot.watched) follow_outside_writes(slot);
    bind_composite(work, i, grad);
  }
  return true;
}

// Zeros over a gradient must not be what another parameter's update reads.
void StepTail::Impl::find_shared_grads(Work& work) {
  Memory memory;
  for (std::size_t i : work.members) memory.add(slots[i].param.grad());
  work.grads_shared = memory.finish();
}

// Hands the plan this step's addresses; false where it no longer matches the slots.
bool StepTail::Impl::bind(Work& work) {
  if (work.generation != generation) return false;
  work.composite.clear();
  work.composite_index.clear();
  if (!bind_native(work) || !bind_others(work)) return false;
  if (!std::exchange(work.grads_moved, false) && work.composite.empty()) return true;
  if (!work.others.empty()) note_written(work);  // the plan holds the others' tensors only
  if ((reads_written(work) != nullptr) != work.in_order) return false;
  if (!zeroes()) return true;
  if (work.in_order) refuse_zeros(work);
  find_shared_grads(work);
  return true;
}

bool StepTail::Impl::gather(Work& work) {
  if (bind(work)) return false;
  const bool created = prepare(work);
  OXY_ASSERT(bind(work), "a plan just made does not match its parameters");
  return created;
}

kernels::TailGroup StepTail::Impl::native_group(const GroupOptions& o) const {
  kernels::TailGroup g;
  g.rule = rule_of(algorithm, o);
  g.beta1 = o.beta1;
  g.beta2 = algorithm == Algorithm::RMSprop ? o.alpha : o.beta2;
  g.eps = o.eps;
  g.weight_decay = o.weight_decay;
  g.momentum = o.momentum;
  g.dampening = o.dampening;
  g.lr_decay = o.lr_decay;
  g.nesterov = o.nesterov;
  g.maximize = o.maximize;
  return g;
}

void StepTail::Impl::note_native_writes(Work& work) {
  const std::span<const kernels::TailTensor> native = work.native();
  for (std::size_t i = 0; i < work.planned.size(); ++i) {
    if (native[i].grad == nullptr) continue;
    Slot& slot = slots[work.planned[i]];
    slot.first = false;
    // Autograd must see that a tensor it may have saved was written.
    c10::TensorImpl& param = *slot.param.unsafeGetTensorImpl();
    if (param.version_counter().enabled()) param.bump_version();
    if (slot.watched) note_own_write(slot);
  }
}

void StepTail::Impl::zero_other_grads(const Work& work) {
  if (!zeroes()) return;
  const at::NoGradGuard no_grad;
  for (std::size_t i : work.members) {
    Slot& slot = slots[i];
    const at::Tensor& grad = slot.param.grad();
    if (!grad.defined()) continue;
    const bool copied = (slot.grad_copy.defined() || grad.is_sparse()) && !readable(grad, slot.param);
    if (copied || work.grads_shared) slot.param.mutable_grad().zero_();
  }
}

}  // namespace oxytorch::optim
