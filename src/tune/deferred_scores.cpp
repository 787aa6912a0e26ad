#include "oxytorch/tune/deferred_scores.h"

#include <ATen/ExpandUtils.h>
#include <ATen/TensorOperators.h>
#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/autocast_mode.h>
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
#include <ATen/ops/softmax.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <map>
#include <memory>
#include <mutex>
#include <string_view>
#include <utility>
#include <vector>

#include "ops/composed_attention.h"
#include "ops/dispatch.h"
#include "oxytorch/error.h"
#include "tune/deferred.h"
#include "tune/operators_entry.h"
#include "tune/thread_key.h"

namespace oxytorch::tune {
namespace {

using at::Tensor;

thread_local int open_score_scopes = 0;
std::atomic<std::int64_t> scores_taken = 0, attentions_joined = 0;

/// What autocast does on a device now, to have it so again.
class Autocast {
 public:
  explicit Autocast(at::DeviceType device)
      : device_(device),
        is_on_(at::autocast::is_autocast_enabled(device)),
        type_(at::autocast::get_autocast_dtype(device)) {}

  /// What a matrix product computes of a tensor in.
  [[nodiscard]] at::ScalarType product_type(const Tensor& of) const { return is_on_ ? type_ : of.scalar_type(); }
  /// What softmax gives of scores.
  [[nodiscard]] at::ScalarType softmax_type(at::ScalarType of) const {
    if (!is_on_) return of;
    static std::mutex mutex;
    static std::map<std::pair<at::DeviceType, at::ScalarType>, at::ScalarType> all;
    const std::lock_guard lock(mutex);
    const auto found = all.find({device_, of});
    if (found != all.end()) return found->second;
    const at::NoGradGuard no_grad;
    const auto type = at::softmax(at::zeros({1}, at::TensorOptions(device_).dtype(of)), 0).scalar_type();
    return all.emplace(std::pair(device_, of), type).first->second;
  }

  void set() const {
    at::autocast::set_autocast_enabled(device_, is_on_);
    at::autocast::set_autocast_dtype(device_, type_);
  }

 private:
  friend class AsAutocast;
  at::DeviceType device_;
  bool is_on_;
  at::ScalarType type_;
};

class AsAutocast {
 public:
  explicit AsAutocast(const Autocast& was) : before_(was.device_) { was.set(); }
  ~AsAutocast() { before_.set(); }
  AsAutocast(const AsAutocast&) = delete;
  AsAutocast& operator=(const AsAutocast&) = delete;

 private:
  Autocast before_;
};

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

struct Part final : DeferredValue {
  Part(Stage is, Attended so_far, c10::OperatorHandle by, Arguments of, std::size_t position, at::Device on)
      : stage(is),
        attended(std::move(so_far)),
        op(std::move(by)),
        arguments(std::move(of)),
        before_at(position),
        autocast(on.type()) {
    device = on;
    for (const Tensor& one : tensors_of(arguments)) versions.push_back(counted(one));
  }

  Tensor values() override {
    const std::lock_guard lock(mutex);
    if (made.defined()) return made;
    OXY_CHECK(is_unchanged(), InvalidState,
              "scores of attention are asked for after what they are made of was changed in place: they were left to "
              "what follows them (native_attention). Read them before, or leave that strategy out.");
    const at::AutoGradMode as_in_training(true);
    std::vector<Tensor> given;
    for (const Tensor& one : tensors_of(arguments)) given.push_back(values_of(one));
    made = behind_hooks(made_of()(given));
    arguments.clear();
    versions.clear();
    attended = {};
    return made;
  }
  bool is_computed() override {
    const std::lock_guard lock(mutex);
    return made.defined();
  }
  void settle() override {}
  std::optional<Tensor> serve(const c10::OperatorHandle& by, const Arguments& given, std::size_t position,
                              std::shared_ptr<DeferredValue> self) override;

  /// What makes it of the tensors among its arguments.
  [[nodiscard]] std::function<Tensor(const std::vector<Tensor>&)> made_of() const {
    Arguments with = arguments;
    for (auto& argument : with) {
      if (is_tensor(argument)) argument = Tensor();  // it holds none of them
    }
    std::vector<std::size_t> at;
    for (std::size_t i = 0; i < arguments.size(); ++i) {
      if (is_tensor(arguments[i])) at.push_back(i);
    }
    const bool drops = is_operator(op, "aten::dropout");
    return [op = op, with, at, autocast = autocast, drops, kept = attended.kept,
            dropout = attended.dropout](const std::vector<Tensor>& given) {
      const c10::impl::ExcludeDispatchKeyGuard as_left_alone(kThreadKey);
      if (drops) return given[0] * kept.view(given[0].sizes()).to(given[0].scalar_type()).div(1 - dropout);
      const AsAutocast as_it_was(autocast);
      torch::jit::Stack stack(with);
      for (std::size_t i = 0; i < at.size(); ++i) stack[at[i]] = given[i];
      op.callBoxed(&stack);
      return std::move(stack.back()).toTensor();
    };
  }
  [[nodiscard]] bool is_unchanged() const {
    const auto all = tensors_of(arguments);
    for (std::size_t i = 0; i < all.size(); ++i) {
      if (counted(all[i]) != versions[i]) return false;
    }
    return true;
  }

  Stage stage;
  Attended attended;
  c10::OperatorHandle op;
  Arguments arguments;
  std::size_t before_at;  // the argument that is the part before it
  Autocast autocast;
  std::vector<std::uint32_t> versions;
  std::mutex mutex;
  Tensor made;

 private:
  /// Of a part's own values: what a model does to scores in place is done to what they stand for.
  static std::uint32_t counted(const Tensor& t) { return is_deferred(t) ? 0 : version_of(t); }
};

std::shared_ptr<Part> part_of(const Tensor& tensor) { return std::dynamic_pointer_cast<Part>(deferred_value(tensor)); }

Tensor tensor_of(const std::shared_ptr<Part>& part) {
  Tensor tensor = deferred_tensor(part);
  put_in_graph(tensor, *part, tensors_of(part->arguments), part->made_of());
  return tensor;
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

/// As it broadcasts to samples x heads x queries x keys.
Tensor over_heads(const Tensor& mask, const Tensor& meta, const Attended& attended) {
  if (meta.dim() == 4 || mask.dim() < 3) return mask;
  return mask.size(0) == 1 ? mask.unsqueeze(0) : mask.unflatten(0, attended.heads);
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
std::optional<Tensor> joined(const std::shared_ptr<Part>& weights, const Tensor& value) {
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

  // Every part of it as it was made, with nobody else who has to see it.
  std::shared_ptr<Part> first;
  for (auto part = weights; part;) {
    const std::lock_guard lock(part->mutex);
    if (part->made.defined() || part->has_hooks() || !part->is_unchanged()) return std::nullopt;
    first = part;
    part = part_of(part->arguments[part->before_at].toTensor());
  }
  const auto product_type = first->autocast.product_type(attended.query);
  if (product_type != type) return std::nullopt;

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

std::optional<Tensor> Part::serve(const c10::OperatorHandle& by, const Arguments& given, std::size_t position,
                                  std::shared_ptr<DeferredValue> self) {
  const auto me = std::static_pointer_cast<Part>(std::move(self));
  if (is_computed() || has_hooks() || !at::GradMode::is_enabled() || !is_unchanged()) return std::nullopt;
  const Tensor tensor = given[position].toTensor();
  const auto in_place = out_of_place(by);
  const c10::OperatorHandle& does = in_place ? *in_place : by;

  Attended next = attended;
  Stage then = stage;
  auto type = meta.scalar_type();
  auto sizes = meta.sizes().vec();
  const auto over = [&](const c10::IValue& other) {
    return is_tensor(other) ? at::result_type(meta, other.toTensor()) : type;
  };
  if (const auto to = position == 0 && !in_place ? converted_to(does, given) : std::nullopt) {
    if (*to == type) return tensor;
    const bool is_served = stage != Stage::Other && (*to == at::kFloat || at::isReducedFloatingType(*to));
    if (!is_served) return std::nullopt;
    type = *to;
  } else if (is_operator(does, "aten::contiguous") && given[1].toMemoryFormat() == at::MemoryFormat::Contiguous) {
    return tensor;
  } else if (const auto factor = factor_of(does, given, position)) {
    const auto stays = [&](Mask& mask) {
      if (mask.filled) *mask.filled *= *factor;
      return mask.filled && *mask.filled <= kHides;
    };
    if (stage == Stage::Weights || stage == Stage::Other) {
      then = Stage::Other;
    } else if (!next.masks.empty() && !std::all_of(next.masks.begin(), next.masks.end(), stays)) {
      return std::nullopt;
    } else if (stage == Stage::Tangent) {
      if (*factor <= 0) return std::nullopt;
      next.soft_cap = *factor;
      then = Stage::Scores;
    } else if (next.soft_cap > 0) {
      return std::nullopt;
    } else {
      next.scale *= *factor;
    }
    type = over(given[1 - position]);
  } else if (stage == Stage::Scores && is_operator(does, "aten::tanh") && next.masks.empty() && next.soft_cap == 0) {
    then = Stage::Tangent;
  } else if (auto mask = stage == Stage::Scores ? mask_of(does, given, position, meta) : std::nullopt) {
    if (!mask->filled) type = over(given[1 - position]);
    mask->tensor = over_heads(mask->tensor, meta, attended);
    next.masks.push_back(std::move(*mask));
  } else if (stage == Stage::Scores && is_operator(does, "aten::softmax", "int")) {
    const auto dim = given[1].toInt();
    if (dim != -1 && dim != meta.dim() - 1) return std::nullopt;
    type = given[2].isNone() ? Autocast(device.type()).softmax_type(type) : given[2].toScalarType();
    then = Stage::Weights;
  } else if (stage == Stage::Weights && is_operator(does, "aten::dropout") && !next.kept.defined()) {
    const double p = given[1].toDouble();
    if (p == 0 || !given[2].toBool()) return tensor;
    if (!(p > 0 && p < 1) || !device.is_cpu()) return std::nullopt;
    const std::array<std::int64_t, 2> heads =
        meta.dim() == 4 ? std::array{meta.size(0), meta.size(1)} : std::array<std::int64_t, 2>{1, meta.size(0)};
    const Tensor shape = at::empty({}, at::TensorOptions(device).dtype(at::kFloat));
    ops::ComposedAttention of;
    of.query = shape.expand({heads[0], heads[1], meta.size(-2), 1});
    of.key = shape.expand({heads[0], heads[1], meta.size(-1), 1});
    of.dropout = next.dropout = p;
    next.kept = ops::drawn_weights(of);
  } else if (position == 0 && (is_operator(does, "aten::view", "") || is_operator(does, "aten::reshape"))) {
    sizes = given[1].toIntVector();
    std::int64_t known = 1, wanted = -1;
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      if (sizes[i] == -1)
        wanted = static_cast<std::int64_t>(i);
      else
        known *= sizes[i];
    }
    if (wanted >= 0) {
      if (known == 0 || meta.numel() % known != 0) return std::nullopt;
      sizes[static_cast<std::size_t>(wanted)] = meta.numel() / known;
    } else if (known != meta.numel()) {
      return std::nullopt;
    }
    const auto count = sizes.size();
    const bool keeps_matrices =
        (count == 3 || count == 4) && sizes[count - 1] == meta.size(-1) && sizes[count - 2] == meta.size(-2);
    const std::array<std::int64_t, 2> one_sample{1, meta.size(0)};
    if (!keeps_matrices) {
      then = Stage::Other;
    } else if (count == 4 && meta.dim() == 3) {
      const std::array<std::int64_t, 2> heads{sizes[0], sizes[1]};
      if (next.heads != heads && next.heads != one_sample) {
        then = Stage::Other;
      } else if (next.heads != heads) {
        next.heads = heads;
        for (Mask& mask : next.masks) {
          Tensor& t = mask.tensor;
          if (t.dim() == 4 && t.size(1) > 1) t = t.squeeze(0).unflatten(0, heads);
        }
      }
    } else if (count == 4 && (sizes[0] != meta.size(0) || sizes[1] != meta.size(1))) {
      then = Stage::Other;
    }
  } else if (stage == Stage::Weights && position == 0 &&
             (is_operator(does, "aten::matmul") || is_operator(does, "aten::bmm"))) {
    return is_tensor(given[1]) ? joined(me, values_of(given[1].toTensor())) : std::nullopt;
  } else if (position == 0 &&
             (is_operator(does, "aten::mean", "dim") || is_operator(does, "aten::sum", "dim_IntList"))) {
    if (given[1].isNone() || !given[3].isNone() || in_place) return std::nullopt;
    const at::NoGradGuard no_grad;
    torch::jit::Stack stack(given);
    stack[0] = without_values(sizes, type);
    const c10::impl::ExcludeDispatchKeyGuard as_left_alone(kThreadKey);
    does.callBoxed(&stack);
    sizes = stack.back().toTensor().sizes().vec();
    then = Stage::Other;
  } else {
    return std::nullopt;
  }
  if (in_place && (position != 0 || type != meta.scalar_type())) return std::nullopt;

  if (!in_place) {
    const auto made_next = std::make_shared<Part>(then, std::move(next), does, given, position, device);
    made_next->meta = without_values(sizes, type);
    return tensor_of(made_next);
  }
  // What it stood for becomes a part of its own, and the tensor stands for what was made of that.
  const auto before = std::make_shared<Part>(stage, attended, op, arguments, before_at, device);
  before->meta = meta;
  before->versions = versions;
  before->autocast = autocast;
  const Tensor as_it_was = deferred_tensor(before);
  torch::autograd::impl::set_gradient_edge(as_it_was, edge);
  before->edge = edge;
  {
    const std::lock_guard lock(mutex);
    stage = then;
    attended = std::move(next);
    op = does;
    arguments = given;
    arguments[0] = as_it_was;
    before_at = 0;
    autocast = Autocast(device.type());
    versions.clear();
    for (const Tensor& one : tensors_of(arguments)) versions.push_back(counted(one));
  }
  put_in_graph(tensor, *this, tensors_of(arguments), made_of());
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
  auto part = std::make_shared<Part>(Stage::Scores, std::move(attended), op, std::move(arguments), 0, query.device());
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

bool DeferredScores::serves(at::Device device) noexcept {
  return device.is_cpu() || device.is_cuda() || device.type() == at::kPrivateUse1;
}

std::int64_t DeferredScores::scores() noexcept { return scores_taken.load(std::memory_order_relaxed); }
std::int64_t DeferredScores::joined() noexcept { return attentions_joined.load(std::memory_order_relaxed); }

}  // namespace oxytorch::tune
