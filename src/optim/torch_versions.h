// Where torch's C++ interface differs between the versions that are supported, 2.9 to 2.15. A newer torch
// needs no line here unless it changes what these use. (backends/hpu/torch_device.cpp, which is loaded without this
// library, asks torch's headers itself.)
#pragma once

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/version.h>

#if __has_include(<ATen/ops/_foreach_clone.h>)  // not yet in 2.11
#include <ATen/ops/_foreach_clone.h>
#define OXYTORCH_TORCH_FOREACH_CLONE 1
#else
#define OXYTORCH_TORCH_FOREACH_CLONE 0
#endif

#if __has_include(<ATen/accelerator/Graph.h>)  // from 2.13
#include <ATen/accelerator/Graph.h>
#define OXYTORCH_TORCH_GRAPHS 1
#else
#define OXYTORCH_TORCH_GRAPHS 0
#endif

#include <algorithm>
#include <array>
#include <cstddef>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "oxytorch/error.h"

namespace oxytorch {

// torch's fp32_precision settings. torch 2.9 knows backends, operations and values by name alone.
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 10
enum class Float32Backend { GENERIC, CUDA, MKLDNN };
enum class Float32Op { ALL, CONV, RNN, MATMUL };
enum class Float32Precision { NONE, IEEE, TF32, BF16 };

namespace detail {
inline const std::array<std::string, 3> kFloat32Backends{"generic", "cuda", "mkldnn"};
inline const std::array<std::string, 4> kFloat32Ops{"all", "conv", "rnn", "matmul"};
inline const std::array<std::string, 4> kFloat32Precisions{"none", "ieee", "tf32", "bf16"};

template <typename T, std::size_t N>
T named(const std::array<std::string, N>& names, const std::string& name) {
  const auto found = std::find(names.begin(), names.end(), name);
  TORCH_CHECK(found != names.end(), "Unknown name in a float32 precision setting: ", name);
  return static_cast<T>(found - names.begin());
}
template <typename T, std::size_t N>
const std::string& name_of(const std::array<std::string, N>& names, T value) {
  return names[static_cast<std::size_t>(value)];
}
}  // namespace detail

inline Float32Backend str2backend(const std::string& name) {
  return detail::named<Float32Backend>(detail::kFloat32Backends, name);
}
inline Float32Op str2op(const std::string& name) { return detail::named<Float32Op>(detail::kFloat32Ops, name); }
inline Float32Precision str2precision(const std::string& name) {
  return detail::named<Float32Precision>(detail::kFloat32Precisions, name);
}
inline std::string precision2str(Float32Precision value) { return detail::name_of(detail::kFloat32Precisions, value); }
inline Float32Precision float32_precision(Float32Backend backend, Float32Op op) {
  return str2precision(at::globalContext().float32Precision(detail::name_of(detail::kFloat32Backends, backend),
                                                            detail::name_of(detail::kFloat32Ops, op)));
}
inline void write_float32_precision(Float32Backend backend, Float32Op op, Float32Precision value) {
  at::globalContext().setFloat32Precision(detail::name_of(detail::kFloat32Backends, backend),
                                          detail::name_of(detail::kFloat32Ops, op), precision2str(value));
}
#else
using at::Float32Backend;
using at::Float32Op;
using at::Float32Precision;
using at::precision2str;
using at::str2backend;
using at::str2op;
using at::str2precision;
inline Float32Precision float32_precision(Float32Backend backend, Float32Op op) {
  return at::globalContext().float32Precision(backend, op);
}
inline void write_float32_precision(Float32Backend backend, Float32Op op, Float32Precision value) {
  at::globalContext().setFloat32Precision(backend, op, value);
}
#endif

inline std::vector<at::Tensor> foreach_clone(at::TensorList tensors) {
#if OXYTORCH_TORCH_FOREACH_CLONE
  return at::_foreach_clone(tensors);
#else
  std::vector<at::Tensor> clones;
  clones.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) clones.push_back(tensor.clone());
  return clones;
#endif
}

// A node of the autograd graph; before 2.13 shared by std::shared_ptr.
template <typename Node>
auto new_node() {
  if constexpr (std::is_base_of_v<c10::intrusive_ptr_target, Node>) {
    return c10::make_intrusive<Node>();
  } else {
    return std::shared_ptr<Node>(new Node, [](Node* node) { deleteNode(node); });
  }
}
template <typename Node>
auto node_of(Node& node) {
  if constexpr (requires { node.shared_from_this(); }) {
    return node.shared_from_this();
  } else {
    return c10::intrusive_ptr<Node>::reclaim_copy(&node);
  }
}

// The vendor's stream behind torch's. Error(NotSupported) before torch 2.10, whose guards do not tell.
template <typename Guard>
void* native_stream(const Guard& guard, const c10::Stream& stream) {
  if constexpr (requires { guard.getStreamNativeHandle(stream); }) {
    return guard.getStreamNativeHandle(stream);
  } else {
    OXY_CHECK(false, NotSupported, "this torch does not tell the stream of ", stream.device().str(),
              "; torch 2.10 does.");
  }
}

}  // namespace oxytorch
