#include "optim/backward_hooks.h"

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

namespace oxytorch::optim {
namespace {

using torch::autograd::PostAccumulateGradHook;
namespace impl = torch::autograd::impl;

// A tensor has room for one hook, so this one keeps the one it found.
struct Hook final : PostAccumulateGradHook {
  std::shared_ptr<BackwardHooks::Ready> ready;
  std::unique_ptr<PostAccumulateGradHook> before;

  void operator()(const at::Tensor& param) override {
    if (before != nullptr) (*before)(param);
    if (*ready) (*ready)(param);
  }
};

// The place in a tensor's chain of hooks where the one that calls `ready` is; null if there is none.
std::unique_ptr<PostAccumulateGradHook>* find(const at::Tensor& param,
                                              const std::shared_ptr<BackwardHooks::Ready>& ready) {
  auto* place = &impl::post_acc_grad_hooks(param);
  while (auto* hook = dynamic_cast<Hook*>(place->get())) {
    if (hook->ready == ready) return place;
    place = &hook->before;
  }
  return nullptr;
}

}  // namespace

void BackwardHooks::watch(const at::Tensor& param) {
  if (find(param, ready_) != nullptr) return;
  auto hook = std::make_unique<Hook>();
  hook->ready = ready_;
  hook->before = std::move(impl::post_acc_grad_hooks(param));
  impl::set_post_acc_grad_hooks(param, std::move(hook));
  watched_.push_back(param);
}

BackwardHooks::~BackwardHooks() {
  *ready_ = nullptr;
  for (const at::Tensor& param : watched_) {
    auto* place = find(param, ready_);
    if (place == nullptr) continue;
    auto before = std::move(static_cast<Hook&>(**place).before);
    *place = std::move(before);
  }
}

}  // namespace oxytorch::optim
