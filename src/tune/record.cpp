#include "tune/record.h"

#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>
#include <torch/types.h>

#include <algorithm>
#include <memory>
#include <set>

#include "oxytorch/amp.h"
#include "oxytorch/memory/parked.h"
#include "oxytorch/tune/keep_double.h"
#include "tune/optimizer_state.h"

namespace oxytorch::tune {
namespace {

Tensors copied_gradients(const Tensors& parameters) {
  Tensors result;
  for (const auto& p : parameters) result.push_back(copied(p.grad()));
  return result;
}

/// Gradients of a run that updates in backward, summed over the backwards of a step as autograd sums them.
class Arrived {
 public:
  explicit Arrived(const Run& run) {
    if (!run.updates_in_backward()) return;
    for (const auto& p : run.parameters()) {
      if (!p.requires_grad()) continue;
      hooks_.emplace_back(p, p.register_hook([this, key = p.unsafeGetTensorImpl()](const at::Tensor& gradient) {
        auto& sum = sums_[key];
        sum = sum.defined() ? sum + gradient.detach() : copied(gradient);
      }));
    }
  }
  ~Arrived() {
    for (const auto& [parameter, place] : hooks_) parameter.remove_hook(place);
  }
  Arrived(const Arrived&) = delete;
  Arrived& operator=(const Arrived&) = delete;

  [[nodiscard]] Tensors of(const Tensors& parameters) const {
    if (hooks_.empty()) return copied_gradients(parameters);
    Tensors result;
    for (const auto& p : parameters) {
      const auto found = sums_.find(p.unsafeGetTensorImpl());
      result.push_back(found == sums_.end() ? at::Tensor() : found->second);
    }
    return result;
  }

 private:
  std::map<const void*, at::Tensor> sums_;
  std::vector<std::pair<at::Tensor, unsigned>> hooks_;
};

/// False where the class of the optimizer is not known.
bool widen_state(torch::optim::Optimizer& optimizer) {
  return each_state_tensor(optimizer, [](const at::Tensor&, at::Tensor& value) {
    if (value.is_floating_point()) value = value.to(at::kDouble);
  });
}

Batch as_double(const Batch& batch) {
  return batch.map([](const at::Tensor& t) { return t.is_floating_point() ? t.to(at::kDouble) : t; });
}

}  // namespace

at::Tensor copied(const at::Tensor& t) { return t.defined() ? memory::park(t) : t; }

Tensors copies(const Tensors& all) {
  Tensors result;
  for (const auto& t : all) result.push_back(copied(t));
  return result;
}

double number(const at::Tensor& loss) { return loss.to(at::kDouble).item<double>(); }

InDouble::InDouble(Run& run, bool state) {
  Tensors all = run.model().parameters();
  for (const auto& t : run.model().buffers()) all.push_back(t);
  all.insert(all.end(), run.parameters().begin(), run.parameters().end());
  for (auto& t : all) widen(t);
  for (const auto& slot : run.slots()) {
    if (!state) break;
    knows_optimizers_ &= widen_state(slot.original());
  }
}

InDouble::InDouble(torch::optim::Optimizer& optimizer, const at::Tensor& parameter) {
  at::Tensor own = parameter;
  widen(own);
  widen_state(optimizer);
}

void InDouble::widen(at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_floating_point() || tensor.scalar_type() == at::kDouble) return;
  held_.emplace_back(tensor, tensor.variable_data());
  if (tensor.is_leaf()) tensor.mutable_grad().reset();
  tensor.set_data(tensor.variable_data().to(at::kDouble));
}

InDouble::~InDouble() {
  for (auto& [tensor, data] : held_) {
    if (tensor.is_leaf()) tensor.mutable_grad().reset();
    tensor.set_data(data);
  }
  mapped_.revert();
}

Recorder::Recorder(Run& run) : run_(run) {
  std::map<const void*, std::string> known;
  for (const auto& item : run.model().named_parameters()) known[item.value().unsafeGetTensorImpl()] = item.key();
  for (const auto& slot : run.slots()) {
    const std::set<std::string> of_others(labels_.begin(), labels_.end());
    for (const auto& parameter : slot.parameters()) {
      const auto name = known.find(parameter.unsafeGetTensorImpl());
      auto label = name == known.end() ? "parameter " + std::to_string(labels_.size()) : name->second;
      labels_.push_back(of_others.contains(label) ? label + " in " + slot.name() : std::move(label));
    }
  }
  for (const auto& item : run.model().named_buffers()) buffer_labels_.push_back(item.key());
}

Observed Recorder::forward_backward(const Batch& batch, const Observed* taken) {
  Observed seen;
  const Arrived arrived(run_);
  seen.loss = copied(run_.backward(batch, [&](std::size_t part) {
    const auto parameters = run_.parameters(part);
    const auto made = arrived.of(parameters);
    seen.gradients.insert(seen.gradients.end(), made.begin(), made.end());
    if (part + 1 == run_.parts()) return;
    if (taken == nullptr) {
      run_.update(part);
      seen.between.push_back(copies(parameters));
      return;
    }
    const at::NoGradGuard no_grad;
    for (std::size_t i = 0; i < parameters.size(); ++i) at::Tensor(parameters[i]).copy_(taken->between[part][i]);
  }));
  seen.buffers = copies(run_.model().buffers());
  return seen;
}

void Recorder::note_updated(Observed& seen) {
  seen.parameters = copies(run_.parameters());
  seen.states = states();
}

Observed Recorder::updated_by(const Tensors& gradients) {
  auto gradient = gradients.begin();
  for (std::size_t part = 0; part < run_.parts(); ++part) {
    for (const auto& p : run_.parameters(part)) {
      p.mutable_grad() = gradient->defined() ? gradient->to(p.scalar_type(), false, true) : *gradient;
      ++gradient;
    }
    run_.update(part);
  }
  Observed found;
  note_updated(found);
  return found;
}

bool Recorder::is_by_parameter() const {
  if (run_.clip_norm() > 0 || run_.clip_value > 0) return false;
  std::set<const void*> seen;
  for (const auto& p : run_.parameters()) {
    if (!seen.insert(p.unsafeGetTensorImpl()).second) return false;  // two optimizers, one after the other
  }
  return std::all_of(run_.slots().begin(), run_.slots().end(), [](const auto& slot) {
    return &slot.optimizer() == &slot.original() && tune::is_by_parameter(slot.original());
  });
}

std::optional<Observed> Recorder::updated_in_float64(const Tensors& gradients) {
  if (!is_by_parameter()) {
    const InDouble scope(run_, /*state=*/true);
    return scope.knows_optimizers() ? std::optional(updated_by(gradients)) : std::nullopt;
  }
  Observed found;
  for (const auto& slot : run_.slots()) {
    for (const auto& parameter : slot.parameters()) {
      const auto place = found.parameters.size();
      const NarrowedOptimizer narrowed(slot.original(), {parameter});
      const InDouble wide(slot.original(), parameter);
      const auto& gradient = gradients[place];
      parameter.mutable_grad() = gradient.defined() ? gradient.to(parameter.scalar_type(), false, true) : gradient;
      slot.original().step();
      found.parameters.push_back(copied(parameter));
      int number = 0;
      each_state_tensor(slot.original(), [&](const at::Tensor&, at::Tensor& value) {
        found.states["state " + std::to_string(++number) + " of " + labels_[place]] = copied(value);
        value.reset();  // else all would be in float64 at the end
      });
      memory::rest(gradient);
    }
  }
  return found;
}

std::map<std::string, at::Tensor> Recorder::states() {
  run_.hand_back();
  std::map<std::string, at::Tensor> all;
  std::size_t begin = 0;  // of a slot's labels
  for (const auto& slot : run_.slots()) {
    std::map<const void*, std::size_t> place;
    for (const auto& p : slot.parameters()) place[p.unsafeGetTensorImpl()] = begin++;
    std::map<std::string, int> numbers;
    std::map<std::string, at::Tensor> found;
    const bool known = each_state_tensor(slot.original(), [&](const at::Tensor& param, at::Tensor& value) {
      const auto& name = labels_[place.at(param.unsafeGetTensorImpl())];
      found["state " + std::to_string(++numbers[name]) + " of " + name] = copied(value);
    });
    if (known) all.merge(found);
  }
  return all;
}

Observed Recorder::in_float64(const Batch& batch, Snapshot& before, const Observed& taken) {
  before.restore();
  const InDouble scope(run_, /*state=*/false);
  const KeepDouble casts;
  auto right = forward_backward(as_double(batch), &taken);
  const auto is_narrow = [](const at::Tensor& t) { return t.defined() && t.scalar_type() != at::kDouble; };
  TORCH_CHECK(!is_narrow(right.loss) && std::none_of(right.gradients.begin(), right.gradients.end(), is_narrow),
              "the step computes in a dtype of its own, whatever that of its inputs");
  return right;
}

void Recorder::move(Nudge nudge) {
  const at::NoGradGuard no_grad;
  for (auto p : run_.parameters()) p.copy_(nudge.moved(p));
}

UnderAutocast::UnderAutocast(Run& run) : run_(run) {
  run.scope("reference",
            [device = run.device().type()] { return std::make_shared<amp::Autocast>(device, at::kBFloat16); });
}

UnderAutocast::~UnderAutocast() { run_.scope("reference", {}); }

Observed Recorder::under_autocast(const Batch& batch, const Observed& taken) {
  const UnderAutocast narrow(run_);
  return forward_backward(batch, &taken);
}

}  // namespace oxytorch::tune
