// The front door in C++: a configuration is honoured by the search, by its trainer, or refused before anything runs.
#include "oxytorch/trainer/performance_optimizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "oxytorch/error.h"
#include "oxytorch/optim.h"

namespace oxytorch {
namespace {

namespace nn = torch::nn;
using testing::Contains;
using testing::HasSubstr;
using Settings = std::vector<std::pair<const char*, ConfigValue>>;

std::vector<Batch> four_batches() {
  torch::manual_seed(3);
  std::vector<Batch> batches;
  for (int i = 0; i < 4; ++i) batches.push_back({torch::randn({8, 6}), torch::randint(0, 3, {8})});
  return batches;
}

class PerformanceOptimizerTest : public testing::Test {
 protected:
  PreparedRun prepared(const Settings& given, std::vector<std::string> strategies = {"tf32"},
                       const char* level = "basic") {
    PerformanceConfig config(level);
    for (const auto& [key, value] : given) config.set(key, value);
    return PerformanceOptimizer(config, gpu)
        .prepare(
            *model, *optimizer, batches,
            [this](const Batch& batch) {
              ++calls;
              const auto out = model->forward(batch.input);
              dtype = out.scalar_type();
              return nn::functional::cross_entropy(out.to(at::kFloat), batch.target);
            },
            AccelerateOptions().strategies(std::move(strategies)).remember(false).tune_seconds(0.05));
  }
  void refused(const Settings& given, ErrorCode code, const char* says) {
    calls = 0;
    try {
      static_cast<void>(prepared(given));
      ADD_FAILURE() << "nothing was thrown, but was to say: " << says;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), code) << error.what();
      EXPECT_THAT(error.what(), HasSubstr(says));
    }
    EXPECT_EQ(calls, 0) << says;
  }
  [[nodiscard]] at::Tensor flat() const {
    std::vector<at::Tensor> parts;
    for (const auto& p : model->parameters()) parts.push_back(p.detach().clone().flatten());
    return at::cat(parts);
  }

  nn::Sequential model = [] {
    torch::manual_seed(0);
    return nn::Sequential(nn::Linear(6, 8), nn::Tanh(), nn::Linear(8, 3));
  }();
  std::unique_ptr<torch::optim::Optimizer> optimizer =
      std::make_unique<torch::optim::SGD>(model->parameters(), torch::optim::SGDOptions(1.0));
  std::vector<Batch> batches = four_batches();
  std::optional<accelerator::GPUConfig> gpu;
  int calls = 0;
  at::ScalarType dtype = at::ScalarType::Undefined;
};

TEST_F(PerformanceOptimizerTest, ItsTrainerTakesThePlansStepsAsTheConfigurationSays) {
  const auto before = flat();
  auto run = prepared({{"accumulation_steps", std::int64_t{2}},
                       {"ema_decay", 0.5},
                       {"clip_norm", 0.01},
                       {"schedule", std::string("cosine")},
                       {"max_steps", std::int64_t{4}}});
  EXPECT_TRUE(at::equal(flat(), before)) << "nothing has changed but what is active";
  run.trainer.step(batches[0]);
  EXPECT_TRUE(at::equal(flat(), before));
  run.plan.step(batches[1]);
  const auto after = flat();
  EXPECT_NEAR((after - before).norm().item<double>(), 0.01, 1e-5);
  EXPECT_EQ(run.trainer.global_step(), 1);
  EXPECT_LT(optimizer->param_groups()[0].options().get_lr(), 1.0);
  {
    const auto guard = run.trainer.ema_weights();
    EXPECT_TRUE(at::allclose(flat(), (before + after) / 2, 1e-5, 1e-6));
  }
  EXPECT_EQ(run.trainer.fit(batches, 0).stop_reason, "max_steps");
  EXPECT_EQ(run.plan.certificate().steps_planned, 4);
  run.revert();
}

TEST_F(PerformanceOptimizerTest, WhatIsNotFiniteIsTreatedAsGiven) {
  auto run = prepared({{"nonfinite", std::string("skip")}});
  const auto before = flat();
  run.trainer.step({torch::full({8, 6}, std::numeric_limits<float>::quiet_NaN()), batches[0].target});
  EXPECT_TRUE(at::equal(flat(), before));
  EXPECT_THAT(run.trainer.report(), HasSubstr("skipped 1"));
}

TEST_F(PerformanceOptimizerTest, ValuesThatAreNamedAreActiveWhateverTheyGain) {
  auto run = prepared({{"precision", std::string("bf16")}}, {"bf16_autocast"}, "advanced");
  EXPECT_THAT(run.plan.accepted(), Contains("bf16_autocast"));
  run.trainer.step(batches[0]);
  EXPECT_EQ(dtype, at::kBFloat16);
  EXPECT_THAT(run.trainer.report(), HasSubstr("precision = 'bf16'"));
  run.revert();
  run.trainer.step(batches[0]);
  EXPECT_EQ(dtype, at::kFloat);
  auto other = prepared({{"precision", std::string("fp32")}}, {"bf16_autocast"}, "advanced");
  EXPECT_EQ(other.plan.certificate().entries.at(0).reason, "precision is 'fp32' in the configuration");
}

TEST_F(PerformanceOptimizerTest, SettingsOfTheProcessAndTheAcceleratorAreTakenBack) {
  const int before = at::get_num_threads();
  at::set_num_threads(2);
  {
    auto run = prepared({{"threads", std::int64_t{1}}, {"deterministic", true}});
    EXPECT_EQ(at::get_num_threads(), 1);
    EXPECT_TRUE(at::globalContext().deterministicAlgorithms());
    EXPECT_THAT(run.trainer.report(), HasSubstr("threads"));
    run.revert();
    EXPECT_EQ(at::get_num_threads(), 2);
    EXPECT_FALSE(at::globalContext().deterministicAlgorithms());
  }
  gpu = accelerator::GPUConfig{.device = "cpu", .threads = 1};
  {
    auto run = prepared({});
    EXPECT_EQ(at::get_num_threads(), 1);
    EXPECT_TRUE(run.gpu.active());
  }
  EXPECT_EQ(at::get_num_threads(), 2) << "its end takes everything back";
  at::set_num_threads(before);
}

TEST_F(PerformanceOptimizerTest, ASeedSeedsTheRun) {
  const auto drawn = [&](std::int64_t seed) {
    const auto run = prepared({{"seed", seed}});
    return torch::rand({4});
  };
  EXPECT_TRUE(at::equal(drawn(5), drawn(5)));
  EXPECT_FALSE(at::equal(drawn(5), drawn(6)));
}

TEST_F(PerformanceOptimizerTest, WhatCannotBeHonouredIsRefusedBeforeAnythingRuns) {
  refused({{"compile", std::string("default")}}, ErrorCode::NotSupported, "C++ has no torch.compile");
  refused({{"memory_limit", std::string("1KB")}}, ErrorCode::InvalidArgument, "below what this process has in memory");
  refused({{"precision", std::string("fp16")}}, ErrorCode::NotSupported, "loss scale");
  refused({{"precision", std::string("bf16")}}, ErrorCode::InvalidArgument, "bf16_autocast is not to be tried");
  refused({{"warmup_steps", std::int64_t{2}}}, ErrorCode::InvalidArgument, "there is no schedule");
  optimizer = std::make_unique<optim::SGD>(model->parameters(), optim::SGDOptions(1.0).clip_norm(0.5));
  refused({{"clip_norm", 0.25}}, ErrorCode::InvalidArgument, "Make them equal");
  auto run = prepared({{"clip_norm", 0.5}});  // which the optimizer does itself
  run.trainer.step(batches[0]);
  PerformanceConfig config("basic");
  EXPECT_THROW(
      static_cast<void>(PerformanceOptimizer(config).prepare(
          *model, *optimizer, batches, supervised(model, nn::CrossEntropyLoss()), AccelerateOptions().config(config))),
      Error);
}

}  // namespace
}  // namespace oxytorch
