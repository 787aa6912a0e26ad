/// Hooks that run when autograd has accumulated a parameter's gradient.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <vector>

namespace oxytorch::optim {

/// Calls `ready` with each watched parameter whose gradient was accumulated, after whatever hook it had before; until
/// destroyed, which must not happen during backward(). Exceptions of `ready` are thrown by backward().
class BackwardHooks {
 public:
  using Ready = std::function<void(const at::Tensor&)>;

  explicit BackwardHooks(Ready ready) : ready_(std::make_shared<Ready>(std::move(ready))) {}
  ~BackwardHooks();
  BackwardHooks(const BackwardHooks&) = delete;
  BackwardHooks& operator=(const BackwardHooks&) = delete;

  /// Does nothing for a parameter that is watched already.
  void watch(const at::Tensor& param);

 private:
  // Emptied when this goes: a hook that another one wrapped cannot be taken out.
  std::shared_ptr<Ready> ready_;
  std::vector<at::Tensor> watched_;
};

}  // namespace oxytorch::optim
