/// What lies between torch's dispatcher and the kernels of oxytorch/kernels/operators.h.
#pragma once

#include <torch/library.h>

#include <atomic>
#include <cstdint>
#include <optional>
#include <string>
#include <tuple>

#include "oxytorch/kernels/operators.h"

namespace oxytorch::tune {

/// The kernel that an operator had when ours took its place: of the CPU, or of autograd or autocast on it.
class Original {
 public:
  constexpr explicit Original(const char* name, const char* overload = "", c10::DispatchKey key = c10::DispatchKey::CPU)
      : name_(name), overload_(overload), key_(key) {}

  [[nodiscard]] const char* name() const { return name_; }
  [[nodiscard]] const char* overload() const { return overload_; }

  /// Takes hold of the kernel that serves now.
  void capture();

  [[nodiscard]] std::int64_t calls() const { return calls_.load(std::memory_order_relaxed); }

  /// Calls it. `Result` is a tensor or a tuple of tensors.
  template <class Result, class... Args>
  Result call(Args&&... args) const {
    calls_.fetch_add(1, std::memory_order_relaxed);
    torch::jit::Stack stack;
    torch::jit::push(stack, std::forward<Args>(args)...);
    // A kernel of autograd goes on to the CPU's.
    kernel_->callBoxed(kernel_->opHandle(), c10::DispatchKeySet({key_, c10::DispatchKey::CPU}), &stack);
    return unpack(stack, std::type_identity<Result>());
  }

 private:
  static at::Tensor unpack(torch::jit::Stack& stack, std::type_identity<at::Tensor>) {
    return std::move(stack.back()).toTensor();
  }
  template <class... T>
  static std::tuple<T...> unpack(torch::jit::Stack& stack, std::type_identity<std::tuple<T...>>) {
    std::tuple<T...> results;
    std::apply([&stack](T&... one) { torch::jit::pop(stack, one...); }, results);
    return results;
  }

  const char* name_;
  const char* overload_;
  c10::DispatchKey key_;
  mutable std::atomic<std::int64_t> calls_ = 0;
  std::optional<c10::SafeKernelFunction> kernel_;
};

using Pair = std::tuple<at::Tensor, at::Tensor>;
using Triple = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
using Quad = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
using Seven = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
using MaybeTensor = std::optional<at::Tensor>;

/// The originals, and the fusion that the proof found in torch's batch normalization.
struct Originals {
  Original max_pool{"aten::max_pool2d_with_indices"};
  Original max_pool_backward{"aten::max_pool2d_with_indices_backward"};
  Original batch_norm{"aten::native_batch_norm"};
  Original batch_norm_backward{"aten::native_batch_norm_backward"};
  Original bernoulli{"aten::bernoulli_", "float"};
  Original embedding_backward{"aten::embedding_dense_backward"};
  Original embedding{"aten::embedding", "", c10::DispatchKey::AutogradCPU};
  Original flash_attention{"aten::_scaled_dot_product_flash_attention_for_cpu"};
  Original flash_attention_backward{"aten::_scaled_dot_product_flash_attention_for_cpu_backward"};
  Original attention{"aten::scaled_dot_product_attention", "", c10::DispatchKey::AutogradCPU};
  Original convolution_backward{"aten::convolution_backward"};
  Original lstm{"aten::mkldnn_rnn_layer"};
  Original lstm_backward{"aten::mkldnn_rnn_layer_backward"};
  Original gru{"aten::gru", "input", c10::DispatchKey::AutogradCPU};
  Original linear{"aten::linear", "", c10::DispatchKey::AutocastCPU};
  Original addmm{"aten::addmm", "", c10::DispatchKey::AutocastCPU};
  Original matmul{"aten::matmul", "", c10::DispatchKey::AutocastCPU};
  Original gelu{"aten::gelu"};
  Original gelu_backward{"aten::gelu_backward"};
  Original silu{"aten::silu"};
  Original silu_in_place{"aten::silu_"};
  Original silu_backward{"aten::silu_backward"};
  kernels::BatchNormFusion fusion;
};
Originals& originals();

// The operators, with torch's arguments.
Pair max_pool(const at::Tensor& self, at::IntArrayRef kernel, at::IntArrayRef stride, at::IntArrayRef padding,
              at::IntArrayRef dilation, bool ceil_mode);
at::Tensor max_pool_backward(const at::Tensor& grad_output, const at::Tensor& self, at::IntArrayRef kernel,
                             at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation, bool ceil_mode,
                             const at::Tensor& indices);
Triple batch_norm(const at::Tensor& input, const MaybeTensor& weight, const MaybeTensor& bias,
                  const MaybeTensor& running_mean, const MaybeTensor& running_var, bool training, double momentum,
                  double eps);
Triple batch_norm_backward(const at::Tensor& grad_output, const at::Tensor& input, const MaybeTensor& weight,
                           const MaybeTensor& running_mean, const MaybeTensor& running_var,
                           const MaybeTensor& save_mean, const MaybeTensor& save_invstd, bool train, double eps,
                           std::array<bool, 3> mask);
at::Tensor& bernoulli(at::Tensor& self, double p, std::optional<at::Generator> generator);
at::Tensor embedding_backward(const at::Tensor& grad_output, const at::Tensor& indices, std::int64_t rows,
                              std::int64_t padding, bool scale_by_frequency);
/// Adds gradients to those of the table where they are made, so it stands where autograd is told of the lookup.
at::Tensor embedding(const at::Tensor& weight, const at::Tensor& indices, c10::SymInt padding, bool scale_by_frequency,
                     bool sparse);
Pair flash_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, double dropout,
                     bool causal, const MaybeTensor& mask, std::optional<double> scale);
Triple flash_attention_backward(const at::Tensor& grad_output, const at::Tensor& query, const at::Tensor& key,
                                const at::Tensor& value, const at::Tensor& output, const at::Tensor& log_sum,
                                double dropout, bool causal, const MaybeTensor& mask, std::optional<double> scale);
/// With dropout torch has no kernel for it and takes it apart, so ours stands where autograd is told of it.
at::Tensor attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const MaybeTensor& mask,
                     double dropout, bool causal, std::optional<double> scale, bool shares_keys);

/// The gradient of the weight by our kernel; torch's makes that of the input.
Triple convolution_backward(const at::Tensor& grad_output, const at::Tensor& input, const at::Tensor& weight,
                            at::OptionalIntArrayRef bias_sizes, at::IntArrayRef stride, at::IntArrayRef padding,
                            at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding,
                            std::int64_t groups, std::array<bool, 3> mask);

Quad lstm(const at::Tensor& input, const at::Tensor& weight0, const at::Tensor& weight1, const at::Tensor& weight2,
          const at::Tensor& weight3, const at::Tensor& hidden, const at::Tensor& cell, bool reverse,
          at::IntArrayRef batch_sizes, std::int64_t mode, std::int64_t hidden_size, std::int64_t num_layers,
          bool has_biases, bool bidirectional, bool batch_first, bool train);
Seven lstm_backward(const at::Tensor& input, const at::Tensor& weight0, const at::Tensor& weight1,
                    const at::Tensor& weight2, const at::Tensor& weight3, const at::Tensor& hidden,
                    const at::Tensor& cell, const at::Tensor& output, const at::Tensor& last_hidden,
                    const at::Tensor& last_cell, const MaybeTensor& grad_output, const MaybeTensor& grad_hidden,
                    const MaybeTensor& grad_cell, bool reverse, std::int64_t mode, std::int64_t hidden_size,
                    std::int64_t num_layers, bool has_biases, bool train, bool bidirectional,
                    at::IntArrayRef batch_sizes, bool batch_first, const at::Tensor& workspace);

/// Of torch composed of other operators, so ours stands where autograd is told of it.
Pair gru(const at::Tensor& input, const at::Tensor& hidden, at::TensorList params, bool has_biases,
         std::int64_t num_layers, double dropout, bool train, bool bidirectional, bool batch_first);

// What autocast does with linear layers. torch::nn::Linear of Python calls linear, that of C++ addmm, or matmul.
at::Tensor cast_linear(const at::Tensor& input, const at::Tensor& weight, const MaybeTensor& bias);
at::Tensor cast_addmm(const at::Tensor& bias, const at::Tensor& input, const at::Tensor& right, const at::Scalar& beta,
                      const at::Scalar& alpha);
at::Tensor cast_matmul(const at::Tensor& input, const at::Tensor& right);

// Torch's GELU without tanh is as fast forward; backward ours is.
at::Tensor gelu(const at::Tensor& self, std::string_view approximate);
at::Tensor gelu_backward(const at::Tensor& grad_output, const at::Tensor& self, std::string_view approximate);
at::Tensor silu(const at::Tensor& self);
at::Tensor& silu_in_place(at::Tensor& self);
at::Tensor silu_backward(const at::Tensor& grad_output, const at::Tensor& self);

/// Why the operators of `name` may not replace the originals, which are captured; empty where they may.
/// Sets originals().fusion. Draws nothing from torch's default generator.
std::string differs_from_original(const std::string& name);

/// Why ops::linear_cross_entropy may not stand in for torch's linear and cross_entropy there; empty where it may.
std::string cross_entropy_differs(at::Device device);

/// Why ops::batch_norm may not stand in for torch's batch_norm and what follows it; empty where it may.
std::string batch_norm_followed_differs();

/// Why ops::add_layer_norm and add_rms_norm may not stand in for torch's operators; empty where they may.
std::string row_norm_differs();

/// Why ops::attention may not stand in for attention that a model writes out; empty where it may.
std::string written_attention_differs();

/// Why ops::swiglu and geglu may not stand in for torch's activation and product; empty where they may.
std::string gate_differs();

}  // namespace oxytorch::tune
