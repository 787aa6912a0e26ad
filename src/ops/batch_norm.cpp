// The operators oxytorch::batch_norm, batch_norm_moments, batch_norm_forward and batch_norm_backward.
#include "oxytorch/ops/batch_norm.h"

#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/ops/add.h>
#include <ATen/ops/batch_norm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/max_pool2d.h>
#include <ATen/ops/relu.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/library.h>

#include <algorithm>

#include "ops/batch_norm.h"
#include "ops/batch_norm_cpu.h"
#include "ops/dispatch.h"
#include "ops/vmap.h"
#include "oxytorch/error.h"

namespace oxytorch::ops {
namespace {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;
using Pair = std::tuple<Tensor, Tensor>;
using Four = std::tuple<Tensor, Tensor, Tensor, Tensor>;

// -- the kernels ------------------------------------------------------------------------------------------------------

void check_taken(const char* name, const Tensor& input, const Tensor& weight, const Tensor& bias) {
  OXY_CHECK(batch_norm_cpu_takes(input, weight, bias), InvalidArgument, name, " does not take an input ", input.sizes(),
            " of ", input.scalar_type(), ", or not as it lies; call oxytorch::batch_norm.");
}

Pair batch_norm_moments_cpu(const Tensor& input) {
  check_taken("batch_norm_moments", input, {}, {});
  const auto [mean, variance] = batch_norm_cpu_moments(input);
  return {mean, variance};
}

Pair batch_norm_forward_cpu(const Tensor& input, const MaybeTensor& weight, const MaybeTensor& bias,
                            const MaybeTensor& added, const Tensor& mean, const Tensor& invstd, bool relu,
                            at::IntArrayRef pool) {
  const Tensor scale = or_none(weight), shift = or_none(bias), plus = or_none(added);
  check_taken("batch_norm_forward", input, scale, shift);
  OXY_CHECK((!plus.defined() || (lies_as(plus, input) && pool.empty())) && windows_fill(input, pool), InvalidArgument,
            "batch_norm_forward takes windows that fill the image or an addition that lies as its input; call "
            "oxytorch::batch_norm.");
  const auto [output, taps] = batch_norm_cpu({input, scale, shift, plus, mean, invstd, relu, pool});
  return {output, taps};
}

// What is not wanted is an empty tensor: an operator returns no undefined ones.
Four batch_norm_backward_cpu(const Tensor& grad_output, const Tensor& input, const MaybeTensor& weight,
                             const MaybeTensor& bias, const Tensor& mean, const Tensor& invstd,
                             const MaybeTensor& output, const MaybeTensor& taps, bool relu, at::IntArrayRef pool,
                             std::array<bool, 4> wanted) {
  const Tensor scale = or_none(weight), shift = or_none(bias), none;
  auto made = batch_norm_cpu_backward({input, scale, shift, none, mean, invstd, relu, pool}, grad_output,
                                      or_none(output), or_none(taps), wanted);
  for (auto& gradient : made) {
    if (!gradient.defined()) gradient = at::empty({0}, input.options());
  }
  return {made[0], made[1], made[2], made[3]};
}

Tensor of_channels_meta(const Tensor& input) {
  return at::empty_symint({input.sym_size(1)}, input.options().dtype(at::kFloat));
}
Pair batch_norm_moments_meta(const Tensor& input) { return {of_channels_meta(input), of_channels_meta(input)}; }

Pair batch_norm_forward_meta(const Tensor& input, const MaybeTensor& /*weight*/, const MaybeTensor& /*bias*/,
                             const MaybeTensor& /*added*/, const Tensor& /*mean*/, const Tensor& /*invstd*/,
                             bool /*relu*/, at::IntArrayRef pool) {
  const auto bytes = input.options().dtype(at::kByte);
  if (pool.empty()) return {at::empty_like(input), at::empty({0}, bytes)};
  const std::vector<c10::SymInt> sizes{input.sym_size(0), input.sym_size(1), input.sym_size(2) / pool[0],
                                       input.sym_size(3) / pool[1]};
  const auto format = at::MemoryFormat::ChannelsLast;
  return {at::empty_symint(sizes, input.options().memory_format(format)),
          at::empty_symint(sizes, bytes.memory_format(format))};
}

Four batch_norm_backward_meta(const Tensor& /*grad_output*/, const Tensor& input, const MaybeTensor& /*weight*/,
                              const MaybeTensor& /*bias*/, const Tensor& /*mean*/, const Tensor& /*invstd*/,
                              const MaybeTensor& /*output*/, const MaybeTensor& /*taps*/, bool /*relu*/,
                              at::IntArrayRef /*pool*/, std::array<bool, 4> wanted) {
  const auto none = [&] { return at::empty({0}, input.options()); };
  return {wanted[0] ? at::empty_like(input) : none(), wanted[1] ? of_channels_meta(input) : none(),
          wanted[2] ? of_channels_meta(input) : none(), wanted[3] ? at::empty_like(input) : none()};
}

constexpr char kBatchNormMomentsName[] = "oxytorch::batch_norm_moments";
constexpr char kBatchNormForwardName[] = "oxytorch::batch_norm_forward";
constexpr char kBatchNormBackwardName[] = "oxytorch::batch_norm_backward";
using BatchNormMoments = Operator<kBatchNormMomentsName, decltype(batch_norm_moments_cpu)>;
using BatchNormForward = Operator<kBatchNormForwardName, decltype(batch_norm_forward_cpu)>;
using BatchNormBackward = Operator<kBatchNormBackwardName, decltype(batch_norm_backward_cpu)>;

// -- by torch's operators ---------------------------------------------------------------------------------------------

Tensor followed(Tensor value, const Tensor& added, bool relu, at::IntArrayRef pool) {
  if (added.defined()) value = value + added;
  if (relu) value = at::relu(value);
  return pool.empty() ? value : at::max_pool2d(value, pool, pool);
}

// -- derivatives ------------------------------------------------------------------------------------------------------

// With derivatives of their own. invstd is that of this input; eps is what invstd says it was.
Four composed_backward(const Tensor& grad_output, const Tensor& input, const Tensor& weight, const Tensor& bias,
                       const Tensor& invstd, const Tensor& output, bool relu, at::IntArrayRef pool,
                       std::array<bool, 4> wanted) {
  const at::AutoGradMode with_grad(true);
  const Tensor wide = input.to(at::kFloat);
  std::vector<std::int64_t> others;  // dimensions that are summed over
  for (std::int64_t d = 0; d < input.dim(); ++d) {
    if (d != 1) others.push_back(d);
  }
  std::vector<std::int64_t> shape(static_cast<std::size_t>(input.dim()), 1);
  shape[1] = input.size(1);
  const auto var = [&](const Tensor& t) { return (t - t.mean(others, true)).square().mean(others, true); };
  const Tensor eps = (invstd.square().reciprocal().view(shape) - var(wide.detach())).detach();
  Tensor value = (wide - wide.mean(others, true)) * (var(wide) + eps).rsqrt();
  if (weight.defined()) value = value * weight.view(shape);
  if (bias.defined()) value = value + bias.view(shape);
  // What was added is not kept: the result says where ReLU let it through.
  Tensor grad = grad_output.to(input.scalar_type());
  if (output.defined()) grad = grad * (output.detach() > 0);
  value = followed(value.to(input.scalar_type()), Tensor(), relu && !output.defined(), pool);
  torch::autograd::variable_list of;
  const std::array<Tensor, 3> given{input, weight, bias};
  for (std::size_t i = 0; i < given.size(); ++i) {
    if (wanted[i] && given[i].requires_grad()) of.push_back(given[i]);
  }
  std::array<Tensor, 4> made;
  if (!of.empty()) {
    const auto found = torch::autograd::grad({value}, of, {grad}, true, true);
    std::size_t at = 0;
    for (std::size_t i = 0; i < given.size(); ++i) {
      if (wanted[i] && given[i].requires_grad()) made[i] = found[at++];
    }
  }
  if (wanted[3]) made[3] = grad;
  for (auto& one : made) {
    if (!one.defined()) one = at::empty({0}, input.options());
  }
  return {made[0], made[1], made[2], made[3]};
}

struct BatchNormNode : torch::autograd::Node {
  std::string name() const override { return "OxytorchBatchNormBackward"; }

  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override {
    const std::lock_guard lock(mutex_);
    torch::autograd::variable_list made(4);
    if (!grads[0].defined()) return made;
    std::array<bool, 4> wanted{};
    for (std::size_t i = 0; i < 4; ++i) wanted[i] = task_should_compute_output(i);
    const auto saved = node_of(*this);
    const auto [of_input, of_weight, of_bias, of_added] = BatchNormBackward::call(
        grads[0], input.unpack(), if_defined(weight.unpack()), if_defined(bias.unpack()), mean.unpack(),
        invstd.unpack(), if_defined(output.unpack(saved)), if_defined(taps.unpack()), relu, pool, wanted);
    if (wanted[0]) made[0] = of_input;
    if (wanted[1]) made[1] = of_weight;
    if (wanted[2]) made[2] = of_bias;
    if (wanted[3]) made[3] = of_added;
    return made;
  }
  void release_variables() override {
    const std::lock_guard lock(mutex_);
    for (auto* saved : {&input, &weight, &bias, &mean, &invstd, &output, &taps}) saved->reset_data();
  }

  torch::autograd::SavedVariable input, weight, bias, mean, invstd, output, taps;
  bool relu = false;
  std::vector<std::int64_t> pool;
};

Pair batch_norm_forward_autograd(const Tensor& input, const MaybeTensor& weight, const MaybeTensor& bias,
                                 const MaybeTensor& added, const Tensor& mean, const Tensor& invstd, bool relu,
                                 at::IntArrayRef pool) {
  const Tensor scale = or_none(weight), shift = or_none(bias), plus = or_none(added);
  decltype(new_node<BatchNormNode>()) node;
  if (torch::autograd::compute_requires_grad(input, scale, shift, plus)) {
    node = new_node<BatchNormNode>();
    node->set_next_edges(torch::autograd::collect_next_edges(input, scale, shift, plus));
    node->input = {input, false};
    node->weight = {scale, false};
    node->bias = {shift, false};
    node->mean = {mean, false};
    node->invstd = {invstd, false};
    node->relu = relu;
    node->pool = pool.vec();
  }
  Tensor output, taps;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    std::tie(output, taps) = BatchNormForward::call(input, weight, bias, added, mean, invstd, relu, pool);
  }
  if (node) {
    torch::autograd::set_history(output, node);
    node->output = {plus.defined() && relu ? output : Tensor(), true};
    node->taps = {pool.empty() ? Tensor() : taps, false};
  }
  return {output, taps};
}

Four batch_norm_backward_autograd(const Tensor& grad_output, const Tensor& input, const MaybeTensor& weight,
                                  const MaybeTensor& bias, const Tensor& mean, const Tensor& invstd,
                                  const MaybeTensor& output, const MaybeTensor& taps, bool relu, at::IntArrayRef pool,
                                  std::array<bool, 4> wanted) {
  if (torch::autograd::compute_requires_grad(grad_output, input, or_none(weight), or_none(bias))) {
    return composed_backward(grad_output, input, or_none(weight), or_none(bias), invstd, or_none(output), relu, pool,
                             wanted);
  }
  const at::AutoDispatchBelowADInplaceOrView below;
  return BatchNormBackward::call(grad_output, input, weight, bias, mean, invstd, output, taps, relu, pool, wanted);
}

Pair batch_norm_moments_autograd(const Tensor& input) {
  const at::AutoDispatchBelowADInplaceOrView below;
  return BatchNormMoments::call(input);
}

// -- the function -----------------------------------------------------------------------------------------------------

std::vector<std::int64_t> windows_of(at::IntArrayRef pool) {
  OXY_CHECK(pool.size() <= 2 && std::all_of(pool.begin(), pool.end(), [](auto size) { return size > 0; }),
            InvalidArgument, "the pool of batch_norm is empty, a size, or a height and a width; it is ", pool, ".");
  if (pool.empty()) return {};
  return {pool.front(), pool.back()};
}

Tensor batch_norm_operator(const Tensor& input, const MaybeTensor& weight, const MaybeTensor& bias,
                           const MaybeTensor& running_mean, const MaybeTensor& running_var, double momentum, double eps,
                           const MaybeTensor& added, bool relu, at::IntArrayRef pool) {
  const Tensor scale = or_none(weight), shift = or_none(bias), plus = or_none(added);
  const auto windows = windows_of(pool);
  OXY_CHECK(input.dim() >= 2, InvalidArgument, "batch_norm takes batch x channels x any sizes; the input's are ",
            input.sym_sizes(), ".");
  OXY_CHECK(windows.empty() || input.dim() == 4, InvalidArgument,
            "batch_norm takes windows of images of 4 dimensions; the input's sizes are ", input.sym_sizes(), ".");
  OXY_CHECK(!plus.defined() || plus.sym_sizes() == input.sym_sizes(), InvalidArgument,
            "batch_norm adds a tensor of the sizes of its input, ", input.sym_sizes(), "; they are ", plus.sym_sizes(),
            ".");
  if (!batch_norm_cpu_takes(input, scale, shift) || !running_cpu_takes(input, running_mean, running_var)) {
    const Tensor value = at::batch_norm(input, weight, bias, running_mean, running_var, true, momentum, eps, false);
    return followed(value, plus, relu, windows);
  }
  const auto moments = batch_moments(input, running_mean, running_var, momentum, eps);
  return normalized(input, scale, shift, moments, plus, relu, windows);
}

constexpr char kBatchNormName[] = "oxytorch::batch_norm";
using WholeBatchNorm = Operator<kBatchNormName, decltype(batch_norm_operator)>;

TORCH_LIBRARY_FRAGMENT(oxytorch, m) {
  m.def(
      "batch_norm(Tensor input, Tensor? weight=None, Tensor? bias=None, Tensor(a!)? running_mean=None, "
      "Tensor(b!)? running_var=None, float momentum=0.1, float eps=1e-05, Tensor? added=None, bool relu=False, "
      "int[] pool=[]) -> Tensor");
  m.def("batch_norm_moments(Tensor input) -> (Tensor mean, Tensor variance)");
  m.def(
      "batch_norm_forward(Tensor input, Tensor? weight, Tensor? bias, Tensor? added, Tensor mean, Tensor invstd, "
      "bool relu, int[] pool) -> (Tensor output, Tensor taps)");
  m.def(
      "batch_norm_backward(Tensor grad_output, Tensor input, Tensor? weight, Tensor? bias, Tensor mean, Tensor invstd, "
      "Tensor? output, Tensor? taps, bool relu, int[] pool, bool[4] wanted) -> "
      "(Tensor grad_input, Tensor grad_weight, Tensor grad_bias, Tensor grad_added)");
}
TORCH_LIBRARY_IMPL(oxytorch, CompositeImplicitAutograd, m) {
  m.impl("batch_norm", &Kernel<&batch_norm_operator>::call);
}
TORCH_LIBRARY_IMPL(oxytorch, FuncTorchBatched, m) {
  m.impl("batch_norm", &Kernel<&batch_norm_operator>::call);
  m.impl("batch_norm_moments", &Kernel<&LoopOverSamples<BatchNormMoments>::call>::call);
  m.impl("batch_norm_forward", &Kernel<&LoopOverSamples<BatchNormForward>::call>::call);
  m.impl("batch_norm_backward", &Kernel<&LoopOverSamples<BatchNormBackward>::call>::call);
}
TORCH_LIBRARY_IMPL(oxytorch, Autograd, m) {
  m.impl("batch_norm_moments", &Kernel<&batch_norm_moments_autograd>::call);
  m.impl("batch_norm_forward", &Kernel<&batch_norm_forward_autograd>::call);
  m.impl("batch_norm_backward", &Kernel<&batch_norm_backward_autograd>::call);
}
TORCH_LIBRARY_IMPL(oxytorch, CPU, m) {
  m.impl("batch_norm_moments", &Kernel<&batch_norm_moments_cpu>::call);
  m.impl("batch_norm_forward", &Kernel<&batch_norm_forward_cpu>::call);
  m.impl("batch_norm_backward", &Kernel<&batch_norm_backward_cpu>::call);
}
TORCH_LIBRARY_IMPL(oxytorch, Meta, m) {
  m.impl("batch_norm_moments", &Kernel<&batch_norm_moments_meta>::call);
  m.impl("batch_norm_forward", &Kernel<&batch_norm_forward_meta>::call);
  m.impl("batch_norm_backward", &Kernel<&batch_norm_backward_meta>::call);
}

}  // namespace

bool running_cpu_takes(const Tensor& input, const MaybeTensor& mean, const MaybeTensor& var) {
  const auto fits = [&](const MaybeTensor& one) {
    return !one || !one->defined() ||
           (one->scalar_type() == at::kFloat && one->dim() == 1 && one->size(0) == input.size(1) &&
            one->device().is_cpu());
  };
  return fits(mean) && fits(var);
}

namespace {

// The part `momentum` of a running value becomes `factor` times that of the batch.
void follow(const MaybeTensor& running, const Tensor& of_batch, double factor, double momentum) {
  if (!running || !running->defined()) return;
  if (at::isTensorSubclassLike(*running)) {  // traced: there are no numbers yet
    running->mul_(1 - momentum).add_(of_batch, momentum * factor);
    return;
  }
  auto kept = running->accessor<float, 1>();
  const auto* now = of_batch.const_data_ptr<float>();
  for (std::int64_t c = 0; c < kept.size(0); ++c) {
    kept[c] = static_cast<float>((1 - momentum) * kept[c] + momentum * factor * now[c]);
  }
  running->unsafeGetTensorImpl()->bump_version();
}

}  // namespace

ChannelMoments batch_moments(const Tensor& input, const MaybeTensor& running_mean, const MaybeTensor& running_var,
                             double momentum, double eps) {
  const at::NoGradGuard no_grad;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const auto [mean, variance] = BatchNormMoments::call(input.detach());
  const auto count = static_cast<double>(input.numel() / input.size(1));
  follow(running_mean, mean, 1, momentum);
  follow(running_var, variance, count / (count - 1), momentum);
  return {mean, (variance + eps).rsqrt()};
}

Tensor normalized(const Tensor& input, const Tensor& weight, const Tensor& bias, const ChannelMoments& moments,
                  const Tensor& added, bool relu, at::IntArrayRef pool) {
  const bool adds = added.defined() && lies_as(added, input) && pool.empty();
  const bool is_last = !added.defined() || adds;
  const bool pools = is_last && !pool.empty() && windows_fill(input, pool);
  const Tensor value = std::get<0>(
      BatchNormForward::call(input, if_defined(weight), if_defined(bias), adds ? MaybeTensor(added) : std::nullopt,
                             moments.mean, moments.invstd, relu && is_last, pools ? pool : at::IntArrayRef()));
  return followed(value, is_last ? Tensor() : added, relu && !is_last, pools ? at::IntArrayRef() : pool);
}

Tensor batch_norm(const Tensor& input, const BatchNormOptions& options) {
  return WholeBatchNorm::call(input, options.weight, options.bias, options.running_mean, options.running_var,
                              options.momentum, options.eps, options.added, options.relu, options.pool);
}

}  // namespace oxytorch::ops
