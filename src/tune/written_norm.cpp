#include "tune/written_norm.h"

#include <ATen/TensorOperators.h>
#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/result_type.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <array>
#include <atomic>
#include <memory>
#include <utility>

#include "ops/dispatch.h"
#include "oxytorch/error.h"
#include "oxytorch/tune/deferred_sums.h"
#include "tune/deferred_call.h"
#include "tune/thread_key.h"

namespace oxytorch::tune {
namespace {

using at::Tensor;

std::atomic<std::int64_t> norms_taken = 0;

/// What an operator of the norm makes, in their order. Root is there in the place of Inverse where the model divides.
enum class Part : std::uint8_t { Wide, Square, Mean, Shifted, Inverse, Root, Normed, Narrow };

/// What the parts of one norm have in common.
struct Rows {
  Tensor given;               // as the model has them: plain, or a deferred sum
  std::uint32_t version = 0;  // of their values, which a deferred sum does not have yet
  double eps = 0;
  Tensor meta, column;  // of Wide and Square, and of what has one number for each row

  [[nodiscard]] bool is_computed() const {
    const auto value = deferred_value(given);
    return !value || value->is_computed();
  }
  [[nodiscard]] bool is_unchanged() const { return !is_computed() || version_of(values_of(given)) == version; }
};

struct Written final : DeferredCall {
  Written(Part is, Rows of_rows, c10::OperatorHandle by, Arguments of)
      : DeferredCall(std::move(by), std::move(of), of_rows.given.device()), part(is), rows(std::move(of_rows)) {}

  std::optional<Tensor> serve(const c10::OperatorHandle& op, const Arguments& arguments, std::size_t position,
                              std::shared_ptr<DeferredValue> self) override;
  bool is_unchanged() const override { return DeferredCall::is_unchanged() && rows.is_unchanged(); }

  /// The norm in the dtype of a result: that of the rows, or float32, in which the model goes on, as Gemma does.
  [[nodiscard]] std::optional<Tensor> whole(const Tensor& weight, at::ScalarType type) const {
    const bool is_wide = type != rows.given.scalar_type();
    if (is_wide && type != at::kFloat) return std::nullopt;
    const c10::impl::ExcludeDispatchKeyGuard as_left_alone(kThreadKey);
    const Tensor of_rows = is_wide ? values_of(rows.given).to(at::kFloat) : rows.given;
    auto made = rms_norm_of(of_rows, is_wide && weight.defined() ? weight.to(at::kFloat) : weight, rows.eps);
    if (made) norms_taken.fetch_add(1, std::memory_order_relaxed);
    return made;
  }
  /// Times a weight of one row; nothing where `weight` is something else.
  [[nodiscard]] std::optional<Tensor> weighted(const Tensor& weight) const {
    const std::array<Tensor, 1> one{weight};
    if (is_deferred(weight) || weight.dim() != 1 || at::areAnyTensorSubclassLike(one)) return std::nullopt;
    const auto type = at::promote_types(weight.scalar_type(), meta.scalar_type());
    return type == at::kFloat || type == meta.scalar_type() ? whole(weight, type) : std::nullopt;
  }

  Part part;
  Rows rows;

 protected:
  std::optional<Tensor> made_instead() override {
    return part >= Part::Normed ? whole({}, meta.scalar_type()) : std::nullopt;
  }
  const char* changed() const override {
    return "a normalization is asked for after what it normalizes was changed in place: it was left to what follows it "
           "(native_layer_norm). Read it before, or leave that strategy out.";
  }
};

std::shared_ptr<Written> written(const Tensor& tensor) {
  return std::dynamic_pointer_cast<Written>(deferred_value(tensor));
}

/// A part without values, of this dtype where it is Normed or Narrow.
Tensor deferred_part(Part part, const Rows& rows, const c10::OperatorHandle& op, const Arguments& arguments,
                     at::ScalarType type = at::kFloat) {
  const auto made = std::make_shared<Written>(part, rows, op, arguments);
  const bool is_column = part > Part::Square && part < Part::Normed;
  made->meta = is_column            ? rows.column
               : type == at::kFloat ? rows.meta
                                    : at::empty(rows.meta.sizes(), rows.meta.options().dtype(type));
  return tensor_of(made);
}

Rows rows_of(const Tensor& given) {
  Rows rows;
  rows.given = given;
  if (rows.is_computed()) rows.version = version_of(values_of(given));
  const auto float_on_meta = given.options().dtype(at::kFloat).device(at::kMeta);
  rows.meta = at::empty(given.sizes(), float_on_meta);
  auto column = given.sizes().vec();
  column.back() = 1;
  rows.column = at::empty(column, float_on_meta);
  return rows;
}

// -- which operator it is ---------------------------------------------------------------------------------------------

bool is_power(const c10::OperatorHandle& op, const Arguments& arguments, double exponent) {
  return is_operator(op, "aten::pow", "Tensor_Scalar") && arguments[1].toScalar().equal(exponent);
}

bool is_square(const c10::OperatorHandle& op, const Arguments& arguments) {
  if (is_power(op, arguments, 2) || is_operator(op, "aten::square")) return true;
  return is_operator(op, "aten::mul", "Tensor") && is_tensor(arguments[0]) && is_tensor(arguments[1]) &&
         arguments[0].toTensor().is_same(arguments[1].toTensor());
}

bool is_mean_of_rows(const c10::OperatorHandle& op, const Arguments& arguments) {
  if (!is_operator(op, "aten::mean", "dim") || arguments[1].isNone() || !arguments[2].toBool() ||
      !arguments[3].isNone()) {
    return false;
  }
  const auto dims = arguments[1].toIntVector();
  return dims.size() == 1 && (dims[0] == -1 || dims[0] == arguments[0].toTensor().dim() - 1);
}

/// The number that is added.
std::optional<double> added_number(const c10::OperatorHandle& op, const Arguments& arguments, std::size_t position) {
  if (is_operator(op, "aten::add", "Scalar")) {
    return arguments[2].toScalar().equal(1) ? number_of(arguments[1]) : std::nullopt;
  }
  if (!is_operator(op, "aten::add", "Tensor") || !arguments[2].toScalar().equal(1)) return std::nullopt;
  return number_of(arguments[1 - position]);
}

/// x times the inverse root of its rows, or over the root.
std::optional<Tensor> normed(const c10::OperatorHandle& op, const Arguments& arguments) {
  const bool divides = is_operator(op, "aten::div", "Tensor");
  if ((!divides && !is_operator(op, "aten::mul", "Tensor")) || !is_tensor(arguments[0]) || !is_tensor(arguments[1])) {
    return std::nullopt;
  }
  for (const std::size_t position : {1, 0}) {
    const Tensor root = arguments[position].toTensor(), x = arguments[1 - position].toTensor();
    const auto by = written(root);
    if (!by || by->is_computed() || by->has_hooks()) continue;
    if (by->part != (divides ? Part::Root : Part::Inverse) || (divides && position == 0)) continue;
    const auto wide = written(x);
    const bool is_wide = wide && wide->part == Part::Wide && wide->rows.given.is_same(by->rows.given);
    if (!is_wide && !x.is_same(by->rows.given)) continue;
    return deferred_part(Part::Normed, by->rows, op, arguments);
  }
  return std::nullopt;
}

std::optional<Tensor> Written::serve(const c10::OperatorHandle& op, const Arguments& arguments, std::size_t position,
                                     std::shared_ptr<DeferredValue> /*self*/) {
  if (is_computed() || has_hooks() || !at::GradMode::is_enabled() || !rows.is_unchanged()) return std::nullopt;
  const auto next = [&](Part is) { return deferred_part(is, rows, op, arguments); };
  if (const auto type = position == 0 ? converted_to(op, arguments) : std::nullopt) {
    if (*type == meta.scalar_type()) return arguments[position].toTensor();
    const bool is_narrow = part == Part::Normed && at::isReducedFloatingType(*type);
    return is_narrow ? std::optional(deferred_part(Part::Narrow, rows, op, arguments, *type)) : std::nullopt;
  }
  switch (part) {
    case Part::Wide:
      if (is_square(op, arguments)) return next(Part::Square);
      return normed(op, arguments);
    case Part::Square:
      if (is_mean_of_rows(op, arguments)) return next(Part::Mean);
      return std::nullopt;
    case Part::Mean:
      if (const auto number = added_number(op, arguments, position)) {
        Rows with_eps = rows;
        with_eps.eps = *number;
        return deferred_part(Part::Shifted, with_eps, op, arguments);
      }
      return std::nullopt;
    case Part::Shifted:
      if (is_operator(op, "aten::rsqrt", "") || is_power(op, arguments, -0.5)) return next(Part::Inverse);
      if (is_operator(op, "aten::sqrt", "")) return next(Part::Root);
      return std::nullopt;
    case Part::Inverse:
    case Part::Root: return normed(op, arguments);
    case Part::Normed:
    case Part::Narrow: break;
  }
  if (!is_operator(op, "aten::mul", "Tensor") || !is_tensor(arguments[1 - position])) return std::nullopt;
  return weighted(arguments[1 - position].toTensor());
}

}  // namespace

bool may_begin_written_norm(const Tensor& x) {
  return x.defined() && !is_deferred(x) && ops::is_narrow(x) && DeferredSums::serves(x.device()) &&
         x.layout() == at::kStrided && x.dim() >= 2 && x.numel() > 0 && x.size(-1) > 1 && x.is_contiguous() &&
         !x.is_inference() && may_defer(x, x);
}

Tensor deferred_square(const char* name, const char* overload, const Arguments& arguments) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, overload);
  return deferred_part(Part::Square, rows_of(arguments[0].toTensor()), op, arguments);
}
Tensor deferred_wide(const Arguments& arguments) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::to", "dtype");
  return deferred_part(Part::Wide, rows_of(arguments[0].toTensor()), op, arguments);
}

std::optional<Tensor> written_norm_of_sum(const c10::OperatorHandle& op, const Arguments& arguments,
                                          std::size_t position) {
  if (!at::GradMode::is_enabled()) return std::nullopt;
  const Tensor& sum = arguments[position].toTensor();
  if (const auto type = position == 0 ? converted_to(op, arguments) : std::nullopt) {
    if (*type == sum.scalar_type()) return sum;
    return *type == at::kFloat ? std::optional(deferred_part(Part::Wide, rows_of(sum), op, arguments)) : std::nullopt;
  }
  if (sum.scalar_type() == at::kFloat && is_square(op, arguments)) {
    return deferred_part(Part::Square, rows_of(sum), op, arguments);
  }
  return normed(op, arguments);
}

std::int64_t written_norms() noexcept { return norms_taken.load(std::memory_order_relaxed); }

}  // namespace oxytorch::tune
