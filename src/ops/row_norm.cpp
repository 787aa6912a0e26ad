// The operators oxytorch::layer_norm, rms_norm, add_layer_norm and add_rms_norm, and row_norm_forward and
// row_norm_backward under them.
#include "ops/row_norm.h"

#include <ATen/TensorOperators.h>
#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/rms_norm.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/library.h>

#include <array>
#include <limits>

#include "ops/bernoulli_cpu.h"
#include "ops/dispatch.h"
#include "ops/vmap.h"
#include "oxytorch/error.h"
#include "oxytorch/ops/row_norm.h"

namespace oxytorch::ops {
namespace {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;
using Four = std::tuple<Tensor, Tensor, Tensor, Tensor>;

// -- the kernels ------------------------------------------------------------------------------------------------------

Four row_norm_forward_cpu(const Tensor& input, const MaybeTensor& residual, const MaybeTensor& keep,
                          const MaybeTensor& weight, const MaybeTensor& bias, double eps, double keep_scale,
                          bool is_centered, std::optional<at::ScalarType> dtype) {
  const NormOfSum of{input,      or_none(residual), or_none(keep), or_none(weight), or_none(bias), eps,
                     keep_scale, is_centered,       dtype};
  OXY_CHECK(row_norm_cpu_takes(of), InvalidArgument, "row_norm_forward does not take an input ", input.sizes(), " of ",
            input.scalar_type(), " with these; call oxytorch::layer_norm, rms_norm or the like.");
  auto made = row_norm_cpu(of);
  // An operator returns no undefined tensor.
  if (!made.sum.defined()) made.sum = at::empty({0}, input.options());
  return {made.output, made.sum, made.mean, made.invstd};
}

Four row_norm_backward_cpu(const Tensor& grad_output, const MaybeTensor& grad_sum, const Tensor& sum,
                           const Tensor& mean, const Tensor& invstd, const MaybeTensor& keep, const MaybeTensor& weight,
                           at::ScalarType input_type, at::ScalarType residual_type, double keep_scale, bool is_centered,
                           std::array<bool, 4> wanted) {
  auto made = row_norm_cpu_backward(
      {sum, mean, invstd, or_none(keep), or_none(weight), keep_scale, is_centered, input_type, residual_type},
      grad_output, or_none(grad_sum), wanted);
  for (auto& gradient : made) {
    if (!gradient.defined()) gradient = at::empty({0}, sum.options());
  }
  return {made[0], made[1], made[2], made[3]};
}

Tensor empty_rows_like(const Tensor& tensor, at::ScalarType type) {
  return at::empty_symint(tensor.sym_sizes(), tensor.options().dtype(type));
}

Four row_norm_forward_meta(const Tensor& input, const MaybeTensor& residual, const MaybeTensor& keep,
                           const MaybeTensor& /*weight*/, const MaybeTensor& /*bias*/, double /*eps*/,
                           double /*keep_scale*/, bool is_centered, std::optional<at::ScalarType> dtype) {
  NormOfSum of{input, or_none(residual), or_none(keep), {}, {}};
  of.rounded_to = dtype;
  auto of_rows = input.sym_sizes().vec();
  of_rows.back() = 1;
  const auto floats = input.options().dtype(at::kFloat);
  return {empty_rows_like(input, of.result_type()),
          of.has_sum() ? empty_rows_like(input, of.type()) : at::empty({0}, input.options()),
          is_centered ? at::empty_symint(of_rows, floats) : at::empty({0}, floats), at::empty_symint(of_rows, floats)};
}

Four row_norm_backward_meta(const Tensor& /*grad_output*/, const MaybeTensor& /*grad_sum*/, const Tensor& sum,
                            const Tensor& /*mean*/, const Tensor& /*invstd*/, const MaybeTensor& keep,
                            const MaybeTensor& weight, at::ScalarType input_type, at::ScalarType residual_type,
                            double /*keep_scale*/, bool /*is_centered*/, std::array<bool, 4> wanted) {
  const auto none = [&] { return at::empty({0}, sum.options()); };
  const auto of_columns = [&] {
    const auto type = or_none(weight).defined() ? weight->scalar_type() : at::kFloat;
    return at::empty_symint({sum.sym_size(-1)}, sum.options().dtype(type));
  };
  const bool is_one = is_one_gradient(or_none(keep), input_type, residual_type, wanted);
  return {wanted[0] ? empty_rows_like(sum, input_type) : none(),
          wanted[1] && !is_one ? empty_rows_like(sum, residual_type) : none(), wanted[2] ? of_columns() : none(),
          wanted[3] ? of_columns() : none()};
}

constexpr char kRowNormForwardName[] = "oxytorch::row_norm_forward";
constexpr char kRowNormBackwardName[] = "oxytorch::row_norm_backward";
using RowNormForward = Operator<kRowNormForwardName, decltype(row_norm_forward_cpu)>;
using RowNormBackward = Operator<kRowNormBackwardName, decltype(row_norm_backward_cpu)>;

// -- batching rules ---------------------------------------------------------------------------------------------------

// The kernel takes any leading dimensions. Mapped weights loop.
Four row_norm_forward_vmap(const Tensor& input, const MaybeTensor& residual, const MaybeTensor& keep,
                           const MaybeTensor& weight, const MaybeTensor& bias, double eps, double keep_scale,
                           bool is_centered, std::optional<at::ScalarType> dtype) {
  const VmapCall call(input, residual, keep, weight, bias);
  if (call.is_mapped(weight) || call.is_mapped(bias)) {
    return call.each([&](std::int64_t i) {
      return RowNormForward::call(call.of(input, i), call.of(residual, i), call.of(keep, i), call.of(weight, i),
                                  call.of(bias, i), eps, keep_scale, is_centered, dtype);
    });
  }
  const auto [output, sum, mean, invstd] =
      RowNormForward::call(call.batch_first(input), call.batch_first(residual), call.batch_first(keep),
                           call.unwrap(weight), call.unwrap(bias), eps, keep_scale, is_centered, dtype);
  const bool has_sum = residual.has_value() || keep.has_value();
  return {call.wrap(output), has_sum ? call.wrap(sum) : sum, is_centered ? call.wrap(mean) : mean, call.wrap(invstd)};
}

// -- by torch's operators, and derivatives ----------------------------------------------------------------------------

Tensor composed_norm(const Tensor& sum, const Tensor& weight, const Tensor& bias, double eps, bool is_centered) {
  const std::array<c10::SymInt, 1> shape{sum.sym_size(-1)};
  if (is_centered) return at::layer_norm_symint(sum, shape, if_defined(weight), if_defined(bias), eps);
  return at::rms_norm_symint(sum, shape, if_defined(weight), eps);
}

std::pair<Tensor, Tensor> composed_norm_of_sum(const NormOfSum& of) {
  Tensor sum = of.keep.defined() ? of.input * of.keep * of.keep_scale : of.input;
  if (of.residual.defined()) sum = sum + of.residual;
  Tensor normed = composed_norm(sum, of.weight, of.bias, of.eps, of.is_centered);
  if (of.rounded_to) normed = normed.to(*of.rounded_to);
  return {normed, of.has_sum() ? sum : Tensor()};
}

// With derivatives of their own. Of a row, 1 / root is that of this sum; eps is what it says it was.
Four composed_row_norm_backward(const Tensor& grad_output, const Tensor& grad_sum, const Tensor& sum,
                                const Tensor& invstd, const Tensor& keep, const Tensor& weight,
                                at::ScalarType input_type, at::ScalarType residual_type, double keep_scale,
                                bool is_centered, std::array<bool, 4> wanted) {
  const at::AutoGradMode with_grad(true);
  const Tensor wide = sum.to(at::kFloat);
  const auto square = [&](const Tensor& t) { return (is_centered ? t - t.mean(-1, true) : t).square().mean(-1, true); };
  const Tensor eps = (invstd.square().reciprocal() - square(wide.detach())).detach();
  const Tensor normed = (is_centered ? wide - wide.mean(-1, true) : wide) * (square(wide) + eps).rsqrt();
  const Tensor grad = grad_output.to(at::kFloat);
  const Tensor slope = weight.defined() ? grad * weight : grad;
  std::array<Tensor, 4> made;
  if (wanted[0] || wanted[1]) {
    // The derivative of the norm, written out: it is differentiated again by torch.
    Tensor of_sum = slope - normed * (slope * normed).mean(-1, true);
    if (is_centered) of_sum = of_sum - slope.mean(-1, true);
    of_sum = of_sum * (square(wide) + eps).rsqrt();
    if (grad_sum.defined()) of_sum = of_sum + grad_sum;
    if (wanted[0]) made[0] = (keep.defined() ? of_sum * keep * keep_scale : of_sum).to(input_type);
    if (wanted[1]) made[1] = of_sum.to(residual_type);
  }
  const auto type = weight.defined() ? weight.scalar_type() : at::kFloat;
  if (wanted[2]) made[2] = (grad * normed).flatten(0, -2).sum(0).to(type);
  if (wanted[3]) made[3] = grad.flatten(0, -2).sum(0).to(type);
  for (auto& one : made) {
    if (!one.defined()) one = at::empty({0}, sum.options());
  }
  return {made[0], made[1], made[2], made[3]};
}

struct RowNormNode : torch::autograd::Node {
  std::string name() const override { return "OxytorchRowNormBackward"; }

  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override {
    const std::lock_guard lock(mutex_);
    torch::autograd::variable_list made(4);
    const Tensor of_sum = grads.size() > 1 ? grads[1] : Tensor();
    if (!grads[0].defined() && !of_sum.defined()) return made;
    std::array<bool, 4> wanted{};
    for (std::size_t i = 0; i < 4; ++i) wanted[i] = task_should_compute_output(i);
    const Tensor of = sum.unpack(sum_is_output ? node_of(*this) : nullptr);
    const auto mask = if_defined(keep.unpack());
    const Tensor grad = grads[0].defined() ? grads[0] : at::zeros_symint(of.sym_sizes(), of.options());
    if (seen.function && has_hooks(*seen.function)) {
      // The gradient of the sum itself, which has the dtype of the residual here, and no dropout before.
      wanted[0] = false;
      wanted[1] = true;
      const auto [none, whole, of_weight, of_bias] = RowNormBackward::call(
          grad, if_defined(of_sum), of, mean.unpack(), invstd.unpack(), std::nullopt, if_defined(weight.unpack()),
          of.scalar_type(), of.scalar_type(), 1, is_centered, wanted);
      torch::autograd::variable_list through{whole};
      for (const auto& hook : seen.function->tensor_pre_hooks()) through = (*hook)(through);
      for (const auto& hook : seen.function->pre_hooks()) through = (*hook)(through);
      for (const auto& [index, hook] : seen.function->retains_grad_hooks()) through = (*hook)(through);
      const auto given = through;
      auto of_addends = (*seen.function)(std::move(through));
      for (const auto& hook : seen.function->post_hooks()) of_addends = (*hook)(of_addends, given);
      for (std::size_t i = 0; i < 2; ++i) made[i] = i < of_addends.size() ? of_addends[i] : Tensor();
      if (wanted[2]) made[2] = of_weight;
      if (wanted[3]) made[3] = of_bias;
      return made;
    }
    const auto [of_input, of_residual, of_weight, of_bias] =
        RowNormBackward::call(grad, if_defined(of_sum), of, mean.unpack(), invstd.unpack(), mask,
                              if_defined(weight.unpack()), input_type, residual_type, keep_scale, is_centered, wanted);
    if (wanted[0]) made[0] = of_input;
    if (wanted[1]) made[1] = is_one_gradient(or_none(mask), input_type, residual_type, wanted) ? of_input : of_residual;
    if (wanted[2]) made[2] = of_weight;
    if (wanted[3]) made[3] = of_bias;
    return made;
  }
  void release_variables() override {
    const std::lock_guard lock(mutex_);
    for (auto* saved : {&sum, &mean, &invstd, &keep, &weight}) saved->reset_data();
  }

  torch::autograd::SavedVariable sum, mean, invstd, keep, weight;
  torch::autograd::Edge seen;
  at::ScalarType input_type = at::kFloat, residual_type = at::kFloat;
  double keep_scale = 1;
  bool is_centered = true, sum_is_output = false;
};

Four row_norm_forward_autograd(const Tensor& input, const MaybeTensor& residual, const MaybeTensor& keep,
                               const MaybeTensor& weight, const MaybeTensor& bias, double eps, double keep_scale,
                               bool is_centered, std::optional<at::ScalarType> dtype) {
  const Tensor plus = or_none(residual), scale = or_none(weight), shift = or_none(bias);
  decltype(new_node<RowNormNode>()) node;
  if (torch::autograd::compute_requires_grad(input, plus, scale, shift)) {
    node = new_node<RowNormNode>();
    node->set_next_edges(torch::autograd::collect_next_edges(input, plus, scale, shift));
  }
  Tensor output, sum, mean, invstd;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    std::tie(output, sum, mean, invstd) =
        RowNormForward::call(input, residual, keep, weight, bias, eps, keep_scale, is_centered, dtype);
  }
  if (node) {
    torch::autograd::set_history(output, node);
    node->sum_is_output = plus.defined() || or_none(keep).defined();
    if (node->sum_is_output) torch::autograd::set_history(sum, node);
    node->sum =
        node->sum_is_output ? torch::autograd::SavedVariable(sum, true) : torch::autograd::SavedVariable(input, false);
    node->mean = {mean, false};
    node->invstd = {invstd, false};
    node->keep = {or_none(keep), false};
    node->weight = {scale, false};
    node->input_type = input.scalar_type();
    node->residual_type = plus.defined() ? plus.scalar_type() : input.scalar_type();
    node->keep_scale = keep_scale;
    node->is_centered = is_centered;
  }
  return {output, sum, mean, invstd};
}

Four row_norm_backward_autograd(const Tensor& grad_output, const MaybeTensor& grad_sum, const Tensor& sum,
                                const Tensor& mean, const Tensor& invstd, const MaybeTensor& keep,
                                const MaybeTensor& weight, at::ScalarType input_type, at::ScalarType residual_type,
                                double keep_scale, bool is_centered, std::array<bool, 4> wanted) {
  if (torch::autograd::compute_requires_grad(grad_output, or_none(grad_sum), sum, or_none(weight))) {
    return composed_row_norm_backward(grad_output, or_none(grad_sum), sum, invstd, or_none(keep), or_none(weight),
                                      input_type, residual_type, keep_scale, is_centered, wanted);
  }
  const at::AutoDispatchBelowADInplaceOrView below;
  return RowNormBackward::call(grad_output, grad_sum, sum, mean, invstd, keep, weight, input_type, residual_type,
                               keep_scale, is_centered, wanted);
}

// -- the functions ----------------------------------------------------------------------------------------------------

void check_row_norm(const char* name, const NormOfSum& of, double dropout) {
  OXY_CHECK(of.input.dim() >= 1, InvalidArgument, name, " takes rows; its input has no dimensions.");
  for (const Tensor& one : {of.weight, of.bias}) {
    OXY_CHECK(!one.defined() || (one.dim() == 1 && one.sym_size(0) == of.input.sym_size(-1)), InvalidArgument, name,
              " takes a weight and a bias for each of the ", of.input.sym_size(-1), " columns; sizes are ",
              one.sym_sizes(), ".");
  }
  OXY_CHECK(!of.residual.defined() || of.residual.sym_sizes() == of.input.sym_sizes(), InvalidArgument, name,
            " adds a residual of the sizes of its input, ", of.input.sym_sizes(), "; they are ",
            of.residual.sym_sizes(), ".");
  OXY_CHECK(dropout >= 0 && dropout < 1, InvalidArgument, name, " takes a dropout from 0 to below 1; it is ", dropout,
            ".");
}

// The mask that torch's dropout draws, by our kernel where nobody else is to see the draw: a tracer, or a thread that
// has random numbers of its own.
Tensor drawn_mask(const Tensor& input, double dropout) {
  Tensor keep = at::empty_like(input.detach());
  const bool is_seen = is_transformed() || at::isTensorSubclassLike(keep) ||
                       c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::TESTING_ONLY_GenericMode);
  if (is_seen || !bernoulli_cpu(keep, 1 - dropout, std::nullopt)) keep.bernoulli_(1 - dropout);
  return keep;
}

std::pair<Tensor, Tensor> norm_of(const char* name, NormOfSum of, double dropout) {
  check_row_norm(name, of, dropout);
  if (dropout > 0) {
    of.keep = drawn_mask(of.input, dropout);
    of.keep_scale = 1 / (1 - dropout);
  }
  return normalized_sum(of);
}

Tensor layer_norm_operator(const Tensor& input, const MaybeTensor& weight, const MaybeTensor& bias, double eps) {
  return norm_of("layer_norm", {input, {}, {}, or_none(weight), or_none(bias), eps}, 0).first;
}
Tensor rms_norm_operator(const Tensor& input, const MaybeTensor& weight, std::optional<double> eps) {
  return norm_of("rms_norm", {input, {}, {}, or_none(weight), {}, rms_eps(input, eps), 1, false}, 0).first;
}
std::tuple<Tensor, Tensor> add_layer_norm_operator(const Tensor& input, const Tensor& residual,
                                                   const MaybeTensor& weight, const MaybeTensor& bias, double eps,
                                                   double dropout) {
  return norm_of("add_layer_norm", {input, residual, {}, or_none(weight), or_none(bias), eps}, dropout);
}
std::tuple<Tensor, Tensor> add_rms_norm_operator(const Tensor& input, const Tensor& residual, const MaybeTensor& weight,
                                                 std::optional<double> eps, double dropout) {
  return norm_of("add_rms_norm", {input, residual, {}, or_none(weight), {}, rms_eps(input, eps), 1, false}, dropout);
}

constexpr char kLayerNormName[] = "oxytorch::layer_norm";
constexpr char kRmsNormName[] = "oxytorch::rms_norm";
constexpr char kAddLayerNormName[] = "oxytorch::add_layer_norm";
constexpr char kAddRmsNormName[] = "oxytorch::add_rms_norm";
using WholeLayerNorm = Operator<kLayerNormName, decltype(layer_norm_operator)>;
using WholeRmsNorm = Operator<kRmsNormName, decltype(rms_norm_operator)>;
using WholeAddLayerNorm = Operator<kAddLayerNormName, decltype(add_layer_norm_operator)>;
using WholeAddRmsNorm = Operator<kAddRmsNormName, decltype(add_rms_norm_operator)>;

TORCH_LIBRARY_FRAGMENT(oxytorch, m) {
  m.def("layer_norm(Tensor input, Tensor? weight=None, Tensor? bias=None, float eps=1e-05) -> Tensor");
  m.def("rms_norm(Tensor input, Tensor? weight=None, float? eps=None) -> Tensor");
  m.def(
      "add_layer_norm(Tensor input, Tensor residual, Tensor? weight=None, Tensor? bias=None, float eps=1e-05, "
      "float dropout=0.0) -> (Tensor normed, Tensor sum)",
      {at::Tag::nondeterministic_seeded});
  m.def(
      "add_rms_norm(Tensor input, Tensor residual, Tensor? weight=None, float? eps=None, float dropout=0.0) -> "
      "(Tensor normed, Tensor sum)",
      {at::Tag::nondeterministic_seeded});
  m.def(
      "row_norm_forward(Tensor input, Tensor? residual, Tensor? keep, Tensor? weight, Tensor? bias, float eps, "
      "float keep_scale, bool is_centered, ScalarType? dtype=None) -> "
      "(Tensor output, Tensor sum, Tensor mean, Tensor invstd)");
  m.def(
      "row_norm_backward(Tensor grad_output, Tensor? grad_sum, Tensor sum, Tensor mean, Tensor invstd, Tensor? keep, "
      "Tensor? weight, ScalarType input_type, ScalarType residual_type, float keep_scale, bool is_centered, "
      "bool[4] wanted) -> (Tensor grad_input, Tensor grad_residual, Tensor grad_weight, Tensor grad_bias)");
}
TORCH_LIBRARY_IMPL(oxytorch, CompositeImplicitAutograd, m) {
  m.impl("layer_norm", &Kernel<&layer_norm_operator>::call);
  m.impl("rms_norm", &Kernel<&rms_norm_operator>::call);
  m.impl("add_layer_norm", &Kernel<&add_layer_norm_operator>::call);
  m.impl("add_rms_norm", &Kernel<&add_rms_norm_operator>::call);
}
TORCH_LIBRARY_IMPL(oxytorch, FuncTorchBatched, m) {
  m.impl("layer_norm", &Kernel<&layer_norm_operator>::call);
  m.impl("rms_norm", &Kernel<&rms_norm_operator>::call);
  m.impl("add_layer_norm", &Kernel<&add_layer_norm_operator>::call);
  m.impl("add_rms_norm", &Kernel<&add_rms_norm_operator>::call);
  m.impl("row_norm_forward", &Kernel<&row_norm_forward_vmap>::call);
  m.impl("row_norm_backward", &Kernel<&LoopOverSamples<RowNormBackward>::call>::call);
}
TORCH_LIBRARY_IMPL(oxytorch, Autograd, m) {
  m.impl("row_norm_forward", &Kernel<&row_norm_forward_autograd>::call);
  m.impl("row_norm_backward", &Kernel<&row_norm_backward_autograd>::call);
}
TORCH_LIBRARY_IMPL(oxytorch, CPU, m) {
  m.impl("row_norm_forward", &Kernel<&row_norm_forward_cpu>::call);
  m.impl("row_norm_backward", &Kernel<&row_norm_backward_cpu>::call);
}
TORCH_LIBRARY_IMPL(oxytorch, Meta, m) {
  m.impl("row_norm_forward", &Kernel<&row_norm_forward_meta>::call);
  m.impl("row_norm_backward", &Kernel<&row_norm_backward_meta>::call);
}

constexpr const char* kNoSum = "dropout belongs to a sum: call add_layer_norm or add_rms_norm, or at::dropout before.";

}  // namespace

double rms_eps(const Tensor& input, std::optional<double> eps) {
  if (eps) return *eps;
  return input.scalar_type() == at::kDouble ? std::numeric_limits<double>::epsilon()
                                            : std::numeric_limits<float>::epsilon();
}

std::pair<Tensor, Tensor> normalized_sum(const NormOfSum& of) {
  if (!row_norm_cpu_takes(of)) return composed_norm_of_sum(of);
  auto [output, sum, mean, invstd] =
      RowNormForward::call(of.input, if_defined(of.residual), if_defined(of.keep), if_defined(of.weight),
                           if_defined(of.bias), of.eps, of.keep_scale, of.is_centered, of.rounded_to);
  return {output, of.has_sum() ? sum : Tensor()};
}

void let_hooks_see_sum(const Tensor& normed, torch::autograd::Edge sum) {
  if (auto* node = dynamic_cast<RowNormNode*>(normed.grad_fn().get())) node->seen = std::move(sum);
}

Tensor layer_norm(const Tensor& input, const RowNormOptions& options) {
  OXY_CHECK(options.dropout == 0, InvalidArgument, kNoSum);
  return WholeLayerNorm::call(input, options.weight, options.bias, options.eps.value_or(1e-5));
}
Tensor rms_norm(const Tensor& input, const RowNormOptions& options) {
  OXY_CHECK(options.dropout == 0, InvalidArgument, kNoSum);
  return WholeRmsNorm::call(input, options.weight, options.eps);
}
std::pair<Tensor, Tensor> add_layer_norm(const Tensor& input, const Tensor& residual, const RowNormOptions& options) {
  const auto [normed, sum] = WholeAddLayerNorm::call(input, residual, options.weight, options.bias,
                                                     options.eps.value_or(1e-5), options.dropout);
  return {normed, sum};
}
std::pair<Tensor, Tensor> add_rms_norm(const Tensor& input, const Tensor& residual, const RowNormOptions& options) {
  const auto [normed, sum] = WholeAddRmsNorm::call(input, residual, options.weight, options.eps, options.dropout);
  return {normed, sum};
}

}  // namespace oxytorch::ops
