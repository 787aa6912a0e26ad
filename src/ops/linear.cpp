// The operators oxytorch::linear, linear_forward and linear_backward.
#include "oxytorch/ops/linear.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/threshold_backward.h>
#include <torch/library.h>

#include "ops/dispatch.h"
#include "ops/gradient_sum.h"
#include "ops/linear_cpu.h"
#include "ops/product.h"
#include "ops/vmap.h"
#include "ops/wide_weight.h"
#include "oxytorch/error.h"

namespace oxytorch::ops {
namespace {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;
using Triple = std::tuple<Tensor, Tensor, Tensor>;

// -- the kernels ------------------------------------------------------------------------------------------------------

Tensor linear_forward_cpu(const Tensor& input, const Tensor& weight, const MaybeTensor& bias, bool relu) {
  const Tensor added = or_none(bias);
  OXY_CHECK(input.dim() == 2 && linear_cpu_takes(input, weight, added), InvalidArgument,
            "linear_forward does not take an input ", input.sizes(), " of ", input.scalar_type(), " and a weight ",
            weight.sizes(), " of ", weight.scalar_type(), " on this processor; call oxytorch::linear.");
  return linear_cpu(input, weight, added, relu);
}

// What is not wanted is an empty tensor: an operator returns no undefined ones.
Triple linear_backward_cpu(const Tensor& grad_output, const MaybeTensor& input, const Tensor& weight,
                           std::array<bool, 3> wanted, const MaybeTensor& output) {
  auto made = linear_cpu_backward(grad_output.to(at::kBFloat16), or_none(input), weight, wanted, {}, or_none(output));
  for (Tensor* gradient : {&made.input, &made.weight, &made.bias}) {
    if (!gradient->defined()) *gradient = at::empty({0}, weight.options());
  }
  return {made.input, made.weight, made.bias};
}

Tensor linear_forward_meta(const Tensor& input, const Tensor& weight, const MaybeTensor& /*bias*/, bool /*relu*/) {
  return at::empty_symint({input.sym_size(0), weight.sym_size(0)}, input.options());
}

Triple linear_backward_meta(const Tensor& grad_output, const MaybeTensor& /*input*/, const Tensor& weight,
                            std::array<bool, 3> wanted, const MaybeTensor& /*output*/) {
  const auto empty_if = [&](bool asked, c10::SymIntArrayRef sizes, at::ScalarType type) {
    return at::empty_symint(asked ? sizes : c10::SymIntArrayRef({0}),
                            weight.options().dtype(asked ? type : weight.scalar_type()));
  };
  return {empty_if(wanted[0], {grad_output.sym_size(0), weight.sym_size(1)}, at::kBFloat16),
          empty_if(wanted[1], weight.sym_sizes(), weight.scalar_type()),
          empty_if(wanted[2], {weight.sym_size(0)}, weight.scalar_type())};
}

constexpr char kLinearForwardName[] = "oxytorch::linear_forward";
constexpr char kLinearBackwardName[] = "oxytorch::linear_backward";
using LinearForward = Operator<kLinearForwardName, decltype(linear_forward_cpu)>;
using LinearBackward = Operator<kLinearBackwardName, decltype(linear_backward_cpu)>;

Tensor linear_forward_vmap(const Tensor& input, const Tensor& weight, const MaybeTensor& bias, bool relu) {
  const VmapCall call(input, weight, bias);
  if (call.is_mapped(weight) || call.is_mapped(bias)) {
    return call.each([&](std::int64_t i) {
      return LinearForward::call(call.of(input, i), call.of(weight, i), call.of(bias, i), relu);
    });
  }
  return call.unfold(LinearForward::call(call.fold(input), call.unwrap(weight), call.unwrap(bias), relu));
}

// Gradients of the weight are per sample, so they loop.
Triple linear_backward_vmap(const Tensor& grad_output, const MaybeTensor& input, const Tensor& weight,
                            std::array<bool, 3> wanted, const MaybeTensor& output) {
  const VmapCall call(grad_output, input, weight, output);
  if (!call.is_mapped(weight) && !wanted[1] && !wanted[2]) {
    const Tensor made = or_none(output);
    const auto [of_input, of_weight, of_bias] =
        LinearBackward::call(call.fold(grad_output), std::nullopt, call.unwrap(weight), wanted,
                             made.defined() ? MaybeTensor(call.fold(made)) : std::nullopt);
    return {wanted[0] ? call.unfold(of_input) : of_input, of_weight, of_bias};
  }
  return call.each([&](std::int64_t i) {
    return LinearBackward::call(call.of(grad_output, i), call.of(input, i), call.of(weight, i), wanted,
                                call.of(output, i));
  });
}

// -- derivatives ------------------------------------------------------------------------------------------------------

// By torch's operators, which have derivatives themselves.
Triple composed_backward(const Tensor& grad_output, const Tensor& input, const Tensor& weight,
                         std::array<bool, 3> wanted, const Tensor& output) {
  const Tensor given = grad_output.to(at::kBFloat16);
  const Tensor grad = output.defined() ? at::threshold_backward(given, output, 0) : given;
  const auto type = weight.scalar_type();
  const auto none = [&] { return at::empty({0}, weight.options()); };
  return {wanted[0] ? grad.mm(weight.to(at::kBFloat16)) : none(), wanted[1] ? grad.t().mm(input).to(type) : none(),
          wanted[2] ? grad.sum(0).to(type) : none()};
}

struct LinearNode : torch::autograd::Node {
  std::string name() const override { return "OxytorchLinearBackward"; }

  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override {
    const std::lock_guard lock(mutex_);
    torch::autograd::variable_list made(3);
    if (!grads[0].defined()) return made;
    std::array<bool, 3> wanted{};
    for (std::size_t i = 0; i < 3; ++i) wanted[i] = task_should_compute_output(i);
    const Tensor kept = input.unpack(), by = weight.unpack(),
                 made_then = output.unpack(node_of<torch::autograd::Node>(*this));
    if (wanted[1]) {
      const GradientSum sum(next_edge(1), grads[0]);
      if (sum.tensor().defined() && linear_cpu_takes(kept, by, {})) {
        auto gradients = linear_cpu_backward(grads[0].to(at::kBFloat16), kept, by, wanted, sum.tensor(), made_then);
        made[0] = std::move(gradients.input);
        made[2] = std::move(gradients.bias);
        return made;
      }
    }
    const auto [of_input, of_weight, of_bias] =
        LinearBackward::call(grads[0], if_defined(kept), by, wanted, if_defined(made_then));
    if (wanted[0]) made[0] = of_input;
    if (wanted[1]) made[1] = of_weight;
    if (wanted[2]) made[2] = of_bias;
    return made;
  }
  void release_variables() override {
    const std::lock_guard lock(mutex_);
    for (auto* saved : {&input, &weight, &output}) saved->reset_data();
  }

  torch::autograd::SavedVariable input, weight, output;  // the output where ReLU made it
};

Tensor linear_forward_autograd(const Tensor& input, const Tensor& weight, const MaybeTensor& bias, bool relu) {
  const Tensor added = or_none(bias);
  decltype(new_node<LinearNode>()) node;
  if (torch::autograd::compute_requires_grad(input, weight, added)) {
    node = new_node<LinearNode>();
    node->set_next_edges(torch::autograd::collect_next_edges(input, weight, added));
    // As torch's linear: each is kept for the gradient of the other.
    node->input = {weight.requires_grad() ? input : Tensor(), false};
    node->weight = {weight, false};
  }
  Tensor output;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    output = LinearForward::call(input, weight, bias, relu);
  }
  if (node) {
    torch::autograd::set_history(output, node);
    if (relu) node->output = {output, true};
  }
  return output;
}

Triple linear_backward_autograd(const Tensor& grad_output, const MaybeTensor& input, const Tensor& weight,
                                std::array<bool, 3> wanted, const MaybeTensor& output) {
  if (torch::autograd::compute_requires_grad(grad_output, or_none(input), weight)) {
    return composed_backward(grad_output, or_none(input), weight, wanted, or_none(output));
  }
  const at::AutoDispatchBelowADInplaceOrView below;
  return LinearBackward::call(grad_output, input, weight, wanted, output);
}

// -- the function -----------------------------------------------------------------------------------------------------

void check_linear(const Tensor& input, const Tensor& weight, const Tensor& bias) {
  OXY_CHECK(input.dim() >= 1 && weight.dim() == 2 && input.sym_size(-1) == weight.sym_size(1), InvalidArgument,
            "linear takes an input of any sizes x features and a weight of outputs x features; they are ",
            input.sym_sizes(), " and ", weight.sym_sizes(), ".");
  check_types("linear", input, weight, bias);
  OXY_CHECK(!bias.defined() || (bias.dim() == 1 && bias.sym_size(0) == weight.sym_size(0)), InvalidArgument,
            "linear takes a bias for each of the ", weight.sym_size(0), " outputs; its sizes are ", bias.sym_sizes(),
            ".");
}

bool has_linear_kernel(const Tensor& input) {
  return input.device().is_cpu() && input.scalar_type() == at::kBFloat16 &&
         product_format(kernels::ElementType::BF16) == kernels::TileFormat::BFloat16;
}

Tensor linear_operator(const Tensor& input, const Tensor& weight, const MaybeTensor& bias, bool relu) {
  const Tensor added = or_none(bias);
  check_linear(input, weight, added);
  if (!has_linear_kernel(input) || input.sym_numel() == 0 || weight.sym_numel() == 0) {
    const Tensor made = linear_by_torch(input, weight, bias);
    return relu ? at::relu(made) : made;
  }
  if (input.dim() == 2) return LinearForward::call(input, weight, bias, relu);
  auto sizes = input.sym_sizes().vec();
  const Tensor rows = input.dim() == 1 ? input.unsqueeze(0) : input.flatten(0, -2);
  sizes.back() = weight.sym_size(0);
  return LinearForward::call(rows, weight, bias, relu).view_symint(sizes);
}

constexpr char kLinearName[] = "oxytorch::linear";
using WholeLinear = Operator<kLinearName, decltype(linear_operator)>;

Tensor linear_autocast(const Tensor& input, const Tensor& weight, const MaybeTensor& bias, bool relu) {
  const c10::impl::ExcludeDispatchKeyGuard below(c10::autocast_dispatch_keyset);
  const auto [narrow, by, added] = autocast_input(input, weight, bias);
  return WholeLinear::call(narrow, by, added, relu);
}

TORCH_LIBRARY_FRAGMENT(oxytorch, m) {
  m.def("linear(Tensor input, Tensor weight, Tensor? bias=None, *, bool relu=False) -> Tensor");
  m.def("linear_forward(Tensor input, Tensor weight, Tensor? bias, bool relu) -> Tensor");
  m.def(
      "linear_backward(Tensor grad_output, Tensor? input, Tensor weight, bool[3] wanted, Tensor? output) -> "
      "(Tensor grad_input, Tensor grad_weight, Tensor grad_bias)");
}
TORCH_LIBRARY_IMPL(oxytorch, CompositeImplicitAutograd, m) { m.impl("linear", &Kernel<&linear_operator>::call); }
TORCH_LIBRARY_IMPL(oxytorch, FuncTorchBatched, m) {
  m.impl("linear", &Kernel<&linear_operator>::call);
  m.impl("linear_forward", &Kernel<&linear_forward_vmap>::call);
  m.impl("linear_backward", &Kernel<&linear_backward_vmap>::call);
}
const auto linear_autocast_kernels =
    on_autocast([](torch::Library& m) { m.impl("linear", &Kernel<&linear_autocast>::call); });
TORCH_LIBRARY_IMPL(oxytorch, Autograd, m) {
  m.impl("linear_forward", &Kernel<&linear_forward_autograd>::call);
  m.impl("linear_backward", &Kernel<&linear_backward_autograd>::call);
}
TORCH_LIBRARY_IMPL(oxytorch, CPU, m) {
  m.impl("linear_forward", &Kernel<&linear_forward_cpu>::call);
  m.impl("linear_backward", &Kernel<&linear_backward_cpu>::call);
}
TORCH_LIBRARY_IMPL(oxytorch, Meta, m) {
  m.impl("linear_forward", &Kernel<&linear_forward_meta>::call);
  m.impl("linear_backward", &Kernel<&linear_backward_meta>::call);
}

}  // namespace

Tensor linear(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, bool relu) {
  return WholeLinear::call(input, weight, bias, relu);
}

}  // namespace oxytorch::ops
