// The operators oxytorch::linear_cross_entropy and linear_cross_entropy_forward.
#include "oxytorch/ops/linear_cross_entropy.h"

#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/library.h>

#include "ops/dispatch.h"
#include "ops/gradient_sum.h"
#include "ops/linear_cross_entropy_kernels.h"
#include "ops/vmap.h"
#include "ops/wide_weight.h"
#include "oxytorch/error.h"

namespace oxytorch::ops {
namespace {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;
using Results = std::tuple<Tensor, Tensor, Tensor, Tensor>;

// What is not wanted is an empty tensor: an operator returns no undefined ones.
template <auto kKernel>
Results loss_forward(const Tensor& input, const Tensor& weight, const Tensor& target, const MaybeTensor& bias,
                     std::int64_t ignore_index, double label_smoothing, bool mean, std::array<bool, 3> wanted) {
  const Tensor added = or_none(bias);
  auto done = kKernel({input, weight, target, added, ignore_index, label_smoothing, mean}, wanted);
  for (Tensor* gradient : {&done.input, &done.weight, &done.bias}) {
    if (!gradient->defined()) *gradient = at::empty({0}, input.options());
  }
  return {done.loss, done.input, done.weight, done.bias};
}

Results loss_forward_meta(const Tensor& input, const Tensor& weight, const Tensor& /*target*/,
                          const MaybeTensor& /*bias*/, std::int64_t /*ignore_index*/, double /*label_smoothing*/,
                          bool /*mean*/, std::array<bool, 3> wanted) {
  const auto empty_if = [&](bool asked, c10::SymIntArrayRef sizes, const Tensor& like) {
    const auto options = input.options();
    return asked ? at::empty_symint(sizes, options.dtype(type_of_gradient(like.scalar_type())))
                 : at::empty({0}, options);
  };
  return {at::empty({}, input.options().dtype(at::kFloat)), empty_if(wanted[0], input.sym_sizes(), input),
          empty_if(wanted[1], weight.sym_sizes(), weight), empty_if(wanted[2], {weight.sym_size(0)}, weight)};
}

constexpr char kLossForwardName[] = "oxytorch::linear_cross_entropy_forward";
using LossForward = Operator<kLossForwardName, decltype(loss_forward_meta)>;

struct LossNode : torch::autograd::Node {
  std::string name() const override { return "OxytorchLinearCrossEntropyBackward"; }

  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override {
    const std::lock_guard lock(mutex_);
    torch::autograd::variable_list scaled(3);
    if (!grads[0].defined()) return scaled;
    const Tensor in = input.unpack(), by = weight.unpack(), added = bias.unpack();
    for (std::size_t i = 0; i < 3; ++i) {
      if (task_should_compute_output(i)) scaled[i] = times(gradients[i], grads[0]).to(types[i]);
    }
    if (scaled[1].defined()) {
      const GradientSum sum(next_edge(1), grads[0]);
      if (sum.tensor().defined()) {
        sum.tensor().add_(scaled[1]);
        scaled[1] = Tensor();
      }
    }
    torch::autograd::variable_list made;
    for (const auto& one : scaled) {
      if (one.defined()) made.push_back(one);
    }
    differentiable_once("linear_cross_entropy", made, grads[0], in, by, added);
    return scaled;
  }
  void release_variables() override {
    const std::lock_guard lock(mutex_);
    for (auto* saved : {&input, &weight, &bias}) saved->reset_data();
    for (auto& saved : gradients) saved.reset_data();
  }

  torch::autograd::SavedVariable input, weight, bias;
  std::array<torch::autograd::SavedVariable, 3> gradients;
  std::array<at::ScalarType, 3> types{};

 private:
  // The gradient of a large weight is not copied where this is its last use.
  static Tensor times(torch::autograd::SavedVariable& saved, const Tensor& number) {
    const at::AutoGradMode once(false);
    Tensor gradient = saved.unpack();
    if (!torch::autograd::get_current_graph_task_keep_graph()) saved.reset_data();
    const bool is_ours = gradient.use_count() == 1 && is_plain(gradient) && gradient.storage().use_count() == 1;
    if (!is_ours || !is_plain(number) || is_transformed()) return gradient * number;  // which does not widen it
    return number.is_cpu() && number.item<float>() == 1 ? gradient : gradient.mul_(number);
  }
};

Results loss_forward_autograd(const Tensor& input, const Tensor& weight, const Tensor& target, const MaybeTensor& bias,
                              std::int64_t ignore_index, double label_smoothing, bool mean,
                              std::array<bool, 3> wanted) {
  const Tensor added = or_none(bias);
  const auto needs = [](const Tensor& t) { return at::GradMode::is_enabled() && t.defined() && t.requires_grad(); };
  // A compiled graph says what it wants, and runs without gradients.
  wanted = {wanted[0] || needs(input), wanted[1] || needs(weight), wanted[2] || needs(added)};
  Results results;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    results = LossForward::call(input, weight, target, bias, ignore_index, label_smoothing, mean, wanted);
  }
  if (!torch::autograd::compute_requires_grad(input, weight, added)) return results;
  auto node = new_node<LossNode>();
  node->set_next_edges(torch::autograd::collect_next_edges(input, weight, added));
  node->input = {input, false};
  node->weight = {weight, false};
  node->bias = {added, false};
  node->types = {input.scalar_type(), weight.scalar_type(), added.defined() ? added.scalar_type() : at::kFloat};
  const auto& [loss, of_input, of_weight, of_bias] = results;
  node->gradients[0] = {of_input, false};
  node->gradients[1] = {of_weight, false};
  node->gradients[2] = {of_bias, false};
  torch::autograd::set_history(loss, node);
  return results;
}

void check(const Tensor& input, const Tensor& weight, const Tensor& target, const MaybeTensor& bias,
           double label_smoothing) {
  OXY_CHECK(input.dim() >= 1 && weight.dim() == 2 && input.sym_size(-1) == weight.sym_size(1), InvalidArgument,
            "linear_cross_entropy takes an input of any sizes x width and a weight of classes x width; they are ",
            input.sym_sizes(), " and ", weight.sym_sizes(), ".");
  OXY_CHECK(target.scalar_type() == at::kLong, InvalidType, "linear_cross_entropy takes targets of int64; they are ",
            target.scalar_type(), ".");
  OXY_CHECK(target.sym_sizes() == input.sym_sizes().slice(0, static_cast<std::size_t>(input.dim()) - 1),
            InvalidArgument, "linear_cross_entropy takes a target for each row of its input; input is ",
            input.sym_sizes(), ", target ", target.sym_sizes(), ".");
  const Tensor added = or_none(bias);
  check_types("linear_cross_entropy", input, weight, added);
  OXY_CHECK(!added.defined() || (added.dim() == 1 && added.sym_size(0) == weight.sym_size(0)), InvalidArgument,
            "linear_cross_entropy takes a bias for each of the ", weight.sym_size(0), " classes.");
  OXY_CHECK(label_smoothing >= 0 && label_smoothing <= 1, InvalidArgument, "label_smoothing is ", label_smoothing,
            "; give a number from 0 to 1.");
}

Tensor loss_operator(const Tensor& input, const Tensor& weight, const Tensor& target, const MaybeTensor& bias,
                     std::int64_t ignore_index, double label_smoothing, bool mean) {
  check(input, weight, target, bias, label_smoothing);
  const Tensor rows = input.dim() == 1 ? input.unsqueeze(0) : input.flatten(0, -2), targets = target.flatten();
  // That of float64 is for those who differentiate twice.
  if (!is_narrow(input) || input.sym_numel() == 0 || weight.sym_numel() == 0) {
    Tensor logits = linear_by_torch(rows, weight, bias);
    if (input.scalar_type() != at::kDouble) logits = logits.to(at::kFloat);
    return at::cross_entropy_loss(logits, targets, {}, mean ? at::Reduction::Mean : at::Reduction::Sum, ignore_index,
                                  label_smoothing);
  }
  constexpr std::array<bool, 3> kNone{};
  return std::get<0>(LossForward::call(rows, weight, targets, bias, ignore_index, label_smoothing, mean, kNone));
}

constexpr char kLossName[] = "oxytorch::linear_cross_entropy";
using WholeLoss = Operator<kLossName, decltype(loss_operator)>;

Tensor loss_autocast(const Tensor& input, const Tensor& weight, const Tensor& target, const MaybeTensor& bias,
                     std::int64_t ignore_index, double label_smoothing, bool mean) {
  const c10::impl::ExcludeDispatchKeyGuard below(c10::autocast_dispatch_keyset);
  const auto [narrow, by, added] = autocast_input(input, weight, bias);
  return WholeLoss::call(narrow, by, target, added, ignore_index, label_smoothing, mean);
}

TORCH_LIBRARY_FRAGMENT(oxytorch, m) {
  m.def(
      "linear_cross_entropy(Tensor input, Tensor weight, Tensor target, Tensor? bias=None, int ignore_index=-100, "
      "float label_smoothing=0., bool mean=True) -> Tensor");
  m.def(
      "linear_cross_entropy_forward(Tensor input, Tensor weight, Tensor target, Tensor? bias, int ignore_index, "
      "float label_smoothing, bool mean, bool[3] wanted) -> "
      "(Tensor loss, Tensor grad_input, Tensor grad_weight, Tensor grad_bias)");
}
TORCH_LIBRARY_IMPL(oxytorch, CompositeImplicitAutograd, m) {
  m.impl("linear_cross_entropy", &Kernel<&loss_operator>::call);
}
TORCH_LIBRARY_IMPL(oxytorch, FuncTorchBatched, m) {
  m.impl("linear_cross_entropy", &Kernel<&loss_operator>::call);
  m.impl("linear_cross_entropy_forward", &Kernel<&LoopOverSamples<LossForward>::call>::call);
}
const auto loss_autocast_kernels =
    on_autocast([](torch::Library& m) { m.impl("linear_cross_entropy", &Kernel<&loss_autocast>::call); });
TORCH_LIBRARY_IMPL(oxytorch, Autograd, m) {
  m.impl("linear_cross_entropy_forward", &Kernel<&loss_forward_autograd>::call);
}
TORCH_LIBRARY_IMPL(oxytorch, CPU, m) {
  m.impl("linear_cross_entropy_forward", &Kernel<&loss_forward<&linear_cross_entropy_cpu>>::call);
}
TORCH_LIBRARY_IMPL(oxytorch, CompositeExplicitAutograd, m) {
  m.impl("linear_cross_entropy_forward", &Kernel<&loss_forward<&linear_cross_entropy_by_torch>>::call);
}
TORCH_LIBRARY_IMPL(oxytorch, Meta, m) { m.impl("linear_cross_entropy_forward", &Kernel<&loss_forward_meta>::call); }

}  // namespace

Tensor linear_cross_entropy(const Tensor& input, const Tensor& weight, const Tensor& target,
                            const LinearCrossEntropyOptions& options) {
  return WholeLoss::call(input, weight, target, options.bias, options.ignore_index, options.label_smoothing,
                         options.reduction == LossReduction::Mean);
}

}  // namespace oxytorch::ops
