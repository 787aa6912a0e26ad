#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <sstream>

#include "oxytorch/error.h"
#include "oxytorch/memory.h"
#include "oxytorch/nn.h"
#include "oxytorch/trainer.h"

namespace oxytorch {
namespace {

using at::Tensor;
using nn::Activation;
using nn::NormKind;
using nn::Transformer;
using nn::TransformerLayer;
using nn::TransformerOptions;
using testing::HasSubstr;

std::string refused(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::InvalidArgument);
    return error.what();
  }
  return {};
}

/// Weights that are not those of the start: ones and zeros hide what is left out.
template <class Module>
void shake(Module& module, at::ScalarType type) {
  module->to(type);
  const torch::NoGradGuard no_grad;
  for (auto& parameter : module->parameters()) parameter.add_(at::randn_like(parameter), 0.2);
}

template <class Module>
std::vector<Tensor> gradients(Module& module, const Tensor& result, const Tensor& x) {
  auto inputs = module->parameters();
  inputs.push_back(x);
  return torch::autograd::grad({result}, inputs, {at::ones_like(result).cumsum(-1).sin()});
}

void expect_close(const std::vector<Tensor>& ours, const std::vector<Tensor>& theirs, double tolerance) {
  ASSERT_EQ(ours.size(), theirs.size());
  for (std::size_t i = 0; i < ours.size(); ++i) {
    EXPECT_LE((ours[i] - theirs[i]).norm().item<double>(), tolerance * theirs[i].norm().item<double>() + 1e-14) << i;
  }
}

constexpr std::int64_t kBatch = 3, kTokens = 17;

Tensor tokens_of(const TransformerOptions& options, at::ScalarType type = at::kDouble) {
  return torch::randn({kBatch, kTokens, options.width}, type).requires_grad_();
}

// What a layer is, written out with torch's own operators.
class Composed {
 public:
  explicit Composed(TransformerLayer layer) : layer_(std::move(layer)), options_(layer_->options) {}

  [[nodiscard]] Tensor operator()(const Tensor& x) const {
    if (options_.norm_first) {
      const Tensor sum = x + attended(normed(layer_->norm1, x));
      return sum + fed(normed(layer_->norm2, sum));
    }
    const Tensor first = normed(layer_->norm1, x + attended(x));
    return normed(layer_->norm2, first + fed(first));
  }

  [[nodiscard]] Tensor normed(const nn::RowNorm& norm, const Tensor& x) const {
    if (options_.norm == NormKind::Layer) {
      return at::layer_norm(x, {options_.width}, norm->weight, norm->bias, options_.eps.value_or(1e-5));
    }
    return x * at::rsqrt(x.square().mean(-1, true) + options_.eps.value()) * norm->weight;
  }

 private:
  [[nodiscard]] Tensor rotated(const Tensor& x) const {
    if (options_.rotary_base == 0) return x;
    const std::int64_t half = options_.head_width() / 2;
    const Tensor rates = at::pow(options_.rotary_base, -at::arange(half, at::kDouble) / half);
    const Tensor angles = at::arange(x.size(2), at::kDouble).unsqueeze(1) * rates;
    const Tensor cos = angles.cos().to(at::kFloat), sin = angles.sin().to(at::kFloat);  // as tables have them
    const Tensor a = x.slice(-1, 0, half), b = x.slice(-1, half);
    return at::cat({a * cos - b * sin, b * cos + a * sin}, -1);
  }

  [[nodiscard]] Tensor attended(const Tensor& x) const {
    auto weights = layer_->attention;
    const std::int64_t width = options_.head_width(), keys = options_.value_heads();
    const Tensor all = weights->qkv(x);
    const auto heads_of = [&](std::int64_t first, std::int64_t count) {
      return all.slice(-1, first * width, (first + count) * width)
          .reshape({x.size(0), x.size(1), count, width})
          .transpose(1, 2);
    };
    const Tensor q = rotated(heads_of(0, options_.heads));
    const auto wide = [&](const Tensor& heads) { return heads.repeat_interleave(options_.heads / keys, 1); };
    const Tensor k = wide(rotated(heads_of(options_.heads, keys))), v = wide(heads_of(options_.heads + keys, keys));
    Tensor scores = q.matmul(k.transpose(-2, -1)) / std::sqrt(static_cast<double>(width));
    if (options_.soft_cap > 0) scores = options_.soft_cap * (scores / options_.soft_cap).tanh();
    const Tensor places = at::arange(x.size(1)), before = places.unsqueeze(1) - places;
    Tensor hidden = at::zeros_like(before, at::kBool);
    if (options_.causal) hidden = hidden.logical_or(before < 0);
    if (options_.window_before >= 0) hidden = hidden.logical_or(before > options_.window_before);
    const Tensor seen = scores.masked_fill(hidden, -INFINITY).softmax(-1).matmul(v);
    return weights->out(seen.transpose(1, 2).reshape(x.sizes()));
  }

  [[nodiscard]] Tensor fed(const Tensor& x) const {
    auto weights = layer_->feed_forward;
    const Tensor wide = weights->up(x);
    const auto half = [&](std::int64_t i) { return wide.chunk(2, -1)[static_cast<std::size_t>(i)]; };
    switch (options_.activation) {
      case Activation::Gelu: return weights->down(at::gelu(wide));
      case Activation::GeluTanh: return weights->down(at::gelu(wide, "tanh"));
      case Activation::Relu: return weights->down(at::relu(wide));
      case Activation::SwiGlu: return weights->down(at::silu(half(0)) * half(1));
      case Activation::GeGlu: return weights->down(at::gelu(half(0)) * half(1));
    }
    return {};
  }

  mutable TransformerLayer layer_;
  TransformerOptions options_;
};

TransformerOptions windowed() {
  auto options = TransformerOptions::llama(32, 4, 2, 1);
  options.window_before = 5;
  options.soft_cap = 3;
  options.activation = Activation::GeGlu;
  return options;
}
TransformerOptions last_relu() {
  auto options = TransformerOptions::bert(24, 3, 3);
  options.dropout = options.attention_dropout = 0;
  options.activation = Activation::Relu;
  return options;
}
TransformerOptions plain_bert() {
  auto options = TransformerOptions::bert(32, 4, 1);
  options.dropout = options.attention_dropout = 0;
  return options;
}

class FamiliesTest : public testing::TestWithParam<TransformerOptions> {};
INSTANTIATE_TEST_SUITE_P(All, FamiliesTest,
                         testing::Values(TransformerOptions::gpt(32, 4, 3), TransformerOptions::llama(32, 4, 3, 2),
                                         windowed(), last_relu(), plain_bert()));

TEST_P(FamiliesTest, AreTorchsOperatorsOneAfterTheOther) {
  for (const auto type : {at::kDouble, at::kFloat}) {
    torch::manual_seed(1);
    Transformer model(GetParam());
    shake(model, type);
    const Tensor x = tokens_of(GetParam(), type), ours = model(x);
    Tensor theirs = x;
    for (std::size_t i = 0; i < model->layers->size(); ++i) {
      theirs = Composed(TransformerLayer(model->layers->ptr<nn::TransformerLayerImpl>(i)))(theirs);
    }
    if (GetParam().norm_first) {
      theirs = Composed(TransformerLayer(model->layers->ptr<nn::TransformerLayerImpl>(0))).normed(model->norm, theirs);
    }
    const double tolerance = type == at::kDouble ? 1e-10 : 2e-4;
    expect_close({ours}, {theirs}, tolerance);
    expect_close(gradients(model, ours, x), gradients(model, theirs, x), tolerance);
  }
}

TEST_P(FamiliesTest, LayersOnTheirOwnGiveWhatTheStackGives) {
  torch::manual_seed(2);
  Transformer model(GetParam());
  shake(model, at::kDouble);
  const Tensor x = tokens_of(GetParam()), stacked = model(x);
  Tensor one_by_one = x;
  for (const auto& layer : *model->layers) one_by_one = layer->as<TransformerLayer>()->forward(one_by_one);
  if (GetParam().norm_first) one_by_one = model->norm(one_by_one);
  expect_close({stacked}, {one_by_one}, 1e-12);
}

TEST_P(FamiliesTest, DocumentsInARowAreEachAlone) {
  torch::manual_seed(3);
  Transformer model(GetParam());
  shake(model, at::kFloat);
  const Tensor lengths = torch::tensor({5, 0, 17, 1}, at::kInt);
  const Tensor offsets = at::cat({torch::zeros({1}, at::kInt), lengths.cumsum(0, at::kInt)});
  const Tensor x = torch::randn({23, GetParam().width}).requires_grad_();
  const Tensor packed = model->forward_packed(x, offsets);
  std::vector<Tensor> alone;
  for (const auto& document : x.split_with_sizes({5, 0, 17, 1})) {
    if (document.size(0) > 0) alone.push_back(model(document.unsqueeze(0)).squeeze(0));
  }
  expect_close({packed}, {at::cat(alone)}, 1e-5);
  expect_close(gradients(model, packed, x), gradients(model, at::cat(alone), x), 1e-4);
}

TEST_P(FamiliesTest, LayersMadeAgainInBackwardGiveTheSameBits) {
  auto options = GetParam();
  options.dropout = options.attention_dropout = 0.3;
  torch::manual_seed(4);
  Transformer model(options);
  shake(model, at::kFloat);
  const Tensor x = tokens_of(options, at::kFloat);
  const auto run = [&] {
    torch::manual_seed(5);
    return gradients(model, model(x), x);
  };
  const auto kept = run();
  const memory::PlannedBlocks again(memory::BlockChoice(memory::BlockAction::Full, {"transformer.1", "transformer.2"})
                                        .add(memory::BlockAction::Selective, "transformer.0"));
  const auto made = run();
  for (std::size_t i = 0; i < kept.size(); ++i) EXPECT_TRUE(at::equal(kept[i], made[i])) << i;
}

TEST_P(FamiliesTest, AreSavedClonedAndPrinted) {
  torch::manual_seed(6);
  Transformer model(GetParam()), other(GetParam());
  shake(model, at::kFloat);
  model->eval();
  other->eval();
  const Tensor x = tokens_of(GetParam(), at::kFloat), given = model(x);
  std::stringstream file;
  torch::save(model, file);
  torch::load(other, file);
  EXPECT_TRUE(at::equal(other(x), given));
  const auto clone = std::dynamic_pointer_cast<nn::TransformerImpl>(model->clone());
  ASSERT_NE(clone, nullptr);
  EXPECT_TRUE(at::equal(clone->forward(x), given));
  {
    const torch::NoGradGuard no_grad;
    for (auto& parameter : clone->parameters()) parameter.zero_();
  }
  EXPECT_TRUE(at::equal(model(x), given));
  std::ostringstream printed;
  printed << *model;
  EXPECT_THAT(printed.str(), HasSubstr("width=" + std::to_string(GetParam().width)));
}

// The peer: torch's own layer, with the same weights.
TEST(TransformerTest, ABertLayerIsTorchsEncoderLayer) {
  torch::manual_seed(7);
  const auto options = plain_bert();
  TransformerLayer ours(options);
  shake(ours, at::kDouble);
  torch::nn::TransformerEncoderLayer theirs(
      torch::nn::TransformerEncoderLayerOptions(32, 4).dim_feedforward(128).dropout(0).activation(torch::kGELU));
  theirs->to(at::kDouble);
  theirs->norm1->options.eps(1e-12);
  theirs->norm2->options.eps(1e-12);
  {
    const torch::NoGradGuard no_grad;
    const std::pair<Tensor, Tensor> same[] = {
        {theirs->self_attn->in_proj_weight, ours->attention->qkv->weight},
        {theirs->self_attn->in_proj_bias, ours->attention->qkv->bias},
        {theirs->self_attn->out_proj->weight, ours->attention->out->weight},
        {theirs->self_attn->out_proj->bias, ours->attention->out->bias},
        {theirs->linear1->weight, ours->feed_forward->up->weight},
        {theirs->linear1->bias, ours->feed_forward->up->bias},
        {theirs->linear2->weight, ours->feed_forward->down->weight},
        {theirs->linear2->bias, ours->feed_forward->down->bias},
        {theirs->norm1->weight, ours->norm1->weight},
        {theirs->norm1->bias, ours->norm1->bias},
        {theirs->norm2->weight, ours->norm2->weight},
        {theirs->norm2->bias, ours->norm2->bias},
    };
    for (const auto& [to, from] : same) to.copy_(from);
  }
  const Tensor x = tokens_of(options);
  const Tensor there = torch::arange(kTokens) < torch::tensor({17, 9, 1}).unsqueeze(1);
  const Tensor made = ours(x, nn::Sequences::padded(options, x, there));
  const torch::nn::Sequential in_a_row(ours);
  EXPECT_TRUE(at::equal(torch::nn::Sequential(in_a_row)->forward(x), ours(x)));
  const Tensor right = theirs->forward(x.transpose(0, 1), {}, there.logical_not()).transpose(0, 1);
  const auto mask = there.unsqueeze(-1);
  expect_close({made * mask}, {right * mask}, 1e-10);
  EXPECT_TRUE(at::allclose(torch::autograd::grad({(made * mask).square().sum()}, {x}, {}, true)[0],
                           torch::autograd::grad({(right * mask).square().sum()}, {x}, {}, true)[0]));
}

TEST(TransformerTest, ParametersHaveNamesAndCounts) {
  const Transformer model(TransformerOptions::llama(64, 4, 2, 2));
  std::vector<std::string> names;
  for (const auto& item : model->named_parameters()) names.push_back(item.key());
  EXPECT_THAT(names,
              testing::UnorderedElementsAre("norm.weight", "layers.0.norm1.weight", "layers.0.norm2.weight",
                                            "layers.0.attention.qkv.weight", "layers.0.attention.out.weight",
                                            "layers.0.feed_forward.up.weight", "layers.0.feed_forward.down.weight",
                                            "layers.1.norm1.weight", "layers.1.norm2.weight",
                                            "layers.1.attention.qkv.weight", "layers.1.attention.out.weight",
                                            "layers.1.feed_forward.up.weight", "layers.1.feed_forward.down.weight"));
  const auto parameters = model->named_parameters();
  EXPECT_EQ(parameters["layers.0.attention.qkv.weight"].sizes(), (std::vector<std::int64_t>{128, 64}));
  EXPECT_EQ(parameters["layers.0.feed_forward.up.weight"].sizes(), (std::vector<std::int64_t>{2 * 192, 64}));
}

TEST(TransformerTest, DropoutIsOfTrainingAlone) {
  const auto options = TransformerOptions::bert(32, 4, 2);
  torch::manual_seed(8);
  Transformer model(options);
  const Tensor x = tokens_of(options, at::kFloat);
  EXPECT_FALSE(at::equal(model(x), model(x)));
  model->eval();
  EXPECT_TRUE(at::equal(model(x), model(x)));
  auto none = options;
  none.dropout = none.attention_dropout = 0;
  Transformer same(none);
  const torch::NoGradGuard no_grad;
  for (auto& item : same->named_parameters()) item.value().copy_(model->named_parameters()[item.key()]);
  EXPECT_TRUE(at::equal(same(x), model(x)));
}

TEST(TransformerTest, ATrainersMemoryBudgetRecomputesLayersAndTrainsTheSame) {
  const auto options = TransformerOptions::llama(64, 4, 4);
  const auto run = [&](const std::string& budget, std::int64_t& peak) {
    torch::manual_seed(9);
    Transformer model(options);
    torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1));
    const Tensor x = torch::randn({4, 64, 64});
    PerformanceConfig config("basic");
    config.set("step_tail", std::string("off"));
    if (!budget.empty()) config.set("gradient_checkpointing", budget);
    Trainer trainer(
        *model, optimizer, [&](const Batch&) { return model(x).square().mean(); }, config,
        TrainerOptions{.calibrate = false});
    const Batch batch(x, x);
    trainer.step(batch);
    const memory::Meter meter;
    trainer.step(batch);
    peak = meter.peak_bytes();
    return model->parameters();
  };
  std::int64_t plain_peak = 0, peak = 0, held = 0;
  const auto plain = run("", plain_peak);
  for (const auto& parameter : plain) held += static_cast<std::int64_t>(parameter.nbytes());
  const auto recomputed = run(std::to_string(held + plain_peak / 2), peak);
  EXPECT_LT(peak, plain_peak * 6 / 10);
  for (std::size_t i = 0; i < plain.size(); ++i) EXPECT_TRUE(at::equal(plain[i], recomputed[i])) << i;
}

TEST(TransformerTest, HiddenTokensChangeNothing) {
  auto options = TransformerOptions::llama(32, 4, 2);
  options.causal = false;
  Transformer model(options);
  const Tensor x = tokens_of(options, at::kFloat).detach();
  const Tensor there = torch::arange(kTokens).lt(10).expand({kBatch, kTokens});
  const Tensor given = model->forward_masked(x, there).slice(1, 0, 10);
  const Tensor other = at::where(there.unsqueeze(-1), x, at::scalar_tensor(7.0F));
  EXPECT_TRUE(at::equal(model->forward_masked(other, there).slice(1, 0, 10), given));
  EXPECT_FALSE(at::equal(model(other).slice(1, 0, 10), given));
}

TEST(TransformerTest, BadOptionsAndSizesAreRefusedInWords) {
  const auto with = [](auto change) {
    return refused([&] {
      auto options = TransformerOptions::gpt(32, 4, 1);
      change(options);
      static_cast<void>(Transformer(options));
    });
  };
  EXPECT_THAT(with([](auto& o) { o.width = 0; }), HasSubstr("width is 0; give 1 or more"));
  EXPECT_THAT(with([](auto& o) { o.heads = 5; }), HasSubstr("5 heads do not share a width of 32"));
  EXPECT_THAT(with([](auto& o) { o.key_heads = 3; }), HasSubstr("3 key_heads do not serve 4 heads"));
  EXPECT_THAT(with([](auto& o) { o.layers = 0; }), HasSubstr("layers is 0"));
  EXPECT_THAT(with([](auto& o) { o.dropout = 1; }), HasSubstr("dropout is 1; give a probability below 1"));
  EXPECT_THAT(with([](auto& o) { o.rotary_base = -1; }), HasSubstr("rotary_base is -1"));
  EXPECT_THAT(with([](auto& o) { o.rotary_base = 100, o.rotary_dim = 7; }), HasSubstr("7 features of a head of 8"));
  Transformer model(TransformerOptions::llama(32, 4, 1));
  const Tensor x = torch::randn({2, 5, 32});
  EXPECT_THAT(refused([&] { model(torch::randn({2, 5, 31})); }), HasSubstr("width 32 takes batch x tokens x width"));
  EXPECT_THAT(refused([&] { model->forward_packed(x, torch::tensor({0, 10})); }), HasSubstr("packed documents"));
  EXPECT_THAT(refused([&] { model->forward_packed(x.flatten(0, 1), torch::tensor({0, 9})); }),
              HasSubstr("offsets end with 9 tokens, and there are 10"));
  EXPECT_THAT(refused([&] { model->forward_masked(x, torch::ones({2, 4}, at::kBool)); }), HasSubstr("2 x 5 tokens"));
  EXPECT_THAT(refused([&] { static_cast<void>(nn::RowNorm(0)); }), HasSubstr("positive number of features"));
}

}  // namespace
}  // namespace oxytorch
