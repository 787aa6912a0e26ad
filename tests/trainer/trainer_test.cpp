#include "oxytorch/trainer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <csignal>
#include <sstream>
#include <stdexcept>

#include "device/torch_device.h"
#include "oxytorch/amp.h"
#include "oxytorch/error.h"
#include "oxytorch/optim.h"

namespace oxytorch {
namespace {

torch::nn::Sequential make_model() {
  torch::manual_seed(0);
  torch::nn::Sequential model(torch::nn::Linear(6, 16), torch::nn::BatchNorm1d(16), torch::nn::ReLU(),
                              torch::nn::Dropout(0.2), torch::nn::Linear(16, 3));
  model->to(test::test_device());
  return model;
}

std::vector<Batch> make_batches(int count, int64_t size = 8) {
  torch::manual_seed(3);
  std::vector<Batch> batches;
  for (int i = 0; i < count; ++i) {
    batches.push_back(
        {torch::randn({size, 6}).to(test::test_device()), torch::randint(0, 3, {size}).to(test::test_device())});
  }
  return batches;
}

struct Drawn {
  at::Tensor data, target;
};

std::vector<Drawn> make_loader(int count) {
  std::vector<Drawn> loader;
  for (auto& batch : make_batches(count)) loader.push_back({batch.input, batch.target});
  return loader;
}

LossFunction loss_of(torch::nn::Sequential model) { return supervised(model, torch::nn::CrossEntropyLoss()); }

std::vector<at::Tensor> weights(const torch::nn::Sequential& model) {
  std::vector<at::Tensor> all;
  for (const auto& tensor : model->parameters()) all.push_back(tensor.detach().clone());
  for (const auto& tensor : model->buffers()) all.push_back(tensor.detach().clone());
  return all;
}

void expect_equal(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(at::equal(a[i], b[i])) << "tensor " << i;
}

PerformanceConfig settings(std::initializer_list<std::pair<const char*, ConfigValue>> values,
                           const char* level = "advanced") {
  PerformanceConfig config(level);
  for (const auto& [key, value] : values) config.set(key, value);
  return config;
}

constexpr TrainerOptions kUntuned{.calibrate = false};  // where the test is not about what is found

PerformanceConfig exact(std::initializer_list<std::pair<const char*, ConfigValue>> values = {}) {
  auto config = settings(values);
  config.set("precision", std::string("fp32"));
  config.set("channels_last", std::string("off"));
  config.set("attention", std::string("default"));
  return config;
}

TEST(TrainerTest, BatchesAreTakenToTheModel) {
  auto model = make_model();
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  std::vector<at::Device> seen;
  const auto loss = [&](const Batch& batch) {
    const auto& pair = batch.as<std::vector<at::Tensor>>();
    for (const auto& tensor : pair) seen.push_back(tensor.device());
    return torch::nn::functional::cross_entropy(model->forward(pair[0]), pair[1]);
  };
  Trainer trainer(*model, optimizer, loss, exact(), kUntuned);
  const std::vector<at::Tensor> here{torch::randn({8, 6}), torch::randint(0, 3, {8})};
  const auto value = trainer.step(Batch(here));
  EXPECT_THAT(seen, testing::Each(model->parameters().front().device()));
  EXPECT_EQ(value.device(), seen.front());
  EXPECT_TRUE(here.front().device().is_cpu());
}

TEST(TrainerTest, BasicKeepsEveryBitOfThePlainLoop) {
  const auto batches = make_batches(20);
  auto reference = make_model();
  auto model = make_model();
  torch::optim::AdamW plain(reference->parameters(), torch::optim::AdamWOptions(1e-2));
  torch::manual_seed(9);
  for (const auto& batch : batches) {
    torch::nn::functional::cross_entropy(reference->forward(batch.input), batch.target).backward();
    plain.step();
    plain.zero_grad();
  }
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-2));
  Trainer trainer(*model, optimizer, loss_of(model), "basic");
  torch::manual_seed(9);
  for (const auto& batch : batches) trainer.step(batch);
  expect_equal(weights(reference), weights(model));
  EXPECT_EQ(trainer.global_step(), 20);
  trainer.revert();
}

TEST(TrainerTest, AccumulationDividesByTheBatchesThereWere) {
  auto reference = torch::nn::Sequential(torch::nn::Linear(6, 3));
  reference->to(test::test_device());
  auto model = torch::nn::Sequential(torch::nn::Linear(6, 3));
  model->to(test::test_device());
  {
    torch::NoGradGuard quiet;
    for (size_t i = 0; i < 2; ++i) model->parameters()[i].copy_(reference->parameters()[i]);
  }
  const auto batches = make_batches(7, 4);
  optim::SGD plain(reference->parameters(), optim::SGDOptions(0.5));
  for (const auto& [first, last] : {std::pair<size_t, size_t>{0, 4}, {4, 7}}) {
    std::vector<at::Tensor> x, y;
    for (size_t i = first; i < last; ++i) {
      x.push_back(batches[i].input);
      y.push_back(batches[i].target);
    }
    torch::nn::functional::cross_entropy(reference->forward(torch::cat(x)), torch::cat(y)).backward();
    plain.step();
    plain.zero_grad();
  }
  optim::SGD optimizer(model->parameters(), optim::SGDOptions(0.5));
  Trainer trainer(*model, optimizer, loss_of(model), exact({{"accumulation_steps", int64_t{4}}}), kUntuned);
  for (const auto& batch : batches) trainer.step(batch);
  EXPECT_EQ(trainer.global_step(), 1);
  EXPECT_TRUE(trainer.flush());
  EXPECT_FALSE(trainer.flush());
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_TRUE(at::allclose(reference->parameters()[i], model->parameters()[i], 1e-5, 1e-6));
  }
  trainer.revert();
}

TEST(TrainerTest, AccumulationUnderHalfPrecisionEqualsTheLoopWrittenByHand) {
  for (const bool tail : {true, false}) {
    for (const size_t count : {8, 3}) {
      const auto batches = make_batches(static_cast<int>(count));
      auto reference = make_model();
      auto model = make_model();
      reference->ptr<torch::nn::DropoutImpl>(3)->options.p(0);
      model->ptr<torch::nn::DropoutImpl>(3)->options.p(0);
      const auto make = [tail](const std::vector<at::Tensor>& parameters) -> std::unique_ptr<torch::optim::Optimizer> {
        if (tail) return std::make_unique<optim::SGD>(parameters, optim::SGDOptions(0.5));
        return std::make_unique<torch::optim::SGD>(parameters, torch::optim::SGDOptions(0.5));
      };
      const auto plain = make(reference->parameters());
      amp::GradScaler scaler;
      for (size_t first = 0; first < count; first += 4) {
        const auto size = std::min<size_t>(4, count - first);
        for (size_t i = first; i < first + size; ++i) {
          at::Tensor loss;
          {
            amp::Autocast guard(test::test_device().type(), at::kHalf);
            loss = torch::nn::functional::cross_entropy(reference->forward(batches[i].input), batches[i].target);
          }
          scaler.scale(loss / static_cast<double>(size)).backward();
        }
        scaler.step(*plain);
        scaler.update();
        plain->zero_grad();
      }
      const auto optimizer = make(model->parameters());
      Trainer trainer(*model, *optimizer, loss_of(model),
                      settings({{"accumulation_steps", int64_t{4}},
                                {"precision", std::string("fp16")},
                                {"channels_last", std::string("off")},
                                {"attention", std::string("default")},
                                {"threads", std::string("keep")},
                                {"flush_denormals", std::string("off")}}),
                      kUntuned);
      std::vector<Drawn> loader;
      for (const auto& batch : batches) loader.push_back({batch.input, batch.target});
      EXPECT_EQ(trainer.fit(loader, 1).steps, (static_cast<int64_t>(count) + 3) / 4);
      for (size_t i = 0; i < model->parameters().size(); ++i) {
        // A third is rounded to float16 in each backward.
        const double loose = count == 8 ? 1 : 500;
        EXPECT_TRUE(at::allclose(reference->parameters()[i], model->parameters()[i], 2e-6 * loose, 3e-7 * loose))
            << "parameter " << i << " after " << count << " batches";
      }
      trainer.revert();
    }
  }
}

TEST(TrainerTest, AStepThatFailsAfterUnscalingCanBeTakenAgain) {
  auto model = make_model();
  optim::AdamW optimizer(model->parameters(), optim::AdamWOptions(1e-2).nonfinite(optim::NonFinite::Raise));
  Trainer trainer(*model, optimizer, loss_of(model),
                  settings({{"precision", std::string("fp16")},
                            {"clip_norm", 1.0},
                            {"channels_last", std::string("off")},
                            {"attention", std::string("default")},
                            {"schedule", std::string("cosine")},
                            {"max_steps", int64_t{9}}}));
  const auto batches = make_batches(3);
  trainer.step(batches[0]);
  auto& lr = static_cast<optim::AdamWOptions&>(optimizer.param_groups()[0].options());
  const double rate = lr.lr();
  lr.lr(-1);
  EXPECT_THROW(trainer.step(batches[1]), Error);
  lr.lr(rate);
  trainer.step(batches[2]);
  EXPECT_EQ(trainer.global_step(), 2);
  trainer.revert();
}

TEST(TrainerTest, ClipAndAverageFollowTheirFormulas) {
  auto reference = make_model();
  auto model = make_model();
  optim::SGD plain(reference->parameters(), optim::SGDOptions(0.1));
  optim::SGD optimizer(model->parameters(), optim::SGDOptions(0.1));
  Trainer trainer(*model, optimizer, loss_of(model), exact({{"clip_norm", 0.05}, {"ema_decay", 0.5}}), kUntuned);
  std::vector<at::Tensor> average;
  for (const auto& p : reference->parameters()) average.push_back(p.detach().clone());
  for (const auto& batch : make_batches(4)) {
    torch::manual_seed(9);
    torch::nn::functional::cross_entropy(reference->forward(batch.input), batch.target).backward();
    torch::nn::utils::clip_grad_norm_(reference->parameters(), 0.05);
    plain.step();
    plain.zero_grad();
    torch::NoGradGuard quiet;
    for (size_t i = 0; i < average.size(); ++i) average[i].lerp_(reference->parameters()[i], 0.5);
    torch::AutoGradMode loud(true);
    torch::manual_seed(9);
    trainer.step(batch);
  }
  const auto own = weights(model);
  {
    const auto guard = trainer.ema_weights();
    const auto inside = model->parameters();
    for (size_t i = 0; i < average.size(); ++i) EXPECT_TRUE(at::allclose(inside[i], average[i], 1e-5, 1e-6));
  }
  expect_equal(own, weights(model));
  trainer.revert();
}

TEST(TrainerTest, AFailingLossLeavesNoHalfStep) {
  auto model = make_model();
  optim::AdamW optimizer(model->parameters());
  bool fail = false;
  const auto inner = loss_of(model);
  Trainer trainer(
      *model, optimizer,
      [&](const Batch& batch) {
        auto loss = inner(batch);
        if (fail) throw std::domain_error("the user's own");
        return loss;
      },
      exact({{"accumulation_steps", int64_t{2}}}), kUntuned);
  const auto batches = make_batches(4);
  trainer.step(batches[0]);
  fail = true;
  EXPECT_THROW(trainer.step(batches[1]), std::domain_error);
  for (const auto& p : model->parameters()) EXPECT_FALSE(p.grad().defined());
  EXPECT_EQ(trainer.batches(), 1);
  fail = false;
  trainer.step(batches[2]);
  EXPECT_EQ(trainer.global_step(), 0) << "the window starts anew";
  trainer.step(batches[3]);
  EXPECT_EQ(trainer.global_step(), 1);
  trainer.revert();
}

TEST(TrainerTest, ALossThatIsNoScalarIsRefused) {
  auto model = make_model();
  optim::AdamW optimizer(model->parameters());
  Trainer trainer(
      *model, optimizer, [&](const Batch& batch) { return model->forward(batch.input); }, exact(), kUntuned);
  EXPECT_THROW(trainer.step(make_batches(1)[0]), Error);
  EXPECT_THROW(Trainer(*model, optimizer, nullptr, exact({{"schedule", std::string("cosine")}})), Error);
  trainer.revert();
}

TEST(TrainerTest, ClippingOfAnOptimizerThatStepsInBackwardIsRefused) {
  auto model = make_model();
  optim::AdamW optimizer(model->parameters(),
                         optim::AdamWOptions(1e-2).step_in_backward(true).nonfinite(optim::NonFinite::Propagate));
  EXPECT_THROW(Trainer(*model, optimizer, loss_of(model), exact({{"clip_norm", 0.5}})), Error);
}

TEST(TrainerTest, AnArchiveContinuesTheRunToTheBit) {
  const auto config = exact({{"schedule", std::string("cosine")}, {"max_steps", int64_t{20}}, {"ema_decay", 0.9}});
  const auto batches = make_batches(12);
  auto whole = make_model();
  optim::AdamW whole_optimizer(whole->parameters(), optim::AdamWOptions(1e-2));
  Trainer first(*whole, whole_optimizer, loss_of(whole), config, kUntuned);
  torch::manual_seed(5);
  for (size_t i = 0; i < 6; ++i) first.step(batches[i]);
  std::stringstream stream;
  {
    torch::serialize::OutputArchive archive;
    first.save(archive);
    archive.save_to(stream);
  }
  for (size_t i = 6; i < 12; ++i) first.step(batches[i]);

  auto resumed = make_model();
  optim::AdamW resumed_optimizer(resumed->parameters(), optim::AdamWOptions(1e-2));
  Trainer second(*resumed, resumed_optimizer, loss_of(resumed), config, kUntuned);
  torch::serialize::InputArchive archive;
  archive.load_from(stream);
  second.load(archive);
  EXPECT_EQ(second.global_step(), 6);
  for (size_t i = 6; i < 12; ++i) second.step(batches[i]);
  expect_equal(weights(whole), weights(resumed));
  EXPECT_EQ(whole_optimizer.param_groups()[0].options().get_lr(),
            resumed_optimizer.param_groups()[0].options().get_lr());
  first.revert();
}

TEST(TrainerTest, AnAllocatorThatTheEnvironmentDecidesIsReportedAsRefused) {
  setenv("MALLOC_TOP_PAD_", "1048576", 1);
  auto model = make_model();
  optim::AdamW optimizer(model->parameters());
  const Trainer trainer(*model, optimizer, loss_of(model), settings({{"allocator", std::string("retain")}}));
  unsetenv("MALLOC_TOP_PAD_");
  const auto& lines = trainer.settings();
  const auto line = std::find_if(lines.begin(), lines.end(), [](const auto& one) { return one.name == "allocator"; });
  ASSERT_NE(line, lines.end());
  EXPECT_EQ(line->state, "refused") << line->reason;
}

TEST(TrainerTest, FitCountsEpochsInTotalThroughSavingAndLoading) {
  auto loader = make_loader(5);
  auto model = make_model();
  optim::AdamW optimizer(model->parameters());
  Trainer trainer(*model, optimizer, loss_of(model), exact(), kUntuned);
  EXPECT_EQ(trainer.fit(loader, 2).steps, 10);
  EXPECT_EQ(trainer.epoch(), 2);
  EXPECT_EQ(trainer.fit(loader, 2).steps, 0);
  std::stringstream stream;
  {
    torch::serialize::OutputArchive archive;
    trainer.save(archive);
    archive.save_to(stream);
  }
  auto other = make_model();
  optim::AdamW other_optimizer(other->parameters());
  Trainer resumed(*other, other_optimizer, loss_of(other), exact(), kUntuned);
  torch::serialize::InputArchive archive;
  archive.load_from(stream);
  resumed.load(archive);
  EXPECT_EQ(resumed.epoch(), 2);
  const auto result = resumed.fit(loader, 3);
  EXPECT_EQ(result.steps, 5);
  EXPECT_EQ(result.losses.size(), 1);
  EXPECT_EQ(resumed.epoch(), 3);
  EXPECT_EQ(resumed.fit(loader, 9, 17).stop_reason, "max_steps");
  EXPECT_EQ(resumed.epoch(), 3) << "an epoch that was broken off is not finished";
}

TEST(TrainerTest, FitStopsForEachReason) {
  auto loader = make_loader(5);
  const auto run = [&](PerformanceConfig config, int64_t epochs, int64_t steps) {
    auto model = make_model();
    optim::AdamW optimizer(model->parameters());
    Trainer trainer(*model, optimizer, loss_of(model), std::move(config), kUntuned);
    return trainer.fit(loader, epochs, steps);
  };
  EXPECT_EQ(run(exact(), 2, 0).stop_reason, "epochs");
  EXPECT_EQ(run(exact(), 2, 0).steps, 10);
  EXPECT_EQ(run(exact(), 2, 7).steps, 7);
  EXPECT_EQ(run(exact({{"max_steps", int64_t{3}}}), 0, 0).stop_reason, "max_steps");
  EXPECT_EQ(run(exact({{"accumulation_steps", int64_t{4}}}), 2, 0).steps, 4);
  const auto early = run(exact({{"early_stopping_patience", int64_t{1}}, {"early_stopping_min_delta", 100.0}}), 9, 0);
  EXPECT_EQ(early.stop_reason, "early_stopping");
  EXPECT_EQ(early.losses.size(), 2);
  EXPECT_THROW(run(exact(), 0, 0), Error);
}

TEST(TrainerTest, MaxStepsReachedByTheLastWindowOfAnEpochIsTheEnd) {
  auto loader = make_loader(5);
  auto model = make_model();
  optim::AdamW optimizer(model->parameters());
  Trainer trainer(*model, optimizer, loss_of(model), exact({{"accumulation_steps", int64_t{4}}}), kUntuned);
  const auto result = trainer.fit(loader, 9, 2);
  EXPECT_EQ(result.stop_reason, "max_steps");
  EXPECT_EQ(result.losses.size(), 1) << "the epoch was whole";
  EXPECT_EQ(trainer.batches(), 5) << "no batch of another epoch was taken";
  EXPECT_EQ(trainer.fit(loader, 9, 2).steps, 0);
  EXPECT_EQ(trainer.batches(), 5);
  trainer.revert();
}

TEST(TrainerTest, EarlyStoppingGoesByTheValidationAndBringsTheBestWeightsBack) {
  auto loader = make_loader(3);
  for (const bool restore : {true, false}) {
    auto model = make_model();
    optim::AdamW optimizer(model->parameters());
    Trainer trainer(*model, optimizer, loss_of(model),
                    exact({{"early_stopping_patience", int64_t{2}},
                           {"early_stopping_mode", std::string("max")},
                           {"early_stopping_restore_best", restore}}),
                    kUntuned);
    std::vector<std::vector<at::Tensor>> seen;
    const std::vector<double> metrics{0.1, 0.5, 0.4, 0.3, 0.9};
    const auto result = trainer.fit(loader, 9, 0, [&] {
      seen.push_back(weights(model));
      return metrics.at(seen.size() - 1);
    });
    EXPECT_EQ(result.stop_reason, "early_stopping");
    EXPECT_EQ(result.validations, std::vector<double>({0.1, 0.5, 0.4, 0.3}));
    expect_equal(weights(model), seen[restore ? 1 : 3]);
    trainer.revert();
  }
}

TEST(TrainerTest, ASignalEndsTheStepAndTheHandlersComeBack) {
  auto loader = make_loader(5);
  auto model = make_model();
  optim::AdamW optimizer(model->parameters());
  const auto inner = loss_of(model);
  int calls = 0;
  Trainer trainer(
      *model, optimizer,
      [&](const Batch& batch) {
        if (++calls == 3) std::raise(SIGTERM);
        return inner(batch);
      },
      exact(), kUntuned);
  struct sigaction before {
  }, after{};
  sigaction(SIGTERM, nullptr, &before);
  const auto result = trainer.fit(loader, 5);
  sigaction(SIGTERM, nullptr, &after);
  EXPECT_EQ(result.stop_reason, "SIGTERM");
  EXPECT_EQ(trainer.global_step(), 3);
  EXPECT_EQ(before.sa_handler, after.sa_handler);
}

TEST(TrainerTest, HalfPrecisionScalesInsideTheTail) {
  auto model = make_model();
  optim::AdamW optimizer(model->parameters());
  Trainer trainer(*model, optimizer, loss_of(model), settings({{"precision", std::string("fp16")}}));
  auto batches = make_batches(2);
  trainer.step(batches[0]);
  const auto before = weights(model);
  batches[1].input.fill_(std::numeric_limits<float>::infinity());
  trainer.step(batches[1]);
  const auto after = weights(model);
  for (size_t i = 0; i < model->parameters().size(); ++i) EXPECT_TRUE(at::equal(before[i], after[i]));
  EXPECT_EQ(optimizer.tail_stats().skipped.item<int64_t>(), 1);
  trainer.revert();
}

TEST(TrainerTest, ReportNamesEachSetting) {
  auto model = make_model();
  optim::AdamW optimizer(model->parameters());
  Trainer trainer(*model, optimizer, loss_of(model));
  for (const auto& batch : make_batches(3)) trainer.step(batch);
  const auto text = trainer.report();
  for (const char* name : {"allocator", "threads", "flush_denormals", "step_tail", "precision", "channels_last",
                           "attention", "grad_scaler", "backward"}) {
    EXPECT_THAT(text, ::testing::HasSubstr(name));
  }
  EXPECT_THAT(trainer.report_json(), ::testing::StartsWith("{\"level\": \"advanced\""));
  trainer.revert();
}

}  // namespace
}  // namespace oxytorch
