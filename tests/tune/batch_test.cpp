// A batch holds what a model needs: any number of tensors, nested containers, a struct of the user's own.
#include "oxytorch/tune/batch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "oxytorch/error.h"
#include "oxytorch/trainer.h"
#include "oxytorch/tune.h"

namespace oxytorch {
namespace {

namespace nn = torch::nn;
using testing::ElementsAre;
using testing::HasSubstr;

/// What a BERT-style model needs.
struct Sentences {
  at::Tensor ids, mask, labels;
  std::string source = {};
  template <class Visit>
  void each_tensor(Visit&& visit) {
    visit(ids);
    visit(mask);
    visit(labels);
  }
};

struct Scene {
  std::map<std::string, std::vector<at::Tensor>> views;
  std::optional<at::Tensor> depth;
  std::pair<at::Tensor, int> camera;
  Sentences caption;
  std::vector<std::string> names = {};
  template <class Visit>
  void each_tensor(Visit&& visit) {
    visit(views);
    visit(depth);
    visit(camera);
    visit(caption);
    visit(names);
  }
};

struct NoTensors {
  at::Tensor hidden;
  template <class Visit>
  void each_tensor(Visit&& /*visit*/) {}
};

at::Tensor filled(double value, std::int64_t rows = 4) { return torch::full({rows, 2}, value); }

std::vector<double> firsts(const Batch& batch) {
  std::vector<double> found;
  for (const auto& t : batch.tensors()) found.push_back(t.flatten()[0].item<double>());
  return found;
}

TEST(BatchTest, FindsEachTensorInOrder) {
  EXPECT_THAT(firsts({filled(1), filled(2)}), ElementsAre(1, 2));
  EXPECT_THAT(firsts(filled(1)), ElementsAre(1));
  EXPECT_THAT(firsts(torch::data::Example<>(filled(3), filled(4))), ElementsAre(3, 4));
  EXPECT_THAT(firsts(Batch(std::vector<at::Tensor>{filled(1), filled(2), filled(3)})), ElementsAre(1, 2, 3));
  EXPECT_THAT(firsts(Batch(std::map<std::string, at::Tensor>{{"b", filled(2)}, {"a", filled(1)}})), ElementsAre(1, 2));
  EXPECT_THAT(firsts(Batch(std::tuple(filled(5), 7, std::vector{filled(6)}))), ElementsAre(5, 6));
  EXPECT_THAT(firsts(Batch(std::vector<Batch>{{filled(1), filled(2)}, Batch(filled(3))})), ElementsAre(1, 2, 3));
  EXPECT_THAT(firsts(Sentences{filled(1), {}, filled(3)}), ElementsAre(1, 3)) << "undefined ones are left out";
  Scene scene{{{"left", {filled(1), filled(2)}}, {"right", {filled(3)}}},
              filled(4),
              {filled(5), 9},
              {filled(6), filled(7), filled(8)},
              {"a name"}};
  EXPECT_THAT(firsts(scene), ElementsAre(1, 2, 3, 4, 5, 6, 7, 8));
  scene.depth.reset();
  EXPECT_EQ(Batch(scene).tensors().size(), 7);
}

TEST(BatchTest, IsReadAsWhatItWasMadeOf) {
  const Batch batch = Sentences{filled(1), filled(2), filled(3), "a book"};
  EXPECT_EQ(batch.as<Sentences>().source, "a book");
  EXPECT_FALSE(batch.input.defined());
  for (const auto& [one, held] :
       std::vector<std::pair<Batch, std::string>>{{batch, "Sentences"}, {filled(1), "input and target"}}) {
    try {
      static_cast<void>(one.as<Scene>());
      ADD_FAILURE() << "nothing was thrown";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::InvalidType);
      EXPECT_THAT(error.what(), HasSubstr(held));
      EXPECT_THAT(error.what(), HasSubstr("Scene"));
    }
  }
  EXPECT_THROW(Batch(NoTensors{filled(1)}), Error);
  EXPECT_THROW(Batch(std::vector<at::Tensor>{}), Error);
}

TEST(BatchTest, AChangedBatchLeavesTheOneItIsOfAlone) {
  const Batch batch(std::vector<Batch>{Sentences{filled(1), filled(2), filled(3), "kept"}});
  Batch copy = batch;
  const auto changed = batch.map([](const at::Tensor& t) { return t * 10; });
  copy.each_tensor([](at::Tensor& t) { t = t + 1; });
  EXPECT_THAT(firsts(batch), ElementsAre(1, 2, 3));
  EXPECT_THAT(firsts(changed), ElementsAre(10, 20, 30));
  EXPECT_THAT(firsts(copy), ElementsAre(2, 3, 4));
  EXPECT_EQ(changed.as<std::vector<Batch>>()[0].as<Sentences>().source, "kept");
}

TEST(BatchTest, IsCutAlongItsRows) {
  const Batch batch = Sentences{torch::arange(10).view({5, 2}), torch::ones({3}), torch::arange(5)};
  EXPECT_EQ(tune::rows(batch), 5);
  const auto pieces = tune::split(batch, 2);
  ASSERT_EQ(pieces.size(), 2);
  const auto& second = pieces[1].as<Sentences>();
  EXPECT_TRUE(at::equal(second.ids, torch::arange(10).view({5, 2}).slice(0, 2)));
  EXPECT_TRUE(at::equal(second.labels, torch::arange(5).slice(0, 2)));
  EXPECT_EQ(second.mask.size(0), 3) << "another number of rows is no batch dimension";
  EXPECT_EQ(tune::split(batch, 8).size(), 5);
  EXPECT_EQ(tune::rows(Batch()), 1);
  const auto laid = tune::channels_last(Batch(std::vector{torch::ones({2, 3, 4, 4}), torch::ones({2, 3})}));
  EXPECT_TRUE(laid.tensors()[0].is_contiguous(at::MemoryFormat::ChannelsLast));
}

/// Tokens of a sentence, some of them hidden, to be found again.
struct FillerImpl : nn::Module {
  FillerImpl() {
    embed = register_module("embed", nn::Embedding(16, 8));
    mix = register_module("mix", nn::Linear(8, 8));
    head = register_module("head", nn::Linear(8, 16));
  }
  at::Tensor loss(const Sentences& batch) {
    const auto x = embed(batch.ids) * batch.mask.unsqueeze(2);
    const auto y = head(torch::tanh(x + mix(x.sum(1, true) / batch.mask.sum(1).view({-1, 1, 1}))));
    return nn::functional::cross_entropy(y.flatten(0, 1), batch.labels.flatten());
  }
  nn::Embedding embed{nullptr};
  nn::Linear mix{nullptr}, head{nullptr};
};
TORCH_MODULE(Filler);

std::vector<Sentences> sentences(int count, std::int64_t length = 6) {
  torch::manual_seed(3);
  std::vector<Sentences> all;
  for (int i = 0; i < count; ++i) {
    const auto ids = torch::randint(1, 16, {8, length});
    auto mask = torch::ones({8, length});
    mask.slice(1, length - 1).zero_();
    all.push_back({ids * (torch::rand({8, length}) > 0.2), mask, ids});
  }
  return all;
}

Filler make_filler() {
  torch::manual_seed(0);
  return Filler();
}

LossFunction loss_of(Filler model) {
  return loss_on<Sentences>([model](const Sentences& batch) mutable { return model->loss(batch); });
}

TEST(BatchTest, StrategiesAndTheVerifierTakeAStructOfTheUsersOwn) {
  auto model = make_filler();
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-2));
  std::vector<Batch> batches;
  for (const auto& one : sentences(4)) batches.emplace_back(one);
  tune::Run run(*model, optimizer, loss_of(model), batches);
  tune::Snapshot snapshot(run);
  tune::Verifier verifier(run, snapshot);
  run.set_active({"split_2"});
  const auto ruling = verifier.check(tune::Kind::Tolerance);
  EXPECT_TRUE(ruling.held) << ruling.reason;
  EXPECT_GT(ruling.evidence.at("float64_steps"), 0) << "the batch was not taken in float64";
  run.inputs("lie", [](const Batch& batch) {
    return batch.map([](const at::Tensor& t) { return t.is_floating_point() ? t * 1.01 : t; });
  });
  EXPECT_FALSE(at::equal(run.loss(batches[0]), loss_of(model)(batches[0]))) << "inputs of a struct are transformed";
  run.inputs("lie", {});
}

TEST(BatchTest, TheTrainerTakesAStructOfTheUsersOwn) {
  auto reference = make_filler(), model = make_filler();
  torch::optim::SGD plain(reference->parameters(), torch::optim::SGDOptions(0.5));
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.5));
  auto loader = sentences(3);
  for (const auto& batch : loader) {
    plain.zero_grad();
    reference->loss(batch).backward();
    plain.step();
  }
  PerformanceConfig config("basic");
  config.set("precision", std::string("fp32"));
  config.set("tune_seconds", 0.2);
  Trainer trainer(*model, optimizer, loss_of(model), config);
  EXPECT_EQ(trainer.fit(loader, 1).steps, 3);
  for (std::size_t i = 0; i < model->parameters().size(); ++i) {
    EXPECT_TRUE(at::equal(model->parameters()[i], reference->parameters()[i])) << "parameter " << i;
  }
  trainer.step(loader[0]);
  EXPECT_EQ(trainer.global_step(), 4);
  trainer.revert();
}

TEST(BatchTest, ACertificateIsOfTheShapesOfEveryTensor) {
  std::vector<std::string> keys;
  for (const std::int64_t length : {6, 7, 6}) {
    auto model = make_filler();
    torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.5));
    std::vector<Batch> batches;
    for (const auto& one : sentences(2, length)) batches.emplace_back(one);
    const auto plan = accelerate(*model, optimizer, loss_of(model), batches,
                                 AccelerateOptions().strategies({"tf32"}).remember(false).tune_seconds(0.1));
    keys.push_back(plan.certificate().key.model);
  }
  EXPECT_EQ(keys[0], keys[2]);
  EXPECT_NE(keys[0], keys[1]);
}

}  // namespace
}  // namespace oxytorch
