#include "tune/deferred_relu.h"

#include <ATen/autocast_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/relu_ops.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "ops/dispatch.h"
#include "oxytorch/error.h"
#include "oxytorch/ops/linear.h"
#include "tune/deferred.h"
#include "tune/what_followed.h"

namespace oxytorch::tune {
namespace {

using at::Tensor;

// Layers by their number of outputs.
WhatFollowed<std::int64_t>& followed() {
  static WhatFollowed<std::int64_t> all;
  return all;
}
bool relu_follows(std::int64_t outputs) {
  const auto count = followed().of(outputs);
  return count.served > count.values;
}
/// ReLU followed a layer that had not waited: reason to try, where it was not tried yet.
void note_relu_behind(std::int64_t outputs) {
  const auto count = followed().of(outputs);
  if (count.served + count.values == 0) followed().note_served(outputs);
}

std::atomic<std::int64_t> relus_with_layer = 0;

/// Of input, weight and bias, whose dtypes are the layer's already.
Tensor layer_before_relu(const std::vector<Tensor>& of, bool relu) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  return ops::linear(of[0], of[1], ops::if_defined(of[2]), relu);
}

/// A linear layer of a bfloat16 input.
class BeforeRelu final : public DeferredValue {
 public:
  BeforeRelu(const Tensor& input, const Tensor& weight, const Tensor& bias)
      : of_{input, weight, bias}, versions_(present_versions()), outputs_(weight.size(0)) {
    auto sizes = input.sizes().vec();
    sizes.back() = outputs_;
    meta = at::empty(sizes, input.options().device(at::kMeta));
  }

  Tensor values() override {
    const std::lock_guard lock(mutex_);
    if (made_.defined()) return made_;
    OXY_CHECK(is_unchanged(), InvalidState,
              "a linear layer is asked for after its weight or its input was changed in place: it was left to the ReLU "
              "that follows it (native_linear). Read it before, or leave that strategy out.");
    followed().note_values(outputs_, served_ ? 2 : 1);  // beside a ReLU it costs a product more than torch
    return keep(made(false));
  }
  bool is_computed() override {
    const std::lock_guard lock(mutex_);
    return made_.defined();
  }
  void settle() override {
    const std::lock_guard lock(mutex_);
    if (!made_.defined() && is_unchanged()) values();
  }
  std::optional<Tensor> serve(const c10::OperatorHandle& op, const std::vector<c10::IValue>& arguments,
                              std::size_t /*position*/, std::shared_ptr<DeferredValue> /*self*/) override {
    const std::string_view name = op.operator_name().name;
    if (name != "aten::relu" && name != "aten::relu_") return std::nullopt;
    const std::lock_guard lock(mutex_);
    if (made_.defined() || has_hooks() || !is_unchanged() || !at::GradMode::is_enabled()) return std::nullopt;
    served_ = true;
    followed().note_served(outputs_);
    relus_with_layer.fetch_add(1, std::memory_order_relaxed);
    Tensor relu = made(true);
    if (name == "aten::relu") return relu;
    // The tensor is now what was made of it.
    const Tensor& tensor = arguments[0].toTensor();
    edge = torch::autograd::impl::gradient_edge(relu);
    torch::autograd::impl::set_gradient_edge(tensor, edge);
    keep(std::move(relu));
    return tensor;
  }

 private:
  [[nodiscard]] Tensor made(bool relu) const {
    const at::AutoGradMode as_in_training(true);
    return behind_hooks(layer_before_relu(of_, relu));
  }
  Tensor keep(Tensor values) {
    for (Tensor& one : of_) one.reset();  // the graph has them
    return made_ = std::move(values);
  }
  [[nodiscard]] std::array<std::uint32_t, 3> present_versions() const {
    const auto of = [](const Tensor& tensor) { return tensor.defined() ? version_of(tensor) : 0; };
    return {of(of_[0]), of(of_[1]), of(of_[2])};
  }
  [[nodiscard]] bool is_unchanged() const { return versions_ == present_versions(); }

  std::vector<Tensor> of_;  // input, weight, bias
  std::array<std::uint32_t, 3> versions_;
  std::int64_t outputs_;
  bool served_ = false;  // a ReLU
  std::recursive_mutex mutex_;
  Tensor made_;
};

/// Notes the layer whose output ReLU is given. That of more dimensions than two is a view of its rows.
void note_layer_of(const Tensor& given) {
  if (given.dim() == 0) return;
  const auto made_by = [](const auto& node, const char* name) { return node && node->name() == name; };
  const auto& node = given.grad_fn();
  const auto& behind = made_by(node, "ViewBackward0") ? node->next_edge(0).function : node;
  if (made_by(behind, "OxytorchLinearBackward")) note_relu_behind(given.size(-1));
}

c10::DispatchKeySet below_autocast(c10::DispatchKeySet keys) {
  return keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::AutocastCPU);
}

}  // namespace

Tensor deferred_before_relu(const Tensor& input, const Tensor& weight, const Tensor& bias) {
  if (!relu_follows(weight.size(0)) || !may_defer(input, weight) || is_deferred(input)) return {};
  auto layer = std::make_shared<BeforeRelu>(input, weight, bias);
  layer->device = input.device();
  remember(layer);
  Tensor tensor = deferred_tensor(layer);
  put_in_graph(tensor, *layer, {input, weight, bias},
               [](const std::vector<Tensor>& given) { return layer_before_relu(given, false); });
  return tensor;
}

Tensor relu_seen(c10::DispatchKeySet keys, const Tensor& self) {
  note_layer_of(self);
  return at::_ops::relu::redispatch(below_autocast(keys), self);
}

Tensor& relu_in_place_seen(c10::DispatchKeySet keys, Tensor& self) {
  note_layer_of(self);
  return at::_ops::relu_::redispatch(below_autocast(keys), self);
}

std::int64_t relus_joined() noexcept { return relus_with_layer.load(std::memory_order_relaxed); }

}  // namespace oxytorch::tune
