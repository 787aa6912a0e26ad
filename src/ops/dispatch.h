/// Calls of this library's operators, and what they have in common.
#pragma once

#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/library.h>

#include <optional>
#include <utility>
#include <vector>

#include "optim/torch_versions.h"
#include "oxytorch/error.h"

namespace oxytorch::ops {

/// Throws torch's exception for an error, by which its front ends tell a ValueError from a TypeError.
[[noreturn]] inline void throw_as_torch_does(const Error& error) {
  TORCH_CHECK_VALUE(error.code() != ErrorCode::InvalidArgument, error.what());
  TORCH_CHECK_TYPE(error.code() != ErrorCode::InvalidType, error.what());
  TORCH_CHECK_NOT_IMPLEMENTED(error.code() != ErrorCode::NotSupported, error.what());
  TORCH_CHECK(false, error.what());
}

/// A kernel as torch's dispatcher is given it: no exception of ours may pass through torch's code, which knows none.
template <auto kFunction>
struct Kernel;
template <class Result, class... Args, Result (*kFunction)(Args...)>
struct Kernel<kFunction> {
  static Result call(Args... args) {
    try {
      return kFunction(std::forward<Args>(args)...);
    } catch (const Error& error) {
      throw_as_torch_does(error);
    }
  }
};

/// The operator of that name, called through torch's dispatcher. Its errors are ours again.
template <const char* kName, class Signature>
struct Operator;
template <const char* kName, class Result, class... Args>
struct Operator<kName, Result(Args...)> {
  static Result call(Args... args) {
    static const auto handle =
        c10::Dispatcher::singleton().findSchemaOrThrow(kName, "").template typed<Result(Args...)>();
    try {
      return handle.call(std::forward<Args>(args)...);
    } catch (const c10::ValueError& error) {
      detail::raise(ErrorCode::InvalidArgument, error.what_without_backtrace());
    } catch (const c10::TypeError& error) {
      detail::raise(ErrorCode::InvalidType, error.what_without_backtrace());
    } catch (const c10::NotImplementedError& error) {
      detail::raise(ErrorCode::NotSupported, error.what_without_backtrace());
    }
  }
};

/// The tensor, undefined where there is none.
inline at::Tensor or_none(const std::optional<at::Tensor>& tensor) { return tensor.value_or(at::Tensor()); }

/// None where the tensor is undefined.
inline std::optional<at::Tensor> if_defined(const at::Tensor& tensor) {
  return tensor.defined() ? std::optional<at::Tensor>(tensor) : std::nullopt;
}

/// Whether anybody waits for the gradient of the tensor that a node made.
inline bool has_hooks(torch::autograd::Node& node) {
  return !(node.tensor_pre_hooks().empty() && node.retains_grad_hooks().empty() && node.pre_hooks().empty() &&
           node.post_hooks().empty());
}

/// Whether the dtype is float32, bfloat16 or float16.
inline bool is_narrow(const at::Tensor& tensor) {
  const auto type = tensor.scalar_type();
  return type == at::kFloat || type == at::kBFloat16 || type == at::kHalf;
}

/// Whether operators of this library have a kernel of their own for such a tensor.
inline bool has_kernel(const at::Tensor& tensor) { return tensor.device().is_cpu() && is_narrow(tensor); }

/// A tensor like one of batch x heads x tokens x width, not cleared: dense, with tokens around heads in memory where
/// that has them so. torch's empty_like() would fix the sizes of a graph that is compiled for any.
inline at::Tensor empty_heads(const at::Tensor& like) {
  const auto size = like.sym_sizes();
  if (like.sym_stride(2) <= like.sym_stride(1)) return at::empty_symint(size, like.options());
  return at::empty_symint({size[0], size[2], size[1], size[3]}, like.options()).transpose(1, 2);
}

/// Whether a transform of torch.func or a dispatch mode sees this call: it has operators of its own.
inline bool is_transformed() {
  return c10::impl::dispatch_mode_enabled() ||
         c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode) ||
         c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerBackMode);
}

/// Whether the tensor holds its elements in memory of the host, and nobody else is told of it. Its keys say what else
/// it may be: a subclass, one of torch.func's, negated, without elements.
inline bool is_ordinary(const at::Tensor& tensor) {
  using c10::DispatchKey;
  constexpr c10::DispatchKeySet kOrdinary(
      {DispatchKey::CPU, DispatchKey::ADInplaceOrView, DispatchKey::AutogradCPU, DispatchKey::AutocastCPU});
  return tensor.defined() && tensor.key_set() == kOrdinary && tensor.numel() > 0 && !tensor._fw_grad(0).defined();
}

/// Whether the tensor is nothing but elements in memory, of whichever device.
inline bool is_plain(const at::Tensor& tensor) {
  return tensor.defined() && tensor.has_storage() && tensor.numel() > 0 && !at::isTensorSubclassLike(tensor) &&
         !tensor.is_neg() && !tensor._fw_grad(0).defined();
}

/// Registers kernels for autocast, on each device that this library has a backend for; PrivateUse1 is everybody's.
template <class Registers>
std::vector<torch::Library> on_autocast(const Registers& registers) {
  using c10::DispatchKey;
  std::vector<torch::Library> made;
  for (const auto key : {DispatchKey::AutocastCPU, DispatchKey::AutocastCUDA, DispatchKey::AutocastHPU,
                         DispatchKey::AutocastPrivateUse1}) {
    registers(made.emplace_back(torch::Library::IMPL, "oxytorch", key, __FILE__, __LINE__));
  }
  return made;
}

/// `tensor` in the dtype that autocast has for its device.
inline at::Tensor autocast(const at::Tensor& tensor) {
  const auto device = tensor.device().type();
  return at::autocast::cached_cast(at::autocast::get_autocast_dtype(device), tensor, device);
}

/// Stands behind gradients that cannot be differentiated, and says so.
struct SecondDerivative : torch::autograd::Node {
  torch::autograd::variable_list apply(torch::autograd::variable_list&& /*grads*/) override {
    detail::raise(ErrorCode::NotSupported, of,
                  " has no second derivative; compose it of torch's own operators where one is needed.");
  }
  const char* of = "";
};

/// `gradients` as what came of `inputs` by the operator `name`.
template <class... Inputs>
void differentiable_once(const char* name, const torch::autograd::variable_list& gradients, const Inputs&... inputs) {
  if (!torch::autograd::compute_requires_grad(inputs...)) return;
  const auto node = new_node<SecondDerivative>();
  node->of = name;
  node->set_next_edges(torch::autograd::collect_next_edges(inputs...));
  torch::autograd::set_history(gradients, node);
}

}  // namespace oxytorch::ops
