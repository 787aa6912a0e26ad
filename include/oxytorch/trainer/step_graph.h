/// A whole training step recorded once and replayed as one launch: zero the gradients, forward, backward, step.
///
/// ```cpp
/// oxytorch::StepGraph graph(
///     [&](const std::vector<at::Tensor>& in) {
///       optimizer.zero_grad();
///       auto loss = torch::mse_loss(model->forward(in[0]), in[1]);
///       loss.backward();
///       optimizer.step();
///       return std::vector<at::Tensor>{loss.detach()};
///     },
///     {&optimizer});
/// for (auto& batch : loader) loss = graph({batch.data, batch.target})[0];
/// ```
///
/// What may go wrong with graphs is looked after. A replay runs no host code, so a learning rate that the host wrote
/// would be ignored: the host's settings are compared at each call, and a change is recorded anew (with
/// TailOptimizer::use_lr_tensors() the rate lies on the device, and nothing is). A recording is verified: one step is
/// taken both ways from the same state, and the graph is used only where every byte comes out the same. What cannot
/// be recorded runs eagerly from then on, and `reason()` says why.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "oxytorch/api.h"
#include "oxytorch/optim/optimizer.h"

namespace oxytorch {

/// What records and replays a device's work. begin() to end() brackets one step, which a recorder need not execute.
class OXY_API GraphRecorder {
 public:
  virtual ~GraphRecorder();
  virtual void begin() = 0;
  virtual void end() = 0;
  virtual void replay() = 0;
};

/// torch's own graphs (at::accelerator::Graph, from torch 2.13). Error(NotSupported) where the device has none.
OXY_API std::unique_ptr<GraphRecorder> make_graph_recorder(at::Device device);

struct StepGraphOptions {
  int warmup = 3;          ///< steps taken eagerly before the recording; at least 1, so that all state exists
  int max_recordings = 8;  ///< after that many changes of settings the graph is given up
  bool verify = true;      ///< take one step both ways and compare; costs a copy of the state for its duration
  /// All tensors that a step writes or reads and that live on: parameters, state, buffers, a scaler's scale. Called
  /// after the warm-up.
  std::function<std::vector<at::Tensor>()> state = {};
  /// A text of everything that the step reads on the host; the graph is recorded anew when it changes. Null: nothing.
  std::function<std::string()> settings = {};
  /// Makes the recorder; null: make_graph_recorder() for the first input's device.
  std::function<std::unique_ptr<GraphRecorder>()> recorder = {};
};

/// Not for use from several threads. Borrows nothing but what the step does.
class OXY_API StepGraph {
 public:
  /// Returns what the caller wants back, for example the loss.
  using Step = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>& inputs)>;

  /// Throws Error(InvalidArgument) for a null step, or a warmup or max_recordings below 1.
  StepGraph(Step step, StepGraphOptions options);
  /// State and settings are those of the optimizers, and of what `options` names beside them.
  StepGraph(Step step, std::vector<optim::TailOptimizer*> optimizers, StepGraphOptions options = {});
  ~StepGraph();
  StepGraph(const StepGraph&) = delete;
  StepGraph& operator=(const StepGraph&) = delete;

  /// One step. The inputs are copied to where the recording reads; inputs of other shapes, dtypes or devices than the
  /// recorded ones are stepped eagerly. The outputs are the recording's own tensors, overwritten by the next call.
  /// Throws what the step throws while it runs eagerly.
  std::vector<at::Tensor> operator()(const std::vector<at::Tensor>& inputs);

  /// Whether the last call replayed a recording.
  [[nodiscard]] bool replayed() const noexcept;
  /// Why the last call did not, or how the recording was proven.
  [[nodiscard]] const std::string& reason() const noexcept;
  [[nodiscard]] std::int64_t replays() const noexcept;
  [[nodiscard]] std::int64_t recordings() const noexcept;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace oxytorch
