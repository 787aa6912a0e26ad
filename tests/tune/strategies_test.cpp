// The library's own strategies: what each is tried on, and that a run with it active has the bits that it promises.
#include <c10/core/CPUAllocator.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "oxytorch/error.h"
#include "oxytorch/memory.h"
#include "oxytorch/ops.h"
#include "oxytorch/tune/deferred_gates.h"
#include "oxytorch/tune/deferred_logits.h"
#include "oxytorch/tune/deferred_norms.h"
#include "oxytorch/tune/deferred_scores.h"
#include "oxytorch/tune/deferred_sums.h"
#include "oxytorch/tune/native_step.h"
#include "oxytorch/tune/operators.h"
#include "oxytorch/tune/run.h"
#include "oxytorch/tune/snapshot.h"
#include "oxytorch/tune/strategy.h"
#include "oxytorch/tune/verify.h"

namespace oxytorch {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
namespace nn = torch::nn;

/// A run of `model` on images of 3 x 16 x 16, and its optimizer.
struct Training {
  explicit Training(nn::Sequential made, std::vector<Batch> given = images())
      : model(std::move(made)), batches(given) {}

  static std::vector<Batch> images() {
    torch::manual_seed(1);
    std::vector<Batch> batches;
    for (int i = 0; i < 3; ++i) batches.push_back({torch::randn({16, 3, 16, 16}), torch::randint(10, {16})});
    return batches;
  }
  /// Convolution, `middle` and a head.
  template <class... Middle>
  static Training with(const Middle&... middle) {
    torch::manual_seed(0);
    nn::Sequential model(nn::Conv2d(nn::Conv2dOptions(3, 8, 3).padding(1)), middle..., nn::AdaptiveAvgPool2d(4),
                         nn::Flatten(), nn::Linear(128, 10));
    return Training(model);
  }
  static Training full() { return with(nn::BatchNorm2d(8), nn::ReLU(), nn::MaxPool2d(2), nn::Dropout(0.3)); }

  /// Losses, weights and running averages of six steps, `before(i)` called before each.
  std::vector<at::Tensor> train(const std::function<void(int)>& before = [](int) {}) {
    torch::manual_seed(2);
    std::vector<at::Tensor> trace;
    for (int i = 0; i < 6; ++i) {
      before(i);
      trace.push_back(run.step(batches[static_cast<std::size_t>(i) % batches.size()]).clone());
    }
    for (const auto& parameter : model->parameters()) trace.push_back(parameter.detach().clone());
    for (const auto& buffer : model->buffers()) trace.push_back(buffer.clone());
    return trace;
  }

  nn::Sequential model;
  std::vector<Batch> batches;
  torch::optim::SGD optimizer{model->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9)};
  tune::Run run{*model, optimizer, supervised(model, nn::CrossEntropyLoss()), batches};
};

void expect_same(const std::vector<at::Tensor>& got, const std::vector<at::Tensor>& expected) {
  ASSERT_EQ(got.size(), expected.size());
  for (std::size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(at::equal(got[i], expected[i])) << i;
}

class ExactStrategyTest : public testing::TestWithParam<const char*> {};

TEST_P(ExactStrategyTest, KeepsEveryBitActiveAndSwitched) {
  const std::string name = GetParam();
  const auto plain = Training::full().train();
  auto steady = Training::full();
  ASSERT_TRUE(steady.run.strategy(name).applies(steady.run).holds);
  expect_same(steady.train([&](int) { steady.run.set_active({name}); }), plain);
  EXPECT_THAT(steady.run.active(), ElementsAre(name));
  auto switched = Training::full();
  const auto in_turn = [&](int i) {
    switched.run.set_active(i % 2 == 0 ? std::vector{name} : std::vector<std::string>{});
  };
  steady.run.set_active({});
  expect_same(switched.train(in_turn), plain);
}

TEST_P(ExactStrategyTest, IsVerifiedAsWhatItClaims) {
  const std::string name = GetParam();
  EXPECT_EQ(tune::find_strategy(name).kind, tune::Kind::Exact);
  auto training = Training::full();
  tune::Snapshot snapshot(training.run);
  tune::Verifier verifier(training.run, snapshot);
  training.run.set_active({name});
  const auto ruling = verifier.check(tune::Kind::Exact);
  EXPECT_TRUE(ruling.held) << ruling.reason;
  training.run.set_active({});
  EXPECT_NO_THROW(snapshot.prove());
}

INSTANTIATE_TEST_SUITE_P(Host, ExactStrategyTest, testing::Values("host_pool", "native_operators", "native_step"),
                         [](const auto& each) { return std::string(each.param); });

/// Weights after six steps of an optimizer over two groups, natively or as torch steps.
template <class Optimizer, class Options>
std::vector<at::Tensor> stepped(const Options& options, at::ScalarType type, bool natively) {
  torch::manual_seed(3);
  nn::Sequential model(nn::Linear(20, 70), nn::Tanh(), nn::Linear(70, 4));
  model->to(type);
  auto second = std::make_unique<Options>(options);
  second->lr(0.02);
  const std::vector<Batch> batches{{torch::randn({8, 20}).to(type), torch::randint(4, {8})}};
  Optimizer optimizer({torch::optim::OptimizerParamGroup(model[0]->parameters()),
                       torch::optim::OptimizerParamGroup(model[2]->parameters(), std::move(second))},
                      options);
  tune::Run run(*model, optimizer, supervised(model, nn::CrossEntropyLoss()), batches);
  if (natively) run.set_active({"native_step"});
  std::vector<at::Tensor> trace;
  for (int i = 0; i < 6; ++i) {
    optimizer.param_groups()[0].options().set_lr(0.01 / (i + 1));
    trace.push_back(run.step(batches.front()).clone());
  }
  if (natively) run.set_active({});
  trace.push_back(run.step(batches.front()).clone());
  for (const auto& parameter : model->parameters()) trace.push_back(parameter.detach().clone());
  return trace;
}

/// As torch steps and natively, in each dtype that a step may be of.
template <class Optimizer, class Options>
void expect_same_steps(const Options& options) {
  for (const auto type : {at::kFloat, at::kDouble, at::kBFloat16}) {
    SCOPED_TRACE(at::toString(type));
    expect_same(stepped<Optimizer>(options, type, true), stepped<Optimizer>(options, type, false));
  }
}

TEST(StrategiesTest, NativeStepHasTheBitsOfEveryOptimizerThatItServes) {
  using torch::optim::AdamOptions, torch::optim::AdamWOptions, torch::optim::SGDOptions;
  for (const bool amsgrad : {false, true}) {
    expect_same_steps<torch::optim::AdamW>(AdamWOptions(0.01).amsgrad(amsgrad).weight_decay(0.1));
    expect_same_steps<torch::optim::Adam>(AdamOptions(0.01).amsgrad(amsgrad).weight_decay(0.1).betas({0.5, 0.9}));
  }
  for (const double momentum : {0.0, 0.9}) {
    expect_same_steps<torch::optim::SGD>(SGDOptions(0.1).momentum(momentum).weight_decay(0.1).nesterov(momentum > 0));
  }
}

TEST(StrategiesTest, NativeStepSaysWhichTensorsAreMissing) {
  const auto refusal = [](const auto& take) -> std::string {
    try {
      take();
    } catch (const Error& error) {
      return error.what();
    }
    return "it was taken";
  };
  const auto one = [] { return std::vector{torch::ones(3)}; };
  using Lists = std::vector<at::Tensor> tune::StepTensors::*;
  const std::pair<Lists, const char*> lists[] = {{&tune::StepTensors::grads, "0 gradients for 1"},
                                                 {&tune::StepTensors::exp_avgs, "0 exp_avgs for 1"},
                                                 {&tune::StepTensors::exp_avg_sqs, "0 exp_avg_sqs for 1"}};
  for (const auto& [list, words] : lists) {
    tune::StepTensors tensors{.params = one(), .grads = one(), .exp_avgs = one(), .exp_avg_sqs = one()};
    (tensors.*list).clear();
    EXPECT_THAT(refusal([&] { tune::adam_step({}, tensors, {1}); }), HasSubstr(words));
    EXPECT_TRUE(at::equal(tensors.params[0], torch::ones(3)));
  }
  tune::StepTensors tensors{.params = one(), .grads = one(), .momentum_buffers = {torch::ones(3), torch::ones(3)}};
  EXPECT_THAT(refusal([&] { tune::sgd_step({}, tensors); }), HasSubstr("2 momentum_buffers for 1"));
}

TEST(StrategiesTest, NativeStepRefusesOptimizersThatItDoesNotKnow) {
  auto training = Training::full();
  torch::optim::RMSprop optimizer(training.model->parameters());
  tune::Run run(*training.model, optimizer, supervised(training.model, nn::CrossEntropyLoss()), training.batches);
  const auto found = run.strategy("native_step").applies(run);
  EXPECT_FALSE(found.holds);
  EXPECT_THAT(found.reason, HasSubstr("no native step"));
}

TEST(StrategiesTest, HostPoolServesTheStepAndLeaves) {
  auto training = Training::full();
  auto* const torchs = c10::GetCPUAllocator();
  const auto before = host_pool_stats();
  training.train([&](int) { training.run.set_active({"host_pool"}); });
  EXPECT_NE(c10::GetCPUAllocator(), torchs);
  const auto after = host_pool_stats();
  EXPECT_GT(after.hits + after.misses, before.hits + before.misses);
  training.run.set_active({});
  EXPECT_EQ(c10::GetCPUAllocator(), torchs);
}

TEST(StrategiesTest, HostPoolSaysThatItIsInUse) {
  auto training = Training::full();
  auto own = use_host_pool();
  ASSERT_TRUE(own.is_applied()) << own.reason();
  try {
    training.run.set_active({"host_pool"});
    ADD_FAILURE() << "the caller's own pool was not seen";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::NotSupported);
    EXPECT_THAT(error.what(), HasSubstr("already in use"));
  }
  EXPECT_THAT(training.run.active(), IsEmpty());
  EXPECT_TRUE(own.is_applied());
  own.revert();
}

/// Adds a row of a table to each channel.
struct ShiftedImpl : nn::Module {
  explicit ShiftedImpl(std::int64_t rows) { table = register_module("table", nn::Embedding(rows, 8)); }
  at::Tensor forward(const at::Tensor& image) {
    return image + table(torch::zeros({image.size(0)}, at::kLong)).view({-1, 8, 1, 1});
  }
  nn::Embedding table{nullptr};
};
TORCH_MODULE(Shifted);

TEST(StrategiesTest, NativeOperatorsAreTriedWhereTheyServe) {
  const auto answer = [](Training training) { return training.run.strategy("native_operators").applies(training.run); };
  EXPECT_TRUE(answer(Training::with(nn::MaxPool2d(2))).holds);
  EXPECT_TRUE(answer(Training::with(nn::BatchNorm2d(8))).holds);
  EXPECT_TRUE(answer(Training::with(nn::BatchNorm2d(nn::BatchNormOptions(8).track_running_stats(false)))).holds);
  EXPECT_TRUE(answer(Training::with(nn::Dropout(0.1))).holds);
  const auto neither = answer(Training::with(nn::ReLU()));
  EXPECT_FALSE(neither.holds);
  EXPECT_THAT(neither.reason, HasSubstr("max pooling"));
  EXPECT_THAT(neither.reason, HasSubstr("too few embeddings"));
  EXPECT_TRUE(answer(Training::with(Shifted(4096))).holds);
  EXPECT_FALSE(answer(Training::with(Shifted(8))).holds);
  auto accumulating = Training::with(Shifted(40));
  EXPECT_FALSE(accumulating.run.strategy("native_operators").applies(accumulating.run).holds);
  accumulating.run.accumulation = 2;
  EXPECT_TRUE(accumulating.run.strategy("native_operators").applies(accumulating.run).holds);
}

/// Attention among the 256 places of an image.
struct PlacesImpl : nn::Module {
  explicit PlacesImpl(double dropout = 0) : dropout(dropout) {}
  at::Tensor forward(const at::Tensor& image) {
    const auto rows = image.flatten(2).transpose(1, 2).unsqueeze(1).contiguous();
    const auto made = at::scaled_dot_product_attention(rows, rows, rows, {}, dropout);
    return made.squeeze(1).transpose(1, 2).view_as(image);
  }
  double dropout;
};
TORCH_MODULE(Places);

TEST(StrategiesTest, NativeAttentionServesTorchsAndGoes) {
  auto none = Training::with(nn::ReLU());
  EXPECT_THAT(none.run.strategy("native_attention").applies(none.run).reason,
              HasSubstr("neither calls nor writes out attention"));
  auto training = Training::with(Places());
  ASSERT_TRUE(training.run.strategy("native_attention").applies(training.run).holds);
  const auto image = training.batches[0].tensors()[0];
  const auto plain = training.model->forward(image);
  training.run.set_active({"native_attention"});
  const auto served = training.model->forward(image);
  EXPECT_FALSE(at::equal(served, plain)) << "torch's kernel still serves";
  EXPECT_TRUE(at::allclose(served, plain, 1e-4, 1e-5));
  training.run.set_active({});
  EXPECT_TRUE(at::equal(training.model->forward(image), plain));
}

TEST(StrategiesTest, NativeAttentionIsVerifiedAsWhatItClaims) {
  EXPECT_EQ(tune::find_strategy("native_attention").kind, tune::Kind::Tolerance);
  for (const double dropout : {0.0, 0.2}) {
    auto training = Training::with(Places(dropout));
    ASSERT_TRUE(training.run.strategy("native_attention").applies(training.run).holds) << dropout;
    tune::Snapshot snapshot(training.run);
    tune::Verifier verifier(training.run, snapshot);
    training.run.set_active({"native_attention"});
    const auto before = tune::NativeOperators::composed_attentions();
    const auto ruling = verifier.check(tune::Kind::Tolerance);
    EXPECT_TRUE(ruling.held) << ruling.reason;
    EXPECT_EQ(tune::NativeOperators::composed_attentions() > before, dropout > 0);
    training.run.set_active({});
    EXPECT_NO_THROW(snapshot.prove());
  }
}

/// The same as a program writes it out, in the order of their numbers, or by torch's layer, whose weights are not read.
struct WrittenPlacesImpl : nn::Module {
  explicit WrittenPlacesImpl(bool is_layer) {
    if (is_layer) {
      layer = register_module("layer", nn::MultiheadAttention(nn::MultiheadAttentionOptions(8, 2).dropout(0.1)));
    }
  }
  at::Tensor forward(const at::Tensor& image) {
    const auto rows = image.flatten(2).transpose(1, 2).contiguous();
    if (layer) {
      const auto by_token = rows.transpose(0, 1);
      return std::get<0>(layer->forward(by_token, by_token, by_token)).permute({1, 2, 0}).reshape(image.sizes());
    }
    const auto heads = rows.unsqueeze(1);
    const auto hidden = torch::ones({heads.size(2), heads.size(2)}, at::kBool).triu(1);
    auto scores = torch::matmul(heads, heads.transpose(-2, -1)) / std::sqrt(8.0);
    scores = scores.masked_fill(hidden, -std::numeric_limits<float>::infinity());
    const auto weights = torch::dropout(torch::softmax(scores, -1), 0.1, is_training());
    return torch::matmul(weights, heads).squeeze(1).transpose(1, 2).reshape(image.sizes());
  }
  nn::MultiheadAttention layer = nullptr;
};
TORCH_MODULE(WrittenPlaces);

TEST(StrategiesTest, AttentionThatIsWrittenOutIsServed) {
  for (const bool is_layer : {false, true}) {
    auto training = Training::with(WrittenPlaces(is_layer));
    auto& run = training.run;
    ASSERT_TRUE(run.strategy("native_attention").applies(run).holds) << is_layer;
    tune::Snapshot snapshot(run);
    tune::Verifier verifier(run, snapshot);
    run.set_active({"native_attention"});
    const auto joined = tune::DeferredScores::joined();
    static_cast<void>(run.losses(training.batches[0]));
    EXPECT_EQ(tune::DeferredScores::joined(), joined + 1) << is_layer;
    snapshot.restore();
    const auto ruling = verifier.check(tune::Kind::Tolerance);
    EXPECT_TRUE(ruling.held) << ruling.reason;
    run.set_active({});
    static_cast<void>(run.losses(training.batches[0]));
    snapshot.restore();
    EXPECT_NO_THROW(snapshot.prove());
  }
}

/// Pixels of a row of an image as the steps of a sequence.
template <class Layer, class Options>
struct RecurrentImpl : nn::Module {
  RecurrentImpl() { layer = register_module("layer", Layer(Options(8, 8).batch_first(true))); }
  at::Tensor forward(const at::Tensor& image) {
    return std::get<0>(layer->forward(image.flatten(2).transpose(1, 2))).transpose(1, 2).reshape(image.sizes());
  }
  Layer layer = nullptr;
};
template <class Layer, class Options>
using Recurrent = nn::ModuleHolder<RecurrentImpl<Layer, Options>>;

template <class Model>
void serves_torchs_and_goes(const std::string& name, const Model& model, const std::string& missing) {
  auto none = Training::with(nn::ReLU());
  EXPECT_THAT(none.run.strategy(name).applies(none.run).reason, HasSubstr(missing));
  auto training = Training::with(model);
  ASSERT_TRUE(training.run.strategy(name).applies(training.run).holds);
  tune::Snapshot snapshot(training.run);
  tune::Verifier verifier(training.run, snapshot);
  const auto image = training.batches[0].tensors()[0];
  const auto plain = training.model->forward(image);
  training.run.set_active({name});
  const auto served = training.model->forward(image);
  EXPECT_FALSE(at::equal(served, plain)) << "torch's kernel still serves";
  EXPECT_TRUE(at::allclose(served, plain, 1e-4, 1e-5));
  const auto ruling = verifier.check(tune::Kind::Tolerance);
  EXPECT_TRUE(ruling.held) << ruling.reason;
  training.run.set_active({});
  EXPECT_TRUE(at::equal(training.model->forward(image), plain));
  EXPECT_NO_THROW(snapshot.prove());
}

TEST(StrategiesTest, NativeLstmServesTorchsAndGoes) {
  serves_torchs_and_goes("native_lstm", Recurrent<nn::LSTM, nn::LSTMOptions>(), "no LSTM");
}

TEST(StrategiesTest, NativeGruServesTorchsAndGoes) {
  serves_torchs_and_goes("native_gru", Recurrent<nn::GRU, nn::GRUOptions>(), "no GRU");
}

/// Channels of each place of an image through a linear layer: of a matrix, and of more dimensions.
struct MixedImpl : nn::Module {
  MixedImpl() {
    first = register_module("first", nn::Linear(8, 8));
    second = register_module("second", nn::Linear(8, 8));
  }
  at::Tensor forward(const at::Tensor& image) {
    const auto places = image.flatten(2).transpose(1, 2);
    const auto matrix = first(places.reshape({-1, 8}));
    return second(matrix.view_as(places)).transpose(1, 2).reshape(image.sizes());
  }
  nn::Linear first = nullptr, second = nullptr;
};
TORCH_MODULE(Mixed);

TEST(StrategiesTest, NativeLinearServesLayersUnderAutocastAndGoes) {
  auto training = Training::with(Mixed());
  ASSERT_TRUE(training.run.strategy("native_linear").applies(training.run).holds);
  tune::NativeOperators probe;
  if (const auto report = probe.install({"linear"}).front(); !report.installed) GTEST_SKIP() << report.reason;
  probe.uninstall();
  tune::Snapshot snapshot(training.run);
  tune::Verifier verifier(training.run, snapshot);
  const auto image = training.batches[0].tensors()[0];
  const auto narrow = [&] {
    const amp::Autocast autocast(c10::DeviceType::CPU, at::kBFloat16);
    return training.model->forward(image);
  };
  const auto plain = training.model->forward(image), by_torch = narrow();
  training.run.set_active({"bf16_autocast", "native_linear"});
  const auto handed_on = tune::NativeOperators::handed_on();
  const auto served = narrow();
  EXPECT_EQ(tune::NativeOperators::handed_on(), handed_on) << "torch's kernel still serves";
  EXPECT_TRUE(at::allclose(served.to(at::kFloat), plain, 3e-2, 3e-2));
  const auto ruling = verifier.check(tune::Kind::Precision);
  EXPECT_TRUE(ruling.held) << ruling.reason;
  training.run.set_active({});
  EXPECT_TRUE(at::equal(narrow(), by_torch));
  EXPECT_NO_THROW(snapshot.prove());
}

TEST(StrategiesTest, NativeConvolutionServesGradientsOfWeightsAndGoes) {
  auto none = Training::with(nn::ReLU());
  EXPECT_THAT(none.run.strategy("native_convolution").applies(none.run).reason, HasSubstr("enough channels"));
  tune::NativeOperators probe;
  if (const auto report = probe.install({"convolution"}).front(); !report.installed) GTEST_SKIP() << report.reason;
  probe.uninstall();

  torch::manual_seed(0);
  std::vector<Batch> batches{{torch::randn({64, 3, 20, 20}), torch::randint(10, {64})}};
  Training training(nn::Sequential(nn::Conv2d(nn::Conv2dOptions(3, 64, 3)), nn::Conv2d(nn::Conv2dOptions(64, 32, 3)),
                                   nn::AdaptiveAvgPool2d(2), nn::Flatten(), nn::Linear(128, 10)),
                    batches);
  ASSERT_TRUE(training.run.strategy("native_convolution").applies(training.run).holds);
  tune::Snapshot snapshot(training.run);
  tune::Verifier verifier(training.run, snapshot);
  const auto weight = training.model->parameters()[2];
  const auto gradient = [&](const std::vector<std::string>& active) {
    training.run.set_active(active);
    weight.mutable_grad() = at::Tensor();
    training.run.loss(batches[0]).backward();
    return weight.grad().clone();
  };
  const auto by_torch = gradient({"channels_last", "bf16_autocast"});
  const auto served = gradient({"channels_last", "bf16_autocast", "native_convolution"});
  EXPECT_FALSE(at::equal(served, by_torch)) << "torch's kernel still serves";
  EXPECT_TRUE(at::allclose(served, by_torch, 1e-2, 1e-3));
  const auto ruling = verifier.check(tune::Kind::Precision);
  EXPECT_TRUE(ruling.held) << ruling.reason;
  EXPECT_TRUE(at::equal(gradient({"channels_last", "bf16_autocast"}), by_torch));
}

/// Each place of an image is one of 300 classes.
struct LabelledImpl : nn::Module {
  LabelledImpl() { head = register_module("head", nn::Linear(8, 300)); }
  at::Tensor forward(const at::Tensor& image) { return head(image.flatten(2).transpose(1, 2)); }
  nn::Linear head = nullptr;
};
TORCH_MODULE(Labelled);

TEST(StrategiesTest, NativeCrossEntropyTakesTheLossWithoutLogits) {
  auto none = Training::with(nn::ReLU());
  EXPECT_THAT(none.run.strategy("native_cross_entropy").applies(none.run).reason, HasSubstr("no cross entropy"));

  torch::manual_seed(0);
  Labelled model;
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  const Batch batch(torch::randn({2, 8, 7, 7}), torch::randint(300, {2, 49}));
  tune::Run run(*model, optimizer,
                [&](const Batch& given) {
                  const auto logits = model->forward(given.input).to(torch::kFloat);
                  return nn::functional::cross_entropy(logits.flatten(0, 1), given.target.flatten());
                },
                {batch});
  run.owns_loop = true;
  auto& strategy = run.strategy("native_cross_entropy");
  ASSERT_TRUE(strategy.applies(run).holds) << strategy.applies(run).reason;
  tune::Snapshot snapshot(run);
  tune::Verifier verifier(run, snapshot);
  const auto plain = run.losses(batch);
  auto losses = tune::DeferredLogits::losses();
  run.set_active({"native_cross_entropy"});
  EXPECT_TRUE(at::allclose(run.losses(batch), plain, 1e-5, 1e-6));
  EXPECT_EQ(tune::DeferredLogits::losses(), losses + 1);
  const auto ruling = verifier.check(tune::Kind::Tolerance);
  EXPECT_TRUE(ruling.held) << ruling.reason;
  run.set_active({});
  losses = tune::DeferredLogits::losses();
  EXPECT_TRUE(at::equal(run.losses(batch), plain));
  EXPECT_EQ(tune::DeferredLogits::losses(), losses) << "torch's layer serves again";
  EXPECT_NO_THROW(snapshot.prove());
}

/// Images in channels_last are normalized.
struct NormedImpl : nn::Module {
  NormedImpl() {
    conv = register_module("conv", nn::Conv2d(nn::Conv2dOptions(8, 8, 3).padding(1)));
    norm = register_module("norm", nn::BatchNorm2d(8));
  }
  at::Tensor forward(const at::Tensor& image) {
    return torch::relu(norm(conv(image.contiguous(at::MemoryFormat::ChannelsLast))));
  }
  nn::Conv2d conv = nullptr;
  nn::BatchNorm2d norm = nullptr;
};
TORCH_MODULE(Normed);

TEST(StrategiesTest, NativeBatchNormTakesWhatFollowsTheLayer) {
  auto none = Training::with(nn::ReLU());
  EXPECT_THAT(none.run.strategy("native_batch_norm").applies(none.run).reason, HasSubstr("no batch normalization"));

  auto training = Training::with(Normed());
  auto& run = training.run;
  ASSERT_TRUE(run.strategy("native_batch_norm").applies(run).holds);
  tune::Snapshot snapshot(run);
  tune::Verifier verifier(run, snapshot);
  const auto& batch = training.batches[0];
  const auto plain = run.losses(batch);
  run.set_active({"native_batch_norm"});
  const auto joined = tune::DeferredNorms::joined();
  EXPECT_TRUE(at::allclose(run.losses(batch), plain, 1e-5, 1e-6));
  EXPECT_EQ(tune::DeferredNorms::joined(), joined + 1);
  snapshot.restore();
  const auto ruling = verifier.check(tune::Kind::Tolerance);
  EXPECT_TRUE(ruling.held) << ruling.reason;
  run.set_active({});
  snapshot.restore();
  EXPECT_TRUE(at::equal(run.losses(batch), plain)) << "torch's layer serves again";
  snapshot.restore();
  EXPECT_NO_THROW(snapshot.prove());
}

/// A block of a transformer that has no attention, over rows of images.
struct BlockImpl : nn::Module {
  BlockImpl() {
    layer = register_module("layer", nn::Linear(16, 16));
    norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({16})));
  }
  at::Tensor forward(const at::Tensor& image) {
    const at::Tensor x = image.contiguous();
    return norm(x + torch::gelu(layer(x), "tanh"));
  }
  nn::Linear layer = nullptr;
  nn::LayerNorm norm = nullptr;
};
TORCH_MODULE(Block);

TEST(StrategiesTest, ABlocksActivationAndNormAreServed) {
  auto none = Training::with(nn::ReLU());
  EXPECT_THAT(none.run.strategy("native_layer_norm").applies(none.run).reason, HasSubstr("neither layer nor RMS"));
  EXPECT_THAT(none.run.strategy("native_activation").applies(none.run).reason, HasSubstr("neither GELU nor SiLU"));
  auto training = Training::with(Block());
  auto& run = training.run;
  tune::Snapshot snapshot(run);
  tune::Verifier verifier(run, snapshot);
  const auto& batch = training.batches[0];
  const auto plain = run.losses(batch);
  for (const std::string name : {"native_layer_norm", "native_activation"}) {
    ASSERT_TRUE(run.strategy(name).applies(run).holds) << name;
    run.set_active({name});
    const auto joined = tune::DeferredSums::joined();
    EXPECT_TRUE(at::allclose(run.losses(batch), plain, 1e-5, 1e-6)) << name;
    EXPECT_EQ(tune::DeferredSums::joined() > joined, name == "native_layer_norm");
    snapshot.restore();
    const auto ruling = verifier.check(tune::Kind::Tolerance);
    EXPECT_TRUE(ruling.held) << name << ruling.reason;
    run.set_active({});
    snapshot.restore();
    EXPECT_TRUE(at::equal(run.losses(batch), plain)) << name;
    snapshot.restore();
  }
}

/// RMS normalization as a program writes it out.
struct WrittenNormImpl : nn::Module {
  WrittenNormImpl() {
    layer = register_module("layer", nn::Linear(16, 16));
    weight = register_parameter("weight", torch::ones({16}));
  }
  at::Tensor forward(const at::Tensor& image) {
    const at::Tensor x = layer(image.contiguous());
    return weight * (x * torch::rsqrt(x.pow(2).mean(-1, /*keepdim=*/true) + 1e-5));
  }
  nn::Linear layer = nullptr;
  at::Tensor weight;
};
TORCH_MODULE(WrittenNorm);

TEST(StrategiesTest, ANormThatIsWrittenOutIsServed) {
  auto training = Training::with(WrittenNorm());
  auto& run = training.run;
  tune::Snapshot snapshot(run);
  tune::Verifier verifier(run, snapshot);
  ASSERT_TRUE(run.strategy("native_layer_norm").applies(run).holds);
  run.set_active({"native_layer_norm"});
  const auto written = tune::DeferredSums::written();
  static_cast<void>(run.losses(training.batches[0]));
  EXPECT_EQ(tune::DeferredSums::written(), written + 1);
  snapshot.restore();
  const auto ruling = verifier.check(tune::Kind::Tolerance);
  EXPECT_TRUE(ruling.held) << ruling.reason;
  run.set_active({});
}

/// A gated layer over rows of images: SwiGLU, then GEGLU.
struct GatedImpl : nn::Module {
  GatedImpl() {
    gate = register_module("gate", nn::Linear(16, 16));
    up = register_module("up", nn::Linear(16, 16));
  }
  at::Tensor forward(const at::Tensor& image) {
    const at::Tensor x = torch::silu(gate(image)) * up(image);
    return up(x) * torch::gelu(gate(x));
  }
  nn::Linear gate = nullptr, up = nullptr;
};
TORCH_MODULE(Gated);

TEST(StrategiesTest, GatedActivationsAreOneOperator) {
  auto none = Training::with(nn::GELU());
  EXPECT_THAT(none.run.strategy("native_gate").applies(none.run).reason, HasSubstr("multiplies nothing by a SiLU"));
  auto training = Training::with(Gated());
  auto& run = training.run;
  tune::Snapshot snapshot(run);
  tune::Verifier verifier(run, snapshot);
  const auto& batch = training.batches[0];
  const auto plain = run.losses(batch);
  ASSERT_TRUE(run.strategy("native_gate").applies(run).holds);
  run.set_active({"native_gate"});
  const auto joined = tune::DeferredGates::joined();
  EXPECT_TRUE(at::allclose(run.losses(batch), plain, 1e-5, 1e-6));
  EXPECT_EQ(tune::DeferredGates::joined(), joined + 2);
  snapshot.restore();
  const auto ruling = verifier.check(tune::Kind::Tolerance);
  EXPECT_TRUE(ruling.held) << ruling.reason;
  run.set_active({});
  snapshot.restore();
  EXPECT_TRUE(at::equal(run.losses(batch), plain)) << "torch's operators serve again";
  snapshot.restore();
  EXPECT_NO_THROW(snapshot.prove());
}

TEST(StrategiesTest, PackedWeightsAreTriedWhereBatchesAreAccumulated) {
  auto training = Training::with(Mixed());
  auto& run = training.run;
  EXPECT_THAT(run.strategy("packed_weights").applies(run).reason, HasSubstr("one batch"));
  run.accumulation = 3;
  ASSERT_TRUE(run.strategy("packed_weights").applies(run).holds);
  tune::NativeOperators probe;
  if (const auto report = probe.install({"linear"}).front(); !report.installed) GTEST_SKIP() << report.reason;
  probe.uninstall();
  tune::Snapshot snapshot(run);
  const auto losses = [&](const std::vector<std::string>& names) {
    snapshot.restore();
    run.set_active(names);
    std::vector<double> found;
    for (int batch = 0; batch < 9; ++batch) found.push_back(run.take(training.batches[0]).item<double>());
    EXPECT_EQ(ops::PackedWeights::bytes() > 0, names.size() == 3);
    run.set_active({});
    EXPECT_EQ(ops::PackedWeights::bytes(), 0);
    return found;
  };
  const auto expected = losses({"bf16_autocast", "native_linear"});
  EXPECT_EQ(losses({"bf16_autocast", "native_linear", "packed_weights"}), expected);
  EXPECT_NE(expected.front(), expected.back());
}

TEST(StrategiesTest, NativeOperatorsComeAndGo) {
  auto training = Training::full();
  const auto installed_elsewhere = [] {
    tune::NativeOperators others;
    others.install();
    return others.installed();
  };
  training.run.set_active({"native_operators"});
  EXPECT_THAT(installed_elsewhere(), IsEmpty()) << "the strategy holds them all";
  training.run.set_active({});
  EXPECT_EQ(installed_elsewhere(), tune::NativeOperators::exact_names());
  tune::NativeOperators own;
  own.install();
  EXPECT_THROW(training.run.set_active({"native_operators"}), Error);
  EXPECT_THAT(training.run.active(), IsEmpty());
}

}  // namespace
}  // namespace oxytorch
