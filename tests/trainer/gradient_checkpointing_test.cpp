// The setting gradient_checkpointing: a trainer's step and a prepared run's stay within their budget.
#include <ATen/Parallel.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "oxytorch/error.h"
#include "oxytorch/memory.h"
#include "oxytorch/trainer.h"
#include "oxytorch/trainer/performance_optimizer.h"
#include "tune/deep_model.h"

namespace oxytorch {
namespace {

namespace nn = torch::nn;
using testing::HasSubstr;
using testing::Not;
using Settings = std::vector<std::pair<const char*, ConfigValue>>;

constexpr const char* kKey = "gradient_checkpointing";

struct Training {
  explicit Training(const Settings& given) : config("basic") {
    torch::manual_seed(0);
    model = Deep(512);
    optimizer = std::make_unique<torch::optim::SGD>(model->parameters(), torch::optim::SGDOptions(0.1));
    batch = Batch(torch::randn({256, 32}), torch::randint(5, {256}));
    config.set("step_tail", std::string("off"));
    for (const auto& [key, value] : given) config.set(key, value);
  }
  LossFunction loss() { return supervised(model, nn::CrossEntropyLoss()); }
  std::unique_ptr<Trainer> trainer(bool calibrate = false) {
    return std::make_unique<Trainer>(*model, *optimizer, loss(), config, TrainerOptions{.calibrate = calibrate});
  }
  PreparedRun prepared() {
    return PerformanceOptimizer(config).prepare(
        *model, *optimizer, {batch}, loss(),
        AccelerateOptions().strategies({"tf32"}).remember(false).tune_seconds(0.05));
  }
  std::int64_t parameter_bytes() const {
    std::int64_t bytes = 0;
    for (const auto& tensor : model->parameters()) bytes += static_cast<std::int64_t>(tensor.nbytes());
    for (const auto& tensor : model->buffers()) bytes += static_cast<std::int64_t>(tensor.nbytes());
    return bytes;
  }
  PerformanceConfig config;
  Deep model{nullptr};
  std::unique_ptr<torch::optim::SGD> optimizer;
  Batch batch;
};

/// Models so small only wait for a second thread.
class GradientCheckpointingTest : public testing::Test {
 protected:
  void SetUp() override { at::set_num_threads(1); }
  void TearDown() override { at::set_num_threads(threads_); }

 private:
  int threads_ = at::get_num_threads();
};

template <class Step>
std::int64_t peak(const Step& step) {
  step();
  const memory::Meter meter;
  step();
  return meter.peak_bytes();
}

std::int64_t plain_peak() {
  Training training({});
  const auto trainer = training.trainer();
  return peak([&] { trainer->step(training.batch); });
}

/// Half of the activations fit in. Before any plan is active: names of blocks are those of the process.
std::string budget() { return std::to_string(Training({}).parameter_bytes() + plain_peak() / 2); }

std::string line_of(const Trainer& trainer) {
  for (const auto& line : trainer.settings()) {
    if (line.name == kKey) return line.state + ": " + line.reason + " " + line.cost;
  }
  return "no line";
}

TEST_F(GradientCheckpointingTest, ATrainerStaysWithinItsBudgetAndTrainsTheSame) {
  const auto bytes = budget();
  const auto limit = plain_peak() / 2 + 8192;
  for (const bool calibrate : {false, true}) {
    Training one({{kKey, bytes}}), other({});
    {
      const auto trainer = one.trainer(calibrate);
      torch::manual_seed(5);
      EXPECT_LE(peak([&] { trainer->step(one.batch); }), limit);
      const auto line = line_of(*trainer);
      EXPECT_THAT(line, HasSubstr("on: "));
      EXPECT_THAT(line, HasSubstr(" blocks are "));
      EXPECT_THAT(line, HasSubstr("times as long."));
      EXPECT_THAT(trainer->report_page().to_html(), HasSubstr("What less memory costs"));
    }
    const auto plain = other.trainer();
    EXPECT_THAT(plain->report_page().to_html(), Not(HasSubstr("What less memory costs")));
    torch::manual_seed(5);
    EXPECT_GT(peak([&] { plain->step(other.batch); }), limit);
    const auto mine = one.model->parameters(), theirs = other.model->parameters();
    if (calibrate) continue;  // which may have found another order of sums
    for (std::size_t i = 0; i < mine.size(); ++i) EXPECT_TRUE(at::equal(mine[i], theirs[i])) << i;
  }
  for (int i = 0; i < 6; ++i) EXPECT_EQ(memory::action_of("deep.layer" + std::to_string(i)), memory::BlockAction::Keep);
}

TEST_F(GradientCheckpointingTest, ChecksOfWhatTuningFoundStayWithinTheBudget) {
  const auto limit = plain_peak() / 2 + 8192;
  Training training({{kKey, budget()}});
  const auto trainer = training.trainer(/*calibrate=*/true);
  trainer->step(training.batch);
  for (int step = 1; step < 90; ++step) {  // losses are compared, and times from step 50 on
    const memory::Meter meter;
    trainer->step(training.batch);
    EXPECT_LE(meter.peak_bytes(), limit) << step;
  }
}

TEST_F(GradientCheckpointingTest, GradientsOfEarlierBatchesCount) {
  const auto limit = plain_peak() / 2 + 8192;
  Training training({{kKey, budget()}, {"accumulation_steps", std::int64_t{2}}});
  const auto trainer = training.trainer();
  const auto window = [&] {
    for (int i = 0; i < 2; ++i) trainer->step(training.batch);
  };
  EXPECT_LE(peak(window), limit);
}

TEST_F(GradientCheckpointingTest, APreparedRunDoes) {
  const auto limit = plain_peak() / 2 + 8192;
  for (const std::int64_t windows : {1, 2}) {
    Training training({{kKey, budget()}, {"accumulation_steps", windows}});
    auto run = training.prepared();
    const auto window = [&] {
      for (std::int64_t i = 0; i < windows; ++i) run.trainer.step(training.batch);
    };
    EXPECT_LE(peak(window), limit) << windows;
    EXPECT_THAT(line_of(run.trainer), HasSubstr(" blocks are "));
    run.plan.revert();
    EXPECT_GT(peak(window), limit);
  }
}

TEST_F(GradientCheckpointingTest, TheGoalMemoryIsTheLeastThatTimeAllows) {
  const auto plain = plain_peak();
  Training one({{"goal", std::string("memory")}, {"max_slowdown", 50.0}}), other({});
  {
    const auto trainer = one.trainer();
    torch::manual_seed(5);
    EXPECT_LT(peak([&] { trainer->step(one.batch); }), plain / 2);
    EXPECT_THAT(line_of(*trainer), HasSubstr("That is the least where a step may take 50 times as long."));
  }
  const auto as_given = other.trainer();
  torch::manual_seed(5);
  (void)peak([&] { as_given->step(other.batch); });
  const auto mine = one.model->parameters(), theirs = other.model->parameters();
  for (std::size_t i = 0; i < mine.size(); ++i) EXPECT_TRUE(at::equal(mine[i], theirs[i])) << i;
  {
    Training named({{kKey, std::string("least")}, {"max_slowdown", 1.0}});
    const auto same = named.trainer();
    EXPECT_GE(peak([&] { same->step(named.batch); }), plain) << "nothing may be slower";
  }
  Training prepared({{"goal", std::string("memory")}, {"max_slowdown", 50.0}});
  auto run = prepared.prepared();
  EXPECT_LT(peak([&] { run.trainer.step(prepared.batch); }), plain / 2);
  run.plan.revert();
}

TEST_F(GradientCheckpointingTest, AutoIsWhatThereIs) {
  Training training({{kKey, std::string("auto")}});
  const auto trainer = training.trainer();
  trainer->step(training.batch);
  EXPECT_THAT(line_of(*trainer), HasSubstr("as it is."));
  Training closures({{kKey, std::string("auto")}});
  const auto stepped = closures.trainer();
  stepped->step([&] {
    return nn::functional::cross_entropy(closures.model->forward(closures.batch.input), closures.batch.target);
  });
  EXPECT_THAT(line_of(*stepped), HasSubstr("refused: "));
}

TEST_F(GradientCheckpointingTest, WhatNoChoiceKeepsIsRefusedAndNothingIsLost) {
  Training training({{kKey, std::to_string(Training({}).parameter_bytes() + 4096)}});
  const auto trainer = training.trainer();
  const auto before = training.model->parameters().front().detach().clone();
  for (int i = 0; i < 2; ++i) {
    try {
      trainer->step(training.batch);
      ADD_FAILURE() << "was within " << training.config.word(kKey);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::OutOfMemory);
      EXPECT_THAT(error.what(), HasSubstr("the lowest peak"));
    }
    EXPECT_TRUE(at::equal(before, training.model->parameters().front()));
  }
}

Batch batch_of(std::int64_t rows) {
  torch::manual_seed(2);
  return {torch::randn({rows, 32}), torch::randint(5, {rows})};
}

/// Model and random state.
std::vector<at::Tensor> left_of(const Training& training) {
  std::vector<at::Tensor> left;
  for (const auto& tensor : training.model->parameters()) left.push_back(tensor.detach().clone());
  for (const auto& tensor : training.model->buffers()) left.push_back(tensor.clone());
  left.push_back(torch::rand({3}));
  return left;
}

TEST_F(GradientCheckpointingTest, AStepThatRunsOutOfMemoryIsTakenAgain) {
  const auto small = batch_of(128), large = batch_of(1024);
  std::vector<std::vector<at::Tensor>> ends;
  for (const bool limited : {false, true}) {
    Settings given{{kKey, std::string("auto")}};
    give_back_host_memory();
    if (limited) {
      given.emplace_back("memory_limit", std::to_string(memory::resident_bytes() + (std::uint64_t{32} << 20)));
    }
    Training training(given);
    const auto trainer = training.trainer();
    torch::manual_seed(5);
    for (const auto* batch : {&small, &small, &large, &small}) trainer->step(*batch);
    EXPECT_EQ(trainer->global_step(), 4);
    EXPECT_EQ(line_of(*trainer).find("step 3 ran out of memory and was fitted anew: ") != std::string::npos, limited)
        << line_of(*trainer);
    ends.push_back(left_of(training));
  }
  for (std::size_t i = 0; i < ends[0].size(); ++i) EXPECT_TRUE(at::equal(ends[0][i], ends[1][i])) << i;
}

/// A loss that raises in steps on `batch`, not on the copy that they are fitted by, where more than `share` of what
/// lived in the first of them does.
LossFunction runs_out(const Training& training, LossFunction loss, const memory::Meter& meter, double share,
                      std::vector<std::int64_t>& lives) {
  const void* const given = training.batch.input.const_data_ptr();
  return [given, loss = std::move(loss), &meter, share, &lives](const Batch& batch) {
    auto value = loss(batch);
    if (batch.input.const_data_ptr() != given) return value;
    lives.push_back(meter.live_bytes());
    TORCH_CHECK_WITH(OutOfMemoryError, static_cast<double>(lives.back()) <= share * static_cast<double>(lives.front()),
                     "the rest of the process takes more than before.");
    return value;
  };
}

TEST_F(GradientCheckpointingTest, APlanThatIsNotEnoughIsFollowedByTighterOnes) {
  std::vector<std::vector<at::Tensor>> ends;
  std::vector<std::int64_t> lives;
  for (const bool is_short : {false, true}) {
    Training training({{kKey, std::string("auto")}});
    const memory::Meter meter;
    auto loss = is_short ? runs_out(training, training.loss(), meter, 0.75, lives) : training.loss();
    Trainer trainer(*training.model, *training.optimizer, std::move(loss), training.config,
                    TrainerOptions{.calibrate = false});
    torch::manual_seed(5);
    trainer.step(training.batch);
    EXPECT_EQ(trainer.global_step(), 1);
    ends.push_back(left_of(training));
  }
  EXPECT_GT(lives.size(), 2U);
  EXPECT_TRUE(std::is_sorted(lives.rbegin(), lives.rend()));
  for (std::size_t i = 0; i < ends[0].size(); ++i) EXPECT_TRUE(at::equal(ends[0][i], ends[1][i])) << i;
}

TEST_F(GradientCheckpointingTest, AStepThatNoPlanHelpsEndsWithAnErrorAndLeavesNoTrace) {
  std::vector<std::int64_t> lives;
  Training training({{kKey, std::string("auto")}});
  const memory::Meter meter;
  Trainer trainer(*training.model, *training.optimizer, runs_out(training, training.loss(), meter, 0, lives),
                  training.config, TrainerOptions{.calibrate = false});
  torch::manual_seed(5);
  const auto before = left_of(training);
  torch::manual_seed(5);
  EXPECT_ANY_THROW(trainer.step(training.batch));
  EXPECT_GT(lives.size(), 2U);
  EXPECT_LE(lives.size(), 6U);
  EXPECT_EQ(trainer.global_step(), 0);
  const auto after = left_of(training);
  for (std::size_t i = 0; i < before.size(); ++i) EXPECT_TRUE(at::equal(before[i], after[i])) << i;
}

}  // namespace
}  // namespace oxytorch
