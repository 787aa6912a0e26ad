#include "memory/saved_tensors.h"

#include <ATen/SavedTensorHooks.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <mutex>
#include <utility>

#include "optim/torch_versions.h"
#include "oxytorch/error.h"

namespace oxytorch::memory {
namespace {

namespace autograd = torch::autograd;
using NodePointer = decltype(node_of(std::declval<autograd::Node&>()));

thread_local KeepingTensors::Scope innermost;

/// Hands on to the engine that was there, but for what a keeper of ours saves.
class KeepingEngine final : public autograd::Engine {
 public:
  explicit KeepingEngine(autograd::Engine& others) : others_(others) {}

  autograd::variable_list execute(const autograd::edge_list& roots, const autograd::variable_list& inputs,
                                  bool keep_graph, bool create_graph, bool accumulate_grad,
                                  const autograd::edge_list& outputs) override {
    return others_.execute(roots, inputs, keep_graph, create_graph, accumulate_grad, outputs);
  }
  c10::intrusive_ptr<at::ivalue::Future> execute_with_graph_task(const std::shared_ptr<autograd::GraphTask>& task,
                                                                 NodePointer root,
                                                                 autograd::InputBuffer&& buffer) override {
    return others_.execute_with_graph_task(task, std::move(root), std::move(buffer));
  }
  std::unique_ptr<autograd::AnomalyMetadata> make_anomaly_metadata() override {
    return others_.make_anomaly_metadata();
  }
  std::unique_ptr<autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
    if (innermost.keeper == nullptr) return others_.get_default_saved_variable_hooks();
    const auto& python = at::SavedTensorDefaultHooks::get_tls_state();
    if (python.is_tracing) return nullptr;
    if (python.stack.size() > innermost.python_hooks) return others_.get_default_saved_variable_hooks();
    return innermost.keeper->make();
  }
  void thread_on_exception(const std::shared_ptr<autograd::GraphTask>& task, const NodePointer& node,
                           std::exception& error) override {
    others_.thread_on_exception(task, node, error);
  }
  void thread_init(int device, const std::shared_ptr<autograd::ReadyQueue>& queue, bool should_increment) override {
    others_.thread_init(device, queue, should_increment);
  }

 private:
  autograd::Engine& others_;
};

void put_engine_in() {
  // Never destroyed: threads of the engine may outlive static objects.
  static auto* const engine = new KeepingEngine(autograd::Engine::get_default_engine());
  static std::once_flag once;
  std::call_once(once, [] { autograd::set_default_engine_stub([]() -> autograd::Engine& { return *engine; }); });
}

}  // namespace

SavedAsItIs::SavedAsItIs(const at::Tensor& tensor) {
  if (!tensor.defined()) return;
  tensor_ = tensor.is_leaf() ? tensor : tensor.detach();  // with its node it would keep itself alive
  version_ = tensor.is_inference() ? 0 : tensor._version();
}

const at::Tensor& SavedAsItIs::get() const {
  OXY_CHECK(!tensor_.defined() || tensor_.is_inference() || version_ == tensor_._version(), InvalidState,
            "a tensor that backward needs was changed in place after forward (its version is ", tensor_._version(),
            ", ", version_, " was saved). Make that operation one that is not in place.");
  return tensor_;
}

KeepingTensors::KeepingTensors(TensorKeeper& keeper) : previous_(innermost) {
  const auto& disabled = at::SavedTensorDefaultHooks::get_disabled_error_message();
  OXY_CHECK(!disabled, NotSupported, "torch refuses hooks of saved tensors here: ", *disabled);
  put_engine_in();
  innermost = {&keeper, at::SavedTensorDefaultHooks::get_tls_state().stack.size()};
}

KeepingTensors::~KeepingTensors() { innermost = previous_; }

bool KeepingTensors::is_active() { return innermost.keeper != nullptr; }

bool KeepingTensors::has_python_hooks() { return !at::SavedTensorDefaultHooks::get_tls_state().stack.empty(); }

bool KeepingTensors::is_possible() { return !at::SavedTensorDefaultHooks::get_disabled_error_message().has_value(); }

}  // namespace oxytorch::memory
