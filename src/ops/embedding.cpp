// The operators oxytorch::embedding, embedding_forward and embedding_gradient.
#include "oxytorch/ops/embedding.h"

#include <ATen/ops/embedding.h>
#include <ATen/ops/embedding_dense_backward.h>
#include <torch/library.h>

#include "ops/dispatch.h"
#include "ops/embedding_cpu.h"
#include "ops/gradient_sum.h"
#include "oxytorch/error.h"

namespace oxytorch::ops {
namespace {

using at::Tensor;

// -- the kernels ------------------------------------------------------------------------------------------------------

Tensor embedding_forward_cpu(const Tensor& weight, const Tensor& input, std::int64_t padding) {
  return at::embedding(weight, input, padding);
}

Tensor embedding_gradient_cpu_kernel(const Tensor& grad_output, const Tensor& input, std::int64_t rows,
                                     std::int64_t padding) {
  OXY_CHECK(embedding_gradient_cpu_takes(grad_output, input, rows), InvalidArgument,
            "embedding_gradient does not take a gradient ", grad_output.sizes(), " of ", grad_output.scalar_type(),
            " for an input ", input.sizes(), " of ", input.scalar_type(), "; call oxytorch::embedding.");
  auto made = embedding_gradient_cpu(grad_output, input, rows, padding);
  OXY_CHECK(made.has_value(), InvalidArgument, "embedding_gradient has an index outside of the ", rows,
            " rows of its table.");
  return *std::move(made);
}

Tensor embedding_forward_meta(const Tensor& weight, const Tensor& input, std::int64_t /*padding*/) {
  auto sizes = input.sym_sizes().vec();
  sizes.push_back(weight.sym_size(1));
  return at::empty_symint(sizes, weight.options());
}

Tensor embedding_gradient_meta(const Tensor& grad_output, const Tensor& /*input*/, c10::SymInt rows,
                               std::int64_t /*padding*/) {
  return at::empty_symint({std::move(rows), grad_output.sym_size(-1)}, grad_output.options());
}

constexpr char kEmbeddingForwardName[] = "oxytorch::embedding_forward";
constexpr char kEmbeddingGradientName[] = "oxytorch::embedding_gradient";
using EmbeddingForward = Operator<kEmbeddingForwardName, decltype(embedding_forward_cpu)>;
using EmbeddingGradient = Operator<kEmbeddingGradientName, decltype(embedding_gradient_meta)>;

// The batching rule: torch's operator has one.
Tensor embedding_gradient_composed(const Tensor& grad_output, const Tensor& input, c10::SymInt rows,
                                   std::int64_t padding) {
  return at::embedding_dense_backward_symint(grad_output, input, std::move(rows), padding, false);
}

// -- derivatives ------------------------------------------------------------------------------------------------------

// Lookup and gradient are linear and each other's transpose: both nodes save the indices alone.
struct EmbeddingNode : torch::autograd::Node {
  std::string name() const override { return "OxytorchEmbeddingBackward"; }

  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override {
    const std::lock_guard lock(mutex_);
    if (!grads[0].defined()) return torch::autograd::variable_list(1);
    const Tensor indices = input.unpack();
    const GradientSum sum(next_edge(0), grads[0]);
    if (const Tensor& to = sum.tensor(); to.defined() && to.scalar_type() == grads[0].scalar_type() &&
                                         embedding_gradient_cpu_takes(grads[0], indices, to.size(0)) &&
                                         embedding_gradient_cpu(grads[0], indices, to.size(0), padding, to)) {
      return torch::autograd::variable_list(1);
    }
    return {EmbeddingGradient::call(grads[0], indices, rows, padding)};
  }
  void release_variables() override {
    const std::lock_guard lock(mutex_);
    input.reset_data();
  }

  torch::autograd::SavedVariable input;
  c10::SymInt rows = 0;
  std::int64_t padding = -1;
};

struct EmbeddingGradientNode : torch::autograd::Node {
  std::string name() const override { return "OxytorchEmbeddingGradientBackward"; }

  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override {
    const std::lock_guard lock(mutex_);
    if (!grads[0].defined()) return torch::autograd::variable_list(1);
    const Tensor indices = input.unpack();
    const Tensor rows = EmbeddingForward::call(grads[0], indices, padding);
    return {padding < 0 ? rows : rows.masked_fill(indices.eq(padding).unsqueeze(-1), 0)};
  }
  void release_variables() override {
    const std::lock_guard lock(mutex_);
    input.reset_data();
  }

  torch::autograd::SavedVariable input;
  std::int64_t padding = -1;
};

Tensor embedding_forward_autograd(const Tensor& weight, const Tensor& input, std::int64_t padding) {
  decltype(new_node<EmbeddingNode>()) node;
  if (torch::autograd::compute_requires_grad(weight)) {
    node = new_node<EmbeddingNode>();
    node->set_next_edges(torch::autograd::collect_next_edges(weight));
    node->input = {input, false};
    node->rows = weight.sym_size(0);
    node->padding = padding;
  }
  Tensor output;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    output = EmbeddingForward::call(weight, input, padding);
  }
  if (node) torch::autograd::set_history(output, node);
  return output;
}

Tensor embedding_gradient_autograd(const Tensor& grad_output, const Tensor& input, c10::SymInt rows,
                                   std::int64_t padding) {
  decltype(new_node<EmbeddingGradientNode>()) node;
  if (torch::autograd::compute_requires_grad(grad_output)) {
    node = new_node<EmbeddingGradientNode>();
    node->set_next_edges(torch::autograd::collect_next_edges(grad_output));
    node->input = {input, false};
    node->padding = padding;
  }
  Tensor made;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    made = EmbeddingGradient::call(grad_output, input, std::move(rows), padding);
  }
  if (node) torch::autograd::set_history(made, node);
  return made;
}

// -- the function -----------------------------------------------------------------------------------------------------

Tensor embedding_operator(const Tensor& input, const Tensor& weight, std::optional<std::int64_t> padding_idx) {
  OXY_CHECK(weight.dim() == 2, InvalidArgument, "embedding takes a weight of rows x columns; its sizes are ",
            weight.sym_sizes(), ".");
  OXY_CHECK(input.scalar_type() == at::kLong || input.scalar_type() == at::kInt, InvalidType,
            "embedding takes indices of int64 or int32; input is ", input.scalar_type(), ".");
  std::int64_t padding = -1;
  if (padding_idx.has_value()) {
    const std::int64_t rows = weight.sym_size(0).guard_int(__FILE__, __LINE__);
    padding = *padding_idx < 0 ? *padding_idx + rows : *padding_idx;
    OXY_CHECK(padding >= 0 && padding < rows, InvalidArgument, "padding_idx is ", *padding_idx, " and the weight has ",
              rows, " rows; give the index of one of them, or none.");
  }
  const bool is_served = has_kernel(weight) && weight.layout() == at::kStrided && input.device().is_cpu();
  return is_served ? EmbeddingForward::call(weight, input, padding) : at::embedding(weight, input, padding);
}

constexpr char kEmbeddingName[] = "oxytorch::embedding";
using WholeEmbedding = Operator<kEmbeddingName, decltype(embedding_operator)>;

TORCH_LIBRARY_FRAGMENT(oxytorch, m) {
  m.def("embedding(Tensor input, Tensor weight, int? padding_idx=None) -> Tensor");
  m.def("embedding_forward(Tensor weight, Tensor input, int padding) -> Tensor");
  m.def("embedding_gradient(Tensor grad_output, Tensor input, SymInt rows, int padding) -> Tensor");
}
TORCH_LIBRARY_IMPL(oxytorch, CompositeImplicitAutograd, m) { m.impl("embedding", &Kernel<&embedding_operator>::call); }
TORCH_LIBRARY_IMPL(oxytorch, FuncTorchBatched, m) {
  m.impl("embedding", &Kernel<&embedding_operator>::call);
  m.impl("embedding_forward", &Kernel<&embedding_forward_cpu>::call);
  m.impl("embedding_gradient", &Kernel<&embedding_gradient_composed>::call);
}
TORCH_LIBRARY_IMPL(oxytorch, Autograd, m) {
  m.impl("embedding_forward", &Kernel<&embedding_forward_autograd>::call);
  m.impl("embedding_gradient", &Kernel<&embedding_gradient_autograd>::call);
}
TORCH_LIBRARY_IMPL(oxytorch, CPU, m) {
  m.impl("embedding_forward", &Kernel<&embedding_forward_cpu>::call);
  m.impl("embedding_gradient", &Kernel<&embedding_gradient_cpu_kernel>::call);
}
TORCH_LIBRARY_IMPL(oxytorch, Meta, m) {
  m.impl("embedding_forward", &Kernel<&embedding_forward_meta>::call);
  m.impl("embedding_gradient", &Kernel<&embedding_gradient_meta>::call);
}

}  // namespace

Tensor embedding_forward(const Tensor& weight, const Tensor& input, std::int64_t padding) {
  return EmbeddingForward::call(weight, input, padding);
}

Tensor embedding(const Tensor& input, const Tensor& weight, std::optional<std::int64_t> padding_idx) {
  return WholeEmbedding::call(input, weight, padding_idx);
}

}  // namespace oxytorch::ops
