// Sparse gradients of embeddings, which torch's SGD and Adagrad take: they train on as in float64 by torch alone.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "accelerate_fixture.h"
#include "oxytorch/load.h"
#include "oxytorch/optim.h"
#include "oxytorch/trainer.h"
#include "oxytorch/tune/accelerate.h"
#include "oxytorch/tune/run.h"
#include "oxytorch/tune/snapshot.h"
#include "oxytorch/tune/strategy.h"
#include "oxytorch/tune/verify.h"

namespace oxytorch {
namespace {

using testing::ElementsAre;
using tune::Kind;
namespace nn = torch::nn;

struct WordsImpl : nn::Module {
  WordsImpl() {
    table = register_module("table", nn::Embedding(nn::EmbeddingOptions(40, 6).sparse(true)));
    head = register_module("head", nn::Linear(6, 3));
  }
  at::Tensor forward(const at::Tensor& words) { return head(table(words).mean(1)); }
  nn::Embedding table{nullptr};
  nn::Linear head{nullptr};
};
TORCH_MODULE(Words);

Words make_words(at::ScalarType dtype = at::kFloat) {
  torch::manual_seed(0);
  Words model;
  model->to(dtype);
  return model;
}

/// With repetitions; the last ten rows never.
std::vector<Batch> make_batches() {
  torch::manual_seed(1);
  std::vector<Batch> batches;
  for (int i = 0; i < 4; ++i) batches.push_back({torch::randint(30, {5, 4}), torch::randint(3, {5})});
  return batches;
}

struct Case {
  const char* name;
  std::function<std::unique_ptr<torch::optim::Optimizer>(const std::vector<at::Tensor>&)> make;
};

template <class Optimizer, class Options>
Case of(const char* name, const Options& options) {
  return {name, [options](const std::vector<at::Tensor>& params) -> std::unique_ptr<torch::optim::Optimizer> {
            return std::make_unique<Optimizer>(params, options);
          }};
}

const std::vector<Case>& cases() {
  using torch::optim::SGDOptions, torch::optim::AdagradOptions;
  static const std::vector<Case> all{
      of<torch::optim::SGD>("SGD", SGDOptions(0.5)),
      of<torch::optim::SGD>("SGDNesterov", SGDOptions(0.5).momentum(0.9).nesterov(true)),
      of<torch::optim::SGD>("SGDDampening", SGDOptions(0.5).momentum(0.5).dampening(0.3)),
      of<torch::optim::Adagrad>("Adagrad", AdagradOptions(0.5).lr_decay(0.1)),
  };
  return all;
}

LossFunction loss_of(const Words& model) { return supervised(model, nn::CrossEntropyLoss()); }

class SparseTest : public testing::TestWithParam<Case> {
 protected:
  SparseTest() : optimizer(GetParam().make(model->parameters())) {}

  /// What torch makes of it in float64.
  static Words exact(int steps, double clip_norm = 0) {
    auto wide = make_words(at::kDouble);
    const auto stepping = GetParam().make(wide->parameters());
    const auto batches = make_batches();
    for (int i = 0; i < steps; ++i) {
      stepping->zero_grad();
      loss_of(wide)(batches[static_cast<std::size_t>(i) % 4]).backward();
      EXPECT_TRUE(wide->table->weight.grad().is_sparse());
      if (clip_norm > 0) {  // torch's function leaves sparse gradients as they are
        double square = 0;
        for (const auto& p : wide->parameters()) square += p.grad().to_dense().square().sum().item<double>();
        const double factor = std::min(1.0, clip_norm / (std::sqrt(square) + 1e-6));
        for (auto& p : wide->parameters()) p.mutable_grad() = p.grad() * factor;
      }
      stepping->step();
    }
    return wide;
  }
  void expect_as(const Words& wide) const {
    for (std::size_t i = 0; i < model->parameters().size(); ++i) {
      const auto off = (model->parameters()[i].to(at::kDouble) - wide->parameters()[i]).abs().max().item<double>();
      EXPECT_LT(off, 4e-6) << GetParam().name << ", parameter " << i;
    }
  }

  Words model = make_words();
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  std::vector<Batch> batches = make_batches();
};

TEST_P(SparseTest, TheTrainerTakesThem) {
  for (const char* level : {"basic", "advanced"}) {
    for (const double clip_norm : {0.0, 0.05}) {
      SCOPED_TRACE(level + std::string(clip_norm > 0 ? ", clipped" : ""));
      model = make_words();
      optimizer = GetParam().make(model->parameters());
      PerformanceConfig config(level);
      config.set("precision", "fp32");
      config.set("clip_norm", clip_norm);
      config.set("step_tail", level == std::string("basic") ? "off" : "on");
      Trainer trainer(*model, *optimizer, loss_of(model), config, {.calibrate = false});
      for (int i = 0; i < 6; ++i) trainer.step(batches[static_cast<std::size_t>(i) % 4]);
      expect_as(exact(6, clip_norm));
    }
  }
}

TEST_P(SparseTest, StrategiesOfTheStepTakeThemAlsoInMidRun) {
  for (const std::string name : {"native_step", "step_tail"}) {
    for (const double clip_norm : {0.0, 0.05}) {
      SCOPED_TRACE(name + (clip_norm > 0 ? ", clipped" : ""));
      model = make_words();
      optimizer = GetParam().make(model->parameters());
      tune::Run run(*model, *optimizer, loss_of(model), batches, clip_norm);
      if (!run.strategy(name).applies(run).holds) {
        EXPECT_EQ(name, "native_step");
        EXPECT_STREQ(GetParam().name, "Adagrad");
        continue;
      }
      for (int i = 0; i < 6; ++i) {
        run.set_active(i < 2 || i > 3 ? std::vector<std::string>{} : std::vector<std::string>{name});
        run.step(batches[static_cast<std::size_t>(i) % 4]);
      }
      expect_as(exact(6, clip_norm));
    }
  }
}

TEST_P(SparseTest, TheyAreHeldProvenAndVerified) {
  tune::Run run(*model, *optimizer, loss_of(model), batches);
  run.step(batches[0]);
  ASSERT_TRUE(model->table->weight.grad().is_sparse());
  const auto before = model->table->weight.grad().to_dense();
  tune::Snapshot snapshot(run);
  run.step(batches[1]);
  EXPECT_NE(snapshot.digest(), snapshot.held());
  snapshot.restore();
  EXPECT_EQ(snapshot.digest(), snapshot.held());
  EXPECT_TRUE(at::equal(model->table->weight.grad().to_dense(), before));
  tune::Verifier verifier(run, snapshot);
  for (const auto kind : {Kind::Exact, Kind::Tolerance}) {
    const auto ruling = verifier.check(kind);
    EXPECT_TRUE(ruling.held) << ruling.reason;
  }
  run.set_active({"step_tail"});
  const auto ruling = verifier.check(Kind::Tolerance);
  EXPECT_TRUE(ruling.held) << ruling.reason;
}

TEST_P(SparseTest, AccelerateTakesThem) {
  accelerate_tests::plant();
  accelerate_tests::costs.update = 0.005;
  const tune::ScopedSources sources(accelerate_tests::clock.sources());
  set_load_source([wall = 0.0]() mutable { return LoadSample{.wall = wall += 1}; });  // a quiet machine
  const auto loss = [inner = loss_of(model)](const Batch& batch) {
    accelerate_tests::pass_step();
    if (accelerate_tests::delayed) accelerate_tests::clock.pass(0.01);
    return inner(batch);
  };
  const auto options = AccelerateOptions()
                           .remember(false)
                           .tune_seconds(20)
                           .level("advanced")
                           .strategies({"no_delay", "native_step", "paying_tail"});
  auto plan = accelerate(*model, *optimizer, loss, batches, options);
  set_load_source({});
  EXPECT_THAT(plan.accepted(), testing::Contains("no_delay"));
  for (const auto& entry : plan.certificate().entries) {
    EXPECT_NE(entry.status, tune::Status::Failed) << entry.strategy << ": " << entry.reason;
    EXPECT_NE(entry.status, tune::Status::Refused) << entry.strategy << ": " << entry.reason;
  }
  // Long enough for the watch to compare losses and gradients.
  for (int i = 0; i < 60; ++i) plan.step(batches[static_cast<std::size_t>(i) % 4]);
  EXPECT_THAT(plan.accepted(), testing::Contains("no_delay")) << plan.report();
  plan.revert();
  EXPECT_TRUE(model->table->weight.grad().is_sparse());
}

INSTANTIATE_TEST_SUITE_P(Optimizers, SparseTest, testing::ValuesIn(cases()),
                         [](const auto& each) { return std::string(each.param.name); });

}  // namespace
}  // namespace oxytorch
