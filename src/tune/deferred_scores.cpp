#include "oxytorch/tune/deferred_scores.h"

#include <ATen/ExpandUtils.h>
#include <ATen/TensorOperators.h>
#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/baddbmm_ops.h>
#include <ATen/ops/bmm_ops.h>
#include <ATen/ops/einsum_ops.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/matmul_ops.h>
#include <ATen/ops/result_type.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/accumulate.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "ops/composed_attention.h"
#include "ops/dispatch.h"
#include "oxytorch/error.h"
#include "tune/deferred_call.h"
#include "tune/operators_entry.h"
#include "tune/thread_key.h"

namespace oxytorch::tune {
namespace {

using at::Tensor;

thread_local int open_score_scopes = 0;
std::atomic<std::int64_t> scores_taken = 0, attentions_joined = 0;

/// A mask that is added, or that is filled in where it is true, or where it is false.
struct Mask {
  Tensor tensor;  // broadcasts to samples x heads x queries x keys
  std::optional<double> filled = {};
  bool is_of_shown = false;
};

/// What the parts of one attention come to so far.
struct Attended {
  Tensor query, key;                    // as the model has them: 3 or 4 dimensions
  std::array<std::int64_t, 2> heads{};  // samples and heads, which the model may have as one dimension
  double scale = 1, soft_cap = 0;       // a cap of scores that are divided by it already
  std::vector<Mask> masks;
  Tensor kept;  // of dropout; undefined: none
  double dropout = 0;
};

/// How far it is: scores, their hyperbolic tangent, weights, or something else that nobody has read yet.
enum class Stage : std::uint8_t { Scores, Tangent, Weights, Other };

struct ScorePart final : DeferredCall {
  ScorePart(Stage is, Attended so_far, c10::OperatorHandle by, Arguments of, std::size_t position, at::Device on)
      : DeferredCall(std::move(by), std::move(of), on), stage(is), attended(std::move(so_far)), before_at(position) {}
  ScorePart(const ScorePart& other)
      : DeferredCall(other), stage(other.stage), attended(other.attended), before_at(other.before_at) {}
  ScorePart& operator=(const ScorePart&) = delete;

  std::optional<Tensor> serve(const c10::OperatorHandle& by, const Arguments& given, std::size_t position,
                              std::shared_ptr<DeferredValue> self) override;

  /// Itself and every part before it, the first last; nothing where one has values, or somebody else has to see it.
  [[nodiscard]] std::vector<ScorePart*> chain();
  [[nodiscard]] at::ScalarType product_type() const { return autocast_.product_type(attended.query); }

  Stage stage;
  Attended attended;
  std::size_t before_at;  // the argument that is the part before it

 protected:
  std::function<Tensor(const std::vector<Tensor>&)> made_of() const override {
    if (!is_operator(op_, "aten::dropout")) return DeferredCall::made_of();
    return [kept = attended.kept, dropout = attended.dropout](const std::vector<Tensor>& given) {
      const c10::impl::ExcludeDispatchKeyGuard as_left_alone(kThreadKey);
      return given[0] * kept.view(given[0].sizes()).to(given[0].scalar_type()).div(1 - dropout);
    };
  }
  void let_go() override { attended = {}; }
  const char* changed() const override {
    return "scores of attention are asked for after what they are made of was changed in place: they were left to what "
           "follows them (native_attention). Read them before, or leave that strategy out.";
  }
};

std::shared_ptr<ScorePart> part_of(const Tensor& tensor) {
  return std::dynamic_pointer_cast<ScorePart>(deferred_value(tensor));
}

std::vector<ScorePart*> ScorePart::chain() {
  std::vector<ScorePart*> all;
  for (auto* part = this; part != nullptr;) {
    const std::lock_guard lock(part->mutex_);
    if (part->made_.defined() || part->has_hooks() || !part->is_unchanged()) return {};
    all.push_back(part);
    part = part_of(part->arguments_[part->before_at].toTensor()).get();  // the argument owns it
  }
  return all;
}

Tensor without_values(at::IntArrayRef sizes, at::ScalarType type) {
  return at::empty(sizes, at::TensorOptions(at::kMeta).dtype(type));
}

// -- from scores to weights -------------------------------------------------------------------------------------------

/// A number by which an operator multiplies or divides the argument at `position`; nothing of others.
std::optional<double> factor_of(const c10::OperatorHandle& op, const Arguments& arguments, std::size_t position) {
  const bool divides = is_operator(op, "aten::div", "Tensor") || is_operator(op, "aten::div", "Scalar");
  const bool multiplies = is_operator(op, "aten::mul", "Tensor") || is_operator(op, "aten::mul", "Scalar");
  if ((!divides && !multiplies) || (divides && position != 0)) return std::nullopt;
  const auto number = number_of(arguments[1 - position]);
  if (!number || !std::isfinite(*number) || *number == 0) return std::nullopt;
  return divides ? 1 / *number : *number;
}

bool is_plain_tensor(const c10::IValue& argument) {
  if (!is_tensor(argument)) return false;
  const std::array<Tensor, 1> one{argument.toTensor()};
  return !is_deferred(one[0]) && one[0].layout() == at::kStrided && !at::areAnyTensorSubclassLike(one);
}

/// What is filled in for a score that is hidden: far below any that is not. -1e4 is -9984 in bfloat16.
constexpr double kHides = -9000;

/// The mask that an operator lays over scores of `meta`; nothing of others.
std::optional<Mask> mask_of(const c10::OperatorHandle& op, const Arguments& arguments, std::size_t position,
                            const Tensor& meta) {
  Mask mask;
  std::size_t at = 1;
  if (is_operator(op, "aten::add", "Tensor")) {
    at = 1 - position;
    if (!arguments[2].toScalar().equal(1)) return std::nullopt;
  } else if (is_operator(op, "aten::masked_fill") && position == 0) {
    mask.filled = number_of(arguments[2]);
    if (!mask.filled || !(*mask.filled <= kHides)) return std::nullopt;
  } else if ((is_operator(op, "aten::where", "self") || is_operator(op, "aten::where", "ScalarOther")) &&
             position == 1) {
    at = 0;
    mask.is_of_shown = true;
    mask.filled = number_of(arguments[2]);
    if (!mask.filled || !(*mask.filled <= kHides)) return std::nullopt;
  } else {
    return std::nullopt;
  }
  if (!is_plain_tensor(arguments[at])) return std::nullopt;
  mask.tensor = arguments[at].toTensor();
  const bool is_right = mask.filled ? mask.tensor.scalar_type() == at::kBool : mask.tensor.is_floating_point();
  const bool widens = mask.tensor.scalar_type() == at::kDouble && mask.tensor.dim() > 0;
  if (!is_right || widens || !at::is_expandable_to(mask.tensor.sizes(), meta.sizes())) {
    return std::nullopt;
  }
  return mask;
}

/// As it broadcasts to samples x heads x queries x keys, where scores of `meta` may have samples and heads as one
/// dimension, or samples as two.
Tensor over_heads(const Tensor& mask, const Tensor& meta, const Attended& attended) {
  if (meta.dim() == 3 && mask.dim() == 3) {
    return mask.size(0) == 1 ? mask.unsqueeze(0) : mask.unflatten(0, attended.heads);
  }
  if (meta.dim() < 5 || mask.dim() < 4) return mask;
  const Tensor of_samples = mask.dim() == 4 ? mask.unsqueeze(0) : mask;
  return of_samples.expand({meta.size(0), meta.size(1), -1, -1, -1}).flatten(0, 1);
}

/// The masks as one that is added; undefined where there is none.
Tensor added_mask(const Attended& attended) {
  Tensor sum;
  for (const Mask& mask : attended.masks) {
    if (!mask.filled) {
      sum = sum.defined() ? sum + mask.tensor : mask.tensor;
      continue;
    }
    const auto options = mask.tensor.options().dtype(at::kFloat);
    const Tensor hidden = at::full({}, *mask.filled, options);
    const Tensor shown = sum.defined() ? sum.to(at::kFloat) : at::zeros({}, options);
    sum = mask.is_of_shown ? at::where(mask.tensor, shown, hidden) : at::where(mask.tensor, hidden, shown);
  }
  return sum;
}

/// The weights and values as one call, or nothing where it does not take them.
std::optional<Tensor> joined(const std::shared_ptr<ScorePart>& weights, const Tensor& value) {
  const Attended& attended = weights->attended;
  const Tensor& meta = weights->meta;
  const std::array<Tensor, 1> one{value};
  if (!value.defined() || is_deferred(value) || value.dim() != meta.dim() || value.device() != weights->device ||
      value.layout() != at::kStrided || at::areAnyTensorSubclassLike(one)) {
    return std::nullopt;
  }
  for (std::int64_t i = 0; i < meta.dim() - 2; ++i) {
    if (value.size(i) != meta.size(i)) return std::nullopt;
  }
  if (value.size(-2) != meta.size(-1) || value.size(-1) != attended.query.size(-1)) return std::nullopt;
  const Autocast now(weights->device.type());
  const auto type = now.product_type(value);
  if (now.product_type(without_values({}, meta.scalar_type())) != type) return std::nullopt;  // torch refuses it

  const auto chain = weights->chain();
  if (chain.empty() || chain.back()->product_type() != type) return std::nullopt;

  const c10::impl::ExcludeDispatchKeyGuard as_left_alone(kThreadKey);
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const auto by_heads = [&](const Tensor& t) { return (t.dim() == 4 ? t : t.unflatten(0, attended.heads)).to(type); };
  ops::ComposedAttention of{by_heads(attended.query), by_heads(attended.key), by_heads(value)};
  of.scale = attended.soft_cap > 0 ? attended.scale * attended.soft_cap : attended.scale;
  of.soft_cap = attended.soft_cap;
  of.dropout = attended.dropout;
  const bool has_kernel = weights->device.is_cpu();
  if (Tensor mask = added_mask(attended); mask.defined()) {
    of.mask = mask.scalar_type() == type ? mask : mask.to(has_kernel ? at::kFloat : type);
  }
  std::optional<Tensor> output;
  if (has_kernel) {
    const Tensor kept = attended.kept.defined()
                            ? attended.kept.view({attended.heads[0], attended.heads[1], meta.size(-2), meta.size(-1)})
                            : Tensor();
    if (ops::composed_attention_takes(of)) output = ops::written_attention(of, kept);
  } else if (of.soft_cap == 0 && of.dropout == 0) {
    output = at::scaled_dot_product_attention(of.query, of.key, of.value, of.mask, 0, false, of.scale);
  }
  if (!output) return std::nullopt;
  attentions_joined.fetch_add(1, std::memory_order_relaxed);
  const Tensor dense = output->contiguous();  // as a product of matrices is
  return meta.dim() == 4 ? dense : dense.flatten(0, 1);
}

/// The operator that an operator in place is, with a result of its own.
std::optional<c10::OperatorHandle> out_of_place(const c10::OperatorHandle& op) {
  const auto& name = op.operator_name();
  if (name.name.back() != '_') return std::nullopt;
  return c10::Dispatcher::singleton().findSchema({name.name.substr(0, name.name.size() - 1), name.overload_name});
}

/// What the next part is.
struct Next {
  Stage stage;
  Attended attended;
  at::ScalarType type;
  std::vector<std::int64_t> sizes;
};

/// False where this is not served.
bool scale_by(Next& next, double factor) {
  auto& [stage, attended, type, sizes] = next;
  if (stage == Stage::Weights || stage == Stage::Other) {
    stage = Stage::Other;
    return true;
  }
  if (stage == Stage::Tangent) {
    attended.soft_cap = factor;
    stage = Stage::Scores;
    return factor > 0;
  }
  for (Mask& mask : attended.masks) {
    if (!mask.filled) return false;
    *mask.filled *= factor;
    if (!(*mask.filled <= kHides)) return false;
  }
  attended.scale *= factor;
  return attended.soft_cap == 0;
}

/// In other sizes, of which one may be -1; false where they do not fit, and torch says so.
bool view_as(Next& next, const Tensor& meta, std::vector<std::int64_t> sizes) {
  const auto unknown = std::find(sizes.begin(), sizes.end(), -1);
  if (unknown != sizes.end()) {
    *unknown = 1;
    const auto known = c10::multiply_integers(sizes);
    if (known <= 0) return false;
    *unknown = meta.numel() / known;
  }
  if (c10::multiply_integers(sizes) != meta.numel()) return false;
  next.sizes = sizes;
  const auto count = static_cast<std::int64_t>(sizes.size()), before = meta.dim();
  const auto from_end = [&](std::int64_t i) { return sizes[static_cast<std::size_t>(count - i)]; };
  const bool keeps_matrices =
      count >= 3 && count <= 5 && before <= 5 && from_end(1) == meta.size(-1) && from_end(2) == meta.size(-2);
  const bool keeps_heads = keeps_matrices && before > 3 && (count == 3 || from_end(3) == meta.size(-3));
  if (keeps_heads || at::IntArrayRef(sizes) == meta.sizes()) return true;
  auto& [stage, attended, type, unused] = next;
  if (!keeps_matrices || before != 3 || count != 4) {
    stage = Stage::Other;
    return true;
  }
  // Samples and heads apart, which were one dimension.
  const std::array<std::int64_t, 2> heads{sizes[0], sizes[1]}, one_sample{1, meta.size(0)};
  if (attended.heads == heads) return true;
  if (attended.heads != one_sample) stage = Stage::Other;
  attended.heads = heads;
  for (Mask& mask : attended.masks) {
    Tensor& t = mask.tensor;
    if (t.dim() == 4 && t.size(1) > 1) t = t.squeeze(0).unflatten(0, heads);
  }
  return true;
}

std::optional<Tensor> ScorePart::serve(const c10::OperatorHandle& by, const Arguments& given, std::size_t position,
                                       std::shared_ptr<DeferredValue> self) {
  const auto me = std::static_pointer_cast<ScorePart>(std::move(self));
  if (is_computed() || has_hooks() || !at::GradMode::is_enabled() || !is_unchanged()) return std::nullopt;
  const Tensor tensor = given[position].toTensor();
  const auto in_place = out_of_place(by);
  const c10::OperatorHandle& does = in_place ? *in_place : by;

  Next next{stage, attended, meta.scalar_type(), meta.sizes().vec()};
  const bool is_first = position == 0;
  const auto type_beside = [&](const c10::IValue& other) {
    return is_tensor(other) ? at::result_type(meta, other.toTensor()) : next.type;
  };
  if (const auto to = is_first && !in_place ? converted_to(does, given) : std::nullopt) {
    if (*to == next.type) return tensor;
    if (stage == Stage::Other || (*to != at::kFloat && !at::isReducedFloatingType(*to))) return std::nullopt;
    next.type = *to;
  } else if (is_operator(does, "aten::contiguous") && given[1].toMemoryFormat() == at::MemoryFormat::Contiguous) {
    return tensor;
  } else if (const auto factor = factor_of(does, given, position)) {
    if (!scale_by(next, *factor)) return std::nullopt;
    next.type = type_beside(given[1 - position]);
  } else if (stage == Stage::Scores && is_operator(does, "aten::tanh")) {
    if (!attended.masks.empty() || attended.soft_cap > 0) return std::nullopt;
    next.stage = Stage::Tangent;
  } else if (auto mask = stage == Stage::Scores ? mask_of(does, given, position, meta) : std::nullopt) {
    if (!mask->filled) next.type = type_beside(given[1 - position]);
    mask->tensor = over_heads(mask->tensor, meta, attended);
    next.attended.masks.push_back(std::move(*mask));
  } else if (stage == Stage::Scores && is_operator(does, "aten::softmax", "int")) {
    const auto dim = given[1].toInt();
    if (dim != -1 && dim != meta.dim() - 1) return std::nullopt;
    next.type = given[2].isNone() ? Autocast(device.type()).softmax_type(next.type) : given[2].toScalarType();
    next.stage = Stage::Weights;
  } else if (stage == Stage::Weights && is_operator(does, "aten::dropout")) {
    const double p = given[1].toDouble();
    if (p == 0 || !given[2].toBool()) return tensor;
    if (!(p > 0 && p < 1) || !device.is_cpu() || attended.kept.defined()) return std::nullopt;
    next.attended.dropout = p;
    next.attended.kept = ops::drawn_weights(meta.sizes(), p);
  } else if (is_first && (is_operator(does, "aten::view", "") || is_operator(does, "aten::reshape"))) {
    if (!view_as(next, meta, given[1].toIntVector())) return std::nullopt;
  } else if (is_first && stage == Stage::Weights &&
             (is_operator(does, "aten::matmul") || is_operator(does, "aten::bmm"))) {
    return is_tensor(given[1]) ? joined(me, values_of(given[1].toTensor())) : std::nullopt;
  } else if (is_first && (is_operator(does, "aten::mean", "dim") || is_operator(does, "aten::sum", "dim_IntList"))) {
    if (given[1].isNone() || !given[3].isNone()) return std::nullopt;
    const at::NoGradGuard no_grad;
    const c10::impl::ExcludeDispatchKeyGuard as_left_alone(kThreadKey);
    torch::jit::Stack stack(given);
    stack[0] = without_values(next.sizes, next.type);
    does.callBoxed(&stack);
    next.sizes = stack.back().toTensor().sizes().vec();
    next.stage = Stage::Other;
  } else {
    return std::nullopt;
  }

  if (!in_place) {
    const auto part = std::make_shared<ScorePart>(next.stage, std::move(next.attended), does, given, position, device);
    part->meta = without_values(next.sizes, next.type);
    return tensor_of(part);
  }
  if (!is_first || next.type != meta.scalar_type()) return std::nullopt;
  // What it stood for becomes a part of its own, and the tensor stands for what was made of that.
  const auto before = std::make_shared<ScorePart>(*this);
  const Tensor as_it_was = deferred_tensor(before);
  torch::autograd::impl::set_gradient_edge(as_it_was, edge);
  auto arguments = given;
  arguments[0] = as_it_was;
  become(does, std::move(arguments));
  stage = next.stage;
  attended = std::move(next.attended);
  before_at = 0;
  put_in_graph(tensor, *this);
  tensor.unsafeGetTensorImpl()->bump_version();
  return tensor;
}

// -- where a thread asks for it ---------------------------------------------------------------------------------------

/// Scores of queries and keys, or nothing where torch's operator must see its arguments.
std::optional<Tensor> scores_of(const char* name, const char* overload, const Tensor& query, const Tensor& transposed,
                                Arguments arguments) {
  if (open_score_scopes == 0 || !query.defined() || !transposed.defined()) return std::nullopt;
  const auto dims = query.dim();
  if ((dims != 3 && dims != 4) || transposed.dim() != dims || is_deferred(query) || is_deferred(transposed) ||
      query.layout() != at::kStrided || transposed.layout() != at::kStrided || query.is_inference() ||
      transposed.is_inference() || query.device() != transposed.device() || !DeferredScores::serves(query.device())) {
    return std::nullopt;
  }
  for (std::int64_t i = 0; i < dims - 2; ++i) {
    if (query.size(i) != transposed.size(i)) return std::nullopt;
  }
  // A right operand that is no transposed matrix is not that of keys.
  const bool is_of_keys = transposed.stride(-2) == 1 && (transposed.stride(-1) != 1 || transposed.size(-1) == 1);
  if (!is_of_keys || query.size(-1) != transposed.size(-2) || query.numel() == 0 || transposed.numel() == 0) {
    return std::nullopt;
  }
  const Autocast autocast(query.device().type());
  const auto type = autocast.product_type(query);
  if (type != autocast.product_type(transposed) || (type != at::kFloat && !at::isReducedFloatingType(type)) ||
      !query.is_floating_point() || !transposed.is_floating_point() || !may_defer(query, transposed)) {
    return std::nullopt;
  }
  Attended attended;
  attended.query = query;
  attended.key = transposed.transpose(-2, -1);
  attended.heads = dims == 4 ? std::array{query.size(0), query.size(1)} : std::array<std::int64_t, 2>{1, query.size(0)};
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, overload);
  auto part =
      std::make_shared<ScorePart>(Stage::Scores, std::move(attended), op, std::move(arguments), 0, query.device());
  auto sizes = query.sizes().vec();
  sizes.back() = transposed.size(-1);
  part->meta = without_values(sizes, type);
  scores_taken.fetch_add(1, std::memory_order_relaxed);
  return tensor_of(part);
}

Tensor matmul_in_scope(c10::DispatchKeySet keys, const Tensor& self, const Tensor& other) {
  auto made = scores_of("aten::matmul", "", self, other, {self, other});
  return made ? *made : at::_ops::matmul::redispatch(behind_thread_key(keys), self, other);
}

Tensor bmm_in_scope(c10::DispatchKeySet keys, const Tensor& self, const Tensor& other) {
  auto made = scores_of("aten::bmm", "", self, other, {self, other});
  return made ? *made : at::_ops::bmm::redispatch(behind_thread_key(keys), self, other);
}

Tensor baddbmm_in_scope(c10::DispatchKeySet keys, const Tensor& self, const Tensor& left, const Tensor& right,
                        const at::Scalar& beta, const at::Scalar& alpha) {
  // What is added is left to an addition of its own, which autograd takes as well.
  if (open_score_scopes > 0 && !is_deferred(self) && (beta.equal(0) || beta.equal(1)) && !alpha.isComplex() &&
      self.defined() && self.scalar_type() == left.scalar_type()) {
    if (auto made = scores_of("aten::bmm", "", left, right, {left, right})) {
      const Tensor scaled = alpha.equal(1) ? *made : *made * alpha;
      return beta.equal(0) ? scaled : self + scaled;
    }
  }
  return at::_ops::baddbmm::redispatch(behind_thread_key(keys), self, left, right, beta, alpha);
}

Tensor einsum_in_scope(c10::DispatchKeySet keys, std::string_view equation, at::TensorList tensors,
                       at::OptionalIntArrayRef path) {
  const auto product = open_score_scopes > 0 && tensors.size() == 2 && tensors[0].defined() && tensors[1].defined()
                           ? einsum_product(equation, tensors[0].dim(), tensors[1].dim())
                           : std::nullopt;
  if (product) {
    const auto weights = part_of(tensors[0]);
    const bool in_order = std::is_sorted(product->left.begin(), product->left.end());
    if (weights && weights->stage == Stage::Weights && in_order) {
      return at::matmul(tensors[0], values_of(tensors[1]).permute(product->right)).permute(product->result);
    }
    if (!is_deferred(tensors[0]) && !is_deferred(tensors[1]) &&
        std::is_sorted(product->result.begin(), product->result.end())) {
      const Tensor query = tensors[0].permute(product->left), key = tensors[1].permute(product->right);
      if (auto made = scores_of("aten::matmul", "", query, key, {query, key})) return *made;
    }
  }
  return at::_ops::einsum::redispatch(behind_thread_key(keys), equation, tensors, path);
}

void register_scores_once() {
  static const bool done = [] {
    register_thread_key();
    auto* const aten = new torch::Library(torch::Library::IMPL, "aten", kThreadKey, __FILE__, __LINE__);
    aten->impl("matmul", TORCH_FN(matmul_in_scope));
    aten->impl("bmm", TORCH_FN(bmm_in_scope));
    aten->impl("baddbmm", TORCH_FN(baddbmm_in_scope));
    aten->impl("einsum", TORCH_FN(einsum_in_scope));
    return true;
  }();
  static_cast<void>(done);
}

}  // namespace

DeferredScores::DeferredScores() {
  register_scores_once();
  static const std::string reason = written_attention_differs();
  OXY_CHECK(reason.empty(), NotSupported, reason, ".");
}

DeferredScores::Scope::Scope() {
  register_scores_once();
  is_first_ = open_scope(open_score_scopes);
}
DeferredScores::Scope::~Scope() { close_scope(open_score_scopes, is_first_); }

bool DeferredScores::serves(at::Device device) noexcept { return finds_written(device); }

std::int64_t DeferredScores::scores() noexcept { return scores_taken.load(std::memory_order_relaxed); }
std::int64_t DeferredScores::joined() noexcept { return attentions_joined.load(std::memory_order_relaxed); }

}  // namespace oxytorch::tune
