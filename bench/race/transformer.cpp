// Transformers from C++: oxytorch::nn against torch's own modules and the layers that people write of them, forward and
// backward.
//
//   transformer_race [--case NAME]... [--threads N] [--seconds S]
//
// All contenders run in this process, in turn, on the same numbers. ops.py runs it and shows the figures.
#include <ATen/Context.h>
#include <torch/torch.h>

#include <memory>
#include <string>
#include <vector>

#include "oxytorch/amp.h"
#include "oxytorch/nn.h"
#include "oxytorch/tune/host.h"
#include "rounds.h"

namespace {

using oxytorch::nn::TransformerOptions;
using torch::Tensor;

constexpr int64_t kBatch = 16, kTokens = 128, kWidth = 256, kHeads = 4, kLayers = 4;

// A layer as examples and tutorials have it.
struct UsualLayerImpl : torch::nn::Module {
  explicit UsualLayerImpl(TransformerOptions given)
      : options(std::move(given)),
        qkv(register_module("qkv", linear(kWidth, (kHeads + 2 * options.value_heads()) * options.head_width()))),
        out(register_module("out", linear(kWidth, kWidth))),
        up(register_module("up", linear(kWidth, options.hidden_width() * (options.is_gated() ? 2 : 1)))),
        down(register_module("down", linear(options.hidden_width(), kWidth))),
        norm1(register_module("norm1", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})))),
        norm2(register_module("norm2", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})))) {}

  [[nodiscard]] torch::nn::Linear linear(int64_t from, int64_t to) const {
    return torch::nn::Linear(torch::nn::LinearOptions(from, to).bias(options.bias));
  }
  [[nodiscard]] Tensor normed(torch::nn::LayerNorm& norm, const Tensor& x) const {
    if (options.norm == oxytorch::nn::NormKind::Layer) return norm(x);
    return x * at::rsqrt(x.square().mean(-1, true) + 1e-5) * norm->weight;
  }
  [[nodiscard]] static Tensor rotated(const Tensor& x, const Tensor& cos, const Tensor& sin) {
    const auto halves = x.chunk(2, -1);
    return x * cos + at::cat({-halves[1], halves[0]}, -1) * sin;
  }

  Tensor attended(const Tensor& x, const Tensor& cos, const Tensor& sin) {
    const int64_t keys = options.value_heads();
    auto parts = qkv(x).view({kBatch, kTokens, kHeads + 2 * keys, options.head_width()}).split({kHeads, keys, keys}, 2);
    for (auto& part : parts) part = part.transpose(1, 2);
    if (cos.defined()) {
      for (const std::size_t i : {0, 1})
        parts[i] = rotated(parts[i], cos.to(parts[i].dtype()), sin.to(parts[i].dtype()));
    }
    const double dropout = is_training() ? options.attention_dropout : 0;
    const auto y =
        at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, dropout, options.causal, {}, keys != kHeads);
    return out(y.transpose(1, 2).reshape({kBatch, kTokens, kWidth}));
  }
  Tensor fed(const Tensor& x) {
    const auto wide = up(x);
    if (!options.is_gated()) {
      return down(at::gelu(wide, options.activation == oxytorch::nn::Activation::GeluTanh ? "tanh" : "none"));
    }
    const auto halves = wide.chunk(2, -1);
    return down(at::silu(halves[0]) * halves[1]);
  }
  Tensor forward(const Tensor& x, const Tensor& cos, const Tensor& sin) {
    const auto dropped = [this](const Tensor& y) {
      return options.dropout > 0 ? at::dropout(y, options.dropout, is_training()) : y;
    };
    if (options.norm_first) {
      const auto sum = x + dropped(attended(normed(norm1, x), cos, sin));
      return sum + dropped(fed(normed(norm2, sum)));
    }
    const auto first = normed(norm1, x + dropped(attended(x, cos, sin)));
    return normed(norm2, first + dropped(fed(first)));
  }

  TransformerOptions options;
  torch::nn::Linear qkv, out, up, down;
  torch::nn::LayerNorm norm1, norm2;
};
TORCH_MODULE(UsualLayer);

Tensor tokens() {
  torch::manual_seed(1);
  return torch::randn({kBatch, kTokens, kWidth}).requires_grad_();
}

race::Contender contender(std::string name, at::ScalarType type, std::vector<Tensor> parameters,
                          std::function<Tensor()> forward) {
  return {std::move(name), [type, parameters = std::move(parameters), forward = std::move(forward)]() mutable {
            for (auto& parameter : parameters) parameter.mutable_grad().reset();
            Tensor loss;
            {
              const oxytorch::amp::Autocast autocast(torch::kCPU, type, type != at::kFloat);
              loss = forward().to(at::kFloat).square().mean();
            }
            loss.backward();
          }};
}

race::Contender ours(const TransformerOptions& options, at::ScalarType type) {
  torch::manual_seed(0);
  oxytorch::nn::Transformer model(options);
  return contender("oxytorch", type, model->parameters(), [model, x = tokens()]() mutable { return model(x); });
}

race::Contender usual(const TransformerOptions& options, at::ScalarType type, bool by_math) {
  torch::manual_seed(0);
  std::vector<UsualLayer> layers;
  std::vector<Tensor> parameters;
  for (int64_t i = 0; i < kLayers; ++i) {
    layers.emplace_back(options);
    for (const auto& parameter : layers.back()->parameters()) parameters.push_back(parameter);
  }
  torch::nn::LayerNorm norm(torch::nn::LayerNormOptions({kWidth}));
  if (options.norm_first) parameters.push_back(norm->weight);
  Tensor cos, sin;
  if (options.rotary_base > 0) {
    const int64_t half = options.head_width() / 2;
    const auto angles =
        torch::arange(kTokens).unsqueeze(1) * torch::pow(options.rotary_base, -torch::arange(half) / half);
    cos = torch::cat({angles, angles}, -1).cos();
    sin = torch::cat({angles, angles}, -1).sin();
  }
  return contender(by_math ? "torch, math attention" : "torch", type, parameters,
                   [layers, norm, options, cos, sin, by_math, x = tokens()]() mutable {
                     auto& context = at::globalContext();
                     const bool flash = context.userEnabledFlashSDP();
                     context.setSDPUseFlash(flash && !by_math);
                     Tensor y = x;
                     for (auto& layer : layers) y = layer(y, cos, sin);
                     context.setSDPUseFlash(flash);
                     return options.norm_first ? layers[0]->normed(norm, y) : y;
                   });
}

race::Contender encoder(const TransformerOptions& options, at::ScalarType type) {
  torch::manual_seed(0);
  torch::nn::TransformerEncoder model(
      torch::nn::TransformerEncoderLayer(torch::nn::TransformerEncoderLayerOptions(kWidth, kHeads)
                                             .dim_feedforward(options.hidden_width())
                                             .dropout(options.dropout)
                                             .activation(torch::kGELU)),
      kLayers);
  return contender("TransformerEncoder", type, model->parameters(),
                   [model, x = tokens()] { return model.ptr()->forward(x.transpose(0, 1)); });
}

}  // namespace

int main(int argc, char** argv) {
  // For all: freed memory serves the next step, and the math path keeps bfloat16.
  const auto allocator = oxytorch::tune_allocator();
  at::globalContext().setAllowFP16BF16ReductionMathSDP(true);
  std::vector<race::Case> cases;
  for (const auto& [type, type_name] : {std::pair(at::kBFloat16, "bf16"), std::pair(at::kFloat, "fp32")}) {
    const auto add = [&cases, type = type, type_name = type_name](const std::string& family,
                                                                  TransformerOptions options) {
      cases.push_back({std::string("transformer ") + type_name + ", " + family + " of 4 x 256, 16 x 128 tokens",
                       [options = std::move(options), type] {
                         std::vector made{ours(options, type), usual(options, type, false), usual(options, type, true)};
                         if (!options.norm_first) made.push_back(encoder(options, type));
                         return made;
                       }});
    };
    add("GPT", TransformerOptions::gpt(kWidth, kHeads, kLayers));
    add("LLaMA", TransformerOptions::llama(kWidth, kHeads, kLayers, 2));
    add("BERT", TransformerOptions::bert(kWidth, kHeads, kLayers));
  }
  return race::run("transformer_race", cases, argc, argv);
}
