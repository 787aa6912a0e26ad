// The operators oxytorch::gelu, swiglu and geglu, and activated_forward and activated_backward under them.
#include "oxytorch/ops/activation.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/chunk.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/silu.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/library.h>

#include <array>

#include "base/spelling.h"
#include "ops/activation_cpu.h"
#include "ops/dispatch.h"
#include "ops/vmap.h"
#include "oxytorch/error.h"

namespace oxytorch::ops {
namespace {

using at::Tensor;
using kernels::Activation;
using MaybeTensor = std::optional<Tensor>;

// -- names ------------------------------------------------------------------------------------------------------------

Activation gelu_form(std::string_view approximate) {
  OXY_CHECK(approximate == "none" || approximate == "tanh", InvalidArgument, "approximate is ", in_quotes(approximate),
            "; give 'none' or 'tanh'.");
  return approximate == "tanh" ? Activation::GeluTanh : Activation::Gelu;
}
constexpr std::array<std::string_view, 3> kActivations{"gelu", "gelu_tanh", "silu"};
std::string_view name_of(Activation activation) { return kActivations[static_cast<std::size_t>(activation)]; }
Activation activation_named(std::string_view name) {
  for (std::size_t i = 0; i < kActivations.size(); ++i) {
    if (kActivations[i] == name) return static_cast<Activation>(i);
  }
  detail::raise(ErrorCode::InvalidArgument, "there is no activation ", in_quotes(name),
                "; give 'gelu', 'gelu_tanh' or 'silu'.");
}

// -- the kernels ------------------------------------------------------------------------------------------------------

Tensor activated_forward_cpu(const Tensor& input, const MaybeTensor& times, std::string_view activation, bool packed) {
  const Tensor up = or_none(times);
  OXY_CHECK(activation_cpu_takes(input, up), InvalidArgument, "activated_forward does not take an input ",
            input.sizes(), " of ", input.scalar_type(), "; call oxytorch::gelu, swiglu or geglu.");
  return activation_cpu({activation_named(activation), input, up, packed});
}

// What is not wanted is an empty tensor: an operator returns no undefined ones.
std::tuple<Tensor, Tensor> activated_backward_cpu(const Tensor& grad_output, const Tensor& input,
                                                  const MaybeTensor& times, std::string_view activation, bool packed,
                                                  std::array<bool, 2> wanted) {
  const Tensor up = or_none(times);
  auto made = activation_cpu_backward({activation_named(activation), input, up, packed}, grad_output, wanted);
  for (auto& gradient : made) {
    if (!gradient.defined()) gradient = at::empty({0}, input.options());
  }
  return {made[0], made[1]};
}

Tensor activated_forward_meta(const Tensor& input, const MaybeTensor& /*times*/, std::string_view /*activation*/,
                              bool packed) {
  if (!packed) return at::empty_like(input);
  auto sizes = input.sym_sizes().vec();
  sizes.back() = sizes.back() / 2;
  return at::empty_symint(sizes, input.options());
}

std::tuple<Tensor, Tensor> activated_backward_meta(const Tensor& /*grad_output*/, const Tensor& input,
                                                   const MaybeTensor& times, std::string_view /*activation*/,
                                                   bool /*packed*/, std::array<bool, 2> wanted) {
  const auto none = [&] { return at::empty({0}, input.options()); };
  return {wanted[0] ? at::empty_like(input) : none(),
          wanted[1] && or_none(times).defined() ? at::empty_like(input) : none()};
}

constexpr char kActivatedForwardName[] = "oxytorch::activated_forward";
constexpr char kActivatedBackwardName[] = "oxytorch::activated_backward";
using ActivatedForward = Operator<kActivatedForwardName, decltype(activated_forward_cpu)>;
using ActivatedBackward = Operator<kActivatedBackwardName, decltype(activated_backward_cpu)>;

// -- by torch's operators, and derivatives ----------------------------------------------------------------------------

Tensor composed_activation(const Tensor& input, const Tensor& times, Activation activation, bool packed) {
  if (packed) {
    const auto halves = at::chunk(input, 2, -1);
    return composed_activation(halves[0], halves[1], activation, false);
  }
  const Tensor value = activation == Activation::Silu
                           ? at::silu(input)
                           : at::gelu(input, activation == Activation::Gelu ? "none" : "tanh");
  return times.defined() ? value * times : value;
}

Tensor activated_forward_composed(const Tensor& input, const MaybeTensor& times, std::string_view activation,
                                  bool packed) {
  return composed_activation(input, or_none(times), activation_named(activation), packed);
}

// With derivatives of their own.
std::tuple<Tensor, Tensor> composed_activation_backward(const Tensor& grad_output, const Tensor& input,
                                                        const Tensor& times, Activation activation, bool packed,
                                                        std::array<bool, 2> wanted) {
  const at::AutoGradMode with_grad(true);
  std::array<Tensor, 2> made, from{input, times};
  torch::autograd::variable_list of;
  for (std::size_t i = 0; i < 2; ++i) {
    if (!wanted[i] || !from[i].defined()) continue;
    // A gradient's own inputs may need no gradient, yet it is taken by them.
    if (!from[i].requires_grad()) from[i] = from[i].detach().requires_grad_();
    of.push_back(from[i]);
  }
  if (!of.empty()) {
    const Tensor value = composed_activation(from[0], from[1], activation, packed);
    const auto found = torch::autograd::grad({value}, of, {grad_output.to(value.scalar_type())}, true, true);
    std::size_t at = 0;
    for (std::size_t i = 0; i < 2; ++i) {
      if (wanted[i] && from[i].defined()) made[i] = found[at++];
    }
  }
  for (auto& one : made) {
    if (!one.defined()) one = at::empty({0}, input.options());
  }
  return {made[0], made[1]};
}

struct ActivatedNode : torch::autograd::Node {
  std::string name() const override { return "OxytorchActivatedBackward"; }

  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override {
    const std::lock_guard lock(mutex_);
    torch::autograd::variable_list made(2);
    if (!grads[0].defined()) return made;
    const std::array<bool, 2> wanted{task_should_compute_output(0), task_should_compute_output(1)};
    const Tensor up = times.unpack();
    auto [of_input, of_times] =
        ActivatedBackward::call(grads[0], input.unpack(), if_defined(up), name_of(activation), packed, wanted);
    if (wanted[0]) made[0] = of_input;
    if (wanted[1] && up.defined()) made[1] = of_times;
    return made;
  }
  void release_variables() override {
    const std::lock_guard lock(mutex_);
    for (auto* saved : {&input, &times}) saved->reset_data();
  }

  torch::autograd::SavedVariable input, times;
  Activation activation = Activation::Gelu;
  bool packed = false;
};

Tensor activated_forward_autograd(const Tensor& input, const MaybeTensor& times, std::string_view activation,
                                  bool packed) {
  const Tensor up = or_none(times);
  decltype(new_node<ActivatedNode>()) node;
  if (torch::autograd::compute_requires_grad(input, up)) {
    node = new_node<ActivatedNode>();
    node->set_next_edges(torch::autograd::collect_next_edges(input, up));
    node->input = {input, false};
    node->times = {up, false};
    node->activation = activation_named(activation);
    node->packed = packed;
  }
  Tensor output;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    output = ActivatedForward::call(input, times, activation, packed);
  }
  if (node) torch::autograd::set_history(output, node);
  return output;
}

std::tuple<Tensor, Tensor> activated_backward_autograd(const Tensor& grad_output, const Tensor& input,
                                                       const MaybeTensor& times, std::string_view activation,
                                                       bool packed, std::array<bool, 2> wanted) {
  if (torch::autograd::compute_requires_grad(grad_output, input, or_none(times))) {
    return composed_activation_backward(grad_output, input, or_none(times), activation_named(activation), packed,
                                        wanted);
  }
  const at::AutoDispatchBelowADInplaceOrView below;
  return ActivatedBackward::call(grad_output, input, times, activation, packed, wanted);
}

// -- the functions ----------------------------------------------------------------------------------------------------

Tensor activated(const Tensor& input, const Tensor& times, Activation activation, bool packed) {
  const bool has = has_kernel(input) && input.layout() == at::kStrided && input.sym_numel() != 0 &&
                   (!times.defined() || times.layout() == at::kStrided);
  if (!has) return composed_activation(input, times, activation, packed);
  return ActivatedForward::call(input, if_defined(times), name_of(activation), packed);
}

Tensor gated(const char* name, const Tensor& gate, const MaybeTensor& up, Activation activation) {
  const Tensor times = or_none(up);
  if (!times.defined()) {
    OXY_CHECK(gate.dim() >= 1 && gate.sym_size(-1) % 2 == 0, InvalidArgument, name,
              " without a second tensor takes one that holds two of the same size side by side; its sizes are ",
              gate.sym_sizes(), ".");
    return activated(gate, {}, activation, true);
  }
  OXY_CHECK(gate.sym_sizes() == times.sym_sizes(), InvalidArgument, name,
            " takes two tensors of the same sizes; they are ", gate.sym_sizes(), " and ", times.sym_sizes(), ".");
  OXY_CHECK(gate.scalar_type() == times.scalar_type(), InvalidType, name, " takes two tensors of one dtype; they are ",
            gate.scalar_type(), " and ", times.scalar_type(), ".");
  OXY_CHECK(gate.device() == times.device(), InvalidArgument, name, " takes two tensors on one device; they are on ",
            gate.device(), " and ", times.device(), ".");
  return activated(gate, times, activation, false);
}

Tensor gelu_operator(const Tensor& input, std::string_view approximate) {
  return activated(input, {}, gelu_form(approximate), false);
}
Tensor swiglu_operator(const Tensor& gate, const MaybeTensor& up) {
  return gated("swiglu", gate, up, Activation::Silu);
}
Tensor geglu_operator(const Tensor& gate, const MaybeTensor& up, std::string_view approximate) {
  return gated("geglu", gate, up, gelu_form(approximate));
}

constexpr char kGeluName[] = "oxytorch::gelu";
constexpr char kSwigluName[] = "oxytorch::swiglu";
constexpr char kGegluName[] = "oxytorch::geglu";
using WholeGelu = Operator<kGeluName, decltype(gelu_operator)>;
using WholeSwiglu = Operator<kSwigluName, decltype(swiglu_operator)>;
using WholeGeglu = Operator<kGegluName, decltype(geglu_operator)>;

TORCH_LIBRARY_FRAGMENT(oxytorch, m) {
  m.def("gelu(Tensor input, str approximate='none') -> Tensor");
  m.def("swiglu(Tensor gate, Tensor? up=None) -> Tensor");
  m.def("geglu(Tensor gate, Tensor? up=None, str approximate='none') -> Tensor");
  m.def("activated_forward(Tensor input, Tensor? times, str activation, bool packed) -> Tensor");
  m.def(
      "activated_backward(Tensor grad_output, Tensor input, Tensor? times, str activation, bool packed, "
      "bool[2] wanted) -> (Tensor grad_input, Tensor grad_times)");
}
TORCH_LIBRARY_IMPL(oxytorch, CompositeImplicitAutograd, m) {
  m.impl("gelu", &Kernel<&gelu_operator>::call);
  m.impl("swiglu", &Kernel<&swiglu_operator>::call);
  m.impl("geglu", &Kernel<&geglu_operator>::call);
}
TORCH_LIBRARY_IMPL(oxytorch, FuncTorchBatched, m) {
  m.impl("gelu", &Kernel<&gelu_operator>::call);
  m.impl("swiglu", &Kernel<&swiglu_operator>::call);
  m.impl("geglu", &Kernel<&geglu_operator>::call);
  // Torch's operators know batches.
  m.impl("activated_forward", &Kernel<&activated_forward_composed>::call);
  m.impl("activated_backward", &Kernel<&LoopOverSamples<ActivatedBackward>::call>::call);
}
TORCH_LIBRARY_IMPL(oxytorch, Autograd, m) {
  m.impl("activated_forward", &Kernel<&activated_forward_autograd>::call);
  m.impl("activated_backward", &Kernel<&activated_backward_autograd>::call);
}
TORCH_LIBRARY_IMPL(oxytorch, CPU, m) {
  m.impl("activated_forward", &Kernel<&activated_forward_cpu>::call);
  m.impl("activated_backward", &Kernel<&activated_backward_cpu>::call);
}
TORCH_LIBRARY_IMPL(oxytorch, Meta, m) {
  m.impl("activated_forward", &Kernel<&activated_forward_meta>::call);
  m.impl("activated_backward", &Kernel<&activated_backward_meta>::call);
}

}  // namespace

Tensor gelu(const Tensor& input, std::string_view approximate) { return WholeGelu::call(input, approximate); }
Tensor swiglu(const Tensor& gate, const std::optional<Tensor>& up) { return WholeSwiglu::call(gate, up); }
Tensor geglu(const Tensor& gate, const std::optional<Tensor>& up, std::string_view approximate) {
  return WholeGeglu::call(gate, up, approximate);
}

}  // namespace oxytorch::ops
