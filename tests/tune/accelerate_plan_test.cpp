// The plan that accelerate() returns: what it does during the run, leaves of the process and stores.
#include <gmock/gmock.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <thread>

#include "accelerate_fixture.h"
#include "oxytorch/error.h"
#include "oxytorch/host.h"
#include "oxytorch/logging.h"
#include "oxytorch/memory.h"
#include "oxytorch/trainer.h"

namespace oxytorch::accelerate_tests {
namespace {

using testing::Contains;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using tune::Status;

TEST_F(AccelerateTest, WithNothingAcceptedTheProcessHasItsHeapAgain) {
  auto model = make_model();
  auto optimizer = make_optimizer("SGD", model);
  const auto given = heap_mmap_threshold();
  costs.faults = 100'000;  // a step that a kept heap may pay for: both are tried
  auto plan = accelerate(*model, *optimizer, loss_of(model), make_batches(), only({"allocator", "keep_heap"}));
  EXPECT_THAT(plan.accepted(), IsEmpty());
  EXPECT_EQ(entry(plan, "allocator").pairs > 0, given.has_value()) << plan.report();
  EXPECT_THAT(plan.report(), testing::Not(HasSubstr("Memory: ")));
  plan.revert();
  EXPECT_EQ(heap_mmap_threshold(), given);
  auto allocator = tune_allocator();
  EXPECT_TRUE(allocator.is_applied() || !given) << "a setting of the plan is left: " << allocator.reason();
  allocator.revert();
}

/// Something that the process keeps in memory as an allocator would, and no tensor.
std::vector<char> hoard;

struct KeepsLess : Strategy {
  void apply(Run& /*run*/) override { std::vector<char>().swap(hoard); }
  void revert(Run& /*run*/) override { hoard.assign(std::size_t{64} << 20, 1); }
};

TEST_F(AccelerateTest, TheGoalMemoryLooksAtWhatAllocatorsKeep) {
  tune::register_strategy<KeepsLess>("keeps_less", Kind::Exact, {.group = "host_pool"});
  hoard.assign(std::size_t{64} << 20, 1);
  auto model = make_model();
  auto optimizer = make_optimizer("AdamW", model);
  auto config = PerformanceConfig("basic");
  config.set("goal", std::string("memory"));
  auto options = only({"keeps_less", "null_0"}).config(config);
  auto plan = accelerate(*model, *optimizer, loss_of(model), make_batches(), options);
  ASSERT_THAT(plan.accepted(), ElementsAre("keeps_less")) << plan.report();
  EXPECT_THAT(entry(plan, "keeps_less").reason, HasSubstr("in memory instead of"));
  EXPECT_TRUE(hoard.empty());
  plan.revert();
  EXPECT_FALSE(hoard.empty());
  hoard = {};
}

TEST_F(AccelerateTest, AnEarlierPlanOrTrainerOfTheModelIsTakenBack) {
  auto model = make_model();
  auto optimizer = make_optimizer("AdamW", model);
  auto first = accelerate(*model, *optimizer, delayed_loss(model), make_batches(), only({"no_delay"}));
  ASSERT_THAT(first.accepted(), ElementsAre("no_delay"));
  ASSERT_FALSE(delayed);
  {
    auto other = make_model();
    auto its_own = make_optimizer("SGD", other);
    auto second = accelerate(*other, *its_own, loss_of(other), make_batches(), only({"null_0"}));
    EXPECT_THAT(first.accepted(), ElementsAre("no_delay")) << "it is of another model";
  }
  auto second = accelerate(*model, *optimizer, delayed_loss(model), make_batches(), only({"no_delay"}));
  EXPECT_THAT(first.accepted(), IsEmpty());
  EXPECT_THAT(second.accepted(), ElementsAre("no_delay")) << "it began from the step as given";
  auto config = PerformanceConfig("basic");
  config.set("step_tail", std::string("on"));
  const Trainer trainer(*model, *optimizer, loss_of(model), config);
  EXPECT_THAT(second.accepted(), IsEmpty());
  EXPECT_TRUE(delayed);
}

TEST_F(AccelerateTest, TriesNothingInOneOfSeveralProcesses) {
  auto model = make_model();
  auto optimizer = make_optimizer("AdamW", model);
  ::setenv("WORLD_SIZE", "8", 1);
  auto plan = accelerate(*model, *optimizer, delayed_loss(model), make_batches(), only({"no_delay"}));
  ::unsetenv("WORLD_SIZE");
  EXPECT_THAT(plan.accepted(), IsEmpty());
  EXPECT_THAT(entry(plan, "no_delay").reason, HasSubstr("WORLD_SIZE is 8"));
}

TEST_F(AccelerateTest, TakesBackWhatDriftsDuringTheRun) {
  auto model = make_model();
  auto optimizer = make_optimizer("AdamW", model);
  const auto batches = make_batches();
  auto plan = accelerate(*model, *optimizer, delayed_loss(model), batches, only({"drifts"}));
  ASSERT_THAT(plan.accepted(), ElementsAre("drifts"));
  ASSERT_TRUE(plan.certificate().tuning_peak_bytes && plan.certificate().given_peak_bytes);
  EXPECT_GE(*plan.certificate().tuning_peak_bytes, *plan.certificate().given_peak_bytes);
  bad_calls = 1;
  for (int i = 0; i < 60; ++i) plan.step(batches[0]);
  EXPECT_THAT(plan.accepted(), IsEmpty());
  EXPECT_EQ(entry(plan, "drifts").status, Status::RolledBack);
  EXPECT_THAT(plan.certificate().events, Contains(HasSubstr("taken back")));
  EXPECT_TRUE(delayed);
}

TEST_F(AccelerateTest, ATrainerOnAPlanAccumulatesAveragesAndSchedulesInItsSteps) {
  auto model = make_model();
  auto optimizer = make_optimizer("SGD", model);
  const auto batches = make_batches();
  auto plan = accelerate(*model, *optimizer, delayed_loss(model), batches, only({"no_delay", "throws"}).clip_norm(1.0));
  ASSERT_THAT(plan.accepted(), ElementsAre("no_delay"));
  PerformanceConfig config("basic");
  for (const auto& [key, value] : std::vector<std::pair<const char*, ConfigValue>>{
           {"accumulation_steps", std::int64_t{2}}, {"ema_decay", 0.5}, {"schedule", std::string("cosine")}}) {
    config.set(key, value);
  }
  config.set("max_steps", std::int64_t{10});
  config.set("clip_norm", 0.5);
  try {
    Trainer other(plan, config);
    ADD_FAILURE() << "clipping that the plan does not do was dropped";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("clip_norm = 0.5"));
  }
  config.unset("clip_norm");
  Trainer trainer(plan, config);
  const auto weights = [&] { return model->head->weight.detach().clone(); };
  const auto before = weights();
  const double rate = optimizer->param_groups()[0].options().get_lr();
  plan.step(batches[0]);
  EXPECT_TRUE(at::equal(weights(), before));
  EXPECT_EQ(trainer.global_step(), 0);
  trainer.step(batches[1]);
  const auto after = weights();
  EXPECT_FALSE(at::equal(after, before));
  EXPECT_EQ(trainer.global_step(), 1);
  EXPECT_LT(optimizer->param_groups()[0].options().get_lr(), rate);
  {
    const auto guard = trainer.ema_weights();
    EXPECT_TRUE(at::allclose(weights(), (before + after) / 2, 1e-5, 1e-7));
  }
  EXPECT_TRUE(at::equal(weights(), after));
  std::vector<std::string> lines;
  for (const auto& line : trainer.settings()) lines.push_back(line.name + ": " + line.state);
  EXPECT_THAT(lines, testing::IsSupersetOf({"no_delay: on", "throws: refused", "grad_scaler: off"}));
}

TEST_F(AccelerateTest, APlanAccumulatesAsItsConfigurationSays) {
  auto model = make_model();
  auto optimizer = make_optimizer("SGD", model);
  const auto batches = make_batches();
  PerformanceConfig config("basic");
  config.set("accumulation_steps", std::int64_t{2});
  auto plan = accelerate(*model, *optimizer, delayed_loss(model), batches, only({"no_delay"}).config(config));
  ASSERT_THAT(plan.accepted(), ElementsAre("no_delay"));
  const auto weights = [&] { return model->head->weight.detach().clone(); };
  const auto before = weights();
  plan.step(batches[0]);
  EXPECT_TRUE(at::equal(weights(), before));
  plan.step(batches[1]);
  EXPECT_FALSE(at::equal(weights(), before));
  Trainer trainer(plan, config);
  plan.step(batches[0]);
  EXPECT_EQ(trainer.global_step(), 1);
  plan.step(batches[1]);
  EXPECT_EQ(trainer.global_step(), 2);
}

TEST_F(AccelerateTest, AWindowHasAllOfItsStrategiesOrNone) {
  auto model = make_model();
  auto optimizer = make_optimizer("SGD", model);
  const auto batches = make_batches();
  auto plan = accelerate(*model, *optimizer, delayed_loss(model), batches, only({"no_delay"}));
  ASSERT_THAT(plan.accepted(), ElementsAre("no_delay"));
  PerformanceConfig config("basic");
  config.set("accumulation_steps", std::int64_t{2});
  Trainer trainer(plan, config);
  int without = 0;
  for (int window = 0; window < 120; ++window) {
    plan.step(batches[0]);
    const bool first = delayed;  // as it was during the step
    plan.step(batches[1]);
    EXPECT_EQ(first, delayed) << "window " << window;
    without += static_cast<int>(first);
  }
  EXPECT_GT(without, 0) << "the plan was not checked";
  EXPECT_THAT(plan.accepted(), ElementsAre("no_delay"));
}

/// A loop of one's own: two batches a step, a second loss beside the first.
template <class Loss, class Update>
void own_loop(Tied& model, torch::optim::Optimizer& optimizer, int steps, const Loss& loss, const Update& update) {
  const auto batches = make_batches();
  for (int i = 0; i < steps; ++i) {
    if (i == 2) optimizer.param_groups()[0].options().set_lr(5e-3);
    optimizer.zero_grad();
    torch::manual_seed(i);
    (loss(batches[0]) / 2).backward();
    (loss(batches[1]) / 2 + 1e-3 * model->head->weight.square().sum()).backward();
    update();
  }
}

TEST_F(AccelerateTest, ALoopOfOnesOwnTakesItsStepsWithWhatIsActive) {
  costs.update = 0.02;
  for (const double clip_norm : {0.0, 0.05}) {
    auto reference = make_model(), model = make_model();
    auto plain = make_optimizer("SGD", reference), optimizer = make_optimizer("SGD", model);
    auto plan = accelerate(*model, *optimizer, loss_of(model), make_batches(),
                           only({"paying_tail", "split_2"}).loop("yours").clip_norm(clip_norm));
    ASSERT_THAT(plan.accepted(), ElementsAre("paying_tail")) << plan.report();
    EXPECT_THAT(entry(plan, "split_2").reason, HasSubstr("Plan::step()"));
    own_loop(model, *optimizer, 5, [&](const Batch& batch) { return plan.loss(batch); }, [&] { plan.update(); });
    plan.revert();
    auto stock = loss_of(reference);
    own_loop(reference, *plain, 5, stock, [&] {
      if (clip_norm > 0) torch::nn::utils::clip_grad_norm_(distinct(reference), clip_norm);
      plain->step();
    });
    for (std::size_t i = 0; i < distinct(model).size(); ++i) {
      EXPECT_TRUE(at::allclose(distinct(model)[i], distinct(reference)[i], 1e-4, 1e-5)) << "parameter " << i;
    }
  }
}

TEST_F(AccelerateTest, ALoopOfOnesOwnIsWatched) {
  auto model = make_model();
  auto optimizer = make_optimizer("AdamW", model);
  auto plan = accelerate(*model, *optimizer, delayed_loss(model), make_batches(), only({"drifts"}).loop("yours"));
  ASSERT_THAT(plan.accepted(), ElementsAre("drifts"));
  const auto train = [&](int steps) {
    own_loop(model, *optimizer, steps, [&](const Batch& batch) { return plan.loss(batch); }, [&] { plan.update(); });
  };
  train(150);
  EXPECT_THAT(plan.accepted(), ElementsAre("drifts")) << "the checks held";
  bad_calls = 1;
  train(600);
  EXPECT_THAT(plan.accepted(), IsEmpty());
  EXPECT_THAT(plan.certificate().events, Contains(HasSubstr("taken back")));
  EXPECT_TRUE(delayed);
}

TEST_F(AccelerateTest, AForwardOfAnotherShapeRunsInThePlansScope) {
  auto model = make_model();
  auto optimizer = make_optimizer("SGD", model);
  PerformanceConfig config("advanced");
  config.set("precision", std::string("bf16"));
  auto plan = accelerate(*model, *optimizer, loss_of(model), make_batches(),
                         only({"bf16_autocast"}).loop("yours").config(config));
  const auto batch = make_batches(1)[0];
  const auto dtype = [&] { return model->forward(batch.input).scalar_type(); };
  EXPECT_EQ(dtype(), at::kFloat);
  {
    const auto scope = plan.scope();
    EXPECT_EQ(dtype(), at::kBFloat16);
  }
  EXPECT_EQ(dtype(), at::kFloat);
  plan.revert();
  const auto scope = plan.scope();
  EXPECT_EQ(dtype(), at::kFloat);
}

TEST_F(AccelerateTest, AChecksRandomNumbersAreItsOwn) {
  auto model = make_model();
  auto optimizer = make_optimizer("SGD", model);
  const auto batches = make_batches();
  std::vector<std::int64_t> drawn;
  bool listening = false;
  LossFunction inner = delayed_loss(model);
  // Another thread draws in the middle of each step, as one that loads data does.
  auto plan = accelerate(
      *model, *optimizer,
      [&](const Batch& batch) {
        auto loss = inner(batch);
        if (!listening) return loss;
        std::thread([&] { drawn.push_back(torch::randint(INT64_MAX, {1}, at::kLong).item<std::int64_t>()); }).join();
        return loss + 0 * inner(batch);
      },
      batches, only({"no_delay"}));
  ASSERT_THAT(plan.accepted(), ElementsAre("no_delay"));
  torch::manual_seed(5);
  listening = true;
  for (int i = 0; i < 60; ++i) plan.step(batches[0]);
  EXPECT_EQ(drawn.size(), 62);  // two in the check
  std::sort(drawn.begin(), drawn.end());
  EXPECT_EQ(std::adjacent_find(drawn.begin(), drawn.end()), drawn.end());
  EXPECT_THAT(plan.accepted(), ElementsAre("no_delay"));
}

TEST_F(AccelerateTest, RemembersAndChecksBeforeItTrusts) {
  const auto folder = std::filesystem::path(testing::TempDir()) / "oxytorch_accelerate_test";
  remove_folder(folder);
  const auto options = only({"no_delay"}).remember(true).folder(folder.string());
  const auto batches = make_batches();
  for (const bool again : {false, true}) {
    auto model = make_model();
    auto optimizer = make_optimizer("AdamW", model);
    auto plan = accelerate(*model, *optimizer, delayed_loss(model), batches, options);
    EXPECT_THAT(plan.accepted(), ElementsAre("no_delay"));
    if (again) {
      EXPECT_THAT(plan.certificate().events, Contains(HasSubstr("reused")));
    } else {
      EXPECT_THAT(plan.certificate().events, IsEmpty());
    }
  }
  remove_folder(folder);
}

TEST_F(AccelerateTest, AFolderThatCannotBeWrittenCostsNoPlan) {
  const auto folder = std::filesystem::path(testing::TempDir()) / "oxytorch_accelerate_no_folder";
  std::ofstream(folder) << "a file in its place";
  const auto batches = make_batches();
  std::vector<std::string> said;
  const LogSink before = set_log_sink([&](const LogRecord& record) { said.emplace_back(record.message); });
  {
    auto model = make_model();
    auto optimizer = make_optimizer("AdamW", model);
    auto plan = accelerate(*model, *optimizer, delayed_loss(model), batches,
                           only({"drifts"}).remember(true).folder(folder.string()));
    EXPECT_THAT(plan.accepted(), ElementsAre("drifts"));
    EXPECT_THAT(plan.certificate().events, ElementsAre(HasSubstr("not stored")));
    EXPECT_THAT(plan.certificate().events, ElementsAre(HasSubstr(folder.string())));
    EXPECT_THAT(plan.report(), HasSubstr("not stored"));
    EXPECT_THAT(said, Contains(HasSubstr("not stored")));
    // Nor does one that cannot be deleted once it does not hold any more.
    std::filesystem::remove(folder);
    std::filesystem::create_directories(folder / (plan.certificate().key.digest() + ".json") / "full");
    bad_calls = 1;
    for (int i = 0; i < 60; ++i) plan.step(batches[0]);
    EXPECT_THAT(plan.accepted(), IsEmpty());
    EXPECT_THAT(plan.certificate().events, Contains(HasSubstr("could not be deleted")));
  }
  set_log_sink(before);
  remove_folder(folder);
}

TEST_F(AccelerateTest, NothingThatWasMeasuredBesideOtherProgramsIsRemembered) {
  const auto folder = std::filesystem::path(testing::TempDir()) / "oxytorch_accelerate_busy";
  remove_folder(folder);
  set_load_source([wall = 0.0]() mutable {
    wall += 1;
    return LoadSample{.wall = wall, .busy = 2 * wall, .waited = 0.5 * wall, .cores = 2};
  });
  auto model = make_model();
  auto optimizer = make_optimizer("AdamW", model);
  auto plan = accelerate(*model, *optimizer, delayed_loss(model), make_batches(),
                         only({"no_delay"}).remember(true).folder(folder.string()));
  EXPECT_THAT(plan.certificate().disturbance, HasSubstr("other programs used 2.0 of its 2 cores"));
  EXPECT_THAT(plan.report(), HasSubstr("The machine was busy"));
  EXPECT_FALSE(tune::CertificateStore(folder.string()).find(plan.certificate().key).has_value());
  remove_folder(folder);
}

}  // namespace
}  // namespace oxytorch::accelerate_tests
