// The operators oxytorch::rotary and rotary_apply.
#include "oxytorch/ops/rotary.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/stack.h>
#include <torch/library.h>

#include "ops/dispatch.h"
#include "ops/rotary_cpu.h"
#include "ops/vmap.h"
#include "oxytorch/error.h"

namespace oxytorch::ops {
namespace {

using at::Tensor;

// -- the kernel -------------------------------------------------------------------------------------------------------

Tensor rotary_apply_cpu(const Tensor& x, const Tensor& cos, const Tensor& sin, bool interleaved, bool inverse) {
  OXY_CHECK(rotary_cpu_takes(x, cos, sin), InvalidArgument, "rotary_apply does not take x ", x.sizes(), " of ",
            x.scalar_type(), " with tables ", cos.sizes(), " and ", sin.sizes(), " of ", cos.scalar_type(),
            "; call oxytorch::rotary.");
  return rotary_cpu(x, cos, sin, interleaved, inverse);
}

Tensor rotary_apply_meta(const Tensor& x, const Tensor& /*cos*/, const Tensor& /*sin*/, bool /*interleaved*/,
                         bool /*inverse*/) {
  return empty_heads(x);
}

constexpr char kRotaryApplyName[] = "oxytorch::rotary_apply";
using RotaryApply = Operator<kRotaryApplyName, decltype(rotary_apply_cpu)>;

Tensor rotary_apply_vmap(const Tensor& x, const Tensor& cos, const Tensor& sin, bool interleaved, bool inverse) {
  const c10::SymInt batch = x.sym_size(0);
  const VmapCall call(x, cos, sin);
  return call.unfold(RotaryApply::call(call.fold(x), call.fold_broadcast(cos, 4, batch),
                                       call.fold_broadcast(sin, 4, batch), interleaved, inverse));
}

// -- derivatives ------------------------------------------------------------------------------------------------------

void refuse_gradient_of_tables(const Tensor& cos, const Tensor& sin) {
  OXY_CHECK(!at::GradMode::is_enabled() || (!cos.requires_grad() && !sin.requires_grad()), NotSupported,
            "rotary has no gradient for cos and sin, and ", cos.requires_grad() ? "cos" : "sin",
            " requires one; detach it, or compose the rotation of torch's own operators.");
}

// Linear in x, with the rotation back for a gradient: the node needs the tables alone, and has a node of its own.
struct RotaryNode : torch::autograd::Node {
  std::string name() const override { return "OxytorchRotaryBackward"; }

  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override {
    const std::lock_guard lock(mutex_);
    if (!grads[0].defined()) return torch::autograd::variable_list(1);
    return {RotaryApply::call(grads[0], cos.unpack(), sin.unpack(), interleaved, !inverse)};
  }
  void release_variables() override {
    const std::lock_guard lock(mutex_);
    for (auto* saved : {&cos, &sin}) saved->reset_data();
  }

  torch::autograd::SavedVariable cos, sin;
  bool interleaved = false, inverse = false;
};

Tensor rotary_apply_autograd(const Tensor& x, const Tensor& cos, const Tensor& sin, bool interleaved, bool inverse) {
  refuse_gradient_of_tables(cos, sin);
  decltype(new_node<RotaryNode>()) node;
  if (torch::autograd::compute_requires_grad(x)) {
    node = new_node<RotaryNode>();
    node->set_next_edges(torch::autograd::collect_next_edges(x));
    node->cos = {cos, false};
    node->sin = {sin, false};
    node->interleaved = interleaved;
    node->inverse = inverse;
  }
  Tensor output;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    output = RotaryApply::call(x, cos, sin, interleaved, inverse);
  }
  if (node) torch::autograd::set_history(output, node);
  return output;
}

// -- the function -----------------------------------------------------------------------------------------------------

// The rotated features, of which the last dimension of `cos` is all or half.
std::int64_t rotated_features(const Tensor& x, const Tensor& cos, std::optional<std::int64_t> rotary_dim) {
  const std::int64_t width = x.sym_size(3).guard_int(__FILE__, __LINE__);
  const std::int64_t angles = cos.sym_size(-1).guard_int(__FILE__, __LINE__);
  const std::int64_t rotated = rotary_dim.value_or(width);
  OXY_CHECK(rotated > 0 && rotated % 2 == 0 && rotated <= width, InvalidArgument,
            rotary_dim.has_value() ? "rotary_dim is " : "the width of x is ", rotated,
            "; give an even number of features to rotate, of the ", width, " that x has.");
  OXY_CHECK(angles == rotated || 2 * angles == rotated, InvalidArgument, "cos has ", angles, " angles for ", rotated,
            " rotated features; give half as many, or each twice",
            rotary_dim.has_value() ? "." : ", or rotary_dim, where not all features of x are rotated.");
  return rotated;
}

// Each angle once, over batch x heads x tokens x pairs, in the dtype of the arithmetic.
Tensor table_of(const char* name, const Tensor& table, const Tensor& x, std::int64_t rotated, bool interleaved,
                at::ScalarType type) {
  Tensor once = table;
  if (table.sym_size(-1) == rotated) {
    once = interleaved ? table.slice(-1, 0, std::nullopt, 2) : table.narrow(-1, 0, rotated / 2);
  }
  if (once.dim() == 3) once = once.unsqueeze(1);
  if (once.dim() == 2) once = once.unsqueeze(0).unsqueeze(0);
  constexpr const char* kOf[] = {"samples", "heads", "tokens"};
  for (std::int64_t d = 0; d < 3; ++d) {
    OXY_CHECK(once.sym_size(d) == 1 || once.sym_size(d) == x.sym_size(d), InvalidArgument, name, " has ",
              once.sym_size(d), " ", kOf[d], " and x ", x.sym_size(d),
              "; give the angles of x's own positions: tokens, batch x tokens, or batch x heads x tokens.");
  }
  return once.to(type);
}

// By torch's operators, which know every dtype and device.
Tensor composed_rotary(const Tensor& x, const Tensor& cos, const Tensor& sin, bool interleaved, std::int64_t rotated) {
  const auto width = x.sym_size(3);
  const Tensor wide = x.narrow(3, 0, rotated).to(cos.scalar_type());
  const Tensor a = interleaved ? wide.slice(3, 0, std::nullopt, 2) : wide.narrow(3, 0, rotated / 2);
  const Tensor b = interleaved ? wide.slice(3, 1, std::nullopt, 2) : wide.narrow(3, rotated / 2, rotated / 2);
  const Tensor first = a * cos - b * sin, second = b * cos + a * sin;
  const Tensor turned =
      (interleaved ? at::stack({first, second}, -1).flatten(-2) : at::cat({first, second}, 3)).to(x.scalar_type());
  return width == rotated ? turned : at::cat({turned, x.slice_symint(3, rotated)}, 3);
}

Tensor rotary_operator(const Tensor& x, const Tensor& cos, const Tensor& sin, bool interleaved,
                       std::optional<std::int64_t> rotary_dim) {
  OXY_CHECK(x.dim() == 4, InvalidArgument, "rotary takes x of batch x heads x tokens x width; it has ", x.dim(),
            " dimensions.");
  OXY_CHECK(cos.dim() >= 2 && cos.dim() <= 4 && cos.sym_sizes() == sin.sym_sizes(), InvalidArgument,
            "rotary takes cos and sin of one size: tokens, batch x tokens or batch x heads x tokens, x angles; cos is ",
            cos.sym_sizes(), ", sin ", sin.sym_sizes(), ".");
  OXY_CHECK(x.is_floating_point() && cos.is_floating_point() && sin.is_floating_point(), InvalidType,
            "rotary takes floating dtypes; x is ", x.scalar_type(), ", cos ", cos.scalar_type(), ", sin ",
            sin.scalar_type(), ".");
  OXY_CHECK(cos.device() == x.device() && sin.device() == x.device(), InvalidArgument,
            "rotary takes tensors of one device; x is on ", x.device(), ", cos on ", cos.device(), ", sin on ",
            sin.device(), ".");
  refuse_gradient_of_tables(cos, sin);
  const std::int64_t rotated = rotated_features(x, cos, rotary_dim);
  const auto type = at::isReducedFloatingType(x.scalar_type()) ? at::kFloat : x.scalar_type();
  const Tensor c = table_of("cos", cos, x, rotated, interleaved, type);
  const Tensor s = table_of("sin", sin, x, rotated, interleaved, type);
  if (has_kernel(x) && x.layout() == at::kStrided) return RotaryApply::call(x, c, s, interleaved, false);
  return composed_rotary(x, c, s, interleaved, rotated);
}

constexpr char kRotaryName[] = "oxytorch::rotary";
using WholeRotary = Operator<kRotaryName, decltype(rotary_operator)>;

TORCH_LIBRARY_FRAGMENT(oxytorch, m) {
  m.def("rotary(Tensor x, Tensor cos, Tensor sin, bool interleaved=False, int? rotary_dim=None) -> Tensor");
  m.def("rotary_apply(Tensor x, Tensor cos, Tensor sin, bool interleaved, bool inverse) -> Tensor");
}
TORCH_LIBRARY_IMPL(oxytorch, CompositeImplicitAutograd, m) { m.impl("rotary", &Kernel<&rotary_operator>::call); }
TORCH_LIBRARY_IMPL(oxytorch, FuncTorchBatched, m) {
  m.impl("rotary", &Kernel<&rotary_operator>::call);
  m.impl("rotary_apply", &Kernel<&rotary_apply_vmap>::call);
}
TORCH_LIBRARY_IMPL(oxytorch, Autograd, m) { m.impl("rotary_apply", &Kernel<&rotary_apply_autograd>::call); }
TORCH_LIBRARY_IMPL(oxytorch, CPU, m) { m.impl("rotary_apply", &Kernel<&rotary_apply_cpu>::call); }
TORCH_LIBRARY_IMPL(oxytorch, Meta, m) { m.impl("rotary_apply", &Kernel<&rotary_apply_meta>::call); }

}  // namespace

Tensor rotary(const Tensor& x, const Tensor& cos, const Tensor& sin, const RotaryOptions& options) {
  return WholeRotary::call(x, cos, sin, options.interleaved, options.rotary_dim);
}

}  // namespace oxytorch::ops
