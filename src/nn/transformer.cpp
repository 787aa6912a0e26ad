#include "oxytorch/nn/transformer.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/repeat_interleave.h>
#include <ATen/ops/zeros.h>

#include <array>
#include <vector>

#include "oxytorch/error.h"
#include "oxytorch/memory/block.h"
#include "oxytorch/ops.h"

namespace oxytorch::nn {
namespace {

using at::Tensor;

torch::nn::Linear linear(std::int64_t from, std::int64_t to, bool bias) {
  return torch::nn::Linear(torch::nn::LinearOptions(from, to).bias(bias));
}

RowNorm norm_of(const TransformerOptions& options) {
  return RowNorm(options.width, options.norm, options.eps, options.bias);
}

void check_tokens(const TransformerOptions& options, const Tensor& x, std::int64_t dims) {
  OXY_CHECK(x.dim() == dims && x.size(-1) == options.width, InvalidArgument, "a transformer of width ", options.width,
            dims == 2 ? " takes packed documents of tokens x width" : " takes batch x tokens x width",
            "; it was given sizes ", x.sizes(), ".");
}

Sequences or_padded(const Sequences& given, const TransformerOptions& options, const Tensor& x) {
  return given.is_empty() ? Sequences::padded(options, x) : given;
}

// Angles of each position, in fp64 until they are rounded once (Su et al., arXiv:2104.09864).
void set_angles(Sequences& sequences, const TransformerOptions& options, const Tensor& positions) {
  if (options.rotary_base == 0) return;
  const std::int64_t pairs = options.rotary_dim.value_or(options.head_width()) / 2;
  const auto wide = positions.options().dtype(at::kDouble);
  const Tensor rates = at::pow(options.rotary_base, at::arange(pairs, wide) / -static_cast<double>(pairs));
  const Tensor angles = positions.to(at::kDouble).unsqueeze(1) * rates;
  sequences.cos = angles.cos().to(at::kFloat);
  sequences.sin = angles.sin().to(at::kFloat);
}

}  // namespace

Sequences Sequences::padded(const TransformerOptions& options, const Tensor& x, const Tensor& mask) {
  check_tokens(options, x, 3);
  Sequences made;
  if (mask.defined() && mask.dim() == 2) {
    OXY_CHECK(mask.scalar_type() == at::kBool && mask.size(0) == x.size(0) && mask.size(1) == x.size(1),
              InvalidArgument, "a mask of two dimensions says of each of the ", x.size(0), " x ", x.size(1),
              " tokens whether it is there, as bool; it has sizes ", mask.sizes(), " and dtype ", mask.scalar_type(),
              ".");
    made.mask = mask.unsqueeze(1).unsqueeze(1);
  } else {
    made.mask = mask;
  }
  set_angles(made, options, at::arange(x.size(1), x.options().dtype(at::kLong).requires_grad(false)));
  return made;
}

Sequences Sequences::packed(const TransformerOptions& options, const Tensor& x, const Tensor& offsets) {
  check_tokens(options, x, 2);
  OXY_CHECK(offsets.defined() && offsets.dim() == 1 && offsets.size(0) >= 1, InvalidArgument,
            "offsets of packed documents say where each begins, and the number of tokens; give one dimension of them.");
  Sequences made;
  made.offsets = offsets;
  if (options.rotary_base == 0) return made;
  const Tensor begins = offsets.slice(0, 0, -1).to(at::kLong), lengths = offsets.diff().to(at::kLong);
  const Tensor first = at::repeat_interleave(begins, lengths);
  OXY_CHECK(first.size(0) == x.size(0), InvalidArgument, "offsets end with ", first.size(0), " tokens, and there are ",
            x.size(0), ".");
  set_angles(made, options, (at::arange(x.size(0), first.options()) - first).to(x.device()));
  return made;
}

// -- normalization ----------------------------------------------------------------------------------------------------

RowNormImpl::RowNormImpl(std::int64_t features, NormKind kind, std::optional<double> eps, bool bias)
    : features_(features), kind_(kind), eps_(eps), has_bias_(bias && kind == NormKind::Layer) {
  OXY_CHECK(features > 0, InvalidArgument, "RowNorm takes a positive number of features; it was given ", features, ".");
  RowNormImpl::reset();
}

void RowNormImpl::reset() {
  weight = register_parameter("weight", at::ones({features_}));
  bias = register_parameter("bias", has_bias_ ? at::zeros({features_}) : Tensor(), has_bias_);
}

void RowNormImpl::pretty_print(std::ostream& out) const {
  out << "oxytorch::nn::RowNorm(" << features_ << ", " << (kind_ == NormKind::Rms ? "rms" : "layer") << ")";
}

namespace {

ops::RowNormOptions row_norm(const Tensor& weight, const Tensor& bias, std::optional<double> eps, double dropout = 0) {
  ops::RowNormOptions made{.weight = weight, .eps = eps, .dropout = dropout};
  if (bias.defined()) made.bias = bias;
  return made;
}

}  // namespace

Tensor RowNormImpl::forward(const Tensor& x) const {
  const auto options = row_norm(weight, bias, eps_);
  return kind_ == NormKind::Rms ? ops::rms_norm(x, options) : ops::layer_norm(x, options);
}

std::pair<Tensor, Tensor> RowNormImpl::add(const Tensor& x, const Tensor& residual, double dropout) const {
  const auto options = row_norm(weight, bias, eps_, is_training() ? dropout : 0);
  return kind_ == NormKind::Rms ? ops::add_rms_norm(x, residual, options) : ops::add_layer_norm(x, residual, options);
}

// -- attention --------------------------------------------------------------------------------------------------------

SelfAttentionImpl::SelfAttentionImpl(TransformerOptions given) : options(std::move(given)) {
  SelfAttentionImpl::reset();
}

void SelfAttentionImpl::reset() {
  options.check();
  const std::int64_t outputs = (options.heads + 2 * options.value_heads()) * options.head_width();
  qkv = register_module("qkv", linear(options.width, outputs, options.bias));
  out = register_module("out", linear(options.width, options.width, options.bias));
}

void SelfAttentionImpl::pretty_print(std::ostream& stream) const {
  stream << "oxytorch::nn::SelfAttention(" << options << ")";
}

Tensor SelfAttentionImpl::forward(const Tensor& x, const Sequences& given) {
  const Sequences sequences = or_padded(given, options, x);
  const bool is_packed = sequences.offsets.defined();
  check_tokens(options, x, is_packed ? 2 : 3);
  const std::int64_t heads = options.heads, key_heads = options.value_heads();
  auto sizes = x.sizes().vec();
  sizes.back() = heads + 2 * key_heads;
  sizes.push_back(options.head_width());
  auto parts = qkv(x).view(sizes).split_with_sizes({heads, key_heads, key_heads}, -2);
  // batch x heads x tokens x width, of packed documents as one sample.
  for (auto& part : parts) part = is_packed ? part.transpose(0, 1).unsqueeze(0) : part.transpose(1, 2);
  if (sequences.cos.defined()) {
    const ops::RotaryOptions rotary{.interleaved = options.rotary_interleaved, .rotary_dim = options.rotary_dim};
    for (const std::size_t i : {0, 1}) parts[i] = ops::rotary(parts[i], sequences.cos, sequences.sin, rotary);
  }
  const double dropout = is_training() ? options.attention_dropout : 0;
  Tensor seen;
  if (is_packed) {
    for (auto& part : parts) part = part.squeeze(0).transpose(0, 1);
    seen = ops::packed_attention(parts[0], parts[1], parts[2], sequences.offsets,
                                 {.causal = options.causal,
                                  .window_before = options.window_before,
                                  .soft_cap = options.soft_cap,
                                  .dropout = dropout});
  } else {
    ops::AttentionOptions attention{.causal = options.causal,
                                    .window_before = options.window_before,
                                    .soft_cap = options.soft_cap,
                                    .dropout = dropout};
    if (sequences.mask.defined()) attention.mask = sequences.mask;
    seen = ops::attention(parts[0], parts[1], parts[2], attention).transpose(1, 2);
  }
  return out(seen.reshape(x.sizes()));
}

// -- feed-forward -----------------------------------------------------------------------------------------------------

FeedForwardImpl::FeedForwardImpl(TransformerOptions given) : options(std::move(given)) { FeedForwardImpl::reset(); }

void FeedForwardImpl::reset() {
  options.check();
  const std::int64_t hidden = options.hidden_width();
  up = register_module("up", linear(options.width, options.is_gated() ? 2 * hidden : hidden, options.bias));
  down = register_module("down", linear(hidden, options.width, options.bias));
}

void FeedForwardImpl::pretty_print(std::ostream& out) const { out << "oxytorch::nn::FeedForward(" << options << ")"; }

Tensor FeedForwardImpl::forward(const Tensor& x) {
  const Tensor wide = up(x);
  switch (options.activation) {
    case Activation::Gelu: return down(ops::gelu(wide));
    case Activation::GeluTanh: return down(ops::gelu(wide, "tanh"));
    case Activation::Relu: return down(at::relu(wide));
    case Activation::SwiGlu: return down(ops::swiglu(wide));
    case Activation::GeGlu: return down(ops::geglu(wide));
  }
  return {};
}

// -- layers -----------------------------------------------------------------------------------------------------------

TransformerLayerImpl::TransformerLayerImpl(TransformerOptions given) : options(std::move(given)) {
  TransformerLayerImpl::reset();
}

void TransformerLayerImpl::reset() {
  options.check();
  norm1 = register_module("norm1", norm_of(options));
  attention = register_module("attention", SelfAttention(options));
  norm2 = register_module("norm2", norm_of(options));
  feed_forward = register_module("feed_forward", FeedForward(options));
}

std::pair<Tensor, Tensor> TransformerLayerImpl::between(const Tensor& normed, const Tensor& sum,
                                                        const Sequences& sequences, const RowNormImpl& next) {
  const auto [again, longer] = norm2->add(attention->forward(normed, sequences), sum, options.dropout);
  return next.add(feed_forward(again), longer, options.dropout);
}

Tensor TransformerLayerImpl::forward(const Tensor& x, const Sequences& given) {
  const Sequences sequences = or_padded(given, options, x);
  if (!options.norm_first) {
    const Tensor attended = norm1->add(attention->forward(x, sequences), x, options.dropout).first;
    return norm2->add(feed_forward(attended), attended, options.dropout).first;
  }
  const auto [normed, sum] = norm2->add(attention->forward(norm1(x), sequences), x, options.dropout);
  return sum + at::dropout(feed_forward(normed), options.dropout, is_training());
}

// -- the stack --------------------------------------------------------------------------------------------------------

TransformerImpl::TransformerImpl(TransformerOptions given) : options(std::move(given)) { TransformerImpl::reset(); }

void TransformerImpl::reset() {
  options.check();
  layers = register_module("layers", torch::nn::ModuleList());
  for (std::int64_t i = 0; i < options.layers; ++i) layers->push_back(TransformerLayer(options));
  if (options.norm_first) norm = register_module("norm", norm_of(options));
}

void TransformerImpl::pretty_print(std::ostream& out) const {
  out << "oxytorch::nn::Transformer(layers=" << options.layers << ", " << options << ")";
}

TransformerLayer TransformerImpl::layer(std::size_t index) const {
  return TransformerLayer(layers->ptr<TransformerLayerImpl>(index));
}

Tensor TransformerImpl::forward(const Tensor& x, const Sequences& given) {
  const Sequences sequences = or_padded(given, options, x);
  const auto name = [this](std::size_t i) { return options.name + "." + std::to_string(i); };
  if (!options.norm_first) {
    Tensor result = x;
    for (std::size_t i = 0; i < layers->size(); ++i) {
      const auto run = [one = layer(i), sequences](const Tensor& in) mutable { return one->forward(in, sequences); };
      result = memory::block(name(i), run, result);
    }
    return result;
  }
  std::vector<Tensor> pair{layer(0)->norm1(x), x};
  for (std::size_t i = 0; i < layers->size(); ++i) {
    // By value: a checkpoint runs it again in backward.
    const auto run = [one = layer(i), next = i + 1 < layers->size() ? layer(i + 1)->norm1 : norm, sequences](
                         const Tensor& normed, const Tensor& sum) mutable {
      auto [again, longer] = one->between(normed, sum, sequences, *next);
      return std::vector<Tensor>{std::move(again), std::move(longer)};
    };
    pair = memory::block(name(i), run, pair[0], pair[1]);
  }
  return pair[0];
}

}  // namespace oxytorch::nn
