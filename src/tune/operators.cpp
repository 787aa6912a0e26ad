// Serves torch's operators by the kernels of oxytorch/kernels/operators.h, or hands them on.
#include "oxytorch/tune/operators.h"

#include <ATen/Parallel.h>
#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/autocast_mode.h>
#include <ATen/native/Pool.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>

#include "base/spelling.h"
#include "ops/activation_cpu.h"
#include "ops/attention_cpu.h"
#include "ops/bernoulli_cpu.h"
#include "ops/composed_attention.h"
#include "ops/convolution_cpu.h"
#include "ops/dispatch.h"
#include "ops/embedding_cpu.h"
#include "ops/gru.h"
#include "ops/lstm_cpu.h"
#include "optim/dense.h"
#include "oxytorch/error.h"
#include "oxytorch/ops/linear.h"
#include "tune/above_autograd.h"
#include "tune/deferred_relu.h"
#include "tune/operators_entry.h"

namespace oxytorch::tune {
namespace {

using at::Tensor;

std::atomic<std::int64_t> attentions_served = 0;

bool is_plain(const Tensor& tensor) { return tensor.scalar_type() == at::kFloat && tensor.is_contiguous(); }
bool is_image(const Tensor& tensor) {
  return is_plain(tensor) && tensor.suggest_memory_format() == at::MemoryFormat::Contiguous &&
         (tensor.dim() == 3 || tensor.dim() == 4) && tensor.numel() > 0;
}
bool is_channels(const Tensor& tensor, std::int64_t channels) { return is_plain(tensor) && tensor.numel() == channels; }
bool is_channels_or_none(const MaybeTensor& tensor, std::int64_t channels) {
  return !tensor.has_value() || !tensor->defined() || is_channels(*tensor, channels);
}
const float* read(const MaybeTensor& tensor) {
  return tensor.has_value() && tensor->defined() ? tensor->const_data_ptr<float>() : nullptr;
}
float* write(const MaybeTensor& tensor) {
  return tensor.has_value() && tensor->defined() ? tensor->mutable_data_ptr<float>() : nullptr;
}

// The windows, or nothing where torch's kernel must see the arguments: to serve them, or to refuse them in its words.
std::optional<kernels::PoolShape> pool_shape(const Tensor& self, at::IntArrayRef kernel, at::IntArrayRef stride,
                                             at::IntArrayRef padding, at::IntArrayRef dilation, bool ceil_mode) {
  if (!is_image(self)) return std::nullopt;
  if (stride.empty()) stride = kernel;
  kernels::PoolShape shape{};
  for (const int axis : {0, 1}) {
    const auto of_axis = [axis](at::IntArrayRef pair) {
      return pair.size() == 1 ? pair[0] : pair.size() == 2 ? pair[static_cast<std::size_t>(axis)] : -1;
    };
    shape.input[axis] = self.size(axis - 2);
    shape.kernel[axis] = of_axis(kernel);
    shape.stride[axis] = of_axis(stride);
    shape.padding[axis] = of_axis(padding);
    shape.dilation[axis] = of_axis(dilation);
    constexpr std::int64_t kMost = std::int64_t{1} << 30;
    const std::int64_t reach = (shape.kernel[axis] - 1) * shape.dilation[axis] + 1;
    if (std::min({shape.kernel[axis], shape.stride[axis], shape.dilation[axis]}) < 1 || shape.padding[axis] < 0 ||
        std::max({shape.kernel[axis], shape.stride[axis], shape.dilation[axis], reach}) > kMost ||
        shape.padding[axis] > reach / 2) {
      return std::nullopt;
    }
    shape.output[axis] =
        at::native::pooling_output_shape<std::int64_t>(shape.input[axis], shape.kernel[axis], shape.padding[axis],
                                                       shape.stride[axis], shape.dilation[axis], ceil_mode);
    if (shape.output[axis] < 1) return std::nullopt;
  }
  if (shape.input[0] * shape.input[1] > std::numeric_limits<std::int32_t>::max()) return std::nullopt;
  return shape;
}

std::vector<std::int64_t> pooled_sizes(const Tensor& self, const kernels::PoolShape& shape) {
  auto sizes = self.sizes().vec();
  std::copy_n(shape.output, 2, sizes.end() - 2);
  return sizes;
}

// Elements below which a second thread costs more than it brings.
constexpr std::int64_t kGrain = 16384;

// Fills in what the passes share; false where they do not serve these tensors.
bool describe(kernels::BatchNorm& args, const Tensor& input, const MaybeTensor& weight) {
  if (!is_plain(input) || input.dim() < 2 || input.numel() == 0) return false;
  if (!is_channels_or_none(weight, input.size(1))) return false;
  args.batch = input.size(0);
  args.channels = input.size(1);
  args.plane = input.numel() / (args.batch * args.channels);
  if (args.plane == 1) return false;  // torch's kernel for channels-last takes these, in another order
  args.input = input.const_data_ptr<float>();
  args.weight = read(weight);
  args.fusion = originals().fusion;
  return true;
}

std::int64_t channel_grain(const kernels::BatchNorm& args) {
  return std::max<std::int64_t>(1, kGrain / (args.batch * args.plane));
}

}  // namespace

void Original::capture() {
  const auto handle = c10::Dispatcher::singleton().findSchemaOrThrow(name_, overload_);
  kernel_.emplace(handle.getComputedKernelForDispatchKey(key_));
}

Originals& originals() {
  static Originals all;
  return all;
}

Pair max_pool(const Tensor& self, at::IntArrayRef kernel, at::IntArrayRef stride, at::IntArrayRef padding,
              at::IntArrayRef dilation, bool ceil_mode) {
  const auto found = pool_shape(self, kernel, stride, padding, dilation, ceil_mode);
  if (!found) return originals().max_pool.call<Pair>(self, kernel, stride, padding, dilation, ceil_mode);
  const kernels::PoolShape& shape = *found;
  const auto sizes = pooled_sizes(self, shape);
  Tensor output = at::empty(sizes, self.options());
  Tensor indices = at::empty(sizes, self.options().dtype(at::kLong));
  const std::int64_t size = shape.input[0] * shape.input[1];
  const std::int64_t outputs = shape.output[0] * shape.output[1];
  const float* from = self.const_data_ptr<float>();
  auto* to = output.mutable_data_ptr<float>();
  auto* at = indices.mutable_data_ptr<std::int64_t>();
  at::parallel_for(
      0, self.numel() / size, std::max<std::int64_t>(1, kGrain / size), [&](std::int64_t begin, std::int64_t end) {
        kernels::max_pool2d(shape, end - begin, from + begin * size, to + begin * outputs, at + begin * outputs);
      });
  return {output, indices};
}

Tensor max_pool_backward(const Tensor& grad_output, const Tensor& self, at::IntArrayRef kernel, at::IntArrayRef stride,
                         at::IntArrayRef padding, at::IntArrayRef dilation, bool ceil_mode, const Tensor& indices) {
  const auto hand_on = [&] {
    return originals().max_pool_backward.call<Tensor>(grad_output, self, kernel, stride, padding, dilation, ceil_mode,
                                                      indices);
  };
  const auto found = pool_shape(self, kernel, stride, padding, dilation, ceil_mode);
  if (!found || !is_image(grad_output) || grad_output.sizes() != pooled_sizes(self, *found) ||
      indices.sizes() != grad_output.sizes() || indices.scalar_type() != at::kLong || !indices.is_contiguous()) {
    return hand_on();
  }
  const kernels::PoolShape& shape = *found;
  Tensor grad_input = at::empty(self.sizes(), self.options());
  const std::int64_t size = shape.input[0] * shape.input[1];
  const std::int64_t outputs = shape.output[0] * shape.output[1];
  const float* from = grad_output.const_data_ptr<float>();
  const auto* at = indices.const_data_ptr<std::int64_t>();
  auto* to = grad_input.mutable_data_ptr<float>();
  std::atomic<bool> whole = true;
  at::parallel_for(0, self.numel() / size, std::max<std::int64_t>(1, kGrain / size),
                   [&](std::int64_t begin, std::int64_t end) {
                     if (!kernels::max_pool2d_backward(shape, end - begin, from + begin * outputs, at + begin * outputs,
                                                       to + begin * size)) {
                       whole = false;
                     }
                   });
  return whole ? grad_input : hand_on();
}

Triple batch_norm(const Tensor& input, const MaybeTensor& weight, const MaybeTensor& bias,
                  const MaybeTensor& running_mean, const MaybeTensor& running_var, bool training, double momentum,
                  double eps) {
  kernels::BatchNormForward args;
  const bool served = training && describe(args, input, weight) && is_channels_or_none(bias, args.channels) &&
                      is_channels_or_none(running_mean, args.channels) &&
                      is_channels_or_none(running_var, args.channels);
  if (!served) {
    return originals().batch_norm.call<Triple>(input, weight, bias, running_mean, running_var, training, momentum, eps);
  }
  Tensor output = at::empty(input.sizes(), input.options());
  Tensor save_mean = at::empty({args.channels}, input.options());
  Tensor save_invstd = at::empty({args.channels}, input.options());
  args.bias = read(bias);
  args.running_mean = write(running_mean);
  args.running_var = write(running_var);
  args.save_mean = save_mean.mutable_data_ptr<float>();
  args.save_invstd = save_invstd.mutable_data_ptr<float>();
  args.output = output.mutable_data_ptr<float>();
  args.momentum = momentum;
  args.eps = eps;
  at::parallel_for(0, args.channels, channel_grain(args),
                   [&](std::int64_t begin, std::int64_t end) { kernels::batch_norm_forward(args, begin, end); });
  return {output, save_mean, save_invstd};
}

Triple batch_norm_backward(const Tensor& grad_output, const Tensor& input, const MaybeTensor& weight,
                           const MaybeTensor& running_mean, const MaybeTensor& running_var,
                           const MaybeTensor& save_mean, const MaybeTensor& save_invstd, bool train, double eps,
                           std::array<bool, 3> mask) {
  kernels::BatchNormBackward args;
  const bool served = train && describe(args, input, weight) && is_plain(grad_output) &&
                      grad_output.sizes() == input.sizes() && read(save_mean) != nullptr &&
                      read(save_invstd) != nullptr && is_channels(*save_mean, args.channels) &&
                      is_channels(*save_invstd, args.channels) && (args.weight != nullptr || !mask[1]);
  if (!served) {
    return originals().batch_norm_backward.call<Triple>(grad_output, input, weight, running_mean, running_var,
                                                        save_mean, save_invstd, train, eps, mask);
  }
  const auto wanted = [&](int index, at::IntArrayRef sizes) {
    return mask[static_cast<std::size_t>(index)] ? at::empty(sizes, input.options()) : Tensor();
  };
  Triple grads{wanted(0, input.sizes()), wanted(1, {args.channels}), wanted(2, {args.channels})};
  args.grad_output = grad_output.const_data_ptr<float>();
  args.save_mean = read(save_mean);
  args.save_invstd = read(save_invstd);
  args.grad_input = write(std::get<0>(grads));
  args.grad_weight = write(std::get<1>(grads));
  args.grad_bias = write(std::get<2>(grads));
  at::parallel_for(0, args.channels, channel_grain(args),
                   [&](std::int64_t begin, std::int64_t end) { kernels::batch_norm_backward(args, begin, end); });
  return grads;
}

Tensor& bernoulli(Tensor& self, double p, std::optional<at::Generator> generator) {
  if (!ops::bernoulli_cpu(self, p, generator)) originals().bernoulli.call<Tensor>(self, p, std::move(generator));
  return self;
}

// In 16 bits torch rounds each addition, and the bits are others.
Tensor embedding_backward(const Tensor& grad_output, const Tensor& indices, std::int64_t rows, std::int64_t padding,
                          bool scale_by_frequency) {
  if (!scale_by_frequency && grad_output.scalar_type() == at::kFloat &&
      ops::embedding_gradient_cpu_takes(grad_output, indices, rows)) {
    if (auto made = ops::embedding_gradient_cpu(grad_output, indices, rows, padding)) return *std::move(made);
  }
  return originals().embedding_backward.call<Tensor>(grad_output, indices, rows, padding, scale_by_frequency);
}

Tensor embedding(const Tensor& weight, const Tensor& indices, c10::SymInt padding, bool scale_by_frequency,
                 bool sparse) {
  const bool serves = !scale_by_frequency && !sparse && !ops::is_transformed() && ops::is_ordinary(weight) &&
                      ops::is_ordinary(indices) && weight.scalar_type() == at::kFloat && weight.dim() == 2 &&
                      weight.is_leaf() && weight.requires_grad() && at::GradMode::is_enabled();
  if (serves) return ops::embedding_forward(weight, indices, padding.guard_int(__FILE__, __LINE__));
  return originals().embedding.call<Tensor>(weight, indices, std::move(padding), scale_by_frequency, sparse);
}

namespace {

// Nothing where torch's kernel must see the arguments.
std::optional<ops::AttentionRule> attention_rule(const Tensor& query, const Tensor& key, const Tensor& value,
                                                 double dropout, bool causal, const MaybeTensor& mask,
                                                 std::optional<double> scale) {
  if (dropout != 0 || !ops::attention_cpu_takes(query, key, value, mask)) return std::nullopt;
  return ops::attention_rule(mask, ops::scale_or_default(scale, query.size(3)), -1, causal ? 0 : -1, 0);
}

}  // namespace

Pair flash_attention(const Tensor& query, const Tensor& key, const Tensor& value, double dropout, bool causal,
                     const MaybeTensor& mask, std::optional<double> scale) {
  const auto rule = attention_rule(query, key, value, dropout, causal, mask, scale);
  if (rule) return ops::attention_cpu(query, key, value, *rule);
  return originals().flash_attention.call<Pair>(query, key, value, dropout, causal, mask, scale);
}

Triple flash_attention_backward(const Tensor& grad_output, const Tensor& query, const Tensor& key, const Tensor& value,
                                const Tensor& output, const Tensor& log_sum, double dropout, bool causal,
                                const MaybeTensor& mask, std::optional<double> scale) {
  const auto rule = attention_rule(query, key, value, dropout, causal, mask, scale);
  if (rule && log_sum.scalar_type() == at::kFloat) {
    return ops::attention_cpu_backward(grad_output, query, key, value, output, log_sum, *rule);
  }
  return originals().flash_attention_backward.call<Triple>(grad_output, query, key, value, output, log_sum, dropout,
                                                           causal, mask, scale);
}

Tensor attention(const Tensor& query, const Tensor& key, const Tensor& value, const MaybeTensor& mask, double dropout,
                 bool causal, std::optional<double> scale, bool shares_keys) {
  const ops::ComposedAttention of{query, key, value, mask, dropout, causal, scale, shares_keys};
  const bool has_learned_mask = mask.has_value() && mask->defined() && mask->requires_grad();
  if ((dropout > 0 || has_learned_mask) && ops::composed_attention_takes(of)) {
    attentions_served.fetch_add(1, std::memory_order_relaxed);
    const auto kept = [&] {
      return ops::drawn_weights({query.size(0), query.size(1), query.size(2), key.size(2)}, dropout);
    };
    return ops::composed_attention(of, dropout > 0 ? kept() : Tensor());
  }
  return originals().attention.call<Tensor>(query, key, value, mask, dropout, causal, scale, shares_keys);
}

namespace {

// The convolution, or nothing where torch's kernel computes the gradient of its weight.
std::optional<ops::ConvolutionShape> convolution_shape(const Tensor& grad_output, const Tensor& input,
                                                       const Tensor& weight, at::IntArrayRef stride,
                                                       at::IntArrayRef padding, at::IntArrayRef dilation,
                                                       bool transposed, std::int64_t groups) {
  if (transposed || groups != 1 || weight.dim() != 4 || weight.scalar_type() != at::kBFloat16 || stride.size() != 2 ||
      padding.size() != 2 || dilation != at::IntArrayRef{1, 1} || isTensorSubclassLike(grad_output) ||
      isTensorSubclassLike(input) || isTensorSubclassLike(weight) ||
      !ops::convolution_cpu_is_for(weight.size(0), weight.size(1)) || input.dim() != 4 ||
      input.size(1) != weight.size(1) || grad_output.dim() != 4 || grad_output.size(1) != weight.size(0)) {
    return std::nullopt;
  }
  const ops::ConvolutionShape shape{{weight.size(2), weight.size(3)}, {stride[0], stride[1]}, {padding[0], padding[1]}};
  if (!ops::convolution_cpu_takes(grad_output, input, shape)) return std::nullopt;
  return shape;
}

}  // namespace

Triple convolution_backward(const Tensor& grad_output, const Tensor& input, const Tensor& weight,
                            at::OptionalIntArrayRef bias_sizes, at::IntArrayRef stride, at::IntArrayRef padding,
                            at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding,
                            std::int64_t groups, std::array<bool, 3> mask) {
  const auto by_torch = [&](std::array<bool, 3> wanted) {
    return originals().convolution_backward.call<Triple>(grad_output, input, weight, bias_sizes, stride, padding,
                                                         dilation, transposed, output_padding, groups, wanted);
  };
  const auto shape = convolution_shape(grad_output, input, weight, stride, padding, dilation, transposed, groups);
  if (!mask[1] || !shape) return by_torch(mask);
  // Torch would compute the gradient of the weight for that of the bias.
  Triple made = mask[0] ? by_torch({true, false, false}) : Triple();
  std::get<1>(made) = ops::convolution_cpu_weight_gradient(grad_output, input, *shape);
  if (mask[2]) std::get<2>(made) = grad_output.sum(at::IntArrayRef{0, 2, 3});
  return made;
}

namespace {

// LSTM in torch's numbers of recurrent networks (ATen/native/RNN.h).
constexpr std::int64_t kLstm = 2;

Tensor given(const MaybeTensor& tensor) { return tensor.value_or(Tensor()); }

}  // namespace

Quad lstm(const Tensor& input, const Tensor& weight0, const Tensor& weight1, const Tensor& weight2,
          const Tensor& weight3, const Tensor& hidden, const Tensor& cell, bool reverse, at::IntArrayRef batch_sizes,
          std::int64_t mode, std::int64_t hidden_size, std::int64_t num_layers, bool has_biases, bool bidirectional,
          bool batch_first, bool train) {
  const ops::LstmLayer layer{input, weight0, weight1, weight2, weight3, hidden, cell, has_biases, reverse};
  if (mode == kLstm && batch_sizes.empty() && ops::lstm_cpu_takes(layer)) {
    return ops::lstm_cpu(layer, train && at::GradMode::is_enabled());
  }
  return originals().lstm.call<Quad>(input, weight0, weight1, weight2, weight3, hidden, cell, reverse, batch_sizes,
                                     mode, hidden_size, num_layers, has_biases, bidirectional, batch_first, train);
}

Seven lstm_backward(const Tensor& input, const Tensor& weight0, const Tensor& weight1, const Tensor& weight2,
                    const Tensor& weight3, const Tensor& hidden, const Tensor& cell, const Tensor& output,
                    const Tensor& last_hidden, const Tensor& last_cell, const MaybeTensor& grad_output,
                    const MaybeTensor& grad_hidden, const MaybeTensor& grad_cell, bool reverse, std::int64_t mode,
                    std::int64_t hidden_size, std::int64_t num_layers, bool has_biases, bool train, bool bidirectional,
                    at::IntArrayRef batch_sizes, bool batch_first, const Tensor& workspace) {
  if (ops::is_lstm_cpu_workspace(workspace)) {
    const ops::LstmLayer layer{input, weight0, weight1, weight2, weight3, hidden, cell, has_biases, reverse};
    return ops::lstm_cpu_backward(layer, output, given(grad_output), given(grad_hidden), given(grad_cell), workspace);
  }
  return originals().lstm_backward.call<Seven>(input, weight0, weight1, weight2, weight3, hidden, cell, output,
                                               last_hidden, last_cell, grad_output, grad_hidden, grad_cell, reverse,
                                               mode, hidden_size, num_layers, has_biases, train, bidirectional,
                                               batch_sizes, batch_first, workspace);
}

Pair gru(const Tensor& input, const Tensor& hidden, at::TensorList params, bool has_biases, std::int64_t num_layers,
         double dropout, bool train, bool bidirectional, bool batch_first) {
  const ops::Gru all{input, hidden, params, has_biases, num_layers, dropout, train, bidirectional, batch_first};
  if (ops::gru_takes(all)) return ops::gru(all);
  return originals().gru.call<Pair>(input, hidden, params, has_biases, num_layers, dropout, train, bidirectional,
                                    batch_first);
}

namespace {

// A weight of float32 whose layer autocast would compute in bfloat16.
bool takes_linear(const Tensor& input, const Tensor& weight, const Tensor& bias) {
  // First: sizes of what a compiler traces may be symbols, which have no numbers.
  const Tensor all[] = {input, weight, bias.defined() ? bias : weight};
  if (at::areAnyTensorSubclassLike(all)) return false;
  const auto is_strided = [](const Tensor& tensor) {
    return tensor.device().is_cpu() && tensor.layout() == at::kStrided && tensor.numel() > 0;
  };
  if (at::autocast::get_autocast_dtype(at::kCPU) != at::kBFloat16 || !is_strided(input) || !is_strided(weight)) {
    return false;
  }
  if (input.scalar_type() != at::kFloat && input.scalar_type() != at::kBFloat16) return false;
  if (weight.scalar_type() != at::kFloat || weight.dim() != 2 || input.dim() < 1) return false;
  if (input.size(-1) != weight.size(1)) return false;
  if (bias.defined() &&
      (bias.scalar_type() != at::kFloat || bias.dim() != 1 || bias.size(0) != weight.size(0) || !is_strided(bias))) {
    return false;
  }
  return true;
}

Tensor layer_of(const Tensor& input, const Tensor& weight, const Tensor& bias) {
  const Tensor narrow = ops::autocast(input);
  for (const auto deferred : {deferred_linear, deferred_before_relu}) {
    if (Tensor left = deferred(narrow, weight, bias); left.defined()) return left;
  }
  return ops::linear(narrow, weight, ops::if_defined(bias));
}

}  // namespace

Tensor cast_linear(const Tensor& input, const Tensor& weight, const MaybeTensor& bias) {
  if (takes_linear(input, weight, given(bias))) return layer_of(input, weight, given(bias));
  return originals().linear.call<Tensor>(input, weight, bias);
}

Tensor cast_addmm(const Tensor& bias, const Tensor& input, const Tensor& right, const at::Scalar& beta,
                  const at::Scalar& alpha) {
  const Tensor weight = right.dim() == 2 && beta.equal(1) && alpha.equal(1) ? weight_of(right) : Tensor();
  const bool serves = weight.defined() && bias.dim() == 1 && input.dim() == 2 && takes_linear(input, weight, bias);
  return serves ? layer_of(input, weight, bias) : originals().addmm.call<Tensor>(bias, input, right, beta, alpha);
}

Tensor cast_matmul(const Tensor& input, const Tensor& right) {
  const Tensor weight = right.dim() == 2 && input.dim() > 1 ? weight_of(right) : Tensor();
  if (weight.defined() && takes_linear(input, weight, {})) return layer_of(input, weight, {});
  return originals().matmul.call<Tensor>(input, right);
}

namespace {

// What the kernel takes as it lies.
bool takes_activation(const Tensor& self) {
  return ops::activation_cpu_takes(self, {}) && self.is_non_overlapping_and_dense();
}
bool takes_activation_backward(const Tensor& grad, const Tensor& self) {
  return takes_activation(self) && grad.scalar_type() == self.scalar_type() && grad.sizes() == self.sizes();
}

}  // namespace

Tensor gelu(const Tensor& self, std::string_view approximate) {
  if (approximate != "tanh" || !takes_activation(self)) return originals().gelu.call<Tensor>(self, approximate);
  return ops::activation_cpu({kernels::Activation::GeluTanh, self, {}});
}

Tensor gelu_backward(const Tensor& grad_output, const Tensor& self, std::string_view approximate) {
  const bool is_known = approximate == "none" || approximate == "tanh";
  if (!is_known || !takes_activation_backward(grad_output, self)) {
    return originals().gelu_backward.call<Tensor>(grad_output, self, approximate);
  }
  const auto form = approximate == "tanh" ? kernels::Activation::GeluTanh : kernels::Activation::Gelu;
  return ops::activation_cpu_backward({form, self, {}}, grad_output, {true, false})[0];
}

Tensor silu(const Tensor& self) {
  if (!takes_activation(self)) return originals().silu.call<Tensor>(self);
  return ops::activation_cpu({kernels::Activation::Silu, self, {}});
}

Tensor& silu_in_place(Tensor& self) {
  if (takes_activation(self)) {
    ops::activation_cpu_into({kernels::Activation::Silu, self, {}}, self);
  } else {
    originals().silu_in_place.call<Tensor>(self);
  }
  return self;
}

Tensor silu_backward(const Tensor& grad_output, const Tensor& self) {
  if (!takes_activation_backward(grad_output, self)) {
    return originals().silu_backward.call<Tensor>(grad_output, self);
  }
  return ops::activation_cpu_backward({kernels::Activation::Silu, self, {}}, grad_output, {true, false})[0];
}

namespace {

struct Entry {
  std::vector<Original*> originals;
  void (*add)(torch::Library& library);
  /// Of a backward that stays once it was installed: torch's could not go on from what our forward left in a graph.
  Original* backward = nullptr;
  void (*add_backward)(torch::Library& library) = nullptr;
  c10::DispatchKey key = c10::DispatchKey::CPU;
};

const std::map<std::string, Entry>& entries() {
  static const std::map<std::string, Entry> all{
      {"max_pool2d",
       {{&originals().max_pool, &originals().max_pool_backward},
        [](torch::Library& library) {
          library.impl("max_pool2d_with_indices", TORCH_FN(max_pool));
          library.impl("max_pool2d_with_indices_backward", TORCH_FN(max_pool_backward));
        }}},
      {"batch_norm",
       {{&originals().batch_norm, &originals().batch_norm_backward},
        [](torch::Library& library) {
          library.impl("native_batch_norm", TORCH_FN(batch_norm));
          library.impl("native_batch_norm_backward", TORCH_FN(batch_norm_backward));
        }}},
      {"bernoulli",
       {{&originals().bernoulli},
        [](torch::Library& library) { library.impl("bernoulli_.float", TORCH_FN(bernoulli)); }}},
      {"embedding",
       {{&originals().embedding_backward},
        [](torch::Library& library) { library.impl("embedding_dense_backward", TORCH_FN(embedding_backward)); }}},
      {"embedding_sum",
       {.originals = {&originals().embedding},
        .add = [](torch::Library& library) { library.impl("embedding", TORCH_FN(embedding)); },
        .key = c10::DispatchKey::AutogradCPU}},
      {"flash_attention",
       {{&originals().flash_attention, &originals().flash_attention_backward},
        [](torch::Library& library) {
          library.impl("_scaled_dot_product_flash_attention_for_cpu", TORCH_FN(flash_attention));
          library.impl("_scaled_dot_product_flash_attention_for_cpu_backward", TORCH_FN(flash_attention_backward));
        }}},
      {"composed_attention",
       {.originals = {&originals().attention},
        .add = [](torch::Library& library) { library.impl("scaled_dot_product_attention", TORCH_FN(attention)); },
        .key = c10::DispatchKey::AutogradCPU}},
      {"convolution",
       {{&originals().convolution_backward},
        [](torch::Library& library) { library.impl("convolution_backward", TORCH_FN(convolution_backward)); }}},
      {"lstm",
       {{&originals().lstm},
        [](torch::Library& library) { library.impl("mkldnn_rnn_layer", TORCH_FN(lstm)); },
        &originals().lstm_backward,
        [](torch::Library& library) { library.impl("mkldnn_rnn_layer_backward", TORCH_FN(lstm_backward)); }}},
      {"gelu",
       {{&originals().gelu, &originals().gelu_backward},
        [](torch::Library& library) {
          library.impl("gelu", TORCH_FN(gelu));
          library.impl("gelu_backward", TORCH_FN(gelu_backward));
        }}},
      {"silu",
       {{&originals().silu, &originals().silu_in_place, &originals().silu_backward},
        [](torch::Library& library) {
          library.impl("silu", TORCH_FN(silu));
          library.impl("silu_", TORCH_FN(silu_in_place));
          library.impl("silu_backward", TORCH_FN(silu_backward));
        }}},
      {"gru",
       {.originals = {&originals().gru},
        .add = [](torch::Library& library) { library.impl("gru.input", TORCH_FN(gru)); },
        .key = c10::DispatchKey::AutogradCPU}},
      {"linear",
       {.originals = {&originals().linear, &originals().addmm, &originals().matmul},
        .add =
            [](torch::Library& library) {
              library.impl("linear", TORCH_FN(cast_linear));
              library.impl("addmm", TORCH_FN(cast_addmm));
              library.impl("matmul", TORCH_FN(cast_matmul));
              library.impl("relu", TORCH_FN(relu_seen));
              library.impl("relu_", TORCH_FN(relu_in_place_seen));
            },
        .key = c10::DispatchKey::AutocastCPU}},
  };
  return all;
}

std::string backward_of(const std::string& name) { return name + " backward"; }

// Registrations of the process, by name.
std::map<std::string, std::unique_ptr<torch::Library>>& live() {
  static std::map<std::string, std::unique_ptr<torch::Library>> all;
  return all;
}
std::mutex& registry_mutex() {
  static std::mutex mutex;
  return mutex;
}

// Overriding a kernel is what is wanted here; other warnings pass.
class QuietOverride : public c10::WarningHandler {
 public:
  void process(const c10::Warning& warning) override {
    if (warning.msg().find("verrid") == std::string::npos) before_->process(warning);
  }

 private:
  c10::WarningHandler* before_ = c10::WarningUtils::get_warning_handler();
};

std::unique_ptr<torch::Library> registered(void (*add)(torch::Library& library), c10::DispatchKey key) {
  QuietOverride quiet;
  const c10::WarningUtils::WarningHandlerGuard guard(&quiet);
  auto library = std::make_unique<torch::Library>(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
  add(*library);
  return library;
}

}  // namespace

const std::vector<std::string>& NativeOperators::exact_names() {
  static const std::vector<std::string> all{"max_pool2d", "batch_norm", "bernoulli", "embedding", "embedding_sum"};
  return all;
}

const std::vector<std::string>& NativeOperators::names() {
  static const std::vector<std::string> all{"max_pool2d",
                                            "batch_norm",
                                            "bernoulli",
                                            "embedding",
                                            "embedding_sum",
                                            "flash_attention",
                                            "composed_attention",
                                            "convolution",
                                            "lstm",
                                            "gru",
                                            "linear",
                                            "gelu",
                                            "silu"};
  return all;
}

std::vector<OperatorReport> NativeOperators::install(const std::vector<std::string>& names) {
  const auto& wanted = names.empty() ? exact_names() : names;
  for (const auto& name : wanted) {
    OXY_CHECK(entries().contains(name), InvalidArgument, "there is no native operator ", in_quotes(name), "; give ",
              list_of(NativeOperators::names()), ".");
  }
  const std::lock_guard lock(registry_mutex());
  std::vector<OperatorReport> reports;
  for (const auto& name : wanted) {
    OperatorReport report{name, false, "it is installed already"};
    const Entry& entry = entries().at(name);
    if (!live().contains(name)) {
      for (Original* original : entry.originals) original->capture();
      if (entry.backward != nullptr && !live().contains(backward_of(name))) {
        entry.backward->capture();
        live().emplace(backward_of(name), registered(entry.add_backward, entry.key));
      }
      report.reason = differs_from_original(name);
      report.installed = report.reason.empty();
    }
    if (report.installed) {
      live().emplace(name, registered(entry.add, entry.key));
      installed_.push_back(name);
    }
    reports.push_back(std::move(report));
  }
  return reports;
}

bool NativeOperators::is_worth_a_trial(std::int64_t embedding_elements, std::int64_t parameter_elements,
                                       bool accumulates) noexcept {
  // To torch each batch costs five passes over a table, of which this library makes none where it adds.
  const std::int64_t least = accumulates ? 8 : 2;
  return embedding_elements > 0 && least * embedding_elements >= parameter_elements;
}

bool NativeOperators::serves_convolution(const std::vector<std::int64_t>& weight) noexcept {
  return weight.size() == 4 && ops::convolution_cpu_is_for(weight[0], weight[1]);
}

std::int64_t NativeOperators::composed_attentions() noexcept {
  return attentions_served.load(std::memory_order_relaxed);
}

std::int64_t NativeOperators::joined_relus() noexcept { return relus_joined(); }

std::int64_t NativeOperators::handed_on() noexcept {
  std::int64_t calls = 0;
  for (const auto& [name, entry] : entries()) {
    for (const Original* original : entry.originals) calls += original->calls();
    if (entry.backward != nullptr) calls += entry.backward->calls();
  }
  return calls;
}

void NativeOperators::uninstall() noexcept {
  const std::lock_guard lock(registry_mutex());
  for (const auto& name : installed_) live().erase(name);
  installed_.clear();
}

NativeOperators::~NativeOperators() { uninstall(); }

}  // namespace oxytorch::tune
