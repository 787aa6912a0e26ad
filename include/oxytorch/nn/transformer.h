/// Transformers, and the modules that they consist of.
#pragma once

#include <torch/nn/cloneable.h>
#include <torch/nn/modules/common.h>
#include <torch/nn/modules/container/any_value.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <optional>
#include <ostream>
#include <string>
#include <utility>

#include "oxytorch/api.h"

namespace oxytorch::nn {

enum class NormKind { Layer, Rms };

/// Between the two matrices of a feed-forward layer. The gated ones multiply two halves of what the first gives.
enum class Activation { Gelu, GeluTanh, Relu, SwiGlu, GeGlu };

/// What a transformer is like. The functions give those of known families; every field may be changed after.
struct OXY_API TransformerOptions {
  std::int64_t width = 0;      ///< features of a token
  std::int64_t heads = 0;      ///< of attention; they share `width`
  std::int64_t layers = 1;     ///< of the whole stack
  std::int64_t key_heads = 0;  ///< of keys and values, each for as many heads; 0: as many as heads
  /// Features between the matrices of a feed-forward layer; 0: 4 widths, or where the activation is gated 8/3 of one,
  /// which has as many parameters, rounded up to a multiple of 64.
  std::int64_t hidden = 0;
  NormKind norm = NormKind::Layer;
  std::optional<double> eps = {};  ///< of the norms; none: as ops::RowNormOptions has it
  bool norm_first = true;          ///< before each part, and once after the last layer; else after each part's sum
  Activation activation = Activation::Gelu;
  bool bias = true;                 ///< of the linear layers and of layer normalization
  bool causal = false;              ///< a token sees itself and those before it
  std::int64_t window_before = -1;  ///< tokens that one sees before itself; a negative number is no limit
  double soft_cap = 0;              ///< of the scores, as ops::AttentionOptions has it
  double dropout = 0;               ///< of what each part adds, in training
  double attention_dropout = 0;     ///< of attention's weights, in training
  /// Where above 0, queries and keys are rotated by position with this base, as ops::rotary() does it; else what is
  /// given has its positions in it.
  double rotary_base = 0;
  std::optional<std::int64_t> rotary_dim = {};  ///< features of a head that are rotated; all where not given
  bool rotary_interleaved = false;              ///< pairs side by side, as in GPT-J
  /// Each layer is the block `name`.0, `name`.1 ... of memory::fit() and of Trainer's gradient_checkpointing.
  std::string name = "transformer";

  /// Normalization first, GELU by tanh, causal (GPT-2).
  static TransformerOptions gpt(std::int64_t width, std::int64_t heads, std::int64_t layers);
  /// RMS normalization first, SwiGLU, no biases, rotary positions, causal (LLaMA). `key_heads` 0: as many as heads.
  static TransformerOptions llama(std::int64_t width, std::int64_t heads, std::int64_t layers,
                                  std::int64_t key_heads = 0);
  /// Normalization after each sum with eps 1e-12, GELU, dropout 0.1 of parts and attention, sees all tokens (BERT).
  static TransformerOptions bert(std::int64_t width, std::int64_t heads, std::int64_t layers);

  [[nodiscard]] std::int64_t head_width() const { return width / heads; }
  [[nodiscard]] std::int64_t value_heads() const { return key_heads == 0 ? heads : key_heads; }
  [[nodiscard]] bool is_gated() const { return activation == Activation::SwiGlu || activation == Activation::GeGlu; }
  [[nodiscard]] std::int64_t hidden_width() const;
  /// Throws InvalidArgument, with the field and its value, for what does not fit.
  void check() const;
};
OXY_API std::ostream& operator<<(std::ostream& out, const TransformerOptions& options);

/// The mask or the document offsets of a batch, and its rotary tables: made once for all layers. An empty one stands
/// for batch x tokens x width without a mask.
struct OXY_API Sequences {
  /// Of batch x tokens x width. `mask`: batch x tokens, true where there is a token (torch's key_padding_mask has it
  /// the other way round); or as ops::AttentionOptions has it; undefined: all are there.
  static Sequences padded(const TransformerOptions& options, const at::Tensor& x, const at::Tensor& mask = {});
  /// Of documents that lie one after the other, tokens x width. `offsets`: as of ops::packed_attention().
  static Sequences packed(const TransformerOptions& options, const at::Tensor& x, const at::Tensor& offsets);

  at::Tensor mask;      ///< that broadcasts to batch x heads x tokens x tokens; undefined for none
  at::Tensor offsets;   ///< undefined where not packed
  at::Tensor cos, sin;  ///< tokens x pairs; undefined without rotary positions

  [[nodiscard]] bool is_empty() const { return !mask.defined() && !offsets.defined() && !cos.defined(); }
};

/// Layer or RMS normalization, alone or of a sum.
class OXY_API RowNormImpl : public torch::nn::Cloneable<RowNormImpl> {
 public:
  explicit RowNormImpl(std::int64_t features, NormKind kind = NormKind::Layer, std::optional<double> eps = {},
                       bool bias = true);
  void reset() override;
  void pretty_print(std::ostream& out) const override;
  /// `x`: any sizes x features, of which the last dimension is normalized.
  at::Tensor forward(const at::Tensor& x) const;
  /// The norm of dropout(x) + residual, and that sum, in one pass.
  std::pair<at::Tensor, at::Tensor> add(const at::Tensor& x, const at::Tensor& residual, double dropout = 0) const;

  at::Tensor weight, bias;  ///< bias: undefined for RMS normalization, and where there is none

 private:
  std::int64_t features_;
  NormKind kind_;
  std::optional<double> eps_;
  bool has_bias_;
};
TORCH_MODULE(RowNorm);

/// Attention of tokens to those of their own sequence. Queries, keys and values are one matrix, heads in this order.
class OXY_API SelfAttentionImpl : public torch::nn::Cloneable<SelfAttentionImpl> {
 public:
  explicit SelfAttentionImpl(TransformerOptions options);
  void reset() override;
  void pretty_print(std::ostream& out) const override;
  /// `x`: batch x tokens x width, or tokens x width of packed documents; the result has the same. Throws
  /// InvalidArgument for other sizes.
  at::Tensor forward(const at::Tensor& x, const Sequences& sequences = {});

  TransformerOptions options;
  torch::nn::Linear qkv{nullptr}, out{nullptr};

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(Sequences())})
};
TORCH_MODULE(SelfAttention);

/// down(activation(up(x))); `up` of a gated activation gives both halves, the gate first.
class OXY_API FeedForwardImpl : public torch::nn::Cloneable<FeedForwardImpl> {
 public:
  explicit FeedForwardImpl(TransformerOptions options);
  void reset() override;
  void pretty_print(std::ostream& out) const override;
  /// `x`: any sizes x width; the result has the same.
  at::Tensor forward(const at::Tensor& x);

  TransformerOptions options;
  torch::nn::Linear up{nullptr}, down{nullptr};
};
TORCH_MODULE(FeedForward);

/// Attention and feed-forward, each added to what it was given. Dropout, sum and normalization are one pass.
class OXY_API TransformerLayerImpl : public torch::nn::Cloneable<TransformerLayerImpl> {
 public:
  explicit TransformerLayerImpl(TransformerOptions options);
  void reset() override;
  /// Sizes and errors as of SelfAttention.
  at::Tensor forward(const at::Tensor& x, const Sequences& sequences = {});
  /// The layer between two norms: from `sum` and norm1 of it, those of the layer's result and `next`.
  std::pair<at::Tensor, at::Tensor> between(const at::Tensor& normed, const at::Tensor& sum, const Sequences& sequences,
                                            const RowNormImpl& next);

  TransformerOptions options;
  RowNorm norm1{nullptr}, norm2{nullptr};
  SelfAttention attention{nullptr};
  FeedForward feed_forward{nullptr};

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(Sequences())})
};
TORCH_MODULE(TransformerLayer);

/// `options.layers` layers, and a norm after them where norms come first. A layer's last sum and the next one's first
/// norm are one pass.
class OXY_API TransformerImpl : public torch::nn::Cloneable<TransformerImpl> {
 public:
  explicit TransformerImpl(TransformerOptions options);
  void reset() override;
  void pretty_print(std::ostream& out) const override;
  /// Sizes and errors as of SelfAttention.
  at::Tensor forward(const at::Tensor& x, const Sequences& sequences = {});
  /// Of batch x tokens x width; `mask` as of Sequences::padded().
  at::Tensor forward_masked(const at::Tensor& x, const at::Tensor& mask) {
    return forward(x, Sequences::padded(options, x, mask));
  }
  /// Of tokens x width; `offsets` as of Sequences::packed().
  at::Tensor forward_packed(const at::Tensor& x, const at::Tensor& offsets) {
    return forward(x, Sequences::packed(options, x, offsets));
  }

  TransformerOptions options;
  torch::nn::ModuleList layers{nullptr};
  RowNorm norm{nullptr};  ///< empty where norms come last

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(Sequences())})

 private:
  TransformerLayer layer(std::size_t index) const;
};
TORCH_MODULE(Transformer);

}  // namespace oxytorch::nn
