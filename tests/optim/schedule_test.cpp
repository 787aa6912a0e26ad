#include "oxytorch/optim/schedule.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <limits>
#include <memory>

#include "oxytorch/error.h"
#include "oxytorch/optim/optimizers.h"
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

TEST_F(ScheduleTest, SequentialEqualsTorch) {
  Sequential schedule(*sgd_,
                      {[](auto& o) { return std::make_unique<Linear>(o, 0.1, 1.0, 4); },
                       [](auto& o) { return std::make_unique<Polynomial>(o, 8, 2.0); },
                       [](auto& o) { return std::make_unique<Step>(o, 3, 0.5); }},
                      {4, 12});
  expect_table(*sgd_, schedule, table::kSequential);
}

std::vector<Sequential::Make> warmup_cosine_cycle() {
  return {[](auto& o) { return std::make_unique<Linear>(o, 0.01, 1.0, 3); },
          [](auto& o) { return std::make_unique<CosineAnnealing>(o, 4, 1e-4); },
          [](auto& o) { return std::make_unique<OneCycle>(o, OneCycleOptions{.max_lr = 0.3, .total_steps = 16}); }};
}

TEST_F(ScheduleTest, SequentialWithACycleEqualsTorchMomentumIncluded) {
  Sequential schedule(*sgd_, warmup_cosine_cycle(), {3, 9});
  expect_table(*sgd_, schedule, table::kSequentialCycle);
}

TEST_F(ScheduleTest, SequentialStateContinuesToTheBit) {
  Sequential whole(*sgd_, warmup_cosine_cycle(), {3, 9});
  for (size_t stop : {2, 5, 9, 13}) {
    while (whole.last_epoch() < static_cast<int64_t>(stop)) whole.step();
    const auto saved = whole.state_dict();
    for (size_t i = 0; i < 3; ++i) whole.step();
    const auto end = whole.state_dict();
    whole.load_state_dict(saved);
    EXPECT_EQ(whole.state_dict(), saved);
    expect_row(*sgd_, table::kSequentialCycle[stop], stop);
    for (size_t i = 0; i < 3; ++i) whole.step();
    EXPECT_EQ(whole.state_dict(), end);
    whole.load_state_dict(saved);
  }
  auto broken = whole.state_dict();
  const auto before = broken;
  broken["0.last_epoch"] = {7};
  broken.erase("2.last_epoch");
  EXPECT_THROW(whole.load_state_dict(broken), Error);
  EXPECT_EQ(whole.state_dict(), before) << "a refused state was half loaded";
}

TEST_F(ScheduleTest, SequentialRefusesWhatDoesNotFit) {
  const Sequential::Make linear = [](auto& o) { return std::make_unique<Linear>(o); };
  const Sequential::Make plateau = [](auto& o) { return std::make_unique<Plateau>(o); };
  EXPECT_THROW(Sequential(*sgd_, {}, {}), Error);
  EXPECT_THROW(Sequential(*sgd_, {linear, linear}, {}), Error);
  EXPECT_THROW(Sequential(*sgd_, {linear, linear}, {0}), Error);
  EXPECT_THROW(Sequential(*sgd_, {linear, linear, linear}, {5, 5}), Error);
  EXPECT_THROW(Sequential(*sgd_, {linear, plateau}, {5}), Error);
}

TEST_F(ScheduleTest, EveryScheduleContinuesToTheBitAfterALoad) {
  const auto expect_resume = [](torch::optim::Optimizer& optimizer, const Sequential::Make& make) {
    auto whole = make(optimizer);
    for (int i = 0; i < 6; ++i) whole->step();
    const auto saved = whole->state_dict();
    std::vector<ScheduleState> rest;
    for (int i = 0; i < 8; ++i) {
      whole->step();
      rest.push_back(whole->state_dict());
    }
    whole->load_state_dict(saved);
    for (const auto& state : rest) {
      whole->step();
      EXPECT_EQ(whole->state_dict(), state);
    }
  };
  expect_resume(*sgd_, [](auto& o) { return std::make_unique<Step>(o, 4, 0.3); });
  expect_resume(*sgd_, [](auto& o) { return std::make_unique<Linear>(o, 0.25, 0.9, 10); });
  expect_resume(*sgd_, [](auto& o) { return std::make_unique<Polynomial>(o, 12, 1.7); });
  expect_resume(*sgd_, [](auto& o) { return std::make_unique<CosineAnnealing>(o, 5, 1e-5); });
  expect_resume(*sgd_, [](auto& o) { return std::make_unique<WarmupCosine>(o, 8, 20); });
  expect_resume(*adamw_, [](auto& o) {
    return std::make_unique<OneCycle>(o, OneCycleOptions{.max_lr = 0.3, .total_steps = 20});
  });
}

TEST_F(ScheduleTest, PlateauContinuesToTheBitAfterALoad) {
  const PlateauOptions options{.factor = 0.5, .patience = 2, .cooldown = 1, .min_lr = 0.001};
  Plateau schedule(*sgd_, options);
  for (size_t i = 0; i < 6; ++i) schedule.step(table::kMetrics[i]);
  const auto saved = schedule.state_dict();
  for (size_t i = 6; i < 12; ++i) schedule.step(table::kMetrics[i]);
  schedule.load_state_dict(saved);
  for (size_t i = 6; i < table::kMetrics.size(); ++i) {
    if (i + 1 >= table::kPlateau.size()) break;
    schedule.step(table::kMetrics[i]);
    expect_row(*sgd_, table::kPlateau[i + 1], i + 1);
  }
}

// The learning rate as a tensor, as a captured graph reads it.
TEST(ScheduleTensorTest, ASchedulesRateIsWrittenInPlace) {
  auto a = torch::ones({3}, torch::requires_grad()), b = torch::ones({2}, torch::requires_grad());
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(std::vector<at::Tensor>{a}, std::make_unique<SGDOptions>(0.5));
  groups.emplace_back(std::vector<at::Tensor>{b}, std::make_unique<SGDOptions>(0.25));
  SGD optimizer(groups, SGDOptions(0.5));
  EXPECT_TRUE(optimizer.lr_tensors().empty());
  optimizer.use_lr_tensors();
  const auto held = optimizer.lr_tensors();
  ASSERT_EQ(held.size(), 2);
  EXPECT_EQ(held[1].dim(), 0);
  EXPECT_EQ(held[1].scalar_type(), at::kFloat);
  Step schedule(optimizer, 1, 0.5);
  a.mutable_grad() = torch::ones({3});
  b.mutable_grad() = torch::ones({2});
  optimizer.step();
  EXPECT_TRUE(at::equal(a, torch::full({3}, 0.5)));
  EXPECT_TRUE(at::equal(b, torch::full({2}, 0.75)));
  schedule.step();
  EXPECT_EQ(held[0].item<float>(), 0.25F) << "written by the schedule, before any step";
  EXPECT_EQ(held[1].item<float>(), 0.125F);
  optimizer.step();
  EXPECT_TRUE(at::equal(a, torch::full({3}, 0.25)));
  held[0].fill_(1.0);
  optimizer.step();
  EXPECT_TRUE(at::equal(a, torch::full({3}, -0.75))) << "the step reads the tensor";
  optimizer.param_groups()[0].options().set_lr(0.125);
  optimizer.step();
  EXPECT_TRUE(at::equal(a, torch::full({3}, -0.875))) << "a rate set by hand is written by the step";
  EXPECT_TRUE(held[0].is_same(optimizer.lr_tensors()[0]));
  const auto saved = schedule.state_dict();
  schedule.step();
  schedule.load_state_dict(saved);
  EXPECT_EQ(held[0].item<float>(), 0.125F) << "loading writes it too";
  optimizer.add_param_group(torch::optim::OptimizerParamGroup({torch::ones({1}, torch::requires_grad())}));
  optimizer.step();
  EXPECT_EQ(optimizer.lr_tensors().size(), 3);
}

TEST(ScheduleTensorTest, TheStepIsThatOfTheRoundedNumber) {
  std::vector<at::Tensor> ends;
  for (const bool tensors : {false, true}) {
    torch::manual_seed(1);
    auto weight = torch::randn({300}).requires_grad_();
    AdamW optimizer({weight}, AdamWOptions(1e-2));
    if (tensors) optimizer.use_lr_tensors();
    CosineAnnealing schedule(optimizer, 10);
    for (int i = 0; i < 10; ++i) {
      if (!tensors) {
        auto& options = optimizer.param_groups()[0].options();
        const double rate = options.get_lr();
        options.set_lr(static_cast<double>(static_cast<float>(rate)));
        weight.mutable_grad() = torch::randn({300});
        optimizer.step();
        options.set_lr(rate);
      } else {
        weight.mutable_grad() = torch::randn({300});
        optimizer.step();
      }
      schedule.step();
    }
    ends.push_back(weight.detach());
  }
  EXPECT_TRUE(at::equal(ends[0], ends[1]));
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
