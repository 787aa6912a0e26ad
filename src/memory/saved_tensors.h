/// What autograd keeps of a tensor for backward, decided from C++. torch asks the hooks of Python alone
/// (torch.autograd.graph.saved_tensors_hooks); an engine that hands on to torch's asks ours too.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <cstddef>
#include <cstdint>
#include <memory>

namespace oxytorch::memory {

/// A saved tensor that stays as it is. torch does not look whether what hooks keep was changed since; this does.
class SavedAsItIs {
 public:
  SavedAsItIs() = default;
  explicit SavedAsItIs(const at::Tensor& tensor);
  /// Error(InvalidState) where it was changed in place since.
  [[nodiscard]] const at::Tensor& get() const;

 private:
  at::Tensor tensor_;
  std::int64_t version_ = 0;
};

/// Keeps what is saved on the thread that runs forward. `make` is called once for each tensor.
class TensorKeeper {
 public:
  virtual ~TensorKeeper() = default;
  virtual std::unique_ptr<torch::autograd::SavedVariableHooks> make() = 0;
};

/// On this thread, from construction to destruction, `keeper` is asked for each tensor that is saved. The innermost
/// counts, among Python's hooks too. Error(NotSupported) where torch has hooks disabled (torch.func).
///
/// torch does not check whether a tensor that hooks keep was modified since: a keeper does.
class KeepingTensors {
 public:
  explicit KeepingTensors(TensorKeeper& keeper);
  ~KeepingTensors();
  KeepingTensors(const KeepingTensors&) = delete;
  KeepingTensors& operator=(const KeepingTensors&) = delete;
  /// Whether a keeper counts on this thread.
  [[nodiscard]] static bool is_active();
  /// Whether hooks of Python count on this thread, or would where no keeper does.
  [[nodiscard]] static bool has_python_hooks();
  /// Whether torch allows hooks of saved tensors here, as it does not inside torch.func.grad.
  [[nodiscard]] static bool is_possible();

  struct Scope {
    TensorKeeper* keeper = nullptr;
    std::size_t python_hooks = 0;  // of this thread, when it began
  };

 private:
  Scope previous_;
};

}  // namespace oxytorch::memory
