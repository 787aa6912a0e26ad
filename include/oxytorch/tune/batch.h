/// What a training step in C++ is given: a batch, which holds whatever the model needs, and the way to its loss.
///
/// ```cpp
/// oxytorch::Batch pair(images, labels);      // Batch::input and Batch::target, for supervised()
/// oxytorch::Batch list(std::vector<at::Tensor>{ids, mask, labels});
/// oxytorch::Batch named(std::map<std::string, at::Tensor>{{"ids", ids}, {"mask", mask}});
///
/// struct Sentences {                         // a struct of one's own names its tensors
///   at::Tensor ids, mask, labels;
///   template <class Visit>
///   void each_tensor(Visit&& visit) { visit(ids); visit(mask); visit(labels); }
/// };
/// auto loss = oxytorch::loss_on<Sentences>([&](const Sentences& b) { return model->loss(b.ids, b.mask, b.labels); });
/// trainer.step(Sentences{ids, mask, labels});
/// ```
#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstdint>
#include <functional>
#include <memory>
#include <ranges>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

#include "oxytorch/api.h"

namespace oxytorch {

class Batch;

namespace detail {

using TensorVisitor = std::function<void(at::Tensor&)>;

struct AnyVisitor {
  template <class T>
  void operator()(T& /*tensor*/) const {}
};

/// Names its tensors itself.
template <class T>
concept NamesTensors = requires(T& value, AnyVisitor visit) { value.each_tensor(visit); };
template <class T>
concept TupleLike = requires { std::tuple_size<T>::value; };
template <class T>
concept OptionalLike = requires(T& value) {
  value.has_value();
  *value;
};
template <class T>
concept Container = std::ranges::range<T> && !std::is_convertible_v<const T&, std::string_view> &&
                    !std::same_as<std::ranges::range_value_t<T>, T>;

/// As torch::data::Example.
template <class T>
concept Example = !std::same_as<T, at::Tensor> && !std::same_as<T, Batch> && !NamesTensors<T> && requires(const T& e) {
  { e.data } -> std::convertible_to<at::Tensor>;
  { e.target } -> std::convertible_to<at::Tensor>;
};

template <class T>
concept Content = !std::same_as<T, at::Tensor> && !std::same_as<T, Batch> && !Example<T> &&
                  (NamesTensors<T> || TupleLike<T> || OptionalLike<T> || Container<T>);

/// Each tensor of nested containers, tuples, optionals and structs that name theirs; what else they hold is left out.
template <class T, class Visit>
void each_tensor(T& value, const Visit& visit) {
  if constexpr (std::same_as<T, at::Tensor>) {
    visit(value);
  } else if constexpr (NamesTensors<T>) {
    value.each_tensor([&](auto& inner) { detail::each_tensor(inner, visit); });
  } else if constexpr (TupleLike<T>) {
    std::apply([&](auto&... inner) { (detail::each_tensor(inner, visit), ...); }, value);
  } else if constexpr (OptionalLike<T>) {
    if (value.has_value()) detail::each_tensor(*value, visit);
  } else if constexpr (Container<T>) {
    for (auto&& inner : value) detail::each_tensor(inner, visit);
  }
}

class OXY_API BatchContent {
 public:
  virtual ~BatchContent();
  [[nodiscard]] virtual std::shared_ptr<BatchContent> copy() const = 0;
  virtual void each_tensor(const TensorVisitor& visit) = 0;
  [[nodiscard]] virtual const std::type_info& type() const noexcept = 0;
};

template <class T>
class Held final : public BatchContent {
 public:
  explicit Held(T given) : value(std::move(given)) {}
  [[nodiscard]] std::shared_ptr<BatchContent> copy() const override { return std::make_shared<Held>(value); }
  void each_tensor(const TensorVisitor& visit) override { detail::each_tensor(value, visit); }
  [[nodiscard]] const std::type_info& type() const noexcept override { return typeid(T); }
  T value;
};

/// Error(InvalidType) that names both; `held` is null for input and target.
[[noreturn]] OXY_API void holds_another(const std::type_info* held, const std::type_info& wanted);

}  // namespace detail

/// A value: tensors are handles, so copies share their memory. What it holds beside input and target is any copyable
/// container, tuple, optional, or struct with `each_tensor(visit)`, nested as one likes; other values in them travel
/// along. Pointers are not followed.
class OXY_API Batch {
 public:
  Batch() = default;
  Batch(at::Tensor given, at::Tensor wanted = {})  // NOLINT(google-explicit-constructor)
      : input(std::move(given)), target(std::move(wanted)) {}
  /// A `torch::data::Example<>`, or another struct of `data` and `target`.
  template <detail::Example T>
  Batch(const T& example) : input(example.data), target(example.target) {}  // NOLINT(google-explicit-constructor)
  /// Error(InvalidArgument) where no tensor is found in it.
  template <class T>
    requires detail::Content<std::remove_cvref_t<T>>
  explicit(!detail::NamesTensors<std::remove_cvref_t<T>>) Batch(T&& content)
      : content_(std::make_shared<detail::Held<std::remove_cvref_t<T>>>(std::forward<T>(content))) {
    check_content();
  }

  at::Tensor input;   ///< of a supervised model
  at::Tensor target;  ///< what it is to learn

  /// What it was made of; Error(InvalidType) for another type.
  template <class T>
  [[nodiscard]] const T& as() const {
    if (!content_ || content_->type() != typeid(T)) {
      detail::holds_another(content_ ? &content_->type() : nullptr, typeid(T));
    }
    return static_cast<const detail::Held<T>&>(*content_).value;
  }

  /// Calls visit(tensor) with each tensor that is defined, in order. What it assigns to one is of this batch alone.
  void each_tensor(const detail::TensorVisitor& visit);
  [[nodiscard]] std::vector<at::Tensor> tensors() const;
  /// A batch of the same shape whose tensors are change(tensor).
  [[nodiscard]] Batch map(const std::function<at::Tensor(const at::Tensor&)>& change) const;

 private:
  void check_content() const;

  std::shared_ptr<detail::BatchContent> content_;
};

/// Computes the loss of a batch, a scalar tensor, under the autocast of the trainer or plan that calls it.
using LossFunction = std::function<at::Tensor(const Batch&)>;

/// The loss of `model(batch.input)` against `batch.target` by `criterion`; both are torch module holders, kept alive.
template <class Model, class Criterion>
[[nodiscard]] LossFunction supervised(Model model, Criterion criterion) {
  return [model = std::move(model), criterion = std::move(criterion)](const Batch& batch) mutable -> at::Tensor {
    return criterion(model->forward(batch.input), batch.target);
  };
}

/// The loss of batches made of a T: `loss` takes a const T&.
template <class T, class Loss>
[[nodiscard]] LossFunction loss_on(Loss loss) {
  return [loss = std::move(loss)](const Batch& batch) mutable -> at::Tensor { return loss(batch.as<T>()); };
}

namespace tune {

/// Rows of a batch: the size of the first dimension of its first tensor that has one; 1 where none has.
[[nodiscard]] OXY_API std::int64_t rows(const Batch& batch);
/// Every tensor of that many rows cut into pieces; others are in each piece whole. Fewer where there are fewer rows.
[[nodiscard]] OXY_API std::vector<Batch> split(const Batch& batch, int pieces);
/// Of each tensor.
[[nodiscard]] OXY_API std::vector<std::vector<std::int64_t>> shapes(const Batch& batch);
/// Its 4-D tensors of floating-point numbers in torch's channels_last layout.
[[nodiscard]] OXY_API Batch channels_last(const Batch& batch);

}  // namespace tune
}  // namespace oxytorch
