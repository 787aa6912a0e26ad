#include "oxytorch/tune/deferred_sums.h"

#include <ATen/TensorOperators.h>
#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/add_ops.h>
#include <ATen/ops/dropout_ops.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/layer_norm_ops.h>
#include <ATen/ops/mul_ops.h>
#include <ATen/ops/pow_ops.h>
#include <ATen/ops/result_type.h>
#include <ATen/ops/rms_norm.h>
#include <ATen/ops/rms_norm_ops.h>
#include <ATen/ops/to_ops.h>
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
#include <utility>
#include <vector>

#include "ops/dispatch.h"
#include "ops/row_norm.h"
#include "oxytorch/error.h"
#include "tune/deferred.h"
#include "tune/deferred_call.h"
#include "tune/operators_entry.h"
#include "tune/thread_key.h"
#include "tune/what_followed.h"
#include "tune/written_norm.h"

namespace oxytorch::tune {
namespace {

using at::Tensor;

thread_local int open_sum_scopes = 0;
std::atomic<std::int64_t> sums_taken = 0, norms_joined = 0, norms_narrowed = 0;

// Norms by their width.
WhatFollowed<std::int64_t>& norms_read() {
  static WhatFollowed<std::int64_t> all;
  return all;
}
/// One is left to a linear layer where few are read as they are.
bool norms_feed_layers(std::int64_t width) {
  constexpr std::int64_t kWhole = 4;  // what one that is made twice costs, in what others save
  const auto count = norms_read().of(width);
  return kWhole * count.values <= count.served;
}

/// What torch's dropout multiplies with.
Tensor noise_of(const Tensor& keep, double dropout) { return keep.div(1 - dropout); }

// Gradients that reach a deferred tensor itself: those of a custom function that was given it.
struct DeferredSumNode final : torch::autograd::Node {
  std::string name() const override { return "OxytorchDeferredSumBackward"; }

  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override {
    torch::autograd::variable_list made(2);
    if (!grads[0].defined()) return made;
    if (task_should_compute_output(0)) {
      made[0] = (keep.defined() ? grads[0] * noise_of(keep, dropout) : grads[0]).to(types[0]);
    }
    if (task_should_compute_output(1)) made[1] = grads[0].to(types[1]);
    return made;
  }

  Tensor keep;
  double dropout = 0;
  std::array<at::ScalarType, 2> types{};
};

/// input, behind dropout, + residual.
struct Sum final : DeferredValue {
  Tensor input, residual;  // no residual: dropout alone
  Tensor keep;             // of dropout; undefined: none
  double dropout = 0;
  std::array<std::uint32_t, 2> versions{};

  [[nodiscard]] std::array<std::uint32_t, 2> present_versions() const {
    std::array<std::uint32_t, 2> found{};
    for (std::size_t i = 0; i < 2; ++i) {
      const Tensor& t = i == 0 ? input : residual;
      if (t.defined() && !t.is_inference()) found[i] = static_cast<std::uint32_t>(t._version());
    }
    return found;
  }

  Tensor values() override {
    const std::lock_guard lock(mutex_);
    if (made_.defined()) return made_;
    OXY_CHECK(versions == present_versions(), InvalidState,
              "a sum is asked for after what was added, or dropped, was changed in place: it was left to what follows "
              "it (native_layer_norm). Read it before, or leave that strategy out.");
    const at::AutoGradMode as_in_training(true);
    const c10::impl::ExcludeDispatchKeyGuard as_left_alone(kThreadKey);
    Tensor made = keep.defined() ? input * noise_of(keep, dropout) : input;
    if (residual.defined()) made = is_residual_first ? residual + made : made + residual;
    keep_made(behind_hooks(made));
    return made_;
  }
  bool is_computed() override {
    const std::lock_guard lock(mutex_);
    return made_.defined();
  }
  void settle() override {}
  std::optional<Tensor> serve(const c10::OperatorHandle& op, const std::vector<c10::IValue>& arguments,
                              std::size_t position, std::shared_ptr<DeferredValue> self) override;
  /// Its norm over the last dimension, `norm` but for what is added, with which it is computed; nothing where the
  /// kernel does not take it.
  std::optional<Tensor> normed(const ops::NormOfSum& norm);
  /// Whether the kernel would.
  [[nodiscard]] bool may_be(const ops::NormOfSum& norm);

  bool is_residual_first = false;

 private:
  [[nodiscard]] bool may_join() const {
    return !made_.defined() && !has_hooks() && versions == present_versions() && at::GradMode::is_enabled();
  }
  /// `norm` of what is added here, where it may join and the kernel takes it.
  [[nodiscard]] std::optional<ops::NormOfSum> joined(ops::NormOfSum norm) const {
    if (!may_join() || !meta.is_contiguous() || is_deferred(norm.weight) || is_deferred(norm.bias)) return std::nullopt;
    norm.input = input;
    norm.residual = residual;
    norm.keep = keep;
    norm.keep_scale = 1 / (1 - dropout);
    return ops::row_norm_cpu_takes(norm) ? std::optional(std::move(norm)) : std::nullopt;
  }
  /// What it was made of is nobody's to hold any longer.
  void keep_made(Tensor made) {
    made_ = std::move(made);
    input = residual = keep = Tensor();
  }
  std::mutex mutex_;
  Tensor made_;
};

/// What torch's operators would give, without values.
Tensor meta_of(const Sum& sum) {
  const auto on_meta = [](const Tensor& t) { return at::empty_like(t, t.options().device(at::kMeta)); };
  if (!sum.residual.defined()) return on_meta(sum.input);
  if (sum.input.is_contiguous() && sum.residual.is_contiguous()) {
    return at::empty(sum.input.sizes(),
                     sum.input.options().dtype(at::result_type(sum.input, sum.residual)).device(at::kMeta));
  }
  const at::NoGradGuard no_grad;
  const Tensor input = on_meta(sum.input), residual = on_meta(sum.residual);
  const c10::impl::ExcludeDispatchKeyGuard as_left_alone(kThreadKey);
  return sum.is_residual_first ? residual + input : input + residual;
}

Tensor deferred_sum(const std::shared_ptr<Sum>& sum) {
  sum->versions = sum->present_versions();
  sum->meta = meta_of(*sum);
  Tensor tensor = deferred_tensor(sum);
  const Tensor& second = sum->residual.defined() ? sum->residual : sum->input;
  auto node = new_node<DeferredSumNode>();
  node->set_next_edges(torch::autograd::collect_next_edges(sum->input, second));
  if (!sum->residual.defined()) node->set_next_edge(1, {});
  node->types = {sum->input.scalar_type(), second.scalar_type()};
  node->keep = sum->keep;
  node->dropout = sum->dropout;
  torch::autograd::set_history(tensor, node);
  sum->edge = torch::autograd::impl::gradient_edge(tensor);
  sums_taken.fetch_add(1, std::memory_order_relaxed);
  return tensor;
}

/// What the kernel takes, and nobody else has a use for.
bool is_addend(const Tensor& tensor) {
  return tensor.defined() && ops::has_kernel(tensor) && tensor.layout() == at::kStrided && tensor.dim() >= 2 &&
         tensor.numel() > 0 && tensor.size(-1) > 1 && tensor.is_non_overlapping_and_dense() && !tensor.is_inference();
}

/// Whether normalizing goes over the last dimension alone.
bool is_of_rows(const Tensor& meta, const c10::IValue& shape) {
  const auto sizes = shape.toIntVector();
  return sizes.size() == 1 && sizes[0] == meta.size(-1);
}
Tensor tensor_or_none(const c10::IValue& argument) { return is_tensor(argument) ? argument.toTensor() : Tensor(); }

/// `norm` of rows: those of a tensor, or of a sum that is computed with it. Nothing where the kernel does not take it.
std::optional<Tensor> norm_of_rows(const Tensor& rows, ops::NormOfSum norm) {
  const auto value = deferred_value(rows);
  if (auto* sum = dynamic_cast<Sum*>(value.get()); sum != nullptr && !sum->is_computed()) return sum->normed(norm);
  norm.input = values_of(rows);
  if (!ops::row_norm_cpu_takes(norm)) return std::nullopt;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  return ops::normalized_sum(norm).first;
}

/// The 16 bits in which linear layers take float32 now, if they do.
std::optional<at::ScalarType> layers_take() {
  if (!at::autocast::is_autocast_enabled(at::kCPU)) return std::nullopt;
  const auto type = at::autocast::get_autocast_dtype(at::kCPU);
  return type == at::kBFloat16 || type == at::kHalf ? std::optional(type) : std::nullopt;
}

/// A norm that is left to the linear layer behind it: under autocast that takes it in 16 bits, in which it is then
/// written at once. Its bits are those of the norm in float32, cast; so are the gradients'.
class RowNorm final : public DeferredCall {
 public:
  RowNorm(c10::OperatorHandle op, Arguments arguments, ops::NormOfSum norm)
      : DeferredCall(std::move(op), std::move(arguments), at::kCPU), norm_(std::move(norm)) {
    const Tensor& rows = arguments_[0].toTensor();
    meta = at::empty(rows.sizes(), at::TensorOptions().dtype(at::kFloat).device(at::kMeta));
  }

  std::optional<Tensor> serve(const c10::OperatorHandle& op, const std::vector<c10::IValue>& arguments,
                              std::size_t position, std::shared_ptr<DeferredValue> /*self*/) override {
    const auto& name = op.operator_name().name;
    const std::size_t place = name == "aten::addmm" ? 1 : 0;
    if (position != place || (place == 0 && name != "aten::linear" && name != "aten::matmul")) return std::nullopt;
    const auto type = layers_take();
    if (!type || has_hooks()) return std::nullopt;
    torch::jit::Stack stack(arguments.begin(), arguments.end());
    {
      const std::lock_guard lock(mutex_);
      // Gradients of a second layer would be added in 16 bits, and torch adds them in float32.
      if (made_.defined() || std::exchange(is_narrowed_, true)) return std::nullopt;
      OXY_CHECK(is_unchanged(), InvalidState, changed());
      const at::AutoGradMode as_in_training(true);
      auto narrow = norm_;
      narrow.rounded_to = type;
      auto made = norm_of_rows(arguments_[0].toTensor(), std::move(narrow));
      if (!made) return std::nullopt;
      stack[place] = std::move(*made);
    }
    norms_read().note_served(meta.size(-1));
    norms_narrowed.fetch_add(1, std::memory_order_relaxed);
    op.callBoxed(stack);
    return std::move(stack.back()).toTensor();
  }

 protected:
  std::optional<Tensor> made_instead() override {
    norms_read().note_values(meta.size(-1));
    return norm_of_rows(arguments_[0].toTensor(), norm_);
  }
  void let_go() override { norm_ = {}; }
  [[nodiscard]] const char* changed() const override {
    return "a norm is asked for after its input or weights were changed in place: it was left to the layer that takes "
           "it (native_layer_norm). Read it before, or leave that strategy out.";
  }

 private:
  ops::NormOfSum norm_;  // of the rows; what is added is the sum's
  bool is_narrowed_ = false;
};

/// The norm that `op` makes of `arguments`, of a tensor or sum like `meta`, left to what follows; or nothing.
std::optional<Tensor> deferred_norm_of(const c10::OperatorHandle& op, const Arguments& arguments, const Tensor& meta,
                                       const ops::NormOfSum& norm) {
  if (meta.scalar_type() != at::kFloat || !meta.is_contiguous() || !layers_take() ||
      !norms_feed_layers(meta.size(-1))) {
    return std::nullopt;
  }
  return tensor_of(std::make_shared<RowNorm>(op, arguments, norm));
}

std::optional<Tensor> Sum::serve(const c10::OperatorHandle& op, const std::vector<c10::IValue>& arguments,
                                 std::size_t position, std::shared_ptr<DeferredValue> /*self*/) {
  if (meta.is_contiguous()) {
    if (auto made = written_norm_of_sum(op, arguments, position)) return made;
  }
  const auto& name = op.operator_name();
  const bool adds = name.name == "aten::add" && name.overload_name == "Tensor";
  Tensor other;
  if (adds) {
    const c10::IValue& beside = arguments[position == 0 ? 1 : 0];
    if (!arguments[2].toScalar().equal(1) || !is_tensor(beside)) return std::nullopt;
    other = values_of(beside.toTensor());  // before the lock: it may be this one
  }
  if (adds) {
    const std::lock_guard lock(mutex_);
    if (!may_join()) return std::nullopt;
    const std::array<Tensor, 1> one{other};
    if (residual.defined() || !is_addend(other) || other.sizes() != meta.sizes() || at::areAnyTensorSubclassLike(one)) {
      return std::nullopt;
    }
    auto next = std::make_shared<Sum>();
    next->input = input;
    next->residual = other;
    next->keep = keep;
    next->dropout = dropout;
    next->is_residual_first = position == 1;
    return deferred_sum(next);
  }
  const bool is_centered = name.name == "aten::layer_norm";
  if (position != 0 || (!is_centered && name.name != "aten::rms_norm") || !is_of_rows(meta, arguments[1])) {
    return std::nullopt;
  }
  const c10::IValue& eps = arguments[is_centered ? 4 : 3];
  const double eps_or_default = ops::rms_eps(meta, eps.isNone() ? std::nullopt : std::optional(eps.toDouble()));
  const ops::NormOfSum norm{.weight = tensor_or_none(arguments[2]),
                            .bias = is_centered ? tensor_or_none(arguments[3]) : Tensor(),
                            .eps = eps_or_default,
                            .is_centered = is_centered};
  if (may_be(norm)) {
    if (auto left = deferred_norm_of(op, arguments, meta, norm)) return left;
  }
  return normed(norm);
}

bool Sum::may_be(const ops::NormOfSum& norm) {
  const std::lock_guard lock(mutex_);
  return joined(norm).has_value();
}

std::optional<Tensor> Sum::normed(const ops::NormOfSum& norm) {
  const std::lock_guard lock(mutex_);
  const auto of = joined(norm);
  if (!of) return std::nullopt;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  auto [normed, sum] = ops::normalized_sum(*of);
  ops::let_hooks_see_sum(normed, edge);
  keep_made(sum);
  norms_joined.fetch_add(1, std::memory_order_relaxed);
  return normed;
}

// -- where a thread asks for it ---------------------------------------------------------------------------------------

Tensor add_in_scope(c10::DispatchKeySet keys, const Tensor& self, const Tensor& other, const at::Scalar& alpha) {
  if (open_sum_scopes > 0 && alpha.equal(1) && !is_deferred(self) && !is_deferred(other) && is_addend(self) &&
      is_addend(other) && self.sizes() == other.sizes() && may_defer(self, other)) {
    auto sum = std::make_shared<Sum>();
    sum->input = self;
    sum->residual = other;
    return deferred_sum(sum);
  }
  return at::_ops::add_Tensor::redispatch(behind_thread_key(keys), self, other, alpha);
}

Tensor dropout_in_scope(c10::DispatchKeySet keys, const Tensor& input, double p, bool train) {
  if (open_sum_scopes > 0 && train && p > 0 && p < 1 && !is_deferred(input) && is_addend(input) &&
      may_defer(input, input)) {
    auto sum = std::make_shared<Sum>();
    sum->input = input;
    sum->keep = at::empty_like(input.detach()).bernoulli_(1 - p);  // as torch draws it
    sum->dropout = p;
    return deferred_sum(sum);
  }
  return at::_ops::dropout::redispatch(behind_thread_key(keys), input, p, train);
}

Tensor pow_in_scope(c10::DispatchKeySet keys, const Tensor& self, const at::Scalar& exponent) {
  if (open_sum_scopes > 0 && exponent.equal(2) && may_begin_written_norm(self) && self.scalar_type() == at::kFloat) {
    return deferred_square("aten::pow", "Tensor_Scalar", {self, exponent});
  }
  return at::_ops::pow_Tensor_Scalar::redispatch(behind_thread_key(keys), self, exponent);
}

Tensor mul_in_scope(c10::DispatchKeySet keys, const Tensor& self, const Tensor& other) {
  if (open_sum_scopes > 0 && self.is_same(other) && may_begin_written_norm(self) && self.scalar_type() == at::kFloat) {
    return deferred_square("aten::mul", "Tensor", {self, other});
  }
  return at::_ops::mul_Tensor::redispatch(behind_thread_key(keys), self, other);
}

Tensor to_in_scope(c10::DispatchKeySet keys, const Tensor& self, at::ScalarType dtype, bool non_blocking, bool copy,
                   std::optional<at::MemoryFormat> format) {
  if (open_sum_scopes > 0 && dtype == at::kFloat && !copy && !format && may_begin_written_norm(self) &&
      self.scalar_type() != at::kFloat) {
    return deferred_wide({self, dtype, non_blocking, copy, format});
  }
  return at::_ops::to_dtype::redispatch(behind_thread_key(keys), self, dtype, non_blocking, copy, format);
}

/// The norm by the kernel of this library, of `arguments` of the operator `name`, or nothing where torch's must see
/// them.
std::optional<Tensor> norm_in_scope(const char* name, const Arguments& arguments, c10::SymIntArrayRef shape,
                                    ops::NormOfSum norm) {
  const Tensor& input = arguments[0].toTensor();
  if (is_deferred(input) || !is_addend(input) || shape.size() != 1 || shape[0] != input.sym_size(-1) ||
      is_deferred(norm.weight) || is_deferred(norm.bias)) {
    return std::nullopt;
  }
  norm.input = input;
  if (!may_defer(input, norm.weight.defined() ? norm.weight : input) || !ops::row_norm_cpu_takes(norm)) {
    return std::nullopt;
  }
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
  if (auto left = deferred_norm_of(op, arguments, input, norm)) return left;
  return norm_of_rows(input, std::move(norm));
}

Tensor rms_norm_in_scope(c10::DispatchKeySet keys, const Tensor& input, c10::SymIntArrayRef shape,
                         const MaybeTensor& weight, std::optional<double> eps) {
  if (open_sum_scopes > 0) {
    const ops::NormOfSum norm{.weight = ops::or_none(weight), .eps = ops::rms_eps(input, eps), .is_centered = false};
    if (auto made = norm_in_scope("aten::rms_norm", {input, shape, weight, eps}, shape, norm)) return *made;
  }
  return at::_ops::rms_norm::redispatch(behind_thread_key(keys), input, shape, weight, eps);
}

Tensor layer_norm_in_scope(c10::DispatchKeySet keys, const Tensor& input, c10::SymIntArrayRef shape,
                           const MaybeTensor& weight, const MaybeTensor& bias, double eps, bool cudnn) {
  if (open_sum_scopes > 0) {
    const ops::NormOfSum norm{.weight = ops::or_none(weight), .bias = ops::or_none(bias), .eps = eps};
    const Arguments arguments{input, shape, weight, bias, eps, cudnn};
    if (auto made = norm_in_scope("aten::layer_norm", arguments, shape, norm)) return *made;
  }
  return at::_ops::layer_norm::redispatch(behind_thread_key(keys), input, shape, weight, bias, eps, cudnn);
}

void register_sums_once() {
  static const bool done = [] {
    register_thread_key();
    auto* const aten = new torch::Library(torch::Library::IMPL, "aten", kThreadKey, __FILE__, __LINE__);
    aten->impl("add.Tensor", TORCH_FN(add_in_scope));
    aten->impl("dropout", TORCH_FN(dropout_in_scope));
    aten->impl("pow.Tensor_Scalar", TORCH_FN(pow_in_scope));
    aten->impl("mul.Tensor", TORCH_FN(mul_in_scope));
    aten->impl("to.dtype", TORCH_FN(to_in_scope));
    aten->impl("rms_norm", TORCH_FN(rms_norm_in_scope));
    aten->impl("layer_norm", TORCH_FN(layer_norm_in_scope));
    return true;
  }();
  static_cast<void>(done);
}

}  // namespace

std::optional<Tensor> rms_norm_of(const Tensor& rows, const Tensor& weight, double eps) {
  if (rows.is_cpu()) return norm_of_rows(rows, {.weight = weight, .eps = eps, .is_centered = false});
  // Of one dtype torch has one kernel on CUDA.
  const Tensor input = values_of(rows);
  if (weight.defined() && weight.scalar_type() != input.scalar_type()) return std::nullopt;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  return at::rms_norm(input, {input.size(-1)}, ops::if_defined(weight), eps);
}

DeferredSums::DeferredSums() {
  norms_read().forget();
  static const std::string reason = row_norm_differs();
  OXY_CHECK(reason.empty(), NotSupported, reason, ".");
  register_sums_once();
}

DeferredSums::Scope::Scope() {
  register_sums_once();
  is_first_ = open_scope(open_sum_scopes);
}
DeferredSums::Scope::~Scope() { close_scope(open_sum_scopes, is_first_); }

bool DeferredSums::serves(at::Device device) noexcept { return finds_written(device); }

std::int64_t DeferredSums::sums() noexcept { return sums_taken.load(std::memory_order_relaxed); }
std::int64_t DeferredSums::joined() noexcept { return norms_joined.load(std::memory_order_relaxed); }
std::int64_t DeferredSums::narrowed() noexcept { return norms_narrowed.load(std::memory_order_relaxed); }
std::int64_t DeferredSums::written() noexcept { return written_norms(); }

}  // namespace oxytorch::tune
