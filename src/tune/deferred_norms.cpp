#include "oxytorch/tune/deferred_norms.h"

#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/batch_norm_native.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "ops/batch_norm.h"
#include "ops/batch_norm_cpu.h"
#include "ops/dispatch.h"
#include "oxytorch/error.h"
#include "tune/deferred.h"
#include "tune/operators_entry.h"

namespace oxytorch::tune {
namespace {

using at::Tensor;

thread_local int open_norm_scopes = 0;
std::atomic<std::int64_t> layers_taken = 0, operators_joined = 0;

// Gradients that reach a deferred tensor itself: those of a custom function that was given it.
struct DeferredNormNode final : torch::autograd::Node {
  std::string name() const override { return "OxytorchDeferredBatchNormBackward"; }

  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override {
    const std::lock_guard lock(mutex_);
    if (!grads[0].defined()) return torch::autograd::variable_list(4);
    OXY_CHECK(given[0].defined(), InvalidState,
              "backward runs a second time through a batch normalization that was let go of. Pass retain_graph=true to "
              "the first.");
    std::vector<bool> wanted;
    for (std::size_t i = 0; i < 4; ++i) wanted.push_back(task_should_compute_output(i));
    const auto normalized = [this](const std::vector<Tensor>& leaves) {
      return ops::normalized(leaves[0], leaves[1], leaves[2], moments, leaves[3], relu, {});
    };
    return gradients_through({given.begin(), given.end()}, wanted, normalized, grads[0]);
  }
  void release_variables() override {
    const std::lock_guard lock(mutex_);
    given = {};
  }

  std::array<Tensor, 4> given;  // input, weight, bias, what is added
  ops::ChannelMoments moments;
  bool relu = false;
};

/// A normalized input, with what has joined it.
struct Norm final : DeferredValue {
  std::array<Tensor, 4> given;  // input, weight, bias, what is added
  std::array<Tensor, 2> then;   // weight and bias as they were: an optimizer may step before anything asks
  ops::ChannelMoments moments;
  bool relu = false;
  std::array<std::uint32_t, 4> versions{};

  void note_versions() { versions = present_versions(); }
  [[nodiscard]] bool is_unchanged() const { return versions == present_versions(); }
  [[nodiscard]] Tensor made(at::IntArrayRef pool) const {
    const at::AutoGradMode as_in_training(true);
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    return ops::normalized(given[0], given[1], given[2], moments, given[3], relu, pool);
  }
  [[nodiscard]] Tensor made_of_old_weights() const {
    const auto now = present_versions();
    OXY_CHECK(
        now[0] == versions[0] && now[3] == versions[3], InvalidState,
        "a batch normalization is asked for after its input, or what was added to it, was changed in place: it was "
        "left to what follows it (native_batch_norm). Read it before, or leave that strategy out.");
    const at::NoGradGuard no_grad;
    Tensor made = ops::normalized(given[0], then[0], then[1], moments, given[3], relu, {});
    torch::autograd::impl::set_gradient_edge(made, edge);
    return made;
  }

  Tensor values() override {
    const std::lock_guard lock(mutex_);
    if (!made_.defined()) made_ = is_unchanged() ? behind_hooks(made({})) : made_of_old_weights();
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
  [[nodiscard]] std::array<std::uint32_t, 4> present_versions() const {
    std::array<std::uint32_t, 4> found{};
    for (std::size_t i = 0; i < 4; ++i) {
      const Tensor& t = given[i];
      if (t.defined() && !t.is_inference()) found[i] = static_cast<std::uint32_t>(t._version());
    }
    return found;
  }
  std::mutex mutex_;
  Tensor made_;
};

void fill_node(DeferredNormNode& node, const Norm& norm) {
  node.given = {norm.given[0].detach(), norm.then[0], norm.then[1],
                norm.given[3].defined() ? norm.given[3].detach() : Tensor()};
  node.moments = norm.moments;
  node.relu = norm.relu;
  for (std::size_t i = 0; i < 4; ++i) {
    const Tensor& t = norm.given[i];
    node.set_next_edge(i, t.defined() ? torch::autograd::impl::gradient_edge(t) : torch::autograd::Edge());
  }
}

Tensor deferred_norm(const std::shared_ptr<Norm>& norm) {
  norm->note_versions();
  Tensor tensor = deferred_tensor(norm);
  auto node = new_node<DeferredNormNode>();
  node->set_next_edges(torch::autograd::collect_next_edges(norm->given[0], norm->given[1], norm->given[2],
                                                           norm->given[0]));  // four places
  fill_node(*node, *norm);
  torch::autograd::set_history(tensor, node);
  norm->edge = torch::autograd::impl::gradient_edge(tensor);
  return tensor;
}

/// The window of a pooling by windows that lie side by side, or nothing.
std::optional<std::array<std::int64_t, 2>> window_of(const std::vector<c10::IValue>& arguments) {
  const auto pair = [&](std::size_t index) -> std::array<std::int64_t, 2> {
    const auto of = arguments[index].toIntVector();
    if (of.empty()) return {0, 0};
    return {of.front(), of.back()};
  };
  const auto kernel = pair(1), stride = pair(2), padding = pair(3), dilation = pair(4);
  const bool apart = stride == kernel || stride[0] == 0;
  if (!apart || padding != std::array<std::int64_t, 2>{0, 0} || dilation != std::array<std::int64_t, 2>{1, 1} ||
      arguments[5].toBool()) {
    return std::nullopt;
  }
  return kernel;
}

/// Whether a tensor may be added to a normalization: not what its kernel would have to convert.
bool may_join(const c10::IValue& argument, const Norm& norm) {
  if (!is_tensor(argument)) return false;
  const Tensor& other = argument.toTensor();
  return other.sizes() == norm.meta.sizes() && other.scalar_type() == norm.meta.scalar_type() &&
         other.device().is_cpu() &&
         (is_deferred(other) || (!at::isTensorSubclassLike(other) && ops::lies_as(other, norm.given[0])));
}

/// Another norm, with one more operator.
Tensor joined(const std::shared_ptr<Norm>& norm, const std::function<void(Norm&)>& change) {
  auto next = std::make_shared<Norm>();
  next->meta = norm->meta;
  next->given = norm->given;
  next->then = norm->then;
  next->moments = norm->moments;
  next->relu = norm->relu;
  change(*next);
  operators_joined.fetch_add(1, std::memory_order_relaxed);
  return deferred_norm(next);
}

std::optional<Tensor> Norm::serve(const c10::OperatorHandle& op, const std::vector<c10::IValue>& arguments,
                                  std::size_t position, std::shared_ptr<DeferredValue> self) {
  const auto norm = std::static_pointer_cast<Norm>(std::move(self));
  if (is_computed() || has_hooks() || !is_unchanged() || !at::GradMode::is_enabled()) return std::nullopt;
  const auto& name = op.operator_name();
  const auto in_place = [&](const auto& change) -> std::optional<Tensor> {
    if (norm.use_count() != 2) return std::nullopt;
    change(*norm);
    norm->note_versions();
    fill_node(static_cast<DeferredNormNode&>(*norm->edge.function), *norm);
    operators_joined.fetch_add(1, std::memory_order_relaxed);
    return arguments[0].toTensor();
  };
  const auto with_relu = [](Norm& one) { one.relu = true; };
  if (name.name == "aten::relu" && !relu) return joined(norm, with_relu);
  if (name.name == "aten::relu_" && !relu) return in_place(with_relu);
  if (name.overload_name == "Tensor" && (name.name == "aten::add" || name.name == "aten::add_")) {
    const std::size_t beside = position == 0 ? 1 : 0;
    if (relu || given[3].defined() || !arguments[2].toScalar().equal(1) || !may_join(arguments[beside], *this)) {
      return std::nullopt;
    }
    const Tensor other = values_of(arguments[beside].toTensor());
    if (!ops::lies_as(other, given[0])) return std::nullopt;
    const auto with_other = [&](Norm& one) { one.given[3] = other; };
    if (name.name == "aten::add") return joined(norm, with_other);
    return position == 0 ? in_place(with_other) : std::nullopt;
  }
  if (name.name == "aten::max_pool2d" && position == 0 && !given[3].defined()) {
    const auto window = window_of(arguments);
    if (!window || !ops::windows_fill(given[0], *window)) return std::nullopt;
    operators_joined.fetch_add(1, std::memory_order_relaxed);
    return made(*window);
  }
  return std::nullopt;
}

bool takes_norm(const Tensor& input, const MaybeTensor& weight, const MaybeTensor& bias, const MaybeTensor& mean,
                const MaybeTensor& var) {
  const Tensor scale = ops::or_none(weight), shift = ops::or_none(bias);
  const std::array<Tensor, 3> all{input, scale.defined() ? scale : input, shift.defined() ? shift : input};
  if (!ops::batch_norm_cpu_takes(input, scale, shift) || !ops::running_cpu_takes(input, mean, var)) return false;
  return torch::autograd::compute_requires_grad(all[0], all[1], all[2]) && !at::areAnyTensorSubclassLike(all);
}

Tensor batch_norm_layer(const Tensor& input, const MaybeTensor& weight, const MaybeTensor& bias,
                        const MaybeTensor& running_mean, const MaybeTensor& running_var, bool training, double momentum,
                        double eps, bool cudnn) {
  if (open_norm_scopes == 0 || !training || !at::GradMode::is_enabled() || is_deferred(input) ||
      has_saved_tensor_hooks() || !takes_norm(input, weight, bias, running_mean, running_var)) {
    return at::native::batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps, cudnn);
  }
  auto norm = std::make_shared<Norm>();
  norm->moments = ops::batch_moments(input, running_mean, running_var, momentum, eps);
  norm->given = {input, ops::or_none(weight), ops::or_none(bias), Tensor()};
  for (std::size_t i = 0; i < 2; ++i) {
    if (norm->given[i + 1].defined()) norm->then[i] = norm->given[i + 1].detach().clone();
  }
  norm->meta = at::empty_like(input, input.options().device(at::kMeta));
  layers_taken.fetch_add(1, std::memory_order_relaxed);
  return deferred_norm(norm);
}

LayerKernels& norm_kernels() {
  static LayerKernels all;
  return all;
}

}  // namespace

DeferredNorms::DeferredNorms() {
  static const std::string reason = batch_norm_followed_differs();
  OXY_CHECK(reason.empty(), NotSupported, reason, ".");
  norm_kernels().acquire({c10::DispatchKey::AutogradCPU}, [](torch::Library& library, c10::DispatchKey /*key*/) {
    library.impl("batch_norm", TORCH_FN(batch_norm_layer));
  });
}

DeferredNorms::~DeferredNorms() { norm_kernels().release(); }

DeferredNorms::Scope::Scope() { ++open_norm_scopes; }
DeferredNorms::Scope::~Scope() { --open_norm_scopes; }

std::int64_t DeferredNorms::layers() noexcept { return layers_taken.load(std::memory_order_relaxed); }
std::int64_t DeferredNorms::joined() noexcept { return operators_joined.load(std::memory_order_relaxed); }

}  // namespace oxytorch::tune
