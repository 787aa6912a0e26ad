// The operators oxytorch::attention, attention_forward and attention_backward.
#include "oxytorch/ops/attention.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/where.h>
#include <torch/library.h>

#include <cmath>
#include <limits>

#include "ops/attention_cpu.h"
#include "ops/dispatch.h"
#include "oxytorch/error.h"

namespace oxytorch::ops {
namespace {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;
using Pair = std::tuple<Tensor, Tensor>;
using Triple = std::tuple<Tensor, Tensor, Tensor>;

// -- the kernels ------------------------------------------------------------------------------------------------------

AttentionRule rule_of(const MaybeTensor& mask, double scale, std::int64_t before, std::int64_t after, double soft_cap,
                      double dropout, const MaybeTensor& seed) {
  auto rule = attention_rule(mask, scale, before, after, soft_cap);
  if (dropout == 0) return rule;
  OXY_CHECK(seed.has_value() && seed->defined() && seed->numel() == 1 && seed->scalar_type() == at::kLong,
            InvalidArgument, "attention_forward and its backward take a seed of one int64 with dropout.");
  rule.dropout = dropout;
  rule.seed = static_cast<std::uint64_t>(seed->item<std::int64_t>());
  return rule;
}

Pair forward_cpu(const Tensor& query, const Tensor& key, const Tensor& value, const MaybeTensor& mask, double scale,
                 std::int64_t before, std::int64_t after, double soft_cap, double dropout, const MaybeTensor& seed) {
  OXY_CHECK(attention_cpu_takes(query, key, value, mask), InvalidArgument, "attention_forward does not take query ",
            query.sizes(), ", key ", key.sizes(), ", value ", value.sizes(),
            " with this mask; call oxytorch::attention.");
  return attention_cpu(query, key, value, rule_of(mask, scale, before, after, soft_cap, dropout, seed));
}

Triple backward_cpu(const Tensor& grad_output, const Tensor& query, const Tensor& key, const Tensor& value,
                    const Tensor& output, const Tensor& log_sum, const MaybeTensor& mask, double scale,
                    std::int64_t before, std::int64_t after, double soft_cap, double dropout, const MaybeTensor& seed) {
  return attention_cpu_backward(grad_output, query, key, value, output, log_sum,
                                rule_of(mask, scale, before, after, soft_cap, dropout, seed));
}

Pair forward_meta(const Tensor& query, const Tensor& /*key*/, const Tensor& /*value*/, const MaybeTensor& /*mask*/,
                  double /*scale*/, std::int64_t /*before*/, std::int64_t /*after*/, double /*soft_cap*/,
                  double /*dropout*/, const MaybeTensor& /*seed*/) {
  const auto log_sum =
      at::empty_symint({query.sym_size(0), query.sym_size(2), query.sym_size(1)}, query.options().dtype(at::kFloat));
  return {at::empty_like(query), log_sum.transpose(1, 2)};
}

Triple backward_meta(const Tensor& /*grad_output*/, const Tensor& query, const Tensor& key, const Tensor& value,
                     const Tensor& /*output*/, const Tensor& /*log_sum*/, const MaybeTensor& /*mask*/, double /*scale*/,
                     std::int64_t /*before*/, std::int64_t /*after*/, double /*soft_cap*/, double /*dropout*/,
                     const MaybeTensor& /*seed*/) {
  const auto like = [](const Tensor& t) {
    return at::empty_symint({t.sym_size(0), t.sym_size(2), t.sym_size(1), t.sym_size(3)}, t.options()).transpose(1, 2);
  };
  return {like(query), like(key), like(value)};
}

constexpr char kForwardName[] = "oxytorch::attention_forward";
constexpr char kBackwardName[] = "oxytorch::attention_backward";
using Forward = Operator<kForwardName, decltype(forward_cpu)>;
using Backward = Operator<kBackwardName, decltype(backward_cpu)>;

// -- derivatives ------------------------------------------------------------------------------------------------------

// Nodes of the graph as torch's own operators have them: torch.func refuses torch::autograd::Function.
struct AttentionNode : torch::autograd::Node {
  std::string name() const override { return "OxytorchAttentionBackward"; }

  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override {
    const std::lock_guard lock(mutex_);
    const Tensor bias = mask.unpack(), drawn = seed.unpack();
    if (!grads[0].defined()) return torch::autograd::variable_list(3);
    const auto saved = node_of<torch::autograd::Node>(*this);
    auto [of_query, of_key, of_value] =
        Backward::call(grads[0], query.unpack(), key.unpack(), value.unpack(), output.unpack(saved),
                       log_sum.unpack(saved), bias.defined() ? MaybeTensor(bias) : std::nullopt, scale, before, after,
                       soft_cap, dropout, drawn.defined() ? MaybeTensor(drawn) : std::nullopt);
    return torch::autograd::variable_list{of_query, of_key, of_value};
  }
  void release_variables() override {
    const std::lock_guard lock(mutex_);
    for (auto* saved : {&query, &key, &value, &mask, &output, &log_sum, &seed}) saved->reset_data();
  }

  torch::autograd::SavedVariable query, key, value, mask, output, log_sum, seed;
  double scale = 1, soft_cap = 0, dropout = 0;
  std::int64_t before = -1, after = -1;
};

Pair forward_autograd(const Tensor& query, const Tensor& key, const Tensor& value, const MaybeTensor& mask,
                      double scale, std::int64_t before, std::int64_t after, double soft_cap, double dropout,
                      const MaybeTensor& seed) {
  OXY_CHECK(!mask.has_value() || !mask->requires_grad() || !at::GradMode::is_enabled(), NotSupported,
            "attention has no gradient for its mask, which requires one; detach the mask, or use "
            "scaled_dot_product_attention.");
  decltype(new_node<AttentionNode>()) node;
  if (torch::autograd::compute_requires_grad(query, key, value)) {
    node = new_node<AttentionNode>();
    node->set_next_edges(torch::autograd::collect_next_edges(query, key, value));
    node->query = {query, false};
    node->key = {key, false};
    node->value = {value, false};
    node->mask = {mask.value_or(Tensor()), false};
    node->scale = scale;
    node->before = before;
    node->after = after;
    node->soft_cap = soft_cap;
    node->dropout = dropout;
    node->seed = {seed.value_or(Tensor()), false};
  }
  Pair results;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    results = Forward::call(query, key, value, mask, scale, before, after, soft_cap, dropout, seed);
  }
  if (node) {
    auto& [output, log_sum] = results;
    torch::autograd::set_history(output, node);
    node->output = {output, true};
    node->log_sum = {log_sum, false};
  }
  return results;
}

Triple backward_autograd(const Tensor& grad_output, const Tensor& query, const Tensor& key, const Tensor& value,
                         const Tensor& output, const Tensor& log_sum, const MaybeTensor& mask, double scale,
                         std::int64_t before, std::int64_t after, double soft_cap, double dropout,
                         const MaybeTensor& seed) {
  Triple grads;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    grads = Backward::call(grad_output, query, key, value, output, log_sum, mask, scale, before, after, soft_cap,
                           dropout, seed);
  }
  const auto& [of_query, of_key, of_value] = grads;
  differentiable_once("attention", {of_query, of_key, of_value}, grad_output, query, key, value);
  return grads;
}

// -- the function -----------------------------------------------------------------------------------------------------

void check(const Tensor& query, const Tensor& key, const Tensor& value) {
  OXY_CHECK(query.dim() == 4 && key.dim() == 4 && value.dim() == 4, InvalidArgument,
            "attention takes tensors of batch x heads x tokens x width; query has ", query.dim(), " dimensions, key ",
            key.dim(), ", value ", value.dim(), ".");
  OXY_CHECK(key.scalar_type() == query.scalar_type() && value.scalar_type() == query.scalar_type(), InvalidType,
            "attention takes one dtype; query is ", query.scalar_type(), ", key ", key.scalar_type(), ", value ",
            value.scalar_type(), ".");
  OXY_CHECK(key.device() == query.device() && value.device() == query.device(), InvalidArgument,
            "attention takes tensors of one device; query is on ", query.device(), ", key on ", key.device(),
            ", value on ", value.device(), ".");
  const auto q = query.sym_sizes(), k = key.sym_sizes();
  OXY_CHECK(value.sym_sizes() == k && k[0] == q[0] && k[3] == q[3], InvalidArgument,
            "attention takes key and value of one size, with the batch and width of query; query is ", q, ", key ", k,
            ", value ", value.sym_sizes(), ".");
  OXY_CHECK(k[1] > 0 && q[1] % k[1] == 0, InvalidArgument,
            "attention takes a multiple of key heads as heads; there are ", q[1], " heads and ", k[1], " key heads.");
}

// Pairs of positions within the window.
Tensor visible_pairs(const Tensor& query, const Tensor& key, std::int64_t before, std::int64_t after) {
  const auto options = query.options().dtype(at::kLong);
  const Tensor ahead = at::arange(key.size(2), options) - at::arange(query.size(2), options).unsqueeze(1);
  Tensor visible = at::full({query.size(2), key.size(2)}, true, query.options().dtype(at::kBool));
  if (after >= 0) visible = visible & (ahead <= after);
  if (before >= 0) visible = visible & (ahead >= -before);
  return visible;
}

// What is added to the scores where `shown` is false.
Tensor hidden_unless(const Tensor& shown, const Tensor& query) {
  constexpr double kHidden = -std::numeric_limits<double>::infinity();
  return at::where(shown, at::full({}, 0, query.options()), at::full({}, kHidden, query.options()));
}

// By torch's operators, which know every dtype and device.
Tensor composed(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& bias, double scale,
                std::int64_t before, std::int64_t after, double soft_cap, double dropout) {
  Tensor added = bias.defined() ? bias.to(query.scalar_type()) : bias;
  const bool causal = after == 0 && before < 0 && !added.defined() && soft_cap == 0;
  if (!causal && (before >= 0 || after >= 0)) {
    const Tensor window = hidden_unless(visible_pairs(query, key, before, after), query);
    added = added.defined() ? added + window : window;
  }
  if (soft_cap == 0) {
    const MaybeTensor mask = added.defined() ? MaybeTensor(added) : std::nullopt;
    return at::scaled_dot_product_attention(query, key, value, mask, dropout, causal, scale, true);
  }
  const auto group = query.size(1) / key.size(1);
  const auto shared = [group](const Tensor& t) { return group == 1 ? t : t.repeat_interleave(group, 1); };
  Tensor scores = at::tanh(at::matmul(query, shared(key).transpose(2, 3)) * (scale / soft_cap)) * soft_cap;
  if (added.defined()) scores = scores + added;
  const Tensor nothing = scores.isneginf().all(-1, true);
  const Tensor weights = at::softmax(scores.masked_fill(nothing, 0), -1).masked_fill(nothing, 0);
  return at::matmul(at::dropout(weights, dropout, dropout > 0), shared(value));
}

Tensor attention_operator(const Tensor& query, const Tensor& key, const Tensor& value, const MaybeTensor& mask,
                          bool causal, std::optional<double> scale, std::int64_t before, std::int64_t after,
                          double soft_cap, double dropout) {
  check(query, key, value);
  OXY_CHECK(dropout >= 0 && dropout < 1, InvalidArgument, "dropout is ", dropout,
            "; give the probability that a weight is dropped, from 0 to below 1.");
  OXY_CHECK(soft_cap >= 0 && std::isfinite(soft_cap), InvalidArgument, "soft_cap is ", soft_cap,
            "; give a positive number, or 0 for none.");
  if (causal) after = 0;
  const double factor = scale_or_default(scale, query.size(3));
  Tensor bias = mask.value_or(Tensor());
  if (bias.defined() && bias.scalar_type() == at::kBool) bias = hidden_unless(bias, query);
  if (!has_kernel(query) || query.sym_numel() == 0 || key.sym_numel() == 0) {
    return composed(query, key, value, bias, factor, before, after, soft_cap, dropout);
  }
  // A draw of torch's generator, so that seeds, checkpoints and compiled graphs hold for it as for torch's dropout.
  MaybeTensor seed;
  if (dropout > 0) {
    seed = at::randint(std::numeric_limits<std::int64_t>::max(), {1}, query.options().dtype(at::kLong));
  }
  MaybeTensor added;
  if (bias.defined()) added = bias.scalar_type() == query.scalar_type() ? bias : bias.to(at::kFloat);
  return std::get<0>(Forward::call(query, key, value, added, factor, before, after, soft_cap, dropout, seed));
}

constexpr char kName[] = "oxytorch::attention";
using WholeAttention = Operator<kName, decltype(attention_operator)>;

Tensor attention_autocast(const Tensor& query, const Tensor& key, const Tensor& value, const MaybeTensor& mask,
                          bool causal, std::optional<double> scale, std::int64_t before, std::int64_t after,
                          double soft_cap, double dropout) {
  const c10::impl::ExcludeDispatchKeyGuard below(c10::autocast_dispatch_keyset);
  return WholeAttention::call(autocast(query), autocast(key), autocast(value), mask, causal, scale, before, after,
                              soft_cap, dropout);
}

TORCH_LIBRARY_FRAGMENT(oxytorch, m) {
  m.def(
      "attention(Tensor query, Tensor key, Tensor value, Tensor? mask=None, bool causal=False, float? scale=None, "
      "int window_before=-1, int window_after=-1, float soft_cap=0., float dropout=0.) -> Tensor");
  m.def(
      "attention_forward(Tensor query, Tensor key, Tensor value, Tensor? mask, float scale, int window_before, "
      "int window_after, float soft_cap, float dropout=0., Tensor? seed=None) -> (Tensor output, Tensor log_sum)");
  m.def(
      "attention_backward(Tensor grad_output, Tensor query, Tensor key, Tensor value, Tensor output, Tensor log_sum, "
      "Tensor? mask, float scale, int window_before, int window_after, float soft_cap, float dropout=0., "
      "Tensor? seed=None) -> "
      "(Tensor grad_query, Tensor grad_key, Tensor grad_value)");
}
TORCH_LIBRARY_IMPL(oxytorch, CompositeImplicitAutograd, m) { m.impl("attention", &Kernel<&attention_operator>::call); }
TORCH_LIBRARY_IMPL(oxytorch, FuncTorchBatched, m) { m.impl("attention", &Kernel<&attention_operator>::call); }
TORCH_LIBRARY_IMPL(oxytorch, AutocastCPU, m) { m.impl("attention", &Kernel<&attention_autocast>::call); }
TORCH_LIBRARY_IMPL(oxytorch, AutocastCUDA, m) { m.impl("attention", &Kernel<&attention_autocast>::call); }
TORCH_LIBRARY_IMPL(oxytorch, Autograd, m) {
  m.impl("attention_forward", &Kernel<&forward_autograd>::call);
  m.impl("attention_backward", &Kernel<&backward_autograd>::call);
}
TORCH_LIBRARY_IMPL(oxytorch, CPU, m) {
  m.impl("attention_forward", &Kernel<&forward_cpu>::call);
  m.impl("attention_backward", &Kernel<&backward_cpu>::call);
}
TORCH_LIBRARY_IMPL(oxytorch, Meta, m) {
  m.impl("attention_forward", &Kernel<&forward_meta>::call);
  m.impl("attention_backward", &Kernel<&backward_meta>::call);
}

}  // namespace

Tensor attention(const Tensor& query, const Tensor& key, const Tensor& value, const AttentionOptions& options) {
  return WholeAttention::call(query, key, value, options.mask, options.causal, options.scale, options.window_before,
                              options.window_after, options.soft_cap, options.dropout);
}

}  // namespace oxytorch::ops
