#include "oxytorch/tune/fit.h"

#include <gmock/gmock.h>
#include <torch/torch.h>

#include <algorithm>
#include <string>
#include <vector>

#include "deep_model.h"
#include "oxytorch/error.h"
#include "oxytorch/memory.h"
#include "oxytorch/optim.h"

namespace oxytorch {
namespace {

using testing::HasSubstr;
namespace nn = torch::nn;

struct Training {
  explicit Training(bool blocks = true) {
    torch::manual_seed(0);
    model = Deep(128, blocks);
    optimizer = std::make_unique<torch::optim::AdamW>(model->parameters(), torch::optim::AdamWOptions(1e-2));
    batch = Batch(torch::randn({256, 32}), torch::randint(5, {256}));
  }
  MemoryPlan fitted(std::int64_t budget) {
    return fit(*model, *optimizer, supervised(model, nn::CrossEntropyLoss()), batch, std::to_string(budget));
  }
  void step() {
    optimizer->zero_grad();
    nn::functional::cross_entropy(model->forward(batch.tensors()[0]), batch.tensors()[1]).backward();
    optimizer->step();
  }
  std::vector<at::Tensor> state() const {
    std::vector<at::Tensor> found;
    for (const auto& tensor : model->parameters()) found.push_back(tensor.detach().clone());
    for (const auto& tensor : model->buffers()) found.push_back(tensor.clone());
    return found;
  }
  Deep model{nullptr};
  std::unique_ptr<torch::optim::AdamW> optimizer;
  Batch batch;
};

bool equal(const std::vector<at::Tensor>& one, const std::vector<at::Tensor>& other) {
  return std::equal(one.begin(), one.end(), other.begin(), other.end(),
                    [](const auto& a, const auto& b) { return at::equal(a, b); });
}

TEST(FitTest, EveryBudgetIsKeptAndLeavesNoTrace) {
  Training training;
  const auto before = training.state();
  const auto loose = training.fitted(std::int64_t{4} << 30);
  EXPECT_FALSE(loose.is_active());
  EXPECT_TRUE(equal(before, training.state()));
  const auto plain = loose.figures().plain_peak(), floor = loose.figures().floor();
  ASSERT_LT(floor, plain * 3 / 4);
  auto last = plain;
  for (const int percent : {90, 50, 10}) {
    const auto budget = floor + (plain - floor) * percent / 100;
    auto plan = training.fitted(budget);
    const auto& figures = plan.figures();
    EXPECT_TRUE(plan.is_active());
    EXPECT_LE(figures.measured_peak(), budget);
    EXPECT_LE(figures.measured_peak(), last) << "a smaller budget never peaks higher";
    EXPECT_EQ(figures.same_bits(), true);
    EXPECT_TRUE(equal(before, training.state()));
    EXPECT_THAT(plan.table(), testing::AnyOf(HasSubstr("selective\n"), HasSubstr("packed\n")));
    last = figures.measured_peak();
    plan.revert();
    EXPECT_EQ(memory::action_of("deep.layer0"), memory::BlockAction::Keep);
  }
}

TEST(FitTest, TrainingUnderAPlanIsTraining) {
  std::vector<std::vector<at::Tensor>> ends;
  for (const bool planned : {false, true}) {
    Training training;
    std::optional<MemoryPlan> plan;
    if (planned) {
      const auto loose = training.fitted(std::int64_t{4} << 30);
      plan.emplace(training.fitted((loose.figures().plain_peak() + loose.figures().floor()) / 2));
      ASSERT_TRUE(plan->is_active());
    }
    torch::manual_seed(3);
    for (int i = 0; i < 4; ++i) training.step();
    ends.push_back(training.state());
    ends.back().push_back(torch::rand({3}));
  }
  EXPECT_TRUE(equal(ends[0], ends[1]));
}

TEST(FitTest, WhatCannotBeIsRefused) {
  const auto refused = [](Training& training, std::string_view budget, const char* part) {
    const auto before = training.state();
    try {
      (void)fit(*training.model, *training.optimizer, supervised(training.model, nn::CrossEntropyLoss()),
                training.batch, budget);
      ADD_FAILURE() << budget << " was taken";
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr(part));
    }
    EXPECT_TRUE(equal(before, training.state()));
  };
  Training training, without(false);
  refused(training, "1000", "the lowest peak of tensors that was reached is");
  refused(training, "0", "expected at least 1");
  refused(training, "-5MB", "-5MB");
  refused(training, "much", "much");
  refused(without, "1GB", "calls no blocks");
  EXPECT_EQ(memory::action_of("deep.layer0"), memory::BlockAction::Keep);
}

TEST(FitTest, TheLeastThatTimeAllows) {
  Training training;
  const auto before = training.state();
  const auto least = [&](double slowdown) {
    return fit(*training.model, *training.optimizer, supervised(training.model, nn::CrossEntropyLoss()), training.batch,
               "least", {.max_slowdown = slowdown});
  };
  auto plan = least(50);
  const auto& figures = plan.figures();
  EXPECT_TRUE(plan.is_active());
  EXPECT_LE(figures.measured_peak(), figures.floor() + figures.plain_peak() / 100);
  EXPECT_EQ(figures.same_bits(), true);
  EXPECT_LE(figures.seconds(), 50 * figures.plain_seconds());
  plan.revert();
  EXPECT_TRUE(equal(before, training.state()));
  EXPECT_FALSE(least(1).is_active());
  EXPECT_THROW((void)least(0.5), Error);
}

TEST(FitTest, WhatBlocksSaveIsPackedWhereThatCostsLess) {
  using memory::BlockAction, memory::SavedFormat;
  Training training;
  const auto before = training.state();
  const auto fitted = [&](std::vector<SavedFormat> formats) {
    return fit(*training.model, *training.optimizer, supervised(training.model, nn::CrossEntropyLoss()), training.batch,
               "least", {.max_slowdown = 50, .formats = std::move(formats)});
  };
  const auto plain = fitted({});
  auto plan = fitted({SavedFormat::Lossless, SavedFormat::File});
  // Which costs less is measured: a busy machine may delay the file.
  for (int more = 0; more < 9 && plan.figures().choice()[BlockAction::File].empty(); ++more) {
    plan.revert();
    plan = fitted({SavedFormat::Lossless, SavedFormat::File});
  }
  const auto& in_file = plan.figures().choice()[BlockAction::File];
  ASSERT_FALSE(in_file.empty()) << plan.table();
  EXPECT_EQ(memory::action_of(in_file.front()), BlockAction::File);
  EXPECT_LT(plan.figures().measured_peak(), plain.figures().measured_peak());
  EXPECT_EQ(plan.figures().same_bits(), true);
  EXPECT_THAT(plan.table(), HasSubstr("written to a file\n"));
  EXPECT_THAT(plan.figures().summary(), HasSubstr("blocks are written to a file"));
  plan.revert();
  EXPECT_TRUE(equal(before, training.state()));
  auto rounded = fitted({SavedFormat::Int8});
  if (!rounded.figures().choice()[BlockAction::Int8].empty()) {
    EXPECT_EQ(rounded.figures().same_bits(), false);
    EXPECT_THAT(rounded.table(), HasSubstr("What is packed is rounded by 0.0"));
  }
}

TEST(BlockTest, OfSeveralPlansTheOneThatKeepsTheLeastCounts) {
  using memory::BlockAction;
  {
    const memory::PlannedBlocks one(
        memory::BlockChoice(BlockAction::Selective, {"a", "b"}).add(BlockAction::Full, "c"));
    {
      const memory::PlannedBlocks other(memory::BlockChoice(BlockAction::Selective, {"c"}).add(BlockAction::Full, "b"));
      EXPECT_EQ(memory::action_of("b"), BlockAction::Full);
      EXPECT_EQ(memory::action_of("c"), BlockAction::Full);
    }
    EXPECT_EQ(memory::action_of("a"), BlockAction::Selective);
    EXPECT_EQ(memory::action_of("b"), BlockAction::Selective);
    EXPECT_EQ(memory::action_of("c"), BlockAction::Full);
    EXPECT_EQ(memory::action_of("d"), BlockAction::Keep);
  }
  EXPECT_EQ(memory::action_of("b"), BlockAction::Keep);
}

}  // namespace
}  // namespace oxytorch
