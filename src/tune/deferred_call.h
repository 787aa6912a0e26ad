/// A call of one operator that is left undone: what is written out in several is a chain of these.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "tune/deferred.h"
#include "tune/operator_call.h"

namespace oxytorch::tune {

/// What autocast does on a device now, to have it so again.
class Autocast {
 public:
  explicit Autocast(at::DeviceType device);

  /// What a matrix product computes of a tensor in.
  [[nodiscard]] at::ScalarType product_type(const at::Tensor& of) const { return is_on_ ? type_ : of.scalar_type(); }
  /// What softmax gives of this dtype.
  [[nodiscard]] at::ScalarType softmax_type(at::ScalarType of) const;
  void set() const;
  [[nodiscard]] at::DeviceType device() const { return device_; }

 private:
  at::DeviceType device_;
  bool is_on_;
  at::ScalarType type_;
};

/// Its tensor is given a place in the graph by tensor_of(). An argument may be deferred itself.
class DeferredCall : public DeferredValue {
 public:
  DeferredCall(c10::OperatorHandle op, Arguments arguments, at::Device on);
  /// The same call, of another tensor; without values.
  DeferredCall(const DeferredCall& other);
  DeferredCall& operator=(const DeferredCall&) = delete;

  /// Throws Error(InvalidState), in the words of `changed`, where an argument was changed in place.
  at::Tensor values() final;
  bool is_computed() final;
  void settle() final {}

  /// Whether arguments have the values that they had.
  [[nodiscard]] virtual bool is_unchanged() const;

 protected:
  /// The operator, as it was called, of the tensors among its arguments. It holds none of them.
  [[nodiscard]] virtual std::function<at::Tensor(const std::vector<at::Tensor>&)> made_of() const;
  /// What may be computed in the place of the operator; nothing: the operator.
  virtual std::optional<at::Tensor> made_instead() { return std::nullopt; }
  /// It has values: what they were made of is nobody's to hold any longer.
  virtual void let_go() {}
  /// What to say of values that cannot be had any more.
  [[nodiscard]] virtual const char* changed() const = 0;
  /// Makes it another call, in the place of what it was.
  void become(c10::OperatorHandle op, Arguments arguments);

  friend at::Tensor tensor_of(const std::shared_ptr<DeferredCall>& call);
  friend void put_in_graph(const at::Tensor& tensor, DeferredCall& call);

  c10::OperatorHandle op_;
  Arguments arguments_;
  std::vector<std::uint32_t> versions_;  // of arguments that have values
  Autocast autocast_;
  mutable std::recursive_mutex mutex_;
  at::Tensor made_;
};

/// A tensor that stands for it, in the graph.
at::Tensor tensor_of(const std::shared_ptr<DeferredCall>& call);
void put_in_graph(const at::Tensor& tensor, DeferredCall& call);

}  // namespace oxytorch::tune
