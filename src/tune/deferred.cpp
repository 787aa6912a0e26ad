#include "tune/deferred.h"

#include <ATen/SavedTensorHooks.h>
#include <ATen/TensorSubclassLikeUtils.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <utility>

#include "ops/dispatch.h"
#include "oxytorch/error.h"

namespace oxytorch::tune {
namespace {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;
using torch::jit::Stack;

/// What is computed here is nobody's to keep.
class WithoutSavedTensorHooks {
 public:
  WithoutSavedTensorHooks() {
    if (!has_saved_tensor_hooks()) return;
    before_ = at::SavedTensorDefaultHooks::get_tls_state();
    at::SavedTensorDefaultHooks::set_tls_state({});
  }
  ~WithoutSavedTensorHooks() {
    if (before_) at::SavedTensorDefaultHooks::set_tls_state(*before_);
  }
  WithoutSavedTensorHooks(const WithoutSavedTensorHooks&) = delete;
  WithoutSavedTensorHooks& operator=(const WithoutSavedTensorHooks&) = delete;

 private:
  std::optional<at::impl::SavedTensorDefaultHooksTLS> before_;
};

class Deferred final : public c10::TensorImpl {
 public:
  Deferred(std::shared_ptr<DeferredValue> value, bool detached)
      : TensorImpl(c10::DispatchKeySet(kAboveAutograd), value->meta.dtype(), value->device),
        value_(std::move(value)),
        detached_(detached) {
    set_custom_device(true);  // its keys do not say where it is
    set_storage_access_should_throw();
    set_sizes_and_strides(value_->meta.sizes(), value_->meta.strides());
  }

  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(const c10::VariableVersion& version,
                                                         bool allow_change) const override {
    return copied(version, allow_change);
  }
  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(c10::VariableVersion&& version,
                                                         bool allow_change) const override {
    return copied(version, allow_change);
  }

  /// Null for one that is cut from the graph.
  [[nodiscard]] std::shared_ptr<DeferredValue> value() const { return detached_ ? nullptr : value_; }
  [[nodiscard]] Tensor values() const {
    const WithoutSavedTensorHooks apart;
    return detached_ ? value_->values().detach() : value_->values();
  }

 protected:
  [[nodiscard]] c10::Device device_custom() const override { return value_->device; }

 private:
  [[nodiscard]] c10::intrusive_ptr<TensorImpl> copied(const c10::VariableVersion& version, bool allow_change) const {
    auto copy = c10::make_intrusive<Deferred>(value_, true);
    copy->set_version_counter(version);
    copy->set_allow_tensor_metadata_change(allow_change);
    return copy;
  }

  std::shared_ptr<DeferredValue> value_;
  bool detached_;
};

Deferred* deferred(const Tensor& tensor) {
  return tensor.defined() ? dynamic_cast<Deferred*>(tensor.unsafeGetTensorImpl()) : nullptr;
}

// Values of all threads that live when weights change.
class Living {
 public:
  void add(const std::shared_ptr<DeferredValue>& value) {
    const std::lock_guard lock(mutex_);
    std::erase_if(all_, [](const auto& one) { return one.expired(); });
    all_.push_back(value);
  }
  void settle() {
    std::vector<std::weak_ptr<DeferredValue>> all;
    {
      const std::lock_guard lock(mutex_);
      all.swap(all_);
    }
    for (const auto& one : all) {
      if (const auto value = one.lock()) value->settle();
    }
  }

 private:
  std::mutex mutex_;
  std::vector<std::weak_ptr<DeferredValue>> all_;
};
Living& living() {
  static auto* all = new Living;  // never destroyed: tensors may go later
  return *all;
}

c10::IValue with_values(const c10::IValue& argument) {
  if (argument.isTensor()) return values_of(argument.toTensor());
  if (argument.isTensorList()) {
    c10::List<Tensor> values;
    for (const Tensor& tensor : argument.toTensorVector()) values.push_back(values_of(tensor));
    return values;
  }
  if (argument.isOptionalTensorList()) {
    c10::List<MaybeTensor> values;
    for (const auto& tensor : argument.toOptionalTensorVector()) {
      values.push_back(tensor ? MaybeTensor(values_of(*tensor)) : tensor);
    }
    return values;
  }
  return argument;
}

bool holds_deferred(const c10::IValue& argument) {
  if (argument.isTensor()) return is_deferred(argument.toTensor());
  if (argument.isTensorList()) {
    const auto all = argument.toTensorVector();
    return std::any_of(all.begin(), all.end(), is_deferred);
  }
  if (argument.isOptionalTensorList()) {
    const auto all = argument.toOptionalTensorVector();
    return std::any_of(all.begin(), all.end(), [&](const MaybeTensor& one) { return one && is_deferred(*one); });
  }
  return false;
}

void serve(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const auto count = op.schema().arguments().size();
  const std::vector<c10::IValue> arguments(stack->end() - static_cast<std::ptrdiff_t>(count), stack->end());
  const auto first = std::find_if(arguments.begin(), arguments.end(), holds_deferred);
  if (first == arguments.end()) {
    op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kAboveAutograd), stack);
    return;
  }
  std::optional<Tensor> result;
  auto* const tensor = first->isTensor() ? deferred(first->toTensor()) : nullptr;
  if (auto value = tensor != nullptr && !has_saved_tensor_hooks() ? tensor->value() : nullptr) {
    auto& asked = *value;
    result = asked.serve(op, arguments, static_cast<std::size_t>(first - arguments.begin()), std::move(value));
  }
  torch::jit::drop(*stack, count);
  if (result) {
    stack->emplace_back(std::move(*result));
    return;
  }
  for (const auto& argument : arguments) stack->push_back(with_values(argument));
  op.callBoxed(stack);
}

/// Every operator that is given a deferred tensor, and all inside of KeepDouble.
void on_deferred(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  try {
    serve(op, keys, stack);
  } catch (const Error& error) {
    ops::throw_as_torch_does(error);
  }
}

TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericWrapper, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_deferred>());
}

}  // namespace

bool has_saved_tensor_hooks() { return !at::SavedTensorDefaultHooks::get_tls_state().stack.empty(); }

bool may_defer(const Tensor& one, const Tensor& other) {
  const std::array<Tensor, 2> both{one, other};
  // Inside of an operator that autograd has been told of, what it calls is its own.
  const auto excluded = c10::impl::tls_local_dispatch_key_set().excluded_;
  return at::GradMode::is_enabled() && !excluded.has(c10::DispatchKey::AutogradFunctionality) &&
         !has_saved_tensor_hooks() && !ops::is_transformed() && torch::autograd::compute_requires_grad(one, other) &&
         !at::areAnyTensorSubclassLike(both);
}

torch::autograd::variable_list gradients_through(const std::vector<Tensor>& given, const std::vector<bool>& wanted,
                                                 const std::function<Tensor(const std::vector<Tensor>&)>& made_of,
                                                 const Tensor& gradient) {
  const at::AutoGradMode with_grad(true);
  std::vector<Tensor> leaves(given.size()), inputs;
  for (std::size_t i = 0; i < given.size(); ++i) {
    if (!given[i].defined()) continue;
    leaves[i] = given[i].detach().requires_grad_(wanted[i]);
    if (wanted[i]) inputs.push_back(leaves[i]);
  }
  torch::autograd::variable_list made(given.size());
  if (inputs.empty()) return made;
  const Tensor values = made_of(leaves);
  const auto found =
      torch::autograd::grad({values}, inputs, {gradient.to(values.scalar_type())}, /*retain_graph=*/std::nullopt,
                            /*create_graph=*/false, /*allow_unused=*/true);
  auto next = found.begin();
  for (std::size_t i = 0; i < given.size(); ++i) {
    if (leaves[i].defined() && wanted[i]) made[i] = *next++;
  }
  return made;
}

namespace {

struct DeferredValueNode final : torch::autograd::Node {
  std::string name() const override { return "OxytorchDeferredBackward"; }

  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override {
    const std::lock_guard lock(mutex_);
    if (!grads[0].defined()) return torch::autograd::variable_list(given.size());
    OXY_CHECK(made_of, InvalidState,
              "backward runs a second time through a layer that was let go of. Pass retain_graph=true to the first.");
    std::vector<Tensor> values;
    std::vector<bool> wanted;
    for (std::size_t i = 0; i < given.size(); ++i) {
      values.push_back(values_of(given[i]));
      wanted.push_back(given[i].defined() && task_should_compute_output(i));
    }
    return gradients_through(values, wanted, made_of, grads[0]);
  }
  void release_variables() override {
    const std::lock_guard lock(mutex_);
    for (Tensor& one : given) one.reset();
    made_of = nullptr;
  }

  std::vector<Tensor> given;  // cut from the graph
  std::function<Tensor(const std::vector<Tensor>&)> made_of;
};

}  // namespace

void put_in_graph(const Tensor& tensor, DeferredValue& value, const std::vector<Tensor>& given,
                  std::function<Tensor(const std::vector<Tensor>&)> made_of) {
  auto node = new_node<DeferredValueNode>();
  node->set_next_edges(torch::autograd::collect_next_edges(at::TensorList(given)));
  for (const Tensor& one : given) {
    node->given.push_back(is_deferred(one) ? one.variable_data() : one.defined() ? one.detach() : one);
  }
  node->made_of = std::move(made_of);
  torch::autograd::set_history(tensor, node);
  value.edge = torch::autograd::impl::gradient_edge(tensor);
}

std::uint32_t version_of(const Tensor& tensor) {
  return tensor.is_inference() ? 0 : static_cast<std::uint32_t>(tensor._version());
}

bool DeferredValue::has_hooks() const { return edge.function && ops::has_hooks(*edge.function); }

Tensor DeferredValue::behind_hooks(Tensor made) const {
  if (!has_hooks()) return made;
  made = made.detach();
  torch::autograd::impl::set_gradient_edge(made, edge);
  return made;
}

void LayerKernels::acquire(const std::vector<c10::DispatchKey>& keys,
                           const std::function<void(torch::Library&, c10::DispatchKey)>& add) {
  const std::lock_guard lock(mutex_);
  if (owners_++ > 0) return;
  for (const auto key : keys) {
    libraries_.push_back(std::make_unique<torch::Library>(torch::Library::IMPL, "aten", key, __FILE__, __LINE__));
    add(*libraries_.back(), key);
  }
}

void LayerKernels::release() {
  const std::lock_guard lock(mutex_);
  if (--owners_ == 0) libraries_.clear();
}

Tensor deferred_tensor(std::shared_ptr<DeferredValue> value) {
  return Tensor(c10::make_intrusive<Deferred>(std::move(value), false));
}

bool is_deferred(const Tensor& tensor) { return deferred(tensor) != nullptr; }
std::shared_ptr<DeferredValue> deferred_value(const Tensor& tensor) {
  const auto* one = deferred(tensor);
  return one != nullptr ? one->value() : nullptr;
}

void remember(const std::shared_ptr<DeferredValue>& value) { living().add(value); }
void settle_all() { living().settle(); }

Tensor values_of(const Tensor& tensor) {
  const auto* one = deferred(tensor);
  return one != nullptr ? one->values() : tensor;
}

}  // namespace oxytorch::tune
