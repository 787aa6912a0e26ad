// Every option of accelerate() has an effect, or is refused with a sentence before a step is taken.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "accelerate_fixture.h"
#include "oxytorch/error.h"
#include "oxytorch/load.h"
#include "oxytorch/tune/accelerate.h"
#include "oxytorch/tune/run.h"
#include "oxytorch/tune/strategy.h"

namespace oxytorch {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;
using tune::Kind;
namespace nn = torch::nn;

bool faster = false;
std::string order;  // of measuring: which side each step belongs to

std::optional<std::uint64_t> retained;  // what the allocator of the last run may keep

struct Faster : tune::Strategy {
  void apply(tune::Run& run) override {
    faster = true;
    retained = run.retain_limit;
  }
  void revert(tune::Run& /*run*/) override { faster = false; }
};
struct Nothing : tune::Strategy {
  void apply(tune::Run& /*run*/) override {}
  void revert(tune::Run& /*run*/) override {}
};

struct Costly : Faster {
  double expected_cost(tune::Run& /*run*/) override { return 1; }
};

class AccelerateOptionsTest : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    tune::register_strategy<Faster>("faster", Kind::Exact);
    tune::register_strategy<Costly>("costly", Kind::Exact);
    tune::register_strategy<Nothing>("nothing", Kind::Exact);
    tune::register_strategy<Nothing>("rounds", Kind::Tolerance);
    tune::register_strategy<Nothing>("narrows", Kind::Trade);
  }
  void SetUp() override {
    sources.emplace(clock.sources());
    set_load_source([wall = 0.0]() mutable { return LoadSample{.wall = wall += 1}; });  // a quiet machine
    folder = (std::filesystem::path(testing::TempDir()) / "oxytorch_accelerate_options").string();
    remove_folder(folder);
    torch::manual_seed(1);
    model = nn::Linear(6, 3);
    batches = {{torch::randn({8, 6}), torch::randint(3, {8})}, {torch::randn({8, 6}), torch::randint(3, {8})}};
    optimizer = std::make_unique<torch::optim::SGD>(model->parameters(), 0.5);
    steps = 0;
    order.clear();
  }
  void TearDown() override {
    set_load_source({});
    sources.reset();
    remove_folder(folder);
  }

  static AccelerateOptions only(std::vector<std::string> names) {
    return AccelerateOptions().strategies(std::move(names)).remember(false).tune_seconds(20);
  }
  Plan plan(const AccelerateOptions& options) {
    const auto loss = [this](const Batch& batch) {
      ++steps;
      order += faster ? 'f' : '-';
      clock.pass(faster ? 0.001 : 0.005);
      return nn::functional::cross_entropy(model->forward(batch.input), batch.target);
    };
    return accelerate(*model, *optimizer, loss, batches, options);
  }
  /// Why a strategy is not active.
  std::string reason(const AccelerateOptions& options, const std::string& strategy) {
    const auto made = plan(options);
    for (const auto& entry : made.certificate().entries) {
      if (entry.strategy == strategy) return entry.reason;
    }
    return "it has no entry";
  }
  /// How far one step with a plan moves the weights.
  double moved(const AccelerateOptions& options) {
    auto made = plan(options);
    const auto before = model->weight.detach().clone(), bias = model->bias.detach().clone();
    made.step(batches[0]);
    return torch::cat({(model->weight - before).flatten(), model->bias - bias}).norm().item<double>();
  }
  std::size_t stored() const {
    if (!std::filesystem::exists(folder)) return 0;
    return static_cast<std::size_t>(
        std::distance(std::filesystem::directory_iterator(folder), std::filesystem::directory_iterator()));
  }
  /// The sentence by which it is refused; no step may have been taken then.
  std::string refusal(const AccelerateOptions& options) {
    steps = 0;
    try {
      plan(options);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::InvalidArgument) << error.what();
      EXPECT_EQ(steps, 0) << error.what();
      return error.what();
    }
    return "it was taken";
  }

  accelerate_tests::Clock clock;
  std::optional<tune::ScopedSources> sources;
  std::string folder;
  nn::Linear model{nullptr};
  std::vector<Batch> batches;
  std::unique_ptr<torch::optim::SGD> optimizer;
  int steps = 0;
};

TEST_F(AccelerateOptionsTest, StrategiesAreToldWhatTheAllocatorMayKeep) {
  PerformanceConfig config;
  plan(only({"faster"}).config(config));
  EXPECT_EQ(retained, std::nullopt);
  config.set("allocator_retain_limit", std::string("96MiB"));
  plan(only({"faster"}).config(config));
  EXPECT_EQ(retained, std::uint64_t{96} << 20);
}

TEST_F(AccelerateOptionsTest, EachHasAnEffect) {
  struct Row {
    const char* option;
    std::function<void()> test;
  };
  const std::vector<Row> rows{
      {"level",
       [&] {
         EXPECT_THAT(reason(only({"rounds"}).level("basic"), "rounds"), HasSubstr("level basic does not allow"));
         EXPECT_THAT(reason(only({"rounds"}).level("advanced"), "rounds"), Not(HasSubstr("level")));
         EXPECT_THAT(reason(only({"narrows"}).level("advanced"), "narrows"), HasSubstr("level advanced"));
         EXPECT_THAT(reason(only({"narrows"}).level("ultra"), "narrows"), Not(HasSubstr("level")));
       }},
      {"steps_planned",
       [&] {
         EXPECT_THAT(reason(only({"costly"}).steps_planned(10), "costly"), HasSubstr("in 10 steps it can save"));
         EXPECT_THAT(plan(only({"costly"}).steps_planned(100'000)).accepted(), ElementsAre("costly"));
       }},
      {"clip_norm",
       [&] {
         EXPECT_GT(moved(only({"nothing"})), 1e-2);
         EXPECT_NEAR(moved(only({"nothing"}).clip_norm(1e-3)), 0.5e-3, 1e-5);  // at a learning rate of 0.5
       }},
      {"loop",
       [&] {
         EXPECT_THAT(reason(only({"split_2"}).loop("yours"), "split_2"), HasSubstr("how a batch is stepped with"));
         EXPECT_THAT(reason(only({"split_2"}).loop("plan"), "split_2"), Not(HasSubstr("how a batch is stepped with")));
         EXPECT_THAT(plan(only({"faster"}).loop("yours")).accepted(), ElementsAre("faster"));
       }},
      {"strategies",
       [&] {
         const auto made = plan(only({"nothing", "faster"}));
         ASSERT_EQ(made.certificate().entries.size(), 2U);
         EXPECT_EQ(made.certificate().entries[0].strategy, "nothing");
         EXPECT_EQ(made.certificate().entries[1].strategy, "faster");
       }},
      {"exclude",
       [&] {
         EXPECT_THAT(plan(only({"faster"})).accepted(), ElementsAre("faster"));
         EXPECT_THAT(reason(only({"faster"}).exclude({"faster"}), "faster"), HasSubstr("excluded by the caller"));
       }},
      {"tune_seconds",
       [&] {
         // The first of those that may pay has its turn whatever is left.
         EXPECT_THAT(reason(only({"faster", "nothing"}).tune_seconds(1e-9), "nothing"), HasSubstr("budget"));
         EXPECT_THAT(reason(only({"faster", "nothing"}), "nothing"), Not(HasSubstr("budget")));
       }},
      {"remember",
       [&] {
         EXPECT_THAT(plan(only({"faster"}).remember(true).folder(folder)).certificate().events, testing::IsEmpty());
         EXPECT_THAT(plan(only({"faster"}).remember(true).folder(folder)).certificate().events,
                     ElementsAre(HasSubstr("reused")));
         EXPECT_THAT(plan(only({"faster"})).certificate().events, testing::IsEmpty());
       }},
      {"folder",
       [&] {
         const auto first = folder;
         for (const char* name : {"one", "other"}) {
           folder = first + "/" + name;
           EXPECT_EQ(stored(), 0U);
           plan(only({"nothing"}).remember(true).folder(folder));
           EXPECT_EQ(stored(), 1U) << folder;
         }
         folder = first;
       }},
      {"config",
       [&] {
         PerformanceConfig config("basic");
         EXPECT_THAT(reason(only({"rounds"}).config(config), "rounds"), HasSubstr("level basic does not allow"));
         EXPECT_THAT(reason(only({"rounds"}).config(config).level("advanced"), "rounds"), Not(HasSubstr("level")));
         config.set("clip_norm", 1e-3);
         EXPECT_NEAR(moved(only({"nothing"}).config(config)), 0.5e-3, 1e-5);
         EXPECT_NEAR(moved(only({"nothing"}).config(config).clip_norm(2e-3)), 1e-3, 1e-5);
         config.set("max_steps", std::int64_t{10});
         EXPECT_EQ(plan(only({"nothing"}).config(config)).certificate().steps_planned, 10);
         config.set("steps_planned", std::int64_t{20});
         EXPECT_EQ(plan(only({"nothing"}).config(config)).certificate().steps_planned, 20);
         EXPECT_EQ(plan(only({"nothing"}).config(config).steps_planned(30)).certificate().steps_planned, 30);
         config.set("threads", std::string("keep"));
         EXPECT_THAT(reason(only({"one_thread"}).config(config), "one_thread"), HasSubstr("threads is 'keep'"));
         auto shows = config;
         shows.set("progress", std::string("on"));
         EXPECT_THROW(plan(only({"nothing"}).config(shows)), Error);
         const int before = at::get_num_threads();
         {
           config.set("threads", std::int64_t{1});
           const auto made = plan(only({"one_thread"}).config(config));
           EXPECT_EQ(at::get_num_threads(), 1);
           EXPECT_EQ(made.certificate().entries.at(0).reason, "threads is 1 in the configuration");
         }
         EXPECT_EQ(at::get_num_threads(), before);
       }},
      {"seed",
       [&] {
         const auto measured = [&](std::uint64_t seed) {  // which side each of the first steps of its trial is on
           order.clear();
           plan(only({"faster"}).seed(seed));
           return order.substr(order.find('f'), 15);
         };
         const auto first = measured(0);
         EXPECT_EQ(measured(0), first);
         EXPECT_NE(measured(1), first);
         EXPECT_NE(measured(1), measured(2));
       }},
  };
  for (const auto& row : rows) {
    SCOPED_TRACE(row.option);
    remove_folder(folder);
    row.test();
  }
  // One more option needs one more row.
  struct Fields {
    std::string level;
    std::int64_t steps_planned;
    double clip_norm;
    std::string loop;
    std::vector<std::string> strategies, exclude;
    double tune_seconds;
    bool remember;
    std::string folder;
    std::optional<PerformanceConfig> config;
    std::uint64_t seed;
  };
  static_assert(sizeof(AccelerateOptions) == sizeof(Fields));
}

TEST_F(AccelerateOptionsTest, WhatSettingsAskForIsNotStored) {
  PerformanceConfig config("advanced");
  config.set("step_tail", std::string("on"));
  const auto options = only({"faster", "step_tail"}).remember(true).folder(folder).config(config);
  const auto made = plan(options);
  EXPECT_THAT(made.accepted(), ElementsAre("faster", "step_tail"));
  const auto kept = tune::CertificateStore(folder).find(made.certificate().key);
  ASSERT_TRUE(kept);
  EXPECT_THAT(kept->accepted(), ElementsAre("faster"));
  config.set("remember", false);
  EXPECT_THAT(refusal(AccelerateOptions(options).config(config)), HasSubstr("remember is false"));
}

TEST_F(AccelerateOptionsTest, WhatCannotBeMeantIsRefusedBeforeAStep) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
  const struct {
    AccelerateOptions options;
    std::vector<const char*> says;
  } rows[] = {
      {only({"faster"}).level("bold"), {"'bold'", "basic", "ultra"}},
      {only({"faster"}).steps_planned(0), {"steps_planned is 0"}},
      {only({"faster"}).steps_planned(-3), {"steps_planned is -3"}},
      {only({"faster"}).clip_norm(-1), {"clip_norm is -1"}},
      {only({"faster"}).clip_norm(kNaN), {"clip_norm is nan"}},
      {only({"fasterr"}), {"'fasterr'", "'faster'"}},
      {only({"faster", "nothing", "faster"}), {"strategies names 'faster' more than once"}},
      {only({"faster"}).exclude({"nothin"}), {"'nothin'", "'nothing'"}},
      {only({"faster"}).exclude({"nothing"}), {"exclude names 'nothing'", "not among the strategies"}},
      {only({"faster"}).tune_seconds(-1), {"tune_seconds is -1"}},
      {only({"faster"}).tune_seconds(kNaN), {"tune_seconds is nan"}},
      {only({"faster"}).tune_seconds(kInfinity), {"tune_seconds is inf"}},
      {only({"faster"}).config(PerformanceConfig("basic")).level("bold"), {"bold", "basic", "ultra"}},
      {only({"faster"}).loop("mine"), {"loop is 'mine'", "'plan' or 'yours'"}},
      {only({"faster"}).folder("/somewhere"), {"folder is '/somewhere'", "remember(true)"}},
  };
  for (const auto& row : rows) {
    const auto said = refusal(row.options);
    for (const char* part : row.says) EXPECT_THAT(said, HasSubstr(part));
  }
}

}  // namespace
}  // namespace oxytorch
