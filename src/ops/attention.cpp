// The operators oxytorch::attention, packed_attention, attention_forward and attention_backward.
#include "oxytorch/ops/attention.h"

#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/ops/_safe_softmax.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/min.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/where.h>
#include <torch/library.h>

#include <array>
#include <cmath>
#include <limits>

#include "ops/attention_cpu.h"
#include "ops/bernoulli_cpu.h"
#include "ops/composed_attention.h"
#include "ops/dispatch.h"
#include "ops/vmap.h"
#include "oxytorch/error.h"

namespace oxytorch::ops {
namespace {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;
using Pair = std::tuple<Tensor, Tensor>;
using Triple = std::tuple<Tensor, Tensor, Tensor>;
using Quad = std::tuple<Tensor, Tensor, Tensor, Tensor>;

// -- the kernels ------------------------------------------------------------------------------------------------------

// The offsets as numbers, which say where `tokens` tokens are cut into documents.
std::vector<std::int64_t> offset_values(const char* name, const Tensor& offsets, std::int64_t tokens) {
  const Tensor here = offsets.to(at::kCPU, at::kLong).contiguous();
  std::vector<std::int64_t> values;
  if (at::isTensorSubclassLike(here)) {  // a tracer has no numbers, and answers item() in its own way
    for (std::int64_t i = 0; i < here.size(0); ++i) values.push_back(here.select(0, i).item<std::int64_t>());
  } else {
    const auto* data = here.const_data_ptr<std::int64_t>();
    values.assign(data, data + here.numel());
  }
  OXY_CHECK(!values.empty() && values.front() == 0, InvalidArgument, name, " begin with ",
            values.empty() ? "nothing" : std::to_string(values.front()), "; the first document begins at 0.");
  for (std::size_t i = 1; i < values.size(); ++i) {
    OXY_CHECK(values[i - 1] <= values[i], InvalidArgument, name, " fall from ", values[i - 1], " to ", values[i],
              " at entry ", i, "; give the first token of each document in order, and the number of tokens.");
  }
  OXY_CHECK(values.back() == tokens, InvalidArgument, name, " end with ", values.back(), " for ", tokens,
            " tokens; the last entry is their number.");
  return values;
}

AttentionRule rule_of(const Tensor& query, const Tensor& key, const MaybeTensor& mask, double scale,
                      std::int64_t before, std::int64_t after, double soft_cap, double dropout, const MaybeTensor& seed,
                      const MaybeTensor& query_offsets, const MaybeTensor& key_offsets) {
  auto rule = attention_rule(mask, scale, before, after, soft_cap);
  if (query_offsets.has_value() || key_offsets.has_value()) {
    OXY_CHECK(query_offsets.has_value() && key_offsets.has_value() && query.size(0) == 1, InvalidArgument,
              "attention_forward and its backward take offsets of queries and of keys with a batch of one; call "
              "oxytorch::packed_attention.");
    rule.query_offsets = offset_values("query_offsets", *query_offsets, query.size(2));
    rule.key_offsets = offset_values("key_offsets", *key_offsets, key.size(2));
    OXY_CHECK(rule.query_offsets.size() == rule.key_offsets.size(), InvalidArgument, "query_offsets have ",
              rule.query_offsets.size(), " entries and key_offsets ", rule.key_offsets.size(), ".");
  }
  if (dropout == 0) return rule;
  rule.dropout = dropout;
  if (seed.has_value() && seed->defined() && seed->scalar_type() == at::kBool) {
    const std::array<std::int64_t, 4> sizes{query.size(0), query.size(1), query.size(2), key.size(2)};
    OXY_CHECK(seed->sizes() == at::IntArrayRef(sizes) && rule.query_offsets.empty(), InvalidArgument,
              "attention_forward and its backward take which weights are kept as ", at::IntArrayRef(sizes), ", not ",
              seed->sizes(), ", and not of packed documents.");
    rule.keep = seed->contiguous();
    return rule;
  }
  OXY_CHECK(
      seed.has_value() && seed->defined() && seed->numel() == 1 && seed->scalar_type() == at::kLong, InvalidArgument,
      "attention_forward and its backward take a seed of one int64 with dropout, or the weights ", "that are kept.");
  rule.seed = static_cast<std::uint64_t>(seed->item<std::int64_t>());
  return rule;
}

Pair forward_cpu(const Tensor& query, const Tensor& key, const Tensor& value, const MaybeTensor& mask, double scale,
                 std::int64_t before, std::int64_t after, double soft_cap, double dropout, const MaybeTensor& seed,
                 const MaybeTensor& query_offsets, const MaybeTensor& key_offsets) {
  OXY_CHECK(attention_cpu_takes(query, key, value, mask), InvalidArgument, "attention_forward does not take query ",
            query.sizes(), ", key ", key.sizes(), ", value ", value.sizes(),
            " with this mask; call oxytorch::attention.");
  return attention_cpu(
      query, key, value,
      rule_of(query, key, mask, scale, before, after, soft_cap, dropout, seed, query_offsets, key_offsets));
}

Triple backward_cpu(const Tensor& grad_output, const Tensor& query, const Tensor& key, const Tensor& value,
                    const Tensor& output, const Tensor& log_sum, const MaybeTensor& mask, double scale,
                    std::int64_t before, std::int64_t after, double soft_cap, double dropout, const MaybeTensor& seed,
                    const MaybeTensor& query_offsets, const MaybeTensor& key_offsets) {
  return attention_cpu_backward(
      grad_output, query, key, value, output, log_sum,
      rule_of(query, key, mask, scale, before, after, soft_cap, dropout, seed, query_offsets, key_offsets));
}

Quad masked_backward_cpu(const Tensor& grad_output, const Tensor& query, const Tensor& key, const Tensor& value,
                         const Tensor& output, const Tensor& log_sum, const Tensor& mask, double scale,
                         std::int64_t before, std::int64_t after, double soft_cap, double dropout,
                         const MaybeTensor& seed) {
  return attention_cpu_masked_backward(
      grad_output, query, key, value, output, log_sum,
      rule_of(query, key, mask, scale, before, after, soft_cap, dropout, seed, std::nullopt, std::nullopt));
}

Pair forward_meta(const Tensor& query, const Tensor& /*key*/, const Tensor& /*value*/, const MaybeTensor& /*mask*/,
                  double /*scale*/, std::int64_t /*before*/, std::int64_t /*after*/, double /*soft_cap*/,
                  double /*dropout*/, const MaybeTensor& /*seed*/, const MaybeTensor& /*query_offsets*/,
                  const MaybeTensor& /*key_offsets*/) {
  const auto log_sum =
      at::empty_symint({query.sym_size(0), query.sym_size(2), query.sym_size(1)}, query.options().dtype(at::kFloat));
  return {empty_heads(query), log_sum.transpose(1, 2)};
}

Triple backward_meta(const Tensor& /*grad_output*/, const Tensor& query, const Tensor& key, const Tensor& value,
                     const Tensor& /*output*/, const Tensor& /*log_sum*/, const MaybeTensor& /*mask*/, double /*scale*/,
                     std::int64_t /*before*/, std::int64_t /*after*/, double /*soft_cap*/, double /*dropout*/,
                     const MaybeTensor& /*seed*/, const MaybeTensor& /*query_offsets*/,
                     const MaybeTensor& /*key_offsets*/) {
  const auto like = [](const Tensor& t) {
    return at::empty_symint({t.sym_size(0), t.sym_size(2), t.sym_size(1), t.sym_size(3)}, t.options()).transpose(1, 2);
  };
  return {like(query), like(key), like(value)};
}

Quad masked_backward_meta(const Tensor& grad_output, const Tensor& query, const Tensor& key, const Tensor& value,
                          const Tensor& output, const Tensor& log_sum, const Tensor& mask, double scale,
                          std::int64_t before, std::int64_t after, double soft_cap, double dropout,
                          const MaybeTensor& seed) {
  return std::tuple_cat(backward_meta(grad_output, query, key, value, output, log_sum, mask, scale, before, after,
                                      soft_cap, dropout, seed, std::nullopt, std::nullopt),
                        std::tuple(at::empty_symint(mask.sym_sizes(), mask.options())));
}

constexpr char kForwardName[] = "oxytorch::attention_forward";
constexpr char kBackwardName[] = "oxytorch::attention_backward";
constexpr char kMaskedBackwardName[] = "oxytorch::attention_masked_backward";
using Forward = Operator<kForwardName, decltype(forward_cpu)>;
using Backward = Operator<kBackwardName, decltype(backward_cpu)>;
using MaskedBackward = Operator<kMaskedBackwardName, decltype(masked_backward_cpu)>;

// -- batching rules ---------------------------------------------------------------------------------------------------

// Samples fold into the batch. Packed documents differ in length, and dropout's mask depends on the index of a sample
// in the batch: both loop.
Pair forward_vmap(const Tensor& query, const Tensor& key, const Tensor& value, const MaybeTensor& mask, double scale,
                  std::int64_t before, std::int64_t after, double soft_cap, double dropout, const MaybeTensor& seed,
                  const MaybeTensor& query_offsets, const MaybeTensor& key_offsets) {
  const c10::SymInt batch = query.sym_size(0);
  if (dropout != 0 || query_offsets.has_value()) {
    return LoopOverSamples<Forward>::call(query, key, value, mask, scale, before, after, soft_cap, dropout, seed,
                                          query_offsets, key_offsets);
  }
  const VmapCall call(query, key, value, mask);
  const MaybeTensor added = mask.has_value() ? MaybeTensor(call.fold_broadcast(*mask, 4, batch)) : std::nullopt;
  const auto [output, log_sum] = Forward::call(call.fold(query), call.fold(key), call.fold(value), added, scale, before,
                                               after, soft_cap, dropout, std::nullopt, std::nullopt, std::nullopt);
  return {call.unfold(output), call.unfold(log_sum)};
}

Triple backward_vmap(const Tensor& grad_output, const Tensor& query, const Tensor& key, const Tensor& value,
                     const Tensor& output, const Tensor& log_sum, const MaybeTensor& mask, double scale,
                     std::int64_t before, std::int64_t after, double soft_cap, double dropout, const MaybeTensor& seed,
                     const MaybeTensor& query_offsets, const MaybeTensor& key_offsets) {
  const c10::SymInt batch = query.sym_size(0);
  if (dropout != 0 || query_offsets.has_value()) {
    return LoopOverSamples<Backward>::call(grad_output, query, key, value, output, log_sum, mask, scale, before, after,
                                           soft_cap, dropout, seed, query_offsets, key_offsets);
  }
  const VmapCall call(grad_output, query, key, value, output, log_sum, mask);
  const MaybeTensor added = mask.has_value() ? MaybeTensor(call.fold_broadcast(*mask, 4, batch)) : std::nullopt;
  const auto [of_query, of_key, of_value] = Backward::call(
      call.fold(grad_output), call.fold(query), call.fold(key), call.fold(value), call.fold(output), call.fold(log_sum),
      added, scale, before, after, soft_cap, dropout, std::nullopt, std::nullopt, std::nullopt);
  return {call.unfold(of_query), call.unfold(of_key), call.unfold(of_value)};
}

// -- derivatives ------------------------------------------------------------------------------------------------------

// Nodes of the graph as torch's own operators have them: torch.func refuses torch::autograd::Function.
struct AttentionNode : torch::autograd::Node {
  std::string name() const override { return "OxytorchAttentionBackward"; }

  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override {
    const std::lock_guard lock(mutex_);
    torch::autograd::variable_list made(4);
    if (!grads[0].defined()) return made;
    const auto saved = node_of<torch::autograd::Node>(*this);
    const Tensor q = query.unpack(), k = key.unpack(), v = value.unpack(), out = output.unpack(saved),
                 logs = log_sum.unpack(saved);
    const MaybeTensor added = maybe(mask), draw = maybe(seed);
    if (added && task_should_compute_output(3)) {
      std::tie(made[0], made[1], made[2], made[3]) =
          MaskedBackward::call(grads[0], q, k, v, out, logs, *added, scale, before, after, soft_cap, dropout, draw);
    } else {
      std::tie(made[0], made[1], made[2]) =
          Backward::call(grads[0], q, k, v, out, logs, added, scale, before, after, soft_cap, dropout, draw,
                         maybe(query_offsets), maybe(key_offsets));
    }
    return made;
  }
  void release_variables() override {
    const std::lock_guard lock(mutex_);
    for (auto* saved : {&query, &key, &value, &mask, &output, &log_sum, &seed, &query_offsets, &key_offsets}) {
      saved->reset_data();
    }
  }

  static MaybeTensor maybe(const torch::autograd::SavedVariable& saved) {
    const Tensor tensor = saved.unpack();
    return if_defined(tensor);
  }

  torch::autograd::SavedVariable query, key, value, mask, output, log_sum, seed, query_offsets, key_offsets;
  double scale = 1, soft_cap = 0, dropout = 0;
  std::int64_t before = -1, after = -1;
};

Pair forward_autograd(const Tensor& query, const Tensor& key, const Tensor& value, const MaybeTensor& mask,
                      double scale, std::int64_t before, std::int64_t after, double soft_cap, double dropout,
                      const MaybeTensor& seed, const MaybeTensor& query_offsets, const MaybeTensor& key_offsets) {
  decltype(new_node<AttentionNode>()) node;
  const Tensor added = or_none(mask);
  if (torch::autograd::compute_requires_grad(query, key, value, added)) {
    node = new_node<AttentionNode>();
    node->set_next_edges(torch::autograd::collect_next_edges(query, key, value, added));
    node->query = {query, false};
    node->key = {key, false};
    node->value = {value, false};
    node->mask = {added, false};
    node->scale = scale;
    node->before = before;
    node->after = after;
    node->soft_cap = soft_cap;
    node->dropout = dropout;
    node->seed = {or_none(seed), false};
    node->query_offsets = {or_none(query_offsets), false};
    node->key_offsets = {or_none(key_offsets), false};
  }
  Pair results;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    results = Forward::call(query, key, value, mask, scale, before, after, soft_cap, dropout, seed, query_offsets,
                            key_offsets);
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
                         const MaybeTensor& seed, const MaybeTensor& query_offsets, const MaybeTensor& key_offsets) {
  Triple grads;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    grads = Backward::call(grad_output, query, key, value, output, log_sum, mask, scale, before, after, soft_cap,
                           dropout, seed, query_offsets, key_offsets);
  }
  const auto& [of_query, of_key, of_value] = grads;
  differentiable_once("attention", {of_query, of_key, of_value}, grad_output, query, key, value);
  return grads;
}

Quad masked_backward_autograd(const Tensor& grad_output, const Tensor& query, const Tensor& key, const Tensor& value,
                              const Tensor& output, const Tensor& log_sum, const Tensor& mask, double scale,
                              std::int64_t before, std::int64_t after, double soft_cap, double dropout,
                              const MaybeTensor& seed) {
  Quad grads;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    grads = MaskedBackward::call(grad_output, query, key, value, output, log_sum, mask, scale, before, after, soft_cap,
                                 dropout, seed);
  }
  const auto& [of_query, of_key, of_value, of_mask] = grads;
  differentiable_once("attention", {of_query, of_key, of_value, of_mask}, grad_output, query, key, value);
  return grads;
}

// -- the function -----------------------------------------------------------------------------------------------------

// `name` is that of the function, which takes tensors of `sizes`.
void check(const char* name, const char* sizes, std::int64_t dims, const Tensor& query, const Tensor& key,
           const Tensor& value) {
  OXY_CHECK(query.dim() == dims && key.dim() == dims && value.dim() == dims, InvalidArgument, name,
            " takes tensors of ", sizes, "; query has ", query.dim(), " dimensions, key ", key.dim(), ", value ",
            value.dim(), ".");
  OXY_CHECK(key.scalar_type() == query.scalar_type() && value.scalar_type() == query.scalar_type(), InvalidType, name,
            " takes one dtype; query is ", query.scalar_type(), ", key ", key.scalar_type(), ", value ",
            value.scalar_type(), ".");
  OXY_CHECK(key.device() == query.device() && value.device() == query.device(), InvalidArgument, name,
            " takes tensors of one device; query is on ", query.device(), ", key on ", key.device(), ", value on ",
            value.device(), ".");
}

void check_rates(double soft_cap, double dropout) {
  OXY_CHECK(dropout >= 0 && dropout < 1, InvalidArgument, "dropout is ", dropout,
            "; give the probability that a weight is dropped, from 0 to below 1.");
  OXY_CHECK(soft_cap >= 0 && std::isfinite(soft_cap), InvalidArgument, "soft_cap is ", soft_cap,
            "; give a positive number, or 0 for none.");
}

void check_heads(const char* name, const c10::SymInt& heads, const c10::SymInt& key_heads) {
  OXY_CHECK(key_heads > 0 && heads % key_heads == 0, InvalidArgument, name,
            " takes a multiple of key heads as heads; there are ", heads, " heads and ", key_heads, " key heads.");
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
    const MaybeTensor mask = if_defined(added);
    // torch's kernel of the CPU gives NaN for a causal order and a negative scale.
    const Tensor turned = scale < 0 ? query.neg() : query;
    return at::scaled_dot_product_attention(turned, key, value, mask, dropout, causal, std::abs(scale), true);
  }
  const auto group = query.size(1) / key.size(1);
  const auto shared = [group](const Tensor& t) { return group == 1 ? t : t.repeat_interleave(group, 1); };
  Tensor scores = at::tanh(at::matmul(query, shared(key).transpose(2, 3)) * (scale / soft_cap)) * soft_cap;
  if (added.defined()) scores = scores + added;
  const Tensor nothing = scores.isneginf().all(-1, true);
  const Tensor weights = at::softmax(scores.masked_fill(nothing, 0), -1).masked_fill(nothing, 0);
  return at::matmul(at::dropout(weights, dropout, dropout > 0), shared(value));
}

// As torch composes it, with the weights that are kept given.
Tensor composed_of(const ComposedAttention& of, const Tensor& kept, double scale) {
  const auto group = of.query.size(1) / of.key.size(1);
  const auto wide = of.query.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const auto shared = [&](const Tensor& t) { return (group == 1 ? t : t.repeat_interleave(group, 1)).to(wide); };
  const Tensor scores = at::matmul(of.query.to(wide), shared(of.key).transpose(2, 3)) * scale + of.mask->to(wide);
  Tensor weights = at::_safe_softmax(scores, -1);
  if (kept.defined()) weights = weights * kept / (1 - of.dropout);
  return at::matmul(weights, shared(of.value)).to(of.query.scalar_type());
}

// Of symbolic sizes this fixes the width alone, where size() would fix all.
double factor_of(std::optional<double> scale, const Tensor& query) {
  return scale_or_default(scale, query.sym_size(-1).guard_int(__FILE__, __LINE__));
}

// A draw of torch's generator, so that seeds, checkpoints and compiled graphs hold for it as for torch's dropout.
MaybeTensor drawn_seed(const Tensor& query, double dropout) {
  if (dropout == 0) return std::nullopt;
  return at::randint(std::numeric_limits<std::int64_t>::max(), {1}, query.options().dtype(at::kLong));
}

Tensor attention_operator(const Tensor& query, const Tensor& key, const Tensor& value, const MaybeTensor& mask,
                          bool causal, std::optional<double> scale, std::int64_t before, std::int64_t after,
                          double soft_cap, double dropout) {
  check("attention", "batch x heads x tokens x width", 4, query, key, value);
  const auto q = query.sym_sizes(), k = key.sym_sizes();
  OXY_CHECK(value.sym_sizes() == k && k[0] == q[0] && k[3] == q[3], InvalidArgument,
            "attention takes key and value of one size, with the batch and width of query; query is ", q, ", key ", k,
            ", value ", value.sym_sizes(), ".");
  check_heads("attention", q[1], k[1]);
  check_rates(soft_cap, dropout);
  if (causal) after = 0;
  const double factor = factor_of(scale, query);
  Tensor bias = mask.value_or(Tensor());
  if (bias.defined() && bias.scalar_type() == at::kBool) bias = hidden_unless(bias, query);
  if (!has_kernel(query) || query.sym_numel() == 0 || key.sym_numel() == 0) {
    return composed(query, key, value, bias, factor, before, after, soft_cap, dropout);
  }
  MaybeTensor added;
  if (bias.defined()) added = bias.scalar_type() == query.scalar_type() ? bias : bias.to(at::kFloat);
  return std::get<0>(Forward::call(query, key, value, added, factor, before, after, soft_cap, dropout,
                                   drawn_seed(query, dropout), std::nullopt, std::nullopt));
}

void check_offsets(const char* name, const Tensor& offsets, const Tensor& query) {
  OXY_CHECK(offsets.scalar_type() == at::kLong || offsets.scalar_type() == at::kInt, InvalidType, name, " are ",
            offsets.scalar_type(), "; give int64 or int32.");
  OXY_CHECK(offsets.dim() == 1 && offsets.sym_size(0) > 0, InvalidArgument, name, " have sizes ", offsets.sym_sizes(),
            "; give one dimension: where each document begins, and the number of tokens.");
  OXY_CHECK(offsets.device() == query.device() || offsets.is_cpu(), InvalidArgument, name, " are on ", offsets.device(),
            "; move them to the CPU, or to the device of query, ", query.device(), ".");
}

Tensor packed_attention_operator(const Tensor& query, const Tensor& key, const Tensor& value,
                                 const Tensor& query_offsets, const MaybeTensor& key_offsets, bool causal,
                                 std::optional<double> scale, std::int64_t before, std::int64_t after, double soft_cap,
                                 double dropout) {
  check("packed_attention", "tokens x heads x width", 3, query, key, value);
  const auto q = query.sym_sizes(), k = key.sym_sizes();
  OXY_CHECK(value.sym_sizes() == k && k[2] == q[2], InvalidArgument,
            "packed_attention takes key and value of one size, with the width of query; query is ", q, ", key ", k,
            ", value ", value.sym_sizes(), ".");
  check_heads("packed_attention", q[1], k[1]);
  check_rates(soft_cap, dropout);
  check_offsets("query_offsets", query_offsets, query);
  if (key_offsets.has_value()) {
    check_offsets("key_offsets", *key_offsets, query);
    OXY_CHECK(key_offsets->sym_size(0) == query_offsets.sym_size(0), InvalidArgument, "query_offsets have ",
              query_offsets.sym_size(0), " entries and key_offsets ", key_offsets->sym_size(0),
              "; give one for each document, and the number of tokens.");
  } else {
    OXY_CHECK(k[0] == q[0], InvalidArgument, "query has ", q[0], " tokens and key ", k[0],
              "; give key_offsets where documents have other keys than queries.");
  }
  const Tensor& of_keys = key_offsets.has_value() ? *key_offsets : query_offsets;
  if (causal) after = 0;
  const double factor = factor_of(scale, query);
  // Tokens are a batch of one, whose documents the offsets tell.
  const auto as_batch = [](const Tensor& t) { return t.transpose(0, 1).unsqueeze(0); };
  const auto as_tokens = [](const Tensor& t) { return t.squeeze(0).transpose(0, 1); };
  const Tensor queries = as_batch(query), keys = as_batch(key), values = as_batch(value);
  if (has_kernel(query) && query.sym_size(2) > 0) {
    return as_tokens(std::get<0>(Forward::call(queries, keys, values, std::nullopt, factor, before, after, soft_cap,
                                               dropout, drawn_seed(query, dropout), query_offsets, of_keys)));
  }
  auto begin = offset_values("query_offsets", query_offsets, query.size(0));
  auto key_begin = offset_values("key_offsets", of_keys, key.size(0));
  if (begin.size() == 1) {  // no document is one without tokens
    begin.push_back(0);
    key_begin.push_back(0);
  }
  std::vector<Tensor> parts;
  for (std::size_t i = 1; i < begin.size(); ++i) {
    const auto cut = [i](const Tensor& t, const std::vector<std::int64_t>& from) {
      return t.narrow(2, from[i - 1], from[i] - from[i - 1]);
    };
    const Tensor part = composed(cut(queries, begin), cut(keys, key_begin), cut(values, key_begin), {}, factor, before,
                                 after, soft_cap, dropout);
    parts.push_back(as_tokens(part));
  }
  return at::cat(parts);
}

constexpr char kName[] = "oxytorch::attention";
constexpr char kPackedName[] = "oxytorch::packed_attention";
using WholeAttention = Operator<kName, decltype(attention_operator)>;
using PackedAttention = Operator<kPackedName, decltype(packed_attention_operator)>;

Tensor attention_autocast(const Tensor& query, const Tensor& key, const Tensor& value, const MaybeTensor& mask,
                          bool causal, std::optional<double> scale, std::int64_t before, std::int64_t after,
                          double soft_cap, double dropout) {
  const c10::impl::ExcludeDispatchKeyGuard below(c10::autocast_dispatch_keyset);
  return WholeAttention::call(autocast(query), autocast(key), autocast(value), mask, causal, scale, before, after,
                              soft_cap, dropout);
}

Tensor packed_attention_autocast(const Tensor& query, const Tensor& key, const Tensor& value,
                                 const Tensor& query_offsets, const MaybeTensor& key_offsets, bool causal,
                                 std::optional<double> scale, std::int64_t before, std::int64_t after, double soft_cap,
                                 double dropout) {
  const c10::impl::ExcludeDispatchKeyGuard below(c10::autocast_dispatch_keyset);
  return PackedAttention::call(autocast(query), autocast(key), autocast(value), query_offsets, key_offsets, causal,
                               scale, before, after, soft_cap, dropout);
}

TORCH_LIBRARY_FRAGMENT(oxytorch, m) {
  m.def(
      "attention(Tensor query, Tensor key, Tensor value, Tensor? mask=None, bool causal=False, float? scale=None, "
      "int window_before=-1, int window_after=-1, float soft_cap=0., float dropout=0.) -> Tensor");
  m.def(
      "packed_attention(Tensor query, Tensor key, Tensor value, Tensor query_offsets, Tensor? key_offsets=None, "
      "bool causal=False, float? scale=None, int window_before=-1, int window_after=-1, float soft_cap=0., "
      "float dropout=0.) -> Tensor");
  m.def(
      "attention_forward(Tensor query, Tensor key, Tensor value, Tensor? mask, float scale, int window_before, "
      "int window_after, float soft_cap, float dropout=0., Tensor? seed=None, Tensor? query_offsets=None, "
      "Tensor? key_offsets=None) -> (Tensor output, Tensor log_sum)");
  m.def(
      "attention_backward(Tensor grad_output, Tensor query, Tensor key, Tensor value, Tensor output, Tensor log_sum, "
      "Tensor? mask, float scale, int window_before, int window_after, float soft_cap, float dropout=0., "
      "Tensor? seed=None, Tensor? query_offsets=None, Tensor? key_offsets=None) -> "
      "(Tensor grad_query, Tensor grad_key, Tensor grad_value)");
  m.def(
      "attention_masked_backward(Tensor grad_output, Tensor query, Tensor key, Tensor value, Tensor output, "
      "Tensor log_sum, Tensor mask, float scale, int window_before, int window_after, float soft_cap, "
      "float dropout=0., Tensor? seed=None) -> "
      "(Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_mask)");
}
TORCH_LIBRARY_IMPL(oxytorch, CompositeImplicitAutograd, m) {
  m.impl("attention", &Kernel<&attention_operator>::call);
  m.impl("packed_attention", &Kernel<&packed_attention_operator>::call);
}
TORCH_LIBRARY_IMPL(oxytorch, FuncTorchBatched, m) {
  m.impl("attention", &Kernel<&attention_operator>::call);
  m.impl("packed_attention", &Kernel<&packed_attention_operator>::call);
  m.impl("attention_forward", &Kernel<&forward_vmap>::call);
  m.impl("attention_backward", &Kernel<&backward_vmap>::call);
  m.impl("attention_masked_backward", &Kernel<&LoopOverSamples<MaskedBackward>::call>::call);
}
const auto attention_autocast_kernels = on_autocast([](torch::Library& m) {
  m.impl("attention", &Kernel<&attention_autocast>::call);
  m.impl("packed_attention", &Kernel<&packed_attention_autocast>::call);
});
TORCH_LIBRARY_IMPL(oxytorch, Autograd, m) {
  m.impl("attention_forward", &Kernel<&forward_autograd>::call);
  m.impl("attention_backward", &Kernel<&backward_autograd>::call);
  m.impl("attention_masked_backward", &Kernel<&masked_backward_autograd>::call);
}
TORCH_LIBRARY_IMPL(oxytorch, CPU, m) {
  m.impl("attention_forward", &Kernel<&forward_cpu>::call);
  m.impl("attention_backward", &Kernel<&backward_cpu>::call);
  m.impl("attention_masked_backward", &Kernel<&masked_backward_cpu>::call);
}
TORCH_LIBRARY_IMPL(oxytorch, Meta, m) {
  m.impl("attention_forward", &Kernel<&forward_meta>::call);
  m.impl("attention_backward", &Kernel<&backward_meta>::call);
  m.impl("attention_masked_backward", &Kernel<&masked_backward_meta>::call);
}

}  // namespace

bool composed_attention_takes(const ComposedAttention& of) {
  if (!(of.dropout >= 0 && of.dropout < 1) || is_transformed()) return false;
  for (const Tensor& tensor : {of.query, of.key, of.value}) {
    if (!is_ordinary(tensor) || tensor.dim() != 4 || tensor.scalar_type() != of.query.scalar_type()) return false;
  }
  const auto q = of.query.sizes(), k = of.key.sizes();
  if (of.value.sizes() != k || k[0] != q[0] || k[3] != q[3] || q[1] % k[1] != 0) return false;
  if (q[1] != k[1] && !of.shares_keys) return false;
  if (of.mask.has_value() && of.mask->defined()) {
    const Tensor& mask = *of.mask;
    const auto type = mask.scalar_type();
    const bool is_typed = type == at::kBool || type == at::kFloat || type == of.query.scalar_type();
    if (of.is_causal || !is_ordinary(mask) || !is_typed) return false;
    if (mask.dim() > 4 || !at::is_expandable_to(mask.sizes(), {q[0], q[1], q[2], k[2]})) return false;
  }
  return attention_cpu_takes(of.query, of.key, of.value, std::nullopt);
}

Tensor drawn_weights(at::IntArrayRef sizes, double dropout) {
  Tensor kept = at::empty(sizes, at::kBool);
  const double p = 1 - dropout;
  if (!bernoulli_cpu_is_torchs() || !bernoulli_cpu(kept, p, std::nullopt)) kept.bernoulli_(p);
  return kept;
}

namespace {

// The kernel's output, and the logarithm of each query's sum.
Pair attended(const ComposedAttention& of, const Tensor& kept, double scale) {
  MaybeTensor added = of.mask;
  if (added && added->defined() && added->scalar_type() == at::kBool) added = hidden_unless(*added, of.query);
  return Forward::call(of.query, of.key, of.value, added, scale, -1, of.is_causal ? 0 : -1, of.soft_cap,
                       kept.defined() ? of.dropout : 0, if_defined(kept), std::nullopt, std::nullopt);
}

// Where a finite number hides all keys of a query, such as the least of its dtype, the logarithm of its sum has lost
// the digits that tell one key's weight from another's.
bool has_lost_scores(const Tensor& log_sum) {
  constexpr float kLeastScore = -1000;
  return log_sum.numel() > 0 && at::min(log_sum.detach()).item<float>() < kLeastScore;
}

}  // namespace

Tensor composed_attention(const ComposedAttention& of, const Tensor& kept) {
  const double scale = scale_or_default(of.scale, of.query.size(3));
  const bool is_added = of.mask.has_value() && of.mask->defined() && of.mask->scalar_type() != at::kBool;
  auto [output, log_sum] = attended(of, kept, scale);
  return is_added && has_lost_scores(log_sum) ? composed_of(of, kept, scale) : output;
}

std::optional<Tensor> written_attention(const ComposedAttention& of, const Tensor& kept) {
  auto [output, log_sum] = attended(of, kept, scale_or_default(of.scale, of.query.size(3)));
  // The kernel gives 0 where nothing is visible.
  const bool may_hide_all = of.mask.has_value() && of.mask->defined();
  if (may_hide_all && (has_lost_scores(log_sum) || log_sum.detach().eq(0).any().item<bool>())) return std::nullopt;
  return output;
}

Tensor attention(const Tensor& query, const Tensor& key, const Tensor& value, const AttentionOptions& options) {
  return WholeAttention::call(query, key, value, options.mask, options.causal, options.scale, options.window_before,
                              options.window_after, options.soft_cap, options.dropout);
}

Tensor packed_attention(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& query_offsets,
                        const PackedAttentionOptions& options) {
  return PackedAttention::call(query, key, value, query_offsets, options.key_offsets, options.causal, options.scale,
                               options.window_before, options.window_after, options.soft_cap, options.dropout);
}

}  // namespace oxytorch::ops
