// What a trainer has on "auto" is decided by the tuner: verified, within its seconds, without a trace, and told.
#include <gmock/gmock.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <cmath>
#include <filesystem>
#include <limits>

#include "oxytorch/error.h"
#include "oxytorch/trainer.h"
#include "tune/accelerate_fixture.h"
#include "tune/strategies.h"

namespace oxytorch::accelerate_tests {
namespace {

using testing::HasSubstr;
using testing::StartsWith;

struct Dearer : Strategy {
  void apply(Run& /*run*/) override { costs.rest *= 2; }
  void revert(Run& /*run*/) override { costs.rest /= 2; }
};

/// Twice as fast, and outputs are off by a little: the first loss moves by less than 5 %.
struct Off : NoDelay {
  void apply(Run& run) override {
    NoDelay::apply(run);
    run.inputs("off", [](const Batch& b) { return Batch{b.input * 1.02, b.target}; });
  }
  void revert(Run& run) override {
    run.inputs("off", {});
    NoDelay::revert(run);
  }
};

template <class T>
tune::RegisteredStrategy planted(const char* name, Kind kind = Kind::Exact, const char* group = "") {
  return {name, kind, {.group = group}, [] { return std::make_unique<T>(); }};
}

std::vector<tune::RegisteredStrategy> useless(int count) {
  std::vector<tune::RegisteredStrategy> all;
  for (int i = 0; i < count; ++i) all.push_back(planted<Null>(("useless_" + std::to_string(i)).c_str()));
  return all;
}

PerformanceConfig with(const char* level, const std::vector<std::pair<const char*, ConfigValue>>& values) {
  PerformanceConfig config(level);
  for (const auto& [key, value] : values) config.set(key, value);
  return config;
}

const SettingLine& line(const Trainer& trainer, const std::string& name) {
  static const SettingLine none{"", "missing", ""};
  for (const auto& one : trainer.settings()) {
    if (one.name == name) return one;
  }
  return none;
}

class TrainerAutoTest : public AccelerateTest {
 protected:
  void SetUp() override {
    AccelerateTest::SetUp();
    model = make_model();
    optimizer = make_optimizer("AdamW", model);
  }
  void only(std::vector<tune::RegisteredStrategy> strategies) {
    scoped.reset();
    scoped.emplace(std::move(strategies));
  }
  Trainer make(PerformanceConfig config, bool calibrate = true) {
    return {*model,
            *optimizer,
            [this, inner = delayed_loss(model)](const Batch& batch) {
              ++calls;
              if (calls == throws_at) throw std::domain_error("the user's own");
              return inner(batch);
            },
            std::move(config),
            {.calibrate = calibrate}};
  }
  Trainer make(const char* level = "basic", bool calibrate = true) { return make(PerformanceConfig(level), calibrate); }
  [[nodiscard]] std::vector<at::Tensor> weights() const { return state_of(model, *optimizer).tensors; }

  Tied model{nullptr};
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  std::vector<Batch> batches = make_batches();
  int calls = 0, throws_at = 0;
  std::optional<tune::ScopedStrategies> scoped;
};

TEST_F(TrainerAutoTest, WhatPaysIsActiveFromTheFirstStepAndTold) {
  only({planted<NoDelay>("no_delay"), planted<Dearer>("dearer", Kind::Tolerance, "layout")});
  auto trainer = make("advanced");
  EXPECT_TRUE(delayed);
  EXPECT_THAT(line(trainer, "channels_last").reason, HasSubstr("first batch"));
  trainer.step(batches[0]);
  EXPECT_FALSE(delayed);
  EXPECT_EQ(trainer.global_step(), 1);
  const auto found = line(trainer, "no_delay");
  EXPECT_EQ(found.state, "on");
  EXPECT_NEAR(found.gain.value_or(0), 2.0, 0.05);
  const auto refused = line(trainer, "channels_last");
  EXPECT_EQ(refused.state, "refused");
  EXPECT_THAT(refused.reason, StartsWith("dearer: "));
  EXPECT_THAT(trainer.report(), HasSubstr("no_delay"));
  trainer.revert();
  EXPECT_TRUE(delayed);
  EXPECT_EQ(line(trainer, "no_delay").state, "missing");
}

TEST_F(TrainerAutoTest, ItsEndIsARevert) {
  only({planted<NoDelay>("no_delay")});
  {
    auto trainer = make();
    trainer.step(batches[0]);
    EXPECT_FALSE(delayed);
    const auto moved = std::move(trainer);
    EXPECT_FALSE(delayed);
  }
  EXPECT_TRUE(delayed);
}

TEST_F(TrainerAutoTest, WhatIsWrongIsRefusedThoughTheFirstLossHardlyMoves) {
  model->eval();
  const auto loss = [&](double factor) {
    const torch::NoGradGuard quiet;
    const auto out = model->forward(batches[0].input * factor);
    return torch::nn::functional::cross_entropy(out, batches[0].target).item<double>();
  };
  ASSERT_LT(std::abs(loss(1.02) / loss(1) - 1), 0.05);
  model->train();
  only({planted<Off>("off_by_a_little", Kind::Tolerance, "layout")});
  auto trainer = make("advanced");
  trainer.step(batches[0]);
  EXPECT_TRUE(delayed);
  EXPECT_EQ(line(trainer, "channels_last").state, "refused");
  EXPECT_THAT(line(trainer, "channels_last").reason, HasSubstr("off_by_a_little: "));
}

TEST_F(TrainerAutoTest, TrialsChangeNoBitAndWhatIsExactNoneEither) {
  only({planted<NoDelay>("no_delay")});
  auto trainer = make();
  torch::manual_seed(4);
  for (int i = 0; i < 8; ++i) trainer.step(batches[static_cast<std::size_t>(i) % 4]);
  EXPECT_FALSE(delayed);
  EXPECT_GT(calls, 50);
  const auto tuned = weights();
  trainer.revert();
  auto reference = make_model();
  auto plain = make_optimizer("AdamW", reference);
  torch::manual_seed(4);
  for (int i = 0; i < 8; ++i) {
    const auto& batch = batches[static_cast<std::size_t>(i) % 4];
    torch::nn::functional::cross_entropy(reference->forward(batch.input), batch.target).backward();
    plain->step();
    for (auto& p : distinct(reference)) p.mutable_grad().reset();
  }
  const auto expected = state_of(reference, *plain).tensors;
  ASSERT_EQ(tuned.size(), expected.size());
  for (std::size_t i = 0; i < tuned.size(); ++i) {
    ASSERT_EQ(tuned[i].defined(), expected[i].defined()) << i;
    if (tuned[i].defined()) {
      EXPECT_TRUE(at::equal(tuned[i], expected[i])) << i;
    }
  }
}

TEST_F(TrainerAutoTest, TrialsRunOnACopyOfTheBatch) {
  only({planted<NoDelay>("no_delay")});
  Trainer trainer(
      *model, *optimizer,
      [inner = delayed_loss(model)](const Batch& batch) {
        at::Tensor(batch.input).add_(1);
        return inner(batch);
      },
      "basic");
  const auto before = batches[0].input.clone();
  trainer.step(batches[0]);
  EXPECT_TRUE(at::equal(batches[0].input, before + 1)) << "by the step that was taken alone";
}

TEST_F(TrainerAutoTest, WithoutCalibrationNothingIsTried) {
  only({planted<NoDelay>("no_delay")});
  auto trainer = make("basic", /*calibrate=*/false);
  for (int i = 1; i < 4; ++i) {
    trainer.step(batches[0]);
    EXPECT_EQ(calls, i);
  }
  EXPECT_TRUE(delayed);
  EXPECT_THAT(line(trainer, "allocator").reason, HasSubstr("calibrate is off"));
}

struct Hook final : torch::autograd::PostAccumulateGradHook {
  void operator()(const at::Tensor& /*parameter*/) override {}
};

TEST_F(TrainerAutoTest, NothingIsTriedWhereItCouldLeaveATrace) {
  only({planted<NoDelay>("no_delay")});
  auto loss = delayed_loss(model);
  auto trainer = make();
  trainer.step([&] {
    ++calls;
    return loss(batches[0]);
  });
  EXPECT_EQ(calls, 1);
  EXPECT_THAT(line(trainer, "allocator").reason, HasSubstr("closure"));
  trainer.step(batches[0]);
  EXPECT_EQ(calls, 2) << "what the first batch left undecided stays so";
  torch::autograd::impl::set_post_acc_grad_hooks(model->head->weight, std::make_unique<Hook>());
  auto hooked = make();
  hooked.step(batches[0]);
  EXPECT_EQ(calls, 3);
  EXPECT_THAT(line(hooked, "allocator").reason, HasSubstr("hook"));
  EXPECT_TRUE(delayed);
}

TEST_F(TrainerAutoTest, WhatIsNamedIsBroughtWhereNothingIsTried) {
  namespace nn = torch::nn;
  nn::Sequential images(nn::Conv2d(2, 3, 2), nn::Flatten(), nn::Linear(27, 3));
  torch::optim::SGD sgd(images->parameters(), torch::optim::SGDOptions(0.1));
  const Batch batch{torch::randn({5, 2, 4, 4}), torch::randint(0, 3, {5})};
  Trainer trainer(*images, sgd, supervised(images, nn::CrossEntropyLoss()),
                  with("basic", {{"channels_last", std::string("on")},
                                 {"step_tail", std::string("on")},
                                 {"attention", std::string("math")}}));
  bool flash = true, last = false;
  trainer.step([&] {
    flash = at::globalContext().userEnabledFlashSDP();
    last = images->parameters()[0].is_contiguous(at::MemoryFormat::ChannelsLast);
    return nn::functional::cross_entropy(images->forward(batch.input), batch.target);
  });
  EXPECT_TRUE(last);
  EXPECT_FALSE(flash);
  for (const char* name : {"channels_last", "step_tail", "attention"}) {
    EXPECT_EQ(line(trainer, name).state, "on") << name;
    EXPECT_THAT(line(trainer, name).reason, HasSubstr("asked for")) << name;
  }
  EXPECT_EQ(line(trainer, "optimizer_state").state, "missing");
  trainer.revert();
  EXPECT_TRUE(images->parameters()[0].is_contiguous());
  EXPECT_EQ(line(trainer, "step_tail").state, "off");
}

TEST_F(TrainerAutoTest, WhatIsNamedAndCannotBeIsRefusedWithTheReason) {
  auto trainer = make(with("basic", {{"channels_last", std::string("on")}}), false);
  EXPECT_EQ(line(trainer, "channels_last").state, "refused");
  EXPECT_EQ(line(trainer, "channels_last").reason, "the model has no 2-D convolution.");
}

TEST_F(TrainerAutoTest, ASmallModelTakesNoLongerThanItsSecond) {
  costs.rest = costs.delay = 4e-4;
  for (const auto& [key, value, most] : std::vector<std::tuple<const char*, ConfigValue, double>>{
           {"steps_planned", std::int64_t{100}, 1.0}, {"tune_seconds", 3.0, 3.0}}) {
    auto all = useless(60);
    all.insert(all.begin(), planted<NoDelay>("no_delay"));
    only(std::move(all));
    const double began = clock.now;
    auto trainer = make(with("basic", {{key, value}}));
    trainer.step(batches[0]);
    EXPECT_LT(clock.now - began, 1.1 * most) << key;
    EXPECT_EQ(line(trainer, "no_delay").state, "on") << key;
    trainer.revert();
  }
}

TEST_F(TrainerAutoTest, TheNextRunReusesWhatWasFound) {
  const CacheFolder cache;
  std::vector<double> took;
  for (const bool remember : {false, true, true, false}) {
    auto all = useless(10);
    all.insert(all.begin(), planted<NoDelay>("no_delay"));
    only(std::move(all));
    const double began = clock.now;
    auto trainer = make(with("basic", {{"remember", remember}, {"seed", static_cast<std::int64_t>(took.size())}}));
    trainer.step(batches[0]);
    took.push_back(clock.now - began);
    EXPECT_EQ(line(trainer, "no_delay").state, "on");
    EXPECT_EQ(std::filesystem::exists(cache.path()), took.size() > 1);
    trainer.revert();
  }
  EXPECT_LT(took[2], took[1] / 2);
  EXPECT_GT(took[3], took[1] / 2);
}

TEST_F(TrainerAutoTest, ALongRunAllowsAShareOfItself) {
  std::vector<double> took;
  for (const std::int64_t steps : {100, 20'000}) {
    only(useless(20));
    const double began = clock.now;
    auto trainer = make(with("basic", {{"steps_planned", steps}}));
    trainer.step(batches[0]);
    took.push_back(clock.now - began);
  }
  EXPECT_LT(took[0], 2.0);
  EXPECT_GT(took[1], 2.0);
  EXPECT_LT(took[1], 0.02 * 20'000 * 0.02 * 1.1);
}

/// Says that it is longer than it is.
struct Loader : std::vector<Batch> {
  [[nodiscard]] std::size_t size() const { return said; }
  std::size_t said = 0;
};

TEST_F(TrainerAutoTest, FitTellsHowLongTheRunIs) {
  std::vector<double> took;
  for (const std::size_t said : {2, 40'000}) {
    only(useless(20));
    Loader loader;
    loader.assign(batches.begin(), batches.begin() + 2);
    loader.said = said;
    auto trainer = make(with("basic", {{"accumulation_steps", std::int64_t{2}}}));
    const double began = clock.now;
    EXPECT_EQ(trainer.fit(loader, 1).steps, 1);
    took.push_back(clock.now - began);
  }
  EXPECT_LT(took[0], 2.0);
  EXPECT_GT(took[1], 2.0);
  EXPECT_LT(took[1], 0.05 * 20'000 * 0.02 * 1.1);
}

TEST_F(TrainerAutoTest, WhatTheUsersLossThrowsComesThroughAndTheNextStepDecides) {
  only({planted<NoDelay>("no_delay")});
  auto trainer = make(with("advanced", {{"ema_decay", 0.5}, {"step_tail", std::string("off")}}));
  const auto before = state_of(model, *optimizer);
  throws_at = 6;
  EXPECT_THROW(trainer.step(batches[0]), std::domain_error);
  EXPECT_EQ(state_of(model, *optimizer), before);
  EXPECT_TRUE(delayed);
  EXPECT_EQ(trainer.global_step(), 0);
  trainer.step(batches[0]);
  EXPECT_FALSE(delayed);
  EXPECT_EQ(trainer.global_step(), 1);
}

TEST_F(TrainerAutoTest, AContinuedRunDecidesAsBeforeWithoutATrial) {
  only({planted<NoDelay>("no_delay")});
  std::stringstream stream;
  {
    auto first = make();
    torch::manual_seed(4);
    for (int i = 0; i < 4; ++i) first.step(batches[0]);
    torch::serialize::OutputArchive archive;
    first.save(archive);
    archive.save_to(stream);
    for (int i = 0; i < 4; ++i) first.step(batches[1]);
  }
  const auto whole = weights();
  model = make_model();
  optimizer = make_optimizer("AdamW", model);
  auto second = make();
  torch::serialize::InputArchive archive;
  archive.load_from(stream);
  second.load(archive);
  EXPECT_FALSE(delayed);
  EXPECT_THAT(line(second, "no_delay").reason, HasSubstr("continued"));
  calls = 0;
  for (int i = 0; i < 4; ++i) second.step(batches[1]);
  EXPECT_EQ(calls, 4);
  const auto resumed = weights();
  ASSERT_EQ(whole.size(), resumed.size());
  for (std::size_t i = 0; i < whole.size(); ++i) {
    if (whole[i].defined()) {
      EXPECT_TRUE(at::equal(whole[i], resumed[i])) << i;
    }
  }
}

TEST_F(TrainerAutoTest, ArchivesOfEarlierVersionsAreUnderstood) {
  namespace nn = torch::nn;
  nn::Sequential images(nn::Conv2d(2, 3, 2), nn::Flatten(), nn::Linear(27, 3));
  torch::optim::SGD sgd(images->parameters(), torch::optim::SGDOptions(0.1));
  std::stringstream stream;
  {
    torch::serialize::OutputArchive archive, weights, state;
    images->save(weights);
    sgd.save(state);
    archive.write("model", weights);
    archive.write("optimizer", state);
    archive.write("counters", torch::tensor({std::int64_t{3}, std::int64_t{3}, std::int64_t{1}}));
    archive.write("decisions",
                  torch::tensor({static_cast<std::int64_t>(at::kBFloat16), std::int64_t{1}, std::int64_t{2}}));
    archive.write("ema_count", torch::tensor(std::int64_t{0}));
    archive.save_to(stream);
  }
  Trainer trainer(*images, sgd, supervised(images, nn::CrossEntropyLoss()));
  torch::serialize::InputArchive archive;
  archive.load_from(stream);
  trainer.load(archive);
  EXPECT_EQ(trainer.global_step(), 3);
  EXPECT_TRUE(images->parameters()[0].is_contiguous(at::MemoryFormat::ChannelsLast));
  EXPECT_THAT(line(trainer, "precision").reason, StartsWith("bf16_autocast: found by the run that is continued"));
  EXPECT_THAT(line(trainer, "precision").reason, HasSubstr("math_attention_bf16: found by"));
  EXPECT_EQ(line(trainer, "threads").state, "off");
}

TEST_F(TrainerAutoTest, WhatAnotherVersionHadFoundAndIsNotHereIsTold) {
  only({planted<NoDelay>("no_delay")});
  std::stringstream stream;
  {
    auto first = make();
    first.step(batches[0]);
    torch::serialize::OutputArchive archive;
    first.save(archive);
    archive.save_to(stream);
  }
  only({});
  auto second = make();
  torch::serialize::InputArchive archive;
  archive.load_from(stream);
  second.load(archive);
  EXPECT_EQ(line(second, "decisions").state, "refused");
  EXPECT_THAT(line(second, "decisions").reason, HasSubstr("no_delay"));
}

TEST_F(TrainerAutoTest, WhatDriftsIsTakenBack) {
  only({planted<Drifts>("drifts")});
  auto trainer = make();
  trainer.step(batches[0]);
  ASSERT_EQ(line(trainer, "drifts").state, "on");
  bad_calls = 1;
  for (int i = 0; i < 200 && !delayed; ++i) trainer.step(batches[static_cast<std::size_t>(i) % 4]);
  for (int i = 0; i < 200 && line(trainer, "drifts").state == "on"; ++i) trainer.step(batches[0]);
  EXPECT_EQ(line(trainer, "drifts").state, "missing");
  EXPECT_TRUE(delayed);
}

TEST_F(TrainerAutoTest, BatchesAndClosuresMayTakeTurns) {
  only({planted<NoDelay>("no_delay")});
  auto trainer = make(with("basic", {{"accumulation_steps", std::int64_t{2}}}));
  auto loss = delayed_loss(model);
  for (int i = 0; i < 30; ++i) {  // windows that begin with the one or the other
    trainer.step(batches[0]);
    if (i % 3 == 0) trainer.step(batches[1]);
    trainer.step([&] { return loss(batches[2]); });
  }
  EXPECT_EQ(trainer.batches(), 70);
  EXPECT_EQ(trainer.global_step(), 35);
}

TEST_F(TrainerAutoTest, TheMovingAverageIsNotMovedByTrialsOrChecks) {
  only({planted<NoDelay>("no_delay")});
  auto trainer = make(with("basic", {{"ema_decay", 0.9}}));
  int compared = 0;
  std::vector<at::Tensor> reference;
  for (const auto& p : distinct(model)) reference.push_back(p.detach().clone());
  for (int i = 0; i < 120; ++i) {
    trainer.step(batches[static_cast<std::size_t>(i) % 4]);
    const torch::NoGradGuard quiet;
    for (std::size_t k = 0; k < reference.size(); ++k) reference[k].lerp_(distinct(model)[k], 0.1);
    compared += static_cast<int>(delayed);
    EXPECT_EQ(line(trainer, "no_delay").state, "on") << "also where a step was taken without it, to compare";
  }
  EXPECT_GT(compared, 0);
  const auto guard = trainer.ema_weights();
  for (std::size_t k = 0; k < reference.size(); ++k) {
    EXPECT_TRUE(at::allclose(reference[k], distinct(model)[k], 1e-4, 1e-6)) << k;
  }
}

TEST_F(TrainerAutoTest, TheRestIsDecidedBesideWhatIsNamed) {
  for (const auto& [key, value] : std::vector<std::pair<const char*, const char*>>{
           {"precision", "fp16"}, {"precision", "bf16"}, {"optimizer_state", "int8"}, {"step_tail", "on"}}) {
    SCOPED_TRACE(value);
    scoped.reset();
    auto all = std::vector{planted<NoDelay>("no_delay")};
    for (const char* name : {"bf16_autocast", "step_tail", "int8_state", "native_step"}) {
      all.push_back(tune::find_strategy(name));
    }
    only(std::move(all));
    model = make_model();
    optimizer = make_optimizer("AdamW", model);
    auto trainer = make(with("advanced", {{key, std::string(value)}, {"ema_decay", 0.9}}));
    for (const auto& batch : batches) EXPECT_TRUE(std::isfinite(trainer.step(batch).item<double>()));
    EXPECT_EQ(line(trainer, key).state, "on");
    EXPECT_EQ(line(trainer, "no_delay").state, "on");
    EXPECT_GT(line(trainer, "no_delay").gain.value_or(0), 1.5);
    trainer.revert();
    EXPECT_TRUE(delayed);
  }
}

TEST_F(TrainerAutoTest, AStepThatOverflowsIsSkippedInsideTheTailThatWasAskedFor) {
  auto trainer = make(with("basic", {{"precision", std::string("fp16")}, {"step_tail", std::string("on")}}), false);
  trainer.step(batches[0]);
  const auto before = distinct(model)[0].detach().clone();
  trainer.step({torch::full_like(batches[0].input, std::numeric_limits<float>::infinity()), batches[0].target});
  EXPECT_TRUE(at::equal(distinct(model)[0], before));
  EXPECT_THAT(line(trainer, "grad_scaler").reason, HasSubstr("inside the step tail"));
}

}  // namespace
}  // namespace oxytorch::accelerate_tests
