/// Operators under torch.func.vmap: one call for all that it maps over where samples are apart anyway, else a call
/// each.
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

/// A call at the innermost level of vmap. Made of all its arguments; while it lives, operators see what tensors hold.
class MappedCall {
 public:
  template <class... Args>
  explicit MappedCall(const Args&... args)
      : level_(at::functorch::maybeCurrentDynamicLayer()->layerId()), below_(c10::DispatchKey::FuncTorchBatched) {
    (see(args), ...);
  }

  [[nodiscard]] bool maps(const at::Tensor& tensor) const {
    return std::get<1>(at::functorch::unwrapTensorAtLevel(tensor, level_)).has_value();
  }
  [[nodiscard]] bool maps(const std::optional<at::Tensor>& tensor) const {
    return tensor.has_value() && tensor->defined() && maps(*tensor);
  }

  /// With what is mapped over as a dimension in front; the same for all where the tensor has none.
  [[nodiscard]] at::Tensor front(const at::Tensor& tensor) const {
    const auto [value, dim] = at::functorch::unwrapTensorAtLevel(tensor, level_);
    if (dim.has_value()) return value.movedim(*dim, 0);
    auto sizes = value.sym_sizes().vec();
    sizes.insert(sizes.begin(), count_);
    return value.unsqueeze(0).expand_symint(sizes);
  }
  [[nodiscard]] std::optional<at::Tensor> front(const std::optional<at::Tensor>& tensor) const {
    return tensor.has_value() && tensor->defined() ? std::optional(front(*tensor)) : std::nullopt;
  }
  /// front(), joined to the dimension that was the first.
  [[nodiscard]] at::Tensor joined(const at::Tensor& tensor) const { return front(tensor).flatten(0, 1); }
  /// As joined(), of a tensor that broadcasts to `dims` dimensions, the first of size `first`.
  [[nodiscard]] at::Tensor joined_broadcast(const at::Tensor& tensor, std::int64_t dims,
                                            const c10::SymInt& first) const {
    if (!maps(tensor) && (tensor.dim() < dims || tensor.sym_size(0) == 1)) return plain(tensor);
    at::Tensor wide = front(tensor);
    while (wide.dim() <= dims) wide = wide.unsqueeze(1);
    auto sizes = wide.sym_sizes().vec();
    sizes[1] = first;
    return wide.expand_symint(sizes).flatten(0, 1);
  }
  /// The tensor that the call is given where vmap does not map over it.
  [[nodiscard]] at::Tensor plain(const at::Tensor& tensor) const {
    return std::get<0>(at::functorch::unwrapTensorAtLevel(tensor, level_));
  }
  [[nodiscard]] std::optional<at::Tensor> plain(const std::optional<at::Tensor>& tensor) const {
    return tensor.has_value() && tensor->defined() ? std::optional(plain(*tensor)) : std::nullopt;
  }

  /// A result with what is mapped over in front, and one with it joined to the first dimension.
  [[nodiscard]] at::Tensor give(const at::Tensor& result) const {
    return at::functorch::makeBatched(result, 0, level_);
  }
  [[nodiscard]] at::Tensor give_joined(const at::Tensor& result) const {
    return give(result.unflatten_symint(0, std::vector<c10::SymInt>{count_, result.sym_size(0) / count_}));
  }

  /// What the call for sample `i` is given for an argument.
  [[nodiscard]] at::Tensor of(const at::Tensor& tensor, std::int64_t i) const {
    return maps(tensor) ? front(tensor).select(0, i) : plain(tensor);
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

  [[nodiscard]] at::Tensor stacked(const std::vector<at::Tensor>& made) const { return give(at::stack(made)); }
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

/// The kernel under vmap of an operator whose samples are calls each.
template <class Op>
struct Each;
template <const char* kName, class Result, class... Args>
struct Each<Operator<kName, Result(Args...)>> {
  static Result call(Args... args) {
    const MappedCall mapped(args...);
    return mapped.each([&](std::int64_t i) { return Operator<kName, Result(Args...)>::call(mapped.of(args, i)...); });
  }
};

}  // namespace oxytorch::ops
