/// Where inf or NaN first appeared: the operator, forward or backward, and what it was given.
///
/// ```cpp
/// oxytorch::optim::NanOrigin finder(*model);
/// auto loss = loss_fn(model->forward(batch.data), batch.target);
/// loss.backward();
/// if (auto origin = finder.finish()) std::cerr << origin->text() << '\n';
/// ```
///
/// A debugging aid: between construction and finish() the result of every operator is checked, which is slow and waits
/// for the device; outside there are no hooks and no cost. An inf or NaN counts once it reaches the loss that
/// backward() starts from, a parameter's gradient, or what check() is given: a -inf in an attention mask raises no
/// alarm. Then its way is followed back to the operator that made it of finite inputs, or to the parameter, buffer or
/// other tensor that already held it.
///
/// LibTorch's modules have no hooks, so places are named by scopes that the program opens: NanOrigin::Scope, or any
/// RECORD_USER_SCOPE.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "oxytorch/api.h"

namespace torch::nn {
class Module;
}

namespace oxytorch::optim {

/// A tensor as it was when an operator was given it or gave it back.
struct TensorFacts {
  std::string name;  ///< the operator's name of the argument, "output", or the name of a parameter or buffer
  std::vector<std::int64_t> shape;
  at::ScalarType dtype = at::kFloat;
  double min = 0;  ///< over the finite elements; NaN where there are none
  double max = 0;
  std::int64_t nan = 0;             ///< elements that are NaN
  std::int64_t inf = 0;             ///< elements that are inf or -inf
  std::vector<std::int64_t> first;  ///< index of the first element that is not finite; empty where all are

  [[nodiscard]] bool finite() const noexcept { return nan + inf == 0; }
  /// One line.
  [[nodiscard]] OXY_API std::string text() const;
};

/// Where inf or NaN first appeared.
struct NanReport {
  std::string phase;       ///< "forward", "backward", or "given": a tensor held it before
  std::string kind;        ///< "nan" or "inf"
  std::string what;        ///< "operator"; where given, "parameter", "gradient", "buffer" or "tensor"
  std::string name;        ///< of the parameter, gradient, buffer or argument that was given
  std::string scope;       ///< the innermost scope, outer ones before it with dots; in backward that of the forward
  std::string op;          ///< "aten::log"; where given, the operator that first read it
  std::string node;        ///< in backward, autograd's node, such as "LogBackward0"
  std::string forward_op;  ///< in backward, the forward operator that made the node
  std::vector<TensorFacts> inputs, outputs;
  std::string reached;     ///< what it made inf or NaN in the end: "the loss", "the gradient of fc.weight" ...
  std::string became_nan;  ///< of an inf, the operator that made NaN of it; empty where none did

  /// The report in lines.
  [[nodiscard]] OXY_API std::string text() const;
};

/// Watches this thread, and what autograd runs for it, until finish() or the end of its life. One at a time in a
/// process: Error(InvalidState) for a second one.
class OXY_API NanOrigin {
 public:
  NanOrigin();
  /// Names parameters, their gradients and buffers as the module does.
  explicit NanOrigin(const torch::nn::Module& model);
  ~NanOrigin();
  NanOrigin(const NanOrigin&) = delete;
  NanOrigin& operator=(const NanOrigin&) = delete;

  /// Counts an inf or NaN in `tensor` as harm done; for results from which no backward() starts.
  void check(const at::Tensor& tensor, const std::string& name = "the loss");

  /// Ends the watch. Nothing where no inf or NaN did harm; the same answer when called again.
  std::optional<NanReport> finish();

  /// A named stretch of the forward pass; nests. Costs next to nothing while no NanOrigin and no profiler is there.
  class OXY_API Scope {
   public:
    explicit Scope(std::string name);

   private:
    std::string name_;  // the record keeps a view of it
    at::RecordFunction record_;
  };

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace oxytorch::optim
