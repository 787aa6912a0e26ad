#include "oxytorch/statistics.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <string>

#include "oxytorch/error.h"
#include "oxytorch/random.h"

namespace oxytorch {
namespace {

double normal(PhiloxStream& random) {
  const double radius = std::sqrt(-2 * std::log(1 - random.uniform_double()));
  return radius * std::cos(2 * std::numbers::pi * random.uniform_double());
}

const std::vector<double> kValues{3.5, -1.25, 8.0, 2.75, 2.75, 100.0, 0.5, -7.0};

// Expected values printed by numpy 2.4 and scipy 1.17 for kValues.
TEST(Summary, EqualsNumpyAndScipy) {
  EXPECT_DOUBLE_EQ(mean(kValues), 13.65625);
  EXPECT_DOUBLE_EQ(stddev(kValues), 35.1532201075317);
  EXPECT_DOUBLE_EQ(median(kValues), 2.75);
  EXPECT_DOUBLE_EQ(quantile(kValues, 0.1), -2.9749999999999996);
  EXPECT_DOUBLE_EQ(quantile(kValues, 0.25), 0.0625);
  EXPECT_DOUBLE_EQ(quantile(kValues, 0.9), 35.59999999999998);
  EXPECT_DOUBLE_EQ(median_absolute_deviation(kValues), 3.125);
  EXPECT_EQ(quantile(kValues, 0), -7);
  EXPECT_EQ(quantile(kValues, 1), 100);
}

TEST(Summary, OneValue) {
  const std::vector<double> one{4};
  EXPECT_EQ(mean(one), 4);
  EXPECT_EQ(stddev(one), 0);
  EXPECT_EQ(median(one), 4);
  EXPECT_EQ(quantile(one, 0.3), 4);
  EXPECT_EQ(median_absolute_deviation(one), 0);
  const Interval interval = median_interval(one);
  EXPECT_EQ(interval.low, 4);
  EXPECT_EQ(interval.high, 4);
}

TEST(Summary, MeanKeepsWhatPlainSummationLoses) {
  EXPECT_EQ(mean(std::vector<double>{1e100, 1.0, -1e100, 1.0}), 0.5);
  std::vector<double> shifted{1e9 + 4, 1e9 + 7, 1e9 + 13, 1e9 + 16};
  EXPECT_DOUBLE_EQ(stddev(shifted), std::sqrt(30.0));
}

TEST(Summary, MedianOfHugeValuesDoesNotOverflow) {
  const double huge = std::numeric_limits<double>::max();
  EXPECT_EQ(median(std::vector<double>{huge, huge}), huge);
  EXPECT_EQ(quantile(std::vector<double>{INFINITY, INFINITY}, 0.5), INFINITY);
}

TEST(Summary, DoesNotChangeItsInput) {
  const std::vector<double> before = kValues;
  median(kValues);
  quantile(kValues, 0.5);
  median_absolute_deviation(kValues);
  median_interval(kValues);
  EXPECT_EQ(before, kValues);
}

TEST(Summary, QuantileIsMonotoneAndInRange) {
  PhiloxStream random(4);
  for (int round = 0; round < 200; ++round) {
    std::vector<double> values(1 + random.below(30));
    for (double& value : values) value = normal(random);
    const auto [least, most] = std::minmax_element(values.begin(), values.end());
    double previous = -INFINITY;
    for (int i = 0; i <= 20; ++i) {
      const double value = quantile(values, i / 20.0);
      EXPECT_GE(value, previous);
      EXPECT_GE(value, *least);
      EXPECT_LE(value, *most);
      previous = value;
    }
    EXPECT_DOUBLE_EQ(quantile(values, 0.5), median(values));
  }
}

TEST(Summary, RefusesEmptyAndNan) {
  const std::vector<double> none;
  const std::vector<double> bad{1, std::nan(""), 2};
  EXPECT_THROW(mean(none), Error);
  EXPECT_THROW(stddev(none), Error);
  EXPECT_THROW(median(none), Error);
  EXPECT_THROW(quantile(none, 0.5), Error);
  EXPECT_THROW(quantile(kValues, 1.5), Error);
  EXPECT_THROW(quantile(kValues, std::nan("")), Error);
  EXPECT_THROW(median_absolute_deviation(none), Error);
  EXPECT_THROW(median_interval(none), Error);
  try {
    median(bad);
    FAIL();
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "median: value 1 of 3 is NaN.");
  }
}

TEST(Bootstrap, IsAFunctionOfItsSeed) {
  const Interval a = median_interval(kValues, {.seed = 1});
  EXPECT_EQ(a, median_interval(kValues, {.seed = 1}));
  EXPECT_EQ(a.mid, median(kValues));
  EXPECT_EQ(a.confidence, 0.95);
  EXPECT_LE(a.low, a.mid);
  EXPECT_GE(a.high, a.mid);
  const Statistic average = [](std::span<const double> values) { return mean(values); };
  EXPECT_NE(bootstrap_interval(kValues, average, {.seed = 1}), bootstrap_interval(kValues, average, {.seed = 2}));
}

TEST(Bootstrap, OfTheMeanAgreesWithItsStandardError) {
  PhiloxStream random(9);
  std::vector<double> values(400);
  for (double& value : values) value = 10 + 2 * normal(random);
  const Interval interval =
      bootstrap_interval(values, [](std::span<const double> sample) { return mean(sample); }, {.resamples = 4000});
  const double expected = 1.96 * stddev(values) / std::sqrt(400.0);
  EXPECT_NEAR(interval.mid - interval.low, expected, 0.1 * expected);
  EXPECT_NEAR(interval.high - interval.mid, expected, 0.1 * expected);
}

TEST(Bootstrap, MoreConfidenceIsWider) {
  PhiloxStream random(10);
  std::vector<double> values(50);
  for (double& value : values) value = normal(random);
  const Interval narrow = median_interval(values, {.confidence = 0.5});
  const Interval wide = median_interval(values, {.confidence = 0.99});
  EXPECT_LT(wide.low, narrow.low);
  EXPECT_GT(wide.high, narrow.high);
}

// 95% intervals of the median of 25 values hold the true one in about 94% of trials: not much less, and not always.
TEST(Bootstrap, CoversTheTrueMedian) {
  PhiloxStream random(12);
  constexpr int kTrials = 600;
  int covered = 0;
  for (int trial = 0; trial < kTrials; ++trial) {
    std::vector<double> values(25);
    for (double& value : values) value = -std::log(1 - random.uniform_double());
    covered += median_interval(values, {.resamples = 400, .seed = random.next64()}).contains(std::numbers::ln2) ? 1 : 0;
  }
  const double rate = covered / double{kTrials};
  EXPECT_GT(rate, 0.91);
  EXPECT_LT(rate, 0.985);
}

// Both contenders feel the same noise of 30%; pairing finds the true ratio of 0.9 where unpaired medians cannot.
TEST(PairedRatio, CancelsWhatBothFelt) {
  PhiloxStream random(13);
  constexpr int kTrials = 1000;
  int covered = 0;
  for (int trial = 0; trial < kTrials; ++trial) {
    std::vector<double> a(21);
    std::vector<double> b(21);
    for (std::size_t i = 0; i < a.size(); ++i) {
      const double busy = std::exp(0.3 * normal(random));
      a[i] = 0.9 * busy * std::exp(0.01 * normal(random));
      b[i] = busy * std::exp(0.01 * normal(random));
    }
    const Interval interval = paired_ratio_interval(a, b, {.resamples = 400, .seed = random.next64()});
    covered += interval.contains(0.9) ? 1 : 0;
    EXPECT_LT(interval.high - interval.low, 0.05);
    EXPECT_LT(interval.high, 1.0);
  }
  EXPECT_GT(covered / double{kTrials}, 0.90);  // 92.7% is the method's own rate for 21 values
  EXPECT_LT(covered / double{kTrials}, 0.96);
}

TEST(PairedRatio, RefusesUnequalLengthsAndZero) {
  const std::vector<double> two{1, 2};
  const std::vector<double> three{1, 2, 3};
  const std::vector<double> zero{1, 0};
  EXPECT_THROW(paired_ratio_interval(two, three), Error);
  EXPECT_THROW(paired_ratio_interval(two, zero), Error);
  EXPECT_NO_THROW(paired_ratio_interval(zero, two));
}

TEST(Bootstrap, RefusesBadOptions) {
  for (const double confidence : {0.0, 1.0, -1.0, std::nan("")}) {
    EXPECT_THROW(median_interval(kValues, {.confidence = confidence}), Error);
  }
  EXPECT_THROW(median_interval(kValues, {.resamples = 0}), Error);
  EXPECT_THROW(bootstrap_interval(kValues, nullptr), Error);
  EXPECT_THROW(bootstrap_interval(kValues, [](std::span<const double>) { return std::nan(""); }), Error);
}

// Expected values printed by scipy 1.17.
TEST(Student, QuantilesEqualScipy) {
  EXPECT_NEAR(student_t_quantile(0.975, 1), 12.706204736174694, 1e-11);
  EXPECT_NEAR(student_t_quantile(0.975, 2), 4.302652729749462, 1e-11);
  EXPECT_NEAR(student_t_quantile(0.975, 7), 2.364624251592784, 1e-11);
  EXPECT_NEAR(student_t_quantile(0.995, 2.5), 7.163728138948783, 1e-11);
  EXPECT_NEAR(student_t_quantile(0.6, 30), 0.2556053649519128, 1e-11);
  EXPECT_NEAR(student_t_quantile(0.001, 1e4), -3.091047516030612, 1e-11);
  EXPECT_EQ(student_t_quantile(0.5, 3), 0);
  EXPECT_THROW(student_t_quantile(1, 3), Error);
  EXPECT_THROW(student_t_quantile(0.9, 0), Error);
}

TEST(Starts, IntervalsEqualScipy) {
  const Interval one = starts_interval(std::vector<double>{1.1, 1.3, 0.9});
  EXPECT_NEAR(one.low, 0.688478911656724, 1e-12);
  EXPECT_NEAR(one.mid, 1.08774271237426, 1e-12);
  EXPECT_NEAR(one.high, 1.71854822027324, 1e-12);
  const Interval both = geometric_mean_interval(std::vector<std::vector<double>>{{1.1, 1.3, 0.9}, {2.0, 2.2}});
  EXPECT_NEAR(both.mid, 1.51051923607131, 1e-12);
  EXPECT_NEAR(both.high, 2.20753027942449, 1e-12);
}

TEST(Starts, OneStartHasNoInterval) {
  const Interval one = starts_interval(std::vector<double>{14.6});
  EXPECT_DOUBLE_EQ(one.mid, 14.6);
  EXPECT_TRUE(std::isnan(one.low) && std::isnan(one.high));
  const Interval both = geometric_mean_interval(std::vector<std::vector<double>>{{2.0}, {8.0, 8.0}});
  EXPECT_DOUBLE_EQ(both.mid, 4);
  EXPECT_TRUE(std::isnan(both.low) && std::isnan(both.high));
  EXPECT_THROW(starts_interval(std::vector<double>{}), Error);
  EXPECT_THROW(starts_interval(std::vector<double>{1, 0}), Error);
  EXPECT_THROW(starts_interval(std::vector<double>{1, 2}, 1), Error);
  EXPECT_THROW(geometric_mean_interval(std::vector<std::vector<double>>{}), Error);
}

/// Share of experiments whose interval holds the true ratio. Each start has a spread of its own and turns have theirs.
double coverage(const std::vector<int>& starts, const std::vector<double>& between, double within) {
  constexpr int kExperiments = 2000;
  constexpr int kTurns = 9;
  PhiloxStream random(17);
  int held = 0;
  for (int i = 0; i < kExperiments; ++i) {
    std::vector<std::vector<double>> subjects;
    for (std::size_t subject = 0; subject < starts.size(); ++subject) {
      subjects.emplace_back();
      for (int start = 0; start < starts[subject]; ++start) {
        const double mode = between[subject] * normal(random);
        std::vector<double> turns;
        for (int turn = 0; turn < kTurns; ++turn) turns.push_back(1.5 * std::exp(mode + within * normal(random)));
        subjects.back().push_back(median(turns));
      }
    }
    held += static_cast<int>(geometric_mean_interval(subjects).contains(1.5));
  }
  return held / static_cast<double>(kExperiments);
}

TEST(Starts, IntervalsCoverWhereStartsDominateAndWhereTurnsDo) {
  for (const int starts : {2, 3, 4, 8}) {
    EXPECT_GE(coverage({starts}, {0.10}, 0.01), 0.93) << starts << " starts, spread between starts";
    EXPECT_GE(coverage({starts}, {0.001}, 0.10), 0.93) << starts << " starts, spread between turns";
    EXPECT_LE(coverage({starts}, {0.10}, 0.01), 0.97) << "an interval that is too wide covers too";
  }
}

TEST(Starts, MeansOverWorkloadsCoverWhicheverOneTheSpreadIsIn) {
  EXPECT_GE(coverage({2, 3, 4, 8}, {0.10, 0.01, 0.01, 0.01}, 0.01), 0.93);
  EXPECT_GE(coverage({2, 3, 4, 8}, {0.01, 0.01, 0.01, 0.10}, 0.01), 0.93);
  EXPECT_GE(coverage({4, 4, 4, 4, 4, 4}, {0.05, 0.05, 0.05, 0.05, 0.05, 0.05}, 0.01), 0.93);
  EXPECT_GE(coverage({8, 8}, {0.001, 0.001}, 0.10), 0.93);
}

}  // namespace
}  // namespace oxytorch
