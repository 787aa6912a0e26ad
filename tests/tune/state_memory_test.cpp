// Where an optimizer's state is and when parameters are updated: less memory, and the bits of the plain step.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "oxytorch/memory/parked.h"
#include "oxytorch/optim.h"
#include "oxytorch/tune/run.h"
#include "oxytorch/tune/snapshot.h"
#include "oxytorch/tune/verify.h"
#include "tune/optimizer_state.h"

namespace oxytorch {
namespace {

using testing::HasSubstr;
namespace nn = torch::nn;
using Names = std::vector<std::string>;

std::unique_ptr<torch::optim::Optimizer> optimizer_of(const std::string& name, const std::vector<at::Tensor>& params) {
  if (name == "adamw") return std::make_unique<torch::optim::AdamW>(params, torch::optim::AdamWOptions(1e-3));
  if (name == "amsgrad") {
    return std::make_unique<torch::optim::Adam>(params, torch::optim::AdamOptions(1e-3).amsgrad(true));
  }
  if (name == "sgd") {
    return std::make_unique<torch::optim::SGD>(params, torch::optim::SGDOptions(1e-2).momentum(0.9).nesterov(true));
  }
  if (name == "rmsprop") {
    return std::make_unique<torch::optim::RMSprop>(params, torch::optim::RMSpropOptions(1e-3).centered(true));
  }
  return std::make_unique<torch::optim::Adagrad>(params, torch::optim::AdagradOptions(1e-2));
}

/// State of 2 MiB for the largest weight, enough for a file.
struct Training {
  explicit Training(const std::string& name = "adamw", double clip_norm = 0)
      : model(made()),
        optimizer(optimizer_of(name, model->parameters())),
        run(*model, *optimizer, supervised(model, nn::MSELoss()), batches(), clip_norm) {}

  static nn::Sequential made() {
    torch::manual_seed(0);
    return nn::Sequential(nn::Linear(24, 1024), nn::GELU(), nn::Linear(1024, 512), nn::GELU(), nn::Linear(512, 4));
  }
  static std::vector<Batch> batches() {
    torch::manual_seed(1);
    std::vector<Batch> all;
    for (int i = 0; i < 4; ++i) all.push_back({torch::randn({8, 24}), torch::randn({8, 4})});
    return all;
  }
  std::vector<at::Tensor> states() {
    std::vector<at::Tensor> all;
    tune::each_state_tensor(*optimizer, [&](const at::Tensor&, at::Tensor& value) { all.push_back(value); });
    return all;
  }
  int parked() {
    int count = 0;
    for (const auto& value : states()) count += memory::is_parked(value) ? 1 : 0;
    return count;
  }
  std::vector<at::Tensor> outcome() {
    run.set_active({});
    auto all = states();
    for (auto& value : all) value = value.clone();
    for (const auto& parameter : model->parameters()) all.push_back(parameter.detach().clone());
    return all;
  }
  const Batch& batch(int i) { return run.batches()[static_cast<std::size_t>(i) % run.batches().size()]; }

  nn::Sequential model;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  tune::Run run;
};

void expect_same(const std::vector<at::Tensor>& got, const std::vector<at::Tensor>& expected) {
  ASSERT_EQ(got.size(), expected.size());
  for (std::size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(at::equal(got[i], expected[i])) << i;
}

class StateMemoryTest : public testing::TestWithParam<std::tuple<Names, std::string>> {};

TEST_P(StateMemoryTest, BitsAreThoseOfThePlainStep) {
  const auto& [names, optimizer] = GetParam();
  Training training(optimizer), plain(optimizer);
  for (const auto& name : names) {
    if (!training.run.strategy(name).applies(training.run).holds) GTEST_SKIP() << name << " is not for " << optimizer;
  }
  for (int i = 0; i < 6; ++i) {  // before there is state, switched on and off
    training.run.set_active(i == 3 ? Names() : names);
    EXPECT_TRUE(at::equal(training.run.step(training.batch(i)), plain.run.step(plain.batch(i))));
  }
  if (names.back() == "update_in_backward") {
    for (const auto& parameter : training.model->parameters()) EXPECT_FALSE(parameter.grad().defined());
  }
  expect_same(training.outcome(), plain.outcome());
}

INSTANTIATE_TEST_SUITE_P(All, StateMemoryTest,
                         testing::Combine(testing::Values(Names{"state_in_file"}, Names{"update_in_backward"},
                                                          Names{"state_in_file", "update_in_backward"},
                                                          Names{"update_in_backward", "state_in_file"},
                                                          Names{"native_step", "update_in_backward"}),
                                          testing::Values("adamw", "amsgrad", "sgd", "rmsprop", "adagrad")),
                         [](const auto& each) {
                           std::string text;
                           for (const auto& name : std::get<0>(each.param)) text += name + "_";
                           return text + std::get<1>(each.param);
                         });

TEST(StateMemoryTest, StateWaitsInAFileAndComesBack) {
  Training training, plain;
  training.run.step(training.batch(0));
  plain.run.step(plain.batch(0));
  training.run.set_active({"state_in_file"});
  EXPECT_EQ(training.parked(), 2);
  const auto held = training.run.held_bytes(training.batch(0));
  EXPECT_LT(held, plain.run.held_bytes(plain.batch(0)) - (std::int64_t{4} << 20) + 1);
  training.run.step(training.batch(1));
  plain.run.step(plain.batch(1));
  EXPECT_EQ(training.parked(), 2);
  expect_same(training.outcome(), plain.outcome());
  EXPECT_EQ(training.parked(), 0);
}

TEST(StateMemoryTest, WideAveragesOfInt8StateWaitInAFile) {
  Training training;
  training.run.step(training.batch(0));
  training.run.set_active({"int8_state"});
  EXPECT_EQ(training.parked(), 0) << "trials ask for them again";
  training.run.settle();
  EXPECT_EQ(training.parked(), 2);
  training.run.step(training.batch(1));
  training.run.hand_back();
  EXPECT_EQ(training.parked(), 2) << "what is decoded for a checkpoint goes there too";
  training.run.set_active({});
  EXPECT_EQ(training.parked(), 0);
  EXPECT_TRUE(training.run.step(training.batch(2)).isfinite().item<bool>());
}

TEST(StateMemoryTest, AStepTailUpdatesInBackwardAsItDoesAfterIt) {
  for (const std::string name : {"step_tail", "int8_state"}) {
    for (const bool first : {true, false}) {
      Training training, after;
      training.run.set_active({first ? name : "update_in_backward"});
      training.run.set_active({name, "update_in_backward"});
      after.run.set_active({name});
      for (int i = 0; i < 5; ++i) {
        training.run.step(training.batch(i));
        after.run.step(after.batch(i));
      }
      for (std::size_t i = 0; i < training.model->parameters().size(); ++i) {
        EXPECT_TRUE(at::equal(training.model->parameters()[i], after.model->parameters()[i])) << name << i;
      }
      training.run.set_active({"update_in_backward"});
      EXPECT_EQ(&training.run.optimizer(), training.optimizer.get());
    }
  }
}

TEST(StateMemoryTest, AWindowOfBatchesIsUpdatedByItsSum) {
  for (const Names& names : {Names{"update_in_backward"}, Names{"split_2", "update_in_backward"},
                             Names{"step_tail", "update_in_backward"}}) {
    Training training, other;
    training.run.set_active(names);
    other.run.set_active({names.begin(), names.end() - 1});
    for (auto* each : {&training, &other}) {
      each->run.accumulation = 3;
      for (int i = 0; i < 5; ++i) each->run.take(each->batch(i));
      EXPECT_TRUE(each->run.flush());
      EXPECT_EQ(each->run.taken(), 2);
    }
    expect_same(training.outcome(), other.outcome());
  }
}

TEST(StateMemoryTest, ABackwardOfTheProgramsOwnUpdatesNothing) {
  Training training, plain;
  training.run.set_active({"update_in_backward"});
  training.run.step(training.batch(0));
  plain.run.step(plain.batch(0));
  training.run.loss(training.batch(1)).backward();
  for (const auto& parameter : training.model->parameters()) EXPECT_TRUE(parameter.grad().defined());
  expect_same(training.outcome(), plain.outcome());
}

TEST(StateMemoryTest, AStepThatFailsInBackwardIsKnownToHaveBegun) {
  auto model = Training::made();
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-3));
  bool fails = false;
  tune::Run run(
      *model, optimizer,
      [&](const Batch& batch) {
        auto hidden = model[1]->as<nn::GELU>()->forward(model[0]->as<nn::Linear>()->forward(batch.input));
        if (fails) hidden.register_hook([](const at::Tensor&) { throw std::runtime_error("no memory"); });
        for (std::size_t i = 2; i < model->size(); ++i) {
          auto* const linear = model[i]->as<nn::Linear>();
          hidden = linear != nullptr ? linear->forward(hidden) : at::gelu(hidden);
        }
        return at::mse_loss(hidden, batch.target);
      },
      Training::batches());
  run.set_active({"update_in_backward"});
  run.take(run.batches()[0]);
  std::vector<at::Tensor> before;
  for (const auto& parameter : model->parameters()) before.push_back(parameter.detach().clone());
  fails = true;
  EXPECT_ANY_THROW(run.take(run.batches()[1]));
  EXPECT_TRUE(run.update_begun());
  const auto now = model->parameters();
  EXPECT_TRUE(at::equal(now[0], before[0]));
  EXPECT_FALSE(at::equal(now[2], before[2]));
  for (const auto& parameter : now) EXPECT_FALSE(parameter.grad().defined());
  fails = false;
  run.take(run.batches()[1]);
  EXPECT_EQ(run.taken(), 2);
}

TEST(StateMemoryTest, UpdatesInBackwardSayWhereTheyAreNotFor) {
  const auto why = [](tune::Run& run) { return run.strategy("update_in_backward").applies(run).reason; };
  Training clipped("adamw", 1.0), guarded, valued;
  guarded.run.guard = NonFiniteGuard(optim::NonFinite::Skip);
  valued.run.clip_value = 1;
  EXPECT_THAT(why(clipped.run), HasSubstr("clipped"));
  EXPECT_THAT(why(valued.run), HasSubstr("clipped"));
  EXPECT_THAT(why(guarded.run), HasSubstr("not finite"));
  auto model = Training::made();
  optim::AdamW own(model->parameters(), optim::AdamWOptions(1e-3));
  tune::Run of_own(*model, own, supervised(model, nn::MSELoss()), Training::batches());
  EXPECT_THAT(why(of_own), HasSubstr("oxytorch::optim already"));
  torch::optim::LBFGS lbfgs(model->parameters());
  tune::Run whole(*model, lbfgs, supervised(model, nn::MSELoss()), Training::batches());
  EXPECT_THAT(why(whole), HasSubstr("all parameters together"));
  EXPECT_THAT(whole.strategy("state_in_file").applies(whole).reason, HasSubstr("all parameters together"));
}

TEST(StateMemoryTest, TheVerifierSeesTheGradientsThatWereUsed) {
  for (const auto& [names, kind] : {std::pair{Names{"update_in_backward"}, tune::Kind::Trade},
                                    std::pair{Names{"state_in_file", "update_in_backward"}, tune::Kind::Trade},
                                    std::pair{Names{"state_in_file"}, tune::Kind::Exact}}) {
    Training training;
    tune::Snapshot snapshot(training.run);
    tune::Verifier verifier(training.run, snapshot);
    training.run.set_active(names);
    const auto ruling = verifier.check(kind);
    EXPECT_TRUE(ruling.held) << ruling.reason;
    training.run.set_active({});
    EXPECT_NO_THROW(snapshot.prove());
  }
}

}  // namespace
}  // namespace oxytorch
