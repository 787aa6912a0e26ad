#include "oxytorch/tune/deferred_logits.h"

#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear_native.h>
#include <ATen/ops/matmul_native.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "ops/dispatch.h"
#include "oxytorch/error.h"
#include "oxytorch/ops/linear.h"
#include "oxytorch/ops/linear_cross_entropy.h"
#include "tune/above_autograd.h"
#include "tune/deferred.h"
#include "tune/operators_entry.h"
#include "tune/what_followed.h"

namespace oxytorch::tune {
namespace {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;
using torch::jit::Stack;

// Fewer classes leave little to save.
constexpr std::int64_t kLeastClasses = 256;

thread_local int open_scopes = 0;

/// Layers are torch's on this thread, for the end of the scope.
class AllClosed {
 public:
  AllClosed() : before_(std::exchange(open_scopes, 0)) {}
  ~AllClosed() { open_scopes = before_; }
  AllClosed(const AllClosed&) = delete;
  AllClosed& operator=(const AllClosed&) = delete;

 private:
  int before_;
};
std::atomic<std::int64_t> losses_made = 0, values_made = 0;

// Layers by the size of their weight.
using WeightSize = std::pair<std::int64_t, std::int64_t>;
WeightSize size_of(const Tensor& weight) { return {weight.size(0), weight.size(1)}; }
WhatFollowed<WeightSize>& experience() {
  static WhatFollowed<WeightSize> all;
  return all;
}
/// A layer is deferred while its values were not asked for more often than a loss.
bool feeds_a_loss(const Tensor& weight) {
  const auto count = experience().of(size_of(weight));
  return count.values <= count.served;
}

Tensor on_meta(at::IntArrayRef sizes, at::ScalarType type) {
  return at::empty(sizes, at::TensorOptions().dtype(type).device(at::kMeta));
}

/// What a deferred tensor stands for: linear(rows, weight, bias), the classes moved to `class_dim`. Rows are the
/// layer's input, sliced and reshaped as the tensor was.
struct Logits final : DeferredValue {
  Tensor rows, weight, bias;
  Tensor added;                                     // the bias of its own dtype, where it was added to a product
  std::function<Tensor(const Logits& self)> layer;  // torch's operators, as they were called; none in a view
  std::int64_t class_dim = 0;
  // Of a view: what it was made of, and how.
  std::shared_ptr<Logits> source;
  std::function<Tensor(const Tensor& values)> change;
  std::array<std::uint32_t, 3> versions{};  // of rows, weight and bias

  void note_versions() { versions = present_versions(); }
  [[nodiscard]] bool is_unchanged() const { return versions == present_versions(); }
  void check_unchanged() const {
    OXY_CHECK(is_unchanged(), InvalidState,
              "logits are asked for after the weight or the input of their layer was changed in place: they were left "
              "to the loss (native_cross_entropy). Read them before optimizer.step(), or leave that strategy out.");
  }

  Tensor values() override {
    const std::lock_guard lock(mutex_);
    if (made_.defined()) return made_;
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const at::AutoGradMode as_in_training(true);
    const AllClosed not_deferred_again;
    if (source) {
      made_ = change(source->values());
    } else {
      check_unchanged();
      experience().note_values(size_of(weight));
      values_made.fetch_add(1, std::memory_order_relaxed);
      made_ = layer(*this);
    }
    return made_ = behind_hooks(made_);
  }
  std::optional<Tensor> serve(const c10::OperatorHandle& op, const std::vector<c10::IValue>& arguments,
                              std::size_t position, std::shared_ptr<DeferredValue> self) override;
  void settle() override {
    // Of one that is too late for it, whoever asks is told.
    if (is_computed() || !is_unchanged()) return;
    values();
    experience().note_values(size_of(weight));  // beside the loss it cost a product more than torch: twice as bad
  }
  bool is_computed() override {
    const std::lock_guard lock(mutex_);
    return made_.defined() || (source && source->is_computed());
  }

 private:
  [[nodiscard]] std::array<std::uint32_t, 3> present_versions() const {
    const auto of = [](const Tensor& t) {
      return t.defined() && !t.is_inference() ? static_cast<std::uint32_t>(t._version()) : 0U;
    };
    return {of(rows), of(weight), of(bias)};
  }
  std::mutex mutex_;
  Tensor made_;
};

// Gradients that reach a deferred tensor itself: those of a custom function that was given it.
struct DeferredNode final : torch::autograd::Node {
  std::string name() const override { return "OxytorchDeferredLinearBackward"; }

  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override {
    const std::lock_guard lock(mutex_);
    torch::autograd::variable_list made(3);
    if (!grads[0].defined()) return made;
    OXY_CHECK(rows.defined(), InvalidState,
              "backward runs a second time through logits that were let go of. Pass "
              "retain_graph=true to the first.");
    const Tensor grad = grads[0].movedim(class_dim, -1).to(rows.scalar_type()).reshape({-1, weight.size(0)});
    const auto type = weight.scalar_type();  // which may be wider than that of the rows
    if (task_should_compute_output(0)) made[0] = grad.mm(weight.to(grad.scalar_type())).view(rows.sizes());
    if (task_should_compute_output(1)) made[1] = grad.t().mm(rows.reshape({-1, weight.size(1)})).to(type);
    if (task_should_compute_output(2)) made[2] = grad.sum(0).to(type);
    return made;
  }
  void release_variables() override {
    const std::lock_guard lock(mutex_);
    rows = weight = Tensor();
  }

  Tensor rows, weight;
  std::int64_t class_dim = 0;
};

Tensor wrapped(const std::shared_ptr<Logits>& logits) {
  logits->note_versions();
  Tensor tensor = deferred_tensor(logits);
  if (torch::autograd::compute_requires_grad(logits->rows, logits->weight, logits->bias)) {
    auto node = new_node<DeferredNode>();
    node->set_next_edges(torch::autograd::collect_next_edges(logits->rows, logits->weight, logits->bias));
    node->rows = logits->rows;
    node->weight = logits->weight;
    node->class_dim = logits->class_dim;
    torch::autograd::set_history(tensor, node);
    logits->edge = torch::autograd::impl::gradient_edge(tensor);
  }
  return tensor;
}

bool is_deferrable(const Tensor& input, at::ScalarType of_input, const Tensor& weight, const Tensor& bias) {
  if (open_scopes == 0 || !at::GradMode::is_enabled() || has_saved_tensor_hooks()) return false;
  // Before any size is asked for: those of what a compiler traces may be symbols, which have no numbers.
  const Tensor all[] = {input, weight, bias.defined() ? bias : weight};
  if (at::areAnyTensorSubclassLike(all)) return false;
  const auto type = weight.scalar_type();
  if (weight.dim() != 2 || weight.size(0) < kLeastClasses || weight.size(1) < 1 || input.dim() < 1) return false;
  if (type != at::kFloat && type != at::kBFloat16 && type != at::kHalf) return false;
  if (input.device() != weight.device() || input.layout() != at::kStrided) return false;
  if (input.scalar_type() != of_input || input.size(-1) != weight.size(1) || input.numel() == 0) return false;
  if (bias.defined() && (bias.scalar_type() != type || bias.dim() != 1 || bias.size(0) != weight.size(0))) return false;
  return torch::autograd::compute_requires_grad(all[0], all[1], all[2]) && !is_deferred(input) && feeds_a_loss(weight);
}
bool is_deferrable(const Tensor& input, const Tensor& weight, const Tensor& bias) {
  return is_deferrable(input, weight.scalar_type(), weight, bias);
}

Tensor deferred_layer(const Tensor& input, const Tensor& weight, const Tensor& bias,
                      std::function<Tensor(const Logits&)> layer) {
  auto logits = std::make_shared<Logits>();
  logits->rows = input;
  logits->weight = weight;
  logits->bias = bias;
  logits->layer = std::move(layer);
  logits->device = input.device();
  auto sizes = input.sizes().vec();
  sizes.back() = weight.size(0);
  logits->meta = on_meta(sizes, input.scalar_type());
  logits->class_dim = static_cast<std::int64_t>(sizes.size()) - 1;
  remember(logits);
  return wrapped(logits);
}

// Operators by which linear layers are called, where autograd is told of them: torch::nn::Linear of Python calls
// linear, that of C++ addmm, or matmul and add_; a head that shares its weight is often a matmul.

// Each gives the deferred result, or an undefined tensor.

Tensor deferred_by_linear(const Tensor& input, const Tensor& weight, const Tensor& bias) {
  if (!is_deferrable(input, weight, bias)) return {};
  return deferred_layer(input, weight, bias, [](const Logits& self) {
    return at::linear(self.rows, self.weight, ops::if_defined(self.bias));
  });
}

Tensor deferred_by_matmul(const Tensor& input, const Tensor& right) {
  const Tensor weight = open_scopes == 0 || input.dim() < 2 ? Tensor() : weight_of(right);
  if (!weight.defined() || !is_deferrable(input, weight, {})) return {};
  return deferred_layer(input, weight, {}, [right](const Logits& self) {
    Tensor values = at::matmul(self.rows, right);
    return self.added.defined() ? values.add_(self.added) : values;
  });
}

Tensor deferred_by_addmm(const Tensor& bias, const Tensor& input, const Tensor& right) {
  const Tensor weight = weight_of(right);
  if (!weight.defined() || !is_deferrable(input, weight, bias)) return {};
  return deferred_layer(input, weight, bias,
                        [right](const Logits& self) { return at::addmm(self.bias, self.rows, right); });
}

// On a CPU, without a detour over a stack.

Tensor linear(const Tensor& input, const Tensor& weight, const MaybeTensor& bias) {
  Tensor made = deferred_by_linear(input, weight, bias.value_or(Tensor()));
  return made.defined() ? made : at::native::linear(input, weight, bias);
}

Tensor matmul(const Tensor& input, const Tensor& right) {
  Tensor made = deferred_by_matmul(input, right);
  return made.defined() ? made : at::native::matmul(input, right);
}

// What served before, of addmm on a CPU and of everything on other devices, whose packages may have kernels of their
// own for autograd.
class Served {
 public:
  void capture(const char* name, c10::DispatchKey key) {
    const auto handle = c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
    captured_ = captured_ | c10::DispatchKeySet(key);
    kernels_.insert_or_assign({handle.operator_name().name, key}, handle.getComputedKernelForDispatchKey(key));
  }
  void call(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) const {
    // Torch's dispatcher in Python, which compilers trace with, passes keys above this one too.
    const auto key = (keys & captured_).highestPriorityTypeId();
    kernels_.at({op.operator_name().name, key}).callBoxed(op, keys, stack);
  }

 private:
  c10::DispatchKeySet captured_;
  std::map<std::pair<std::string, c10::DispatchKey>, c10::SafeKernelFunction> kernels_;
};
Served& served() {
  static Served all;
  return all;
}

/// A layer as the dispatcher calls it: `deferred` makes its result of the arguments, or nothing.
template <std::size_t Arguments, Tensor (*deferred)(c10::ArrayRef<c10::IValue> arguments)>
void boxed(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  if (open_scopes > 0) {
    if (Tensor made = deferred(torch::jit::last(*stack, Arguments)); made.defined()) {
      torch::jit::drop(*stack, Arguments);
      stack->emplace_back(std::move(made));
      return;
    }
  }
  served().call(op, keys, stack);
}

Tensor addmm_of(c10::ArrayRef<c10::IValue> given) {
  if (!given[3].toScalar().equal(1) || !given[4].toScalar().equal(1)) return {};  // beta and alpha
  return deferred_by_addmm(given[0].toTensor(), given[1].toTensor(), given[2].toTensor());
}

Tensor linear_of(c10::ArrayRef<c10::IValue> given) {
  return deferred_by_linear(given[0].toTensor(), given[1].toTensor(),
                            is_tensor(given[2]) ? given[2].toTensor() : Tensor());
}

Tensor matmul_of(c10::ArrayRef<c10::IValue> given) {
  return deferred_by_matmul(given[0].toTensor(), given[1].toTensor());
}

// -- what is done with deferred tensors -------------------------------------------------------------------------------

enum class View : std::uint8_t { None, Reshape, Cast, Rows, Transpose, Permute };

View view_of(const c10::OperatorName& name) {
  static const std::map<std::string, View> all{
      {"aten::view", View::Reshape},
      {"aten::reshape", View::Reshape},
      {"aten::flatten.using_ints", View::Reshape},
      {"aten::unflatten.int", View::Reshape},
      {"aten::contiguous", View::Reshape},
      {"aten::squeeze.dim", View::Reshape},
      {"aten::unsqueeze", View::Reshape},
      {"aten::to.dtype", View::Cast},
      {"aten::slice.Tensor", View::Rows},
      {"aten::select.int", View::Rows},
      {"aten::index.Tensor", View::Rows},
      {"aten::index_select", View::Rows},
      {"aten::transpose.int", View::Transpose},
      {"aten::permute", View::Permute},
  };
  const auto found = all.find(name.overload_name.empty() ? name.name : name.name + '.' + name.overload_name);
  return found == all.end() ? View::None : found->second;
}

/// The operator with `self` in the place of its first argument.
Tensor called_with(const c10::OperatorHandle& op, const std::vector<c10::IValue>& arguments, const Tensor& self) {
  Stack stack(arguments.begin(), arguments.end());
  stack.front() = self;
  op.callBoxed(stack);
  return std::move(stack.back()).toTensor();
}

std::int64_t dimension(const c10::IValue& given, std::int64_t dims) {
  const auto dim = given.toInt();
  return dim < 0 ? dim + dims : dim;
}

/// The deferred tensor after a change that leaves rows of classes whole, or null: then its values are needed. Errors
/// are torch's own, of the same operator on a tensor of this size.
std::shared_ptr<Logits> changed(const c10::OperatorHandle& op, const std::vector<c10::IValue>& arguments,
                                const std::shared_ptr<Logits>& from) {
  const auto change = view_of(op.operator_name());
  const auto dims = from->meta.dim(), classes = from->weight.size(0), width = from->weight.size(1);
  if (change == View::None || (change != View::Reshape && dims < 1)) return nullptr;
  const bool classes_last = from->class_dim == dims - 1;
  if (!classes_last) return nullptr;
  from->check_unchanged();
  auto to = std::make_shared<Logits>();
  to->device = from->device;
  to->weight = from->weight;
  to->bias = from->bias;
  switch (change) {
    case View::None: return nullptr;
    case View::Reshape: {
      to->meta = called_with(op, arguments, from->meta);
      if (to->meta.dim() < 1 || to->meta.size(-1) != classes || !to->meta.is_contiguous()) return nullptr;
      auto sizes = to->meta.sizes().vec();
      sizes.back() = width;
      to->rows = from->rows.reshape(sizes);
      break;
    }
    case View::Cast: {
      const auto type = arguments[1].toScalarType();
      if (type != at::kFloat && type != from->meta.scalar_type()) return nullptr;
      to->meta = called_with(op, arguments, from->meta);
      to->rows = from->rows;
      break;
    }
    case View::Rows: {
      if (arguments[1].isInt()) {
        if (dimension(arguments[1], dims) == dims - 1) return nullptr;
        to->meta = called_with(op, arguments, from->meta);
        to->rows = called_with(op, arguments, from->rows);
      } else {
        std::int64_t indexed = 0;  // dimensions: a mask of booleans takes as many as it has
        for (const c10::IValue& index : arguments[1].toListRef()) {
          const bool mask = index.isTensor() && (index.toTensor().scalar_type() == at::kBool ||
                                                 index.toTensor().scalar_type() == at::kByte);
          indexed += mask ? index.toTensor().dim() : 1;
        }
        if (indexed >= dims) return nullptr;
        to->rows = called_with(op, arguments, from->rows);
        auto sizes = to->rows.sizes().vec();
        sizes.back() = classes;
        to->meta = on_meta(sizes, from->meta.scalar_type());
      }
      break;
    }
    case View::Transpose:
    case View::Permute: {
      to->meta = called_with(op, arguments, from->meta);
      const Tensor moved = called_with(op, arguments, from->rows);
      to->class_dim = dims - 1;
      if (change == View::Transpose) {
        const auto a = dimension(arguments[1], dims), b = dimension(arguments[2], dims);
        to->class_dim = a == dims - 1 ? b : b == dims - 1 ? a : dims - 1;
      } else {
        const auto order = arguments[1].toIntVector();
        for (std::size_t i = 0; i < order.size(); ++i) {
          if ((order[i] < 0 ? order[i] + dims : order[i]) == dims - 1) to->class_dim = static_cast<std::int64_t>(i);
        }
      }
      to->rows = moved.movedim(to->class_dim, -1);
      break;
    }
  }
  if (change != View::Transpose && change != View::Permute) to->class_dim = to->meta.dim() - 1;
  to->source = from;
  to->change = [op, arguments](const Tensor& values) { return called_with(op, arguments, values); };
  return to;
}

/// Whether a bias was added in place to a product that nobody else has seen: then it is that layer's.
bool takes_bias(const std::vector<c10::IValue>& arguments, const std::shared_ptr<Logits>& logits) {
  const Tensor added = arguments[1].toTensor();
  const bool fits = !logits->source && logits.use_count() == 2 && !logits->bias.defined() && !logits->has_hooks() &&
                    arguments[2].toScalar().equal(1) && added.dim() == 1 && !is_deferred(added) &&
                    added.size(0) == logits->weight.size(0) && added.device() == logits->device &&
                    at::isFloatingType(added.scalar_type()) && !at::isTensorSubclassLike(added);
  auto* node = static_cast<DeferredNode*>(logits->edge.function.get());
  if (!fits || node == nullptr) return false;
  logits->check_unchanged();
  logits->added = added;
  logits->bias = added.to(logits->weight.scalar_type());
  node->set_next_edge(2, torch::autograd::impl::gradient_edge(logits->bias));
  logits->note_versions();
  return true;
}

/// The loss, or nothing where torch's operator must see the values: to serve it, or to refuse it in its words.
MaybeTensor loss_of(const std::vector<c10::IValue>& arguments, Logits& logits) {
  const Tensor target = arguments[1].toTensor();
  const auto dims = logits.meta.dim();
  const auto reduction = arguments[3].toInt();
  const bool fits = logits.class_dim == (dims <= 2 ? dims - 1 : 1) && !is_tensor(arguments[2]) &&
                    (reduction == at::Reduction::Mean || reduction == at::Reduction::Sum) && !is_deferred(target) &&
                    target.device() == logits.device && target.scalar_type() == at::kLong &&
                    !at::areAnyTensorSubclassLike({target, logits.rows}) &&
                    target.sizes() == logits.rows.sizes().slice(0, static_cast<std::size_t>(dims) - 1) &&
                    at::GradMode::is_enabled();
  if (!fits || logits.is_computed()) return std::nullopt;
  for (Logits* one = &logits; one != nullptr; one = one->source.get()) {
    if (one->has_hooks()) return std::nullopt;
  }
  logits.check_unchanged();
  const bool wide = at::autocast::is_autocast_enabled(logits.device.type());  // which computes this loss in float32
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  ops::LinearCrossEntropyOptions options;
  if (logits.bias.defined()) options.bias = logits.bias;
  options.ignore_index = arguments[4].toInt();
  options.label_smoothing = arguments[5].toDouble();
  options.reduction = reduction == at::Reduction::Mean ? ops::LossReduction::Mean : ops::LossReduction::Sum;
  const Tensor loss = ops::linear_cross_entropy(logits.rows, logits.weight, target, options);
  experience().note_served(size_of(logits.weight));
  losses_made.fetch_add(1, std::memory_order_relaxed);
  return wide ? loss : loss.to(logits.meta.scalar_type());
}

std::optional<Tensor> Logits::serve(const c10::OperatorHandle& op, const std::vector<c10::IValue>& arguments,
                                    std::size_t position, std::shared_ptr<DeferredValue> self) {
  const auto logits = std::static_pointer_cast<Logits>(std::move(self));
  if (position > 0) return std::nullopt;
  const auto& name = op.operator_name();
  if (name.name == "aten::cross_entropy_loss") return loss_of(arguments, *logits);
  if (is_computed() || !at::GradMode::is_enabled()) return std::nullopt;
  if (name.name == "aten::add_" && name.overload_name == "Tensor") {
    return takes_bias(arguments, logits) ? MaybeTensor(arguments[0].toTensor()) : std::nullopt;
  }
  if (const auto to = changed(op, arguments, logits)) return wrapped(to);
  return std::nullopt;
}

/// Devices, and the key by which their layers are known to autograd.
constexpr std::array<std::pair<c10::DeviceType, c10::DispatchKey>, 4> kDevices{
    {{c10::DeviceType::CPU, c10::DispatchKey::AutogradCPU},
     {c10::DeviceType::CUDA, c10::DispatchKey::AutogradCUDA},
     {c10::DeviceType::HPU, c10::DispatchKey::AutogradHPU},
     {c10::DeviceType::PrivateUse1, c10::DispatchKey::AutogradPrivateUse1}}};

/// cross_entropy_differs() of the first device of a kind.
const std::string& difference_on(at::Device device) {
  static std::mutex mutex;
  static std::map<c10::DeviceType, std::string> known;
  const std::lock_guard lock(mutex);
  const auto found = known.find(device.type());
  return found != known.end() ? found->second : known[device.type()] = cross_entropy_differs(device);
}

LayerKernels& linear_kernels() {
  static LayerKernels all;
  return all;
}

}  // namespace

Tensor weight_of(const Tensor& right) {
  const bool transposed = right.dim() == 2 && right.layout() == at::kStrided && !at::isTensorSubclassLike(right) &&
                          right.stride(0) == 1 && !is_deferred(right);
  return transposed ? right.t() : Tensor();
}

Tensor deferred_linear(const Tensor& input, const Tensor& weight, const Tensor& bias) {
  if (weight.scalar_type() != at::kFloat || !is_deferrable(input, at::kBFloat16, weight, bias)) return {};
  return deferred_layer(input, weight, bias, [](const Logits& self) {
    return ops::linear(self.rows, self.weight, ops::if_defined(self.bias));
  });
}

DeferredLogits::DeferredLogits(at::Device device) {
  OXY_CHECK(serves(device), NotSupported, "logits are deferred on a CPU, CUDA, Gaudi and privateuse1; the device is ",
            device.str(), ".");
  const auto& reason = difference_on(device);
  OXY_CHECK(reason.empty(), NotSupported, reason, ".");
  std::vector<c10::DispatchKey> keys;
  for (const auto& [type, key] : kDevices) keys.push_back(key);
  linear_kernels().acquire(keys, [](torch::Library& library, c10::DispatchKey key) {
    experience().forget();
    served().capture("aten::addmm", key);
    library.impl("addmm", torch::CppFunction::makeFromBoxedFunction<&boxed<5, addmm_of>>());
    if (key == c10::DispatchKey::AutogradCPU) {
      library.impl("linear", TORCH_FN(linear));
      library.impl("matmul", TORCH_FN(matmul));
      return;
    }
    served().capture("aten::linear", key);
    served().capture("aten::matmul", key);
    library.impl("linear", torch::CppFunction::makeFromBoxedFunction<&boxed<3, linear_of>>());
    library.impl("matmul", torch::CppFunction::makeFromBoxedFunction<&boxed<2, matmul_of>>());
  });
}

bool DeferredLogits::serves(at::Device device) noexcept {
  return std::any_of(kDevices.begin(), kDevices.end(), [&](const auto& one) { return one.first == device.type(); });
}

DeferredLogits::~DeferredLogits() { linear_kernels().release(); }

DeferredLogits::Scope::Scope() { ++open_scopes; }
DeferredLogits::Scope::~Scope() { --open_scopes; }

void DeferredLogits::before_weights_change() { settle_all(); }
std::int64_t DeferredLogits::losses() noexcept { return losses_made.load(std::memory_order_relaxed); }
std::int64_t DeferredLogits::computed() noexcept { return values_made.load(std::memory_order_relaxed); }

}  // namespace oxytorch::tune
