/// Batching rules: operators under torch.func.vmap.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/functorch/BatchedTensorImpl.h>
#include <ATen/functorch/DynamicLayer.h>
#include <ATen/functorch/PlumbingHelper.h>
#include <ATen/ops/stack.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstdint>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "ops/dispatch.h"

namespace oxytorch::ops {

/// A call of an operator at the innermost level of vmap, made of all its arguments. While it lives, operators are
/// called with the tensors that vmap has wrapped.
class VmapCall {
 public:
  template <class... Args>
  explicit VmapCall(const Args&... args)
      : level_(at::functorch::maybeCurrentDynamicLayer()->layerId()), below_(c10::DispatchKey::FuncTorchBatched) {
    (see(args), ...);
  }

  [[nodiscard]] bool is_mapped(const at::Tensor& tensor) const {
    return std::get<1>(at::functorch::unwrapTensorAtLevel(tensor, level_)).has_value();
  }
  [[nodiscard]] bool is_mapped(const std::optional<at::Tensor>& tensor) const {
    return tensor.has_value() && tensor->defined() && is_mapped(*tensor);
  }

  /// The tensor with the mapped dimension first; expanded to it where the tensor is not mapped.
  [[nodiscard]] at::Tensor batch_first(const at::Tensor& tensor) const {
    const auto [value, dim] = at::functorch::unwrapTensorAtLevel(tensor, level_);
    if (dim.has_value()) return value.movedim(*dim, 0);
    auto sizes = value.sym_sizes().vec();
    sizes.insert(sizes.begin(), count_);
    return value.unsqueeze(0).expand_symint(sizes);
  }
  [[nodiscard]] std::optional<at::Tensor> batch_first(const std::optional<at::Tensor>& tensor) const {
    return tensor.has_value() && tensor->defined() ? std::optional(batch_first(*tensor)) : std::nullopt;
  }
  /// batch_first(), with the first two dimensions flattened into one.
  [[nodiscard]] at::Tensor fold(const at::Tensor& tensor) const { return batch_first(tensor).flatten(0, 1); }
  /// fold() of a tensor that broadcasts to `dims` dimensions, of which the first has size `first`.
  [[nodiscard]] at::Tensor fold_broadcast(const at::Tensor& tensor, std::int64_t dims, const c10::SymInt& first) const {
    if (!is_mapped(tensor) && (tensor.dim() < dims || tensor.sym_size(0) == 1)) return unwrap(tensor);
    at::Tensor wide = batch_first(tensor);
    while (wide.dim() <= dims) wide = wide.unsqueeze(1);
    auto sizes = wide.sym_sizes().vec();
    sizes[1] = first;
    return wide.expand_symint(sizes).flatten(0, 1);
  }
  /// A tensor that is not mapped.
  [[nodiscard]] at::Tensor unwrap(const at::Tensor& tensor) const {
    return std::get<0>(at::functorch::unwrapTensorAtLevel(tensor, level_));
  }
  [[nodiscard]] std::optional<at::Tensor> unwrap(const std::optional<at::Tensor>& tensor) const {
    return tensor.has_value() && tensor->defined() ? std::optional(unwrap(*tensor)) : std::nullopt;
  }

  /// A result that has the mapped dimension first, for vmap.
  [[nodiscard]] at::Tensor wrap(const at::Tensor& result) const {
    return at::functorch::makeBatched(result, 0, level_);
  }
  /// A result of folded tensors, for vmap.
  [[nodiscard]] at::Tensor unfold(const at::Tensor& result) const {
    return wrap(result.unflatten_symint(0, std::vector<c10::SymInt>{count_, result.sym_size(0) / count_}));
  }

  /// The argument for sample `i`.
  [[nodiscard]] at::Tensor of(const at::Tensor& tensor, std::int64_t i) const {
    const auto [value, dim] = at::functorch::unwrapTensorAtLevel(tensor, level_);
    return dim.has_value() ? value.select(*dim, i) : value;
  }
  [[nodiscard]] std::optional<at::Tensor> of(const std::optional<at::Tensor>& tensor, std::int64_t i) const {
    return tensor.has_value() && tensor->defined() ? std::optional(of(*tensor, i)) : std::nullopt;
  }
  template <class Other>
  [[nodiscard]] const Other& of(const Other& argument, std::int64_t /*i*/) const {
    return argument;
  }
  /// The results of `call` for sample 0, 1 ...: a tensor, or a tuple of them.
  template <class Call>
  [[nodiscard]] auto each(const Call& call) const {
    std::vector<decltype(call(std::int64_t()))> made;
    for (std::int64_t i = 0; i < count_; ++i) made.push_back(call(i));
    return stacked(made);
  }

 private:
  void see(const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    const auto [value, dim] = at::functorch::unwrapTensorAtLevel(tensor, level_);
    if (dim.has_value()) count_ = value.sym_size(*dim).guard_int(__FILE__, __LINE__);
  }
  void see(const std::optional<at::Tensor>& tensor) {
    if (tensor.has_value()) see(*tensor);
  }
  template <class Other>
  void see(const Other& /*argument*/) {}

  [[nodiscard]] at::Tensor stacked(const std::vector<at::Tensor>& made) const { return wrap(at::stack(made)); }
  template <class... T>
  [[nodiscard]] std::tuple<T...> stacked(const std::vector<std::tuple<T...>>& made) const {
    return stacked(made, std::index_sequence_for<T...>());
  }
  template <class Tuple, std::size_t... I>
  [[nodiscard]] Tuple stacked(const std::vector<Tuple>& made, std::index_sequence<I...> /*all*/) const {
    const auto results = [&made]<std::size_t N>(std::integral_constant<std::size_t, N> /*which*/) {
      std::vector<at::Tensor> parts;
      for (const auto& one : made) parts.push_back(std::get<N>(one));
      return parts;
    };
    return {stacked(results(std::integral_constant<std::size_t, I>()))...};
  }

  std::int64_t level_, count_ = 1;
  c10::impl::ExcludeDispatchKeyGuard below_;
};

/// The batching rule that calls the operator for each sample.
template <class Op>
struct LoopOverSamples;
template <const char* kName, class Result, class... Args>
struct LoopOverSamples<Operator<kName, Result(Args...)>> {
  static Result call(Args... args) {
    const VmapCall mapped(args...);
    return mapped.each([&](std::int64_t i) { return Operator<kName, Result(Args...)>::call(mapped.of(args, i)...); });
  }
};

}  // namespace oxytorch::ops
