#include "oxytorch/trainer/early_stopping.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <limits>
#include <sstream>

#include "oxytorch/error.h"

namespace oxytorch {
namespace {

/// Evaluations until the run is over, or 0 where it never is.
int64_t length(EarlyStopping stopping, const std::vector<double>& metrics) {
  for (const double metric : metrics) {
    if (stopping.step(metric)) return stopping.evaluations();
  }
  return 0;
}

TEST(EarlyStoppingTest, CountsEvaluationsWithoutImprovement) {
  EXPECT_EQ(length(EarlyStopping({.patience = 2}), {3, 2, 2, 2, 1}), 4);
  EXPECT_EQ(length(EarlyStopping({.patience = 2}), {3, 2, 2.5, 1.9, 2, 1.8}), 0);
  EXPECT_EQ(length(EarlyStopping({.patience = 1}), {1, 1}), 2) << "an equal metric is no improvement";
}

TEST(EarlyStoppingTest, AnImprovementIsMoreThanMinDelta) {
  EXPECT_EQ(length(EarlyStopping({.patience = 2, .min_delta = 0.5}), {3, 2.5, 2.6, 1}), 3);
  EXPECT_EQ(length(EarlyStopping({.patience = 2, .min_delta = 0.5}), {3, 2.4, 2.0, 1.95}), 4);
}

TEST(EarlyStoppingTest, AMetricThatIsToGrow) {
  EXPECT_EQ(length(EarlyStopping({.patience = 2, .minimize = false}), {0.5, 0.6, 0.6, 0.55, 0.9}), 4);
  EXPECT_EQ(length(EarlyStopping({.patience = 2, .min_delta = 0.1, .minimize = false}), {0.5, 0.55, 0.65, 0.9}), 0);
}

TEST(EarlyStoppingTest, ANanIsNoImprovement) {
  const double nan = std::nan("");
  EXPECT_EQ(length(EarlyStopping({.patience = 2}), {nan, nan}), 2);
  EXPECT_EQ(length(EarlyStopping({.patience = 2, .minimize = false}), {1, nan, 2, nan, nan}), 5);
  EXPECT_EQ(length(EarlyStopping({.patience = 1}), {std::numeric_limits<double>::infinity()}), 1);
}

TEST(EarlyStoppingTest, TheBestWeightsAndBuffersComeBack) {
  torch::nn::BatchNorm1d model(3);
  EarlyStopping stopping({.patience = 3, .restore_best = true});
  EXPECT_FALSE(stopping.restore(*model)) << "nothing is kept yet";
  std::vector<at::Tensor> best;
  for (const double metric : {3.0, 1.0, 2.0, 4.0}) {
    torch::NoGradGuard quiet;
    model->weight.fill_(metric);
    model->running_mean.fill_(-metric);
    stopping.step(metric, model.get());
    EXPECT_EQ(stopping.improved(), metric != 2.0 && metric != 4.0);
  }
  EXPECT_EQ(stopping.best(), 1.0);
  EXPECT_EQ(stopping.best_evaluation(), 1);
  EXPECT_EQ(stopping.bad_evaluations(), 2);
  ASSERT_TRUE(stopping.restore(*model));
  EXPECT_TRUE(at::equal(model->weight, torch::ones(3)));
  EXPECT_TRUE(at::equal(model->running_mean, torch::full({3}, -1.0)));
  torch::nn::BatchNorm1d other(4);
  EXPECT_THROW(stopping.restore(*other), Error);
}

TEST(EarlyStoppingTest, AnArchiveCarriesTheRuleAndTheWeights) {
  torch::nn::Linear model(2, 2);
  const EarlyStoppingOptions options{.patience = 2, .restore_best = true};
  EarlyStopping stopping(options);
  stopping.step(1.0, model.get());
  const auto best = model->weight.detach().clone();
  stopping.step(2.0, model.get());
  std::stringstream stream;
  {
    torch::serialize::OutputArchive archive;
    stopping.save(archive);
    archive.save_to(stream);
  }
  torch::serialize::InputArchive archive;
  archive.load_from(stream);
  EarlyStopping resumed(options);
  resumed.load(archive);
  EXPECT_EQ(resumed.state(), stopping.state());
  EXPECT_TRUE(resumed.step(3.0)) << "the two evaluations without improvement count together";
  {
    torch::NoGradGuard quiet;
    model->weight.zero_();
  }
  ASSERT_TRUE(resumed.restore(*model));
  EXPECT_TRUE(at::equal(model->weight, best));
}

TEST(EarlyStoppingTest, BadSettingsAreRefused) {
  EXPECT_THROW(EarlyStopping({.patience = 0}), Error);
  EXPECT_THROW(EarlyStopping({.min_delta = -1.0}), Error);
  EXPECT_THROW(EarlyStopping({.min_delta = std::nan("")}), Error);
  EXPECT_THROW(EarlyStopping().load_state({1.0}), Error);
}

}  // namespace
}  // namespace oxytorch
