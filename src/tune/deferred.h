/// Tensors that have sizes and a gradient and no values yet: those of a layer whose result is left to what follows it.
///
/// An operator that is given such a tensor asks what it stands for; where that cannot serve the operator, the values
/// are computed, once, and go to it.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "tune/above_autograd.h"
#include "tune/operator_call.h"

namespace oxytorch::tune {

class DeferredValue {
 public:
  virtual ~DeferredValue() = default;

  at::Tensor meta;  ///< sizes, strides and dtype
  at::Device device = at::kCPU;
  torch::autograd::Edge edge;  ///< where gradients of the deferred tensor go

  /// Computed once, with the gradients that torch's operators give; with hooks of the tensor, behind its edge.
  virtual at::Tensor values() = 0;
  [[nodiscard]] virtual bool is_computed() = 0;
  /// What an operator gives of it without its values, or nothing. The argument at `position` is the first that is
  /// deferred. `self` is the one owner beside the tensor, where nobody else has one.
  virtual std::optional<at::Tensor> serve(const c10::OperatorHandle& op, const std::vector<c10::IValue>& arguments,
                                          std::size_t position, std::shared_ptr<DeferredValue> self) = 0;
  /// The weights are about to change: computes what could not be computed afterwards.
  virtual void settle() = 0;

  /// Whether something waits at the tensor's own place in the graph.
  [[nodiscard]] bool has_hooks() const;

 protected:
  /// `made`, behind the edge where something waits there.
  [[nodiscard]] at::Tensor behind_hooks(at::Tensor made) const;
};

/// A tensor that stands for it, without a place in the graph.
at::Tensor deferred_tensor(std::shared_ptr<DeferredValue> value);
[[nodiscard]] bool is_deferred(const at::Tensor& tensor);
/// What it stands for; null of other tensors, and of one that is cut from the graph.
[[nodiscard]] std::shared_ptr<DeferredValue> deferred_value(const at::Tensor& tensor);

/// Whether what backward needs is handed to somebody now, as under torch's checkpoint: he counts what an operator
/// keeps, so layers are left alone, and values that are asked for are computed apart.
[[nodiscard]] bool has_saved_tensor_hooks();

/// Whether what an operator makes of these may be left to what follows: in training, called by the model itself, of
/// plain tensors, with nobody who would have to see it.
[[nodiscard]] bool may_defer(const at::Tensor& one, const at::Tensor& other);

/// Whether what a model writes out is found on that device: torch has one operator for it there, or this library.
[[nodiscard]] inline bool finds_written(at::Device device) noexcept {
  return device.is_cpu() || device.is_cuda() || device.type() == at::kPrivateUse1;
}

/// Gradients of those of `given` that are `wanted`, of what `made_of` makes of them: for the node of a deferred tensor
/// that a custom function was given. Undefined for the others, and `given` may hold undefined tensors.
torch::autograd::variable_list gradients_through(
    const std::vector<at::Tensor>& given, const std::vector<bool>& wanted,
    const std::function<at::Tensor(const std::vector<at::Tensor>&)>& made_of, const at::Tensor& gradient);

/// Gives `tensor`, which stands for `value`, a place in the graph. Gradients that reach it there are those of a custom
/// function that was given it, and go through `made_of` to `given`, of which some may be undefined.
void put_in_graph(const at::Tensor& tensor, DeferredValue& value, const std::vector<at::Tensor>& given,
                  std::function<at::Tensor(const std::vector<at::Tensor>&)> made_of);

/// How often its values were written; 0 of a tensor that does not count.
[[nodiscard]] std::uint32_t version_of(const at::Tensor& tensor);

/// Kernels of layers where autograd is told of them, in the place of torch's, while anybody has them.
class LayerKernels {
 public:
  /// For the first owner `add` registers them, once for each key of a kind of device.
  void acquire(const std::vector<c10::DispatchKey>& keys,
               const std::function<void(torch::Library& library, c10::DispatchKey key)>& add);
  void release();

 private:
  std::mutex mutex_;
  std::int64_t owners_ = 0;
  std::vector<std::unique_ptr<torch::Library>> libraries_;
};

/// Settles it before_weights_change(), if it lives.
void remember(const std::shared_ptr<DeferredValue>& value);
void settle_all();

}  // namespace oxytorch::tune
