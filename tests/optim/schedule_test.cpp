#include "oxytorch/optim/schedule.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <limits>

#include "oxytorch/error.h"
#include "schedule_table.h"

namespace oxytorch::optim {
namespace {

using Table = std::vector<std::array<double, 4>>;

class ScheduleTest : public ::testing::Test {
 protected:
  ScheduleTest() {
    const auto group = [](double lr, auto options) {
      options.lr(lr);
      return torch::optim::OptimizerParamGroup({torch::zeros({1}, torch::requires_grad())},
                                               std::make_unique<decltype(options)>(options));
    };
    const auto momentum = torch::optim::SGDOptions(0.1).momentum(0.9);
    sgd_ = std::make_unique<torch::optim::SGD>(
        std::vector<torch::optim::OptimizerParamGroup>{group(0.1, momentum), group(0.003, momentum)}, momentum);
    const torch::optim::AdamWOptions adamw(0.1);
    adamw_ = std::make_unique<torch::optim::AdamW>(
        std::vector<torch::optim::OptimizerParamGroup>{group(0.1, adamw), group(0.003, adamw)}, adamw);
  }

  static double inertia(const torch::optim::OptimizerParamGroup& group) {
    if (auto* o = dynamic_cast<const torch::optim::SGDOptions*>(&group.options())) return o->momentum();
    return std::get<0>(dynamic_cast<const torch::optim::AdamWOptions&>(group.options()).betas());
  }

  static bool within_one_ulp(double a, double b) {
    const double inf = std::numeric_limits<double>::infinity();
    return a == b || std::nextafter(a, inf) == b || std::nextafter(a, -inf) == b;
  }

  void expect_row(const torch::optim::Optimizer& optimizer, const std::array<double, 4>& row, size_t step) {
    for (size_t g = 0; g < 2; ++g) {
      const auto& group = optimizer.param_groups()[g];
      EXPECT_TRUE(within_one_ulp(group.options().get_lr(), row[g]))
          << "step " << step << " group " << g << ": " << group.options().get_lr() << " is not " << row[g];
      EXPECT_TRUE(within_one_ulp(inertia(group), row[2 + g]))
          << "step " << step << " group " << g << ": " << inertia(group) << " is not " << row[2 + g];
    }
  }

  void expect_table(torch::optim::Optimizer& optimizer, Schedule& schedule, const Table& rows) {
    for (size_t step = 0; step < rows.size(); ++step) {
      if (step > 0) schedule.step();
      expect_row(optimizer, rows[step], step);
    }
  }

  std::unique_ptr<torch::optim::SGD> sgd_;
  std::unique_ptr<torch::optim::AdamW> adamw_;
};

TEST_F(ScheduleTest, StepEqualsTorch) {
  Step schedule(*sgd_, 5, 0.3);
  expect_table(*sgd_, schedule, table::kStep);
}

TEST_F(ScheduleTest, LinearEqualsTorch) {
  Linear schedule(*sgd_, 0.25, 0.9, 7);
  expect_table(*sgd_, schedule, table::kLinear);
}

TEST_F(ScheduleTest, PolynomialEqualsTorch) {
  Polynomial schedule(*sgd_, 20, 1.7);
  expect_table(*sgd_, schedule, table::kPolynomial);
}

TEST_F(ScheduleTest, CosineEqualsTorchThroughItsSecondHalf) {
  CosineAnnealing schedule(*sgd_, 7, 1e-4);
  expect_table(*sgd_, schedule, table::kCosine);
}

TEST_F(ScheduleTest, WarmupCosineEqualsTorch) {
  WarmupCosine schedule(*sgd_, 5, 20, 1e-4);
  expect_table(*sgd_, schedule, table::kWarmupCosine);
}

TEST_F(ScheduleTest, OneCycleCyclesMomentum) {
  OneCycle schedule(*sgd_, {.total_steps = 20, .max_lrs = {0.5, 0.02}});
  expect_table(*sgd_, schedule, table::kOneCycleSgd);
}

TEST_F(ScheduleTest, OneCycleCyclesBeta1) {
  OneCycle schedule(*adamw_, {.max_lr = 0.3, .total_steps = 20, .pct_start = 0.4});
  expect_table(*adamw_, schedule, table::kOneCycleAdam);
}

TEST_F(ScheduleTest, OneCycleInThreePhases) {
  OneCycle schedule(*sgd_, {.max_lr = 0.3, .total_steps = 20, .three_phase = true});
  expect_table(*sgd_, schedule, table::kOneCycleThree);
}

TEST_F(ScheduleTest, OneCycleInStraightLines) {
  OneCycle schedule(*adamw_, {.max_lr = 0.3, .total_steps = 20, .cosine = false});
  expect_table(*adamw_, schedule, table::kOneCycleLine);
}

TEST_F(ScheduleTest, PlateauEqualsTorch) {
  Plateau schedule(*sgd_, {.factor = 0.5, .patience = 2, .cooldown = 1, .min_lr = 0.001});
  for (size_t step = 0; step < table::kPlateau.size(); ++step) {
    if (step > 0) schedule.step(table::kMetrics[step - 1]);
    expect_row(*sgd_, table::kPlateau[step], step);
  }
}

TEST_F(ScheduleTest, PlateauOfAGrowingMetricEqualsTorch) {
  Plateau schedule(*sgd_, {.minimize = false, .factor = 0.5, .patience = 1, .threshold = 0.01, .relative = false});
  for (size_t step = 0; step < table::kPlateauMax.size(); ++step) {
    if (step > 0) schedule.step(table::kMetrics[step - 1]);
    expect_row(*sgd_, table::kPlateauMax[step], step);
  }
}

TEST_F(ScheduleTest, StateRoundTripContinuesToTheBit) {
  WarmupCosine whole(*sgd_, 5, 20, 1e-4);
  for (int i = 0; i < 9; ++i) whole.step();
  const auto saved = whole.state_dict();

  const torch::optim::SGDOptions options = torch::optim::SGDOptions(0.1).momentum(0.9);
  std::vector<torch::optim::OptimizerParamGroup> groups;
  for (const double lr : {0.1, 0.003}) {
    auto own = std::make_unique<torch::optim::SGDOptions>(options);
    own->lr(lr);
    groups.emplace_back(std::vector<torch::Tensor>{torch::zeros({1}, torch::requires_grad())}, std::move(own));
  }
  torch::optim::SGD fresh(groups, options);
  WarmupCosine resumed(fresh, 5, 20, 1e-4);
  resumed.load_state_dict(saved);
  EXPECT_EQ(resumed.last_epoch(), 9);
  EXPECT_EQ(resumed.last_lr(), whole.last_lr());
  for (int i = 0; i < 8; ++i) {
    whole.step();
    resumed.step();
    EXPECT_EQ(resumed.last_lr(), whole.last_lr());
  }
}

TEST_F(ScheduleTest, OneCycleStateRoundTripRestoresMomentum) {
  OneCycle whole(*adamw_, {.max_lr = 0.3, .total_steps = 20});
  for (int i = 0; i < 4; ++i) whole.step();
  const auto saved = whole.state_dict();
  const double beta1 = inertia(adamw_->param_groups()[0]);
  for (int i = 0; i < 4; ++i) whole.step();
  ASSERT_NE(inertia(adamw_->param_groups()[0]), beta1);
  whole.load_state_dict(saved);
  EXPECT_EQ(inertia(adamw_->param_groups()[0]), beta1);
  EXPECT_EQ(whole.state_dict(), saved);
}

TEST_F(ScheduleTest, BadSettingsAreRefused) {
  EXPECT_THROW(Step(*sgd_, 0), Error);
  EXPECT_THROW(Linear(*sgd_, 0.0), Error);
  EXPECT_THROW(CosineAnnealing(*sgd_, 0), Error);
  EXPECT_THROW(WarmupCosine(*sgd_, 5, 5), Error);
  EXPECT_THROW(OneCycle(*sgd_, {.max_lr = 0.1}), Error);
  EXPECT_THROW(Plateau(*sgd_, {.factor = 1.0}), Error);
}

TEST_F(ScheduleTest, OneCyclePastItsEndIsRefused) {
  OneCycle schedule(*sgd_, {.max_lr = 0.1, .total_steps = 3});
  for (int i = 0; i < 3; ++i) schedule.step();
  EXPECT_THROW(schedule.step(), Error);
}

TEST_F(ScheduleTest, PlateauNeedsAMetric) {
  Plateau schedule(*sgd_);
  Schedule& base = schedule;
  EXPECT_THROW(base.step(), Error);
}

TEST_F(ScheduleTest, StateOfAnotherOptimizerIsRefused) {
  Step schedule(*sgd_, 5);
  auto state = schedule.state_dict();
  state["base_lrs"].pop_back();
  EXPECT_THROW(schedule.load_state_dict(state), Error);
  state.erase("last_epoch");
  EXPECT_THROW(schedule.load_state_dict(state), Error);
}

}  // namespace
}  // namespace oxytorch::optim
