#include "oxytorch/tune/deferred_gates.h"

#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/gelu_backward.h>
#include <ATen/ops/gelu_ops.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/silu_backward.h>
#include <ATen/ops/silu_ops.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ops/activation_cpu.h"
#include "ops/dispatch.h"
#include "oxytorch/error.h"
#include "oxytorch/ops/activation.h"
#include "tune/deferred.h"
#include "tune/operators_entry.h"
#include "tune/thread_key.h"

namespace oxytorch::tune {
namespace {

using at::Tensor;

thread_local int open_gate_scopes = 0;
std::atomic<std::int64_t> activations_taken = 0, products_joined = 0;

// Gradients that reach a deferred tensor itself: those of a custom function that was given it.
struct DeferredGateNode final : torch::autograd::Node {
  std::string name() const override { return "OxytorchDeferredGateBackward"; }

  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override {
    const std::lock_guard lock(mutex_);
    if (!grads[0].defined() || !task_should_compute_output(0)) return {Tensor()};
    OXY_CHECK(input.defined(), InvalidState,
              "backward runs a second time through an activation that was let go of. Pass retain_graph=true to the "
              "first.");
    return {approximate.empty() ? at::silu_backward(grads[0], input) : at::gelu_backward(grads[0], input, approximate)};
  }
  void release_variables() override {
    const std::lock_guard lock(mutex_);
    input = Tensor();
  }

  Tensor input;
  std::string approximate;  // of GELU; empty: SiLU
};

/// SiLU or GELU of its input.
struct Gate final : DeferredValue {
  Tensor input;
  std::string approximate;  // of GELU; empty: SiLU
  std::uint32_t version = 0;

  [[nodiscard]] bool is_unchanged() const { return static_cast<std::uint32_t>(input._version()) == version; }

  Tensor values() override {
    const std::lock_guard lock(mutex_);
    if (made_.defined()) return made_;
    OXY_CHECK(is_unchanged(), InvalidState,
              "an activation is asked for after its input was changed in place: it was left to the product that "
              "follows it (native_gate). Read it before, or leave that strategy out.");
    const at::AutoGradMode as_in_training(true);
    const c10::impl::ExcludeDispatchKeyGuard as_left_alone(kThreadKey);
    made_ = behind_hooks(approximate.empty() ? at::silu(input) : at::gelu(input, approximate));
    input = Tensor();  // the graph has it
    return made_;
  }
  bool is_computed() override {
    const std::lock_guard lock(mutex_);
    return made_.defined();
  }
  void settle() override {}
  std::optional<Tensor> serve(const c10::OperatorHandle& op, const std::vector<c10::IValue>& arguments,
                              std::size_t position, std::shared_ptr<DeferredValue> self) override;

 private:
  std::mutex mutex_;
  Tensor made_;
};

std::optional<Tensor> Gate::serve(const c10::OperatorHandle& op, const std::vector<c10::IValue>& arguments,
                                  std::size_t position, std::shared_ptr<DeferredValue> /*self*/) {
  const auto& name = op.operator_name();
  if (name.name != "aten::mul" || name.overload_name != "Tensor") return std::nullopt;
  const c10::IValue& beside = arguments[position == 0 ? 1 : 0];
  if (!is_tensor(beside)) return std::nullopt;
  const Tensor other = values_of(beside.toTensor());  // before the lock: it may be this one
  const std::lock_guard lock(mutex_);
  if (made_.defined() || has_hooks() || !is_unchanged() || !at::GradMode::is_enabled()) return std::nullopt;
  const std::array<Tensor, 1> one{other};
  if (!ops::activation_cpu_takes(input, other) || at::areAnyTensorSubclassLike(one)) return std::nullopt;
  products_joined.fetch_add(1, std::memory_order_relaxed);
  return approximate.empty() ? ops::swiglu(input, other) : ops::geglu(input, other, approximate);
}

// -- where a thread asks for it ---------------------------------------------------------------------------------------

/// The activation without values, or nothing where torch's must see its argument.
std::optional<Tensor> gate_in_scope(const Tensor& input, std::string_view approximate) {
  if (open_gate_scopes == 0 || !input.defined() || is_deferred(input) || !ops::activation_cpu_takes(input, {}) ||
      input.is_inference() || !may_defer(input, input)) {
    return std::nullopt;
  }
  auto gate = std::make_shared<Gate>();
  gate->input = input;
  gate->approximate = approximate;
  gate->version = static_cast<std::uint32_t>(input._version());
  gate->meta = at::empty_like(input, input.options().device(at::kMeta));
  Tensor tensor = deferred_tensor(gate);
  auto node = new_node<DeferredGateNode>();
  node->set_next_edges(torch::autograd::collect_next_edges(input));
  node->input = input.detach();
  node->approximate = gate->approximate;
  torch::autograd::set_history(tensor, node);
  gate->edge = torch::autograd::impl::gradient_edge(tensor);
  activations_taken.fetch_add(1, std::memory_order_relaxed);
  return tensor;
}

Tensor silu_in_scope(c10::DispatchKeySet keys, const Tensor& self) {
  auto made = gate_in_scope(self, "");
  return made ? *made : at::_ops::silu::redispatch(behind_thread_key(keys), self);
}

Tensor gelu_in_scope(c10::DispatchKeySet keys, const Tensor& self, std::string_view approximate) {
  const bool is_known = approximate == "none" || approximate == "tanh";
  auto made = is_known ? gate_in_scope(self, approximate) : std::nullopt;
  return made ? *made : at::_ops::gelu::redispatch(behind_thread_key(keys), self, approximate);
}

void register_gates_once() {
  static const bool done = [] {
    register_thread_key();
    auto* const aten = new torch::Library(torch::Library::IMPL, "aten", kThreadKey, __FILE__, __LINE__);
    aten->impl("silu", TORCH_FN(silu_in_scope));
    aten->impl("gelu", TORCH_FN(gelu_in_scope));
    return true;
  }();
  static_cast<void>(done);
}

}  // namespace

DeferredGates::DeferredGates() {
  static const std::string reason = gate_differs();
  OXY_CHECK(reason.empty(), NotSupported, reason, ".");
  register_gates_once();
}

DeferredGates::Scope::Scope() {
  register_gates_once();
  is_first_ = open_scope(open_gate_scopes);
}
DeferredGates::Scope::~Scope() { close_scope(open_gate_scopes, is_first_); }

std::int64_t DeferredGates::activations() noexcept { return activations_taken.load(std::memory_order_relaxed); }
std::int64_t DeferredGates::joined() noexcept { return products_joined.load(std::memory_order_relaxed); }

}  // namespace oxytorch::tune
