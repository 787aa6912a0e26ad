#include "oxytorch/tune/paired_test.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "normal.h"
#include "oxytorch/error.h"
#include "oxytorch/random.h"
#include "oxytorch/tune/block.h"
#include "tune/sign_test.h"

namespace oxytorch::tune {
namespace {

/// Seconds of one step of a side that takes one second without noise; called once a step, in order of time.
using Noise = std::function<double(PhiloxStream&)>;

Noise gaussian(double spread) {
  return [=](PhiloxStream& random) { return std::max(0.05, 1 + spread * normal(random)); };
}

/// Log-normal, and one step in twelve is up to three times as long.
Noise heavy(double spread) {
  return [=](PhiloxStream& random) {
    const double outlier = random.uniform_double() < 1.0 / 12 ? 1 + 2 * random.uniform_double() : 1;
    return std::exp(spread * normal(random)) * outlier;
  };
}

Noise bimodal(double spread) {
  return [=](PhiloxStream& random) {
    return (random.uniform_double() < 0.4 ? 1 + 3 * spread : 1.0) * (1 + spread / 4 * normal(random));
  };
}

Noise autoregressive(double spread) {
  return [=, state = 0.0](PhiloxStream& random) mutable {
    state = 0.9 * state + std::sqrt(1 - 0.81) * normal(random);
    return std::exp(spread * state);
  };
}

/// Grows by the spread every ten steps, as a throttling processor does.
Noise drifting(double spread) {
  return [=, step = 0](PhiloxStream& random) mutable {
    return (1 + spread * step++ / 10) * std::exp(spread / 3 * normal(random));
  };
}

/// `true_speedup` is how many times longer the incumbent takes.
PairedTestResult fight(double true_speedup, Noise noise, std::uint64_t seed, PairedTestOptions options = {}) {
  options.seed = seed;
  PairedTest paired_test(options);
  PhiloxStream random(seed, 7);
  while (const auto side = paired_test.next()) {
    paired_test.record(*side, noise(random) * (*side == Side::Incumbent ? true_speedup : 1.0));
  }
  return paired_test.result();
}

struct Weather {
  const char* name;
  std::function<Noise(double)> make;
};

class PairedTestNull : public testing::TestWithParam<Weather> {};

// Whatever time they are given: an interim analysis that is the last for want of it may use the error that is left.
TEST_P(PairedTestNull, AcceptsAtMostOneInAHundredEqualSidesThatRunOutOfTime) {
  constexpr int kPairedTests = 1000;
  int accepted = 0;
  for (int i = 0; i < kPairedTests; ++i) {
    const double spread = 0.01 + 0.19 * i / kPairedTests;
    const PairedTestOptions options{.threshold = 1, .budget_seconds = 12.0 + i % 70};
    accepted += fight(1, GetParam().make(spread), static_cast<std::uint64_t>(i), options).decision == Decision::Accept;
  }
  EXPECT_LE(accepted, 10);
}

// What goes on past its time because it interim analyses well must not take more error for it.
TEST_P(PairedTestNull, AcceptsAtMostOneInAHundredEqualSidesThatMayGoOn) {
  constexpr int kPairedTests = 1000;
  int accepted = 0;
  for (int i = 0; i < kPairedTests; ++i) {
    const double spread = 0.01 + 0.19 * i / kPairedTests;
    const PairedTestOptions options{.threshold = 1, .budget_seconds = 12.0 + i % 70, .repay_steps = 10.0 + i % 300};
    accepted += fight(1, GetParam().make(spread), static_cast<std::uint64_t>(i), options).decision == Decision::Accept;
  }
  EXPECT_LE(accepted, 10);
}

TEST_P(PairedTestNull, AcceptsAtMostOneInAHundredEqualSides) {
  constexpr int kPairedTests = 1000;
  int accepted = 0;
  double pairs = 0;
  for (int i = 0; i < kPairedTests; ++i) {
    const double spread = 0.01 + 0.19 * i / kPairedTests;
    const PairedTestResult result = fight(1, GetParam().make(spread), static_cast<std::uint64_t>(i));
    accepted += result.decision == Decision::Accept;
    pairs += result.pairs;
  }
  EXPECT_LE(accepted, 10);
  // Most are given up long before the last interim analysis.
  EXPECT_LE(pairs / kPairedTests, 15);
  RecordProperty("accepted", accepted);
  RecordProperty("pairs", std::to_string(pairs / kPairedTests));
}

INSTANTIATE_TEST_SUITE_P(Weathers, PairedTestNull,
                         testing::Values(Weather{"gaussian", gaussian}, Weather{"heavy", heavy},
                                         Weather{"bimodal", bimodal}, Weather{"autoregressive", autoregressive},
                                         Weather{"drifting", drifting}),
                         [](const auto& info) { return info.param.name; });

/// Of 500 paired tests of a challenger that is faster by the ratio.
struct Tally {
  int accepted = 0;
  int at_first_look = 0;
  int covered = 0;
  double pairs = 0;
};

Tally tally(double ratio, const std::function<Noise(double)>& noise, double spread) {
  Tally tally;
  for (int i = 0; i < 500; ++i) {
    const PairedTestResult result = fight(ratio, noise(spread), static_cast<std::uint64_t>(1000 + i));
    tally.accepted += result.decision == Decision::Accept;
    tally.at_first_look += result.decision == Decision::Accept && result.pairs == 9;
    tally.covered += result.speedup.contains(ratio);
    tally.pairs += result.pairs / 500.0;
  }
  return tally;
}

TEST(Block, LastsLongEnoughForTheClock) {
  EXPECT_EQ(block_steps(0.5), 1);
  EXPECT_EQ(block_steps(0.003), 1);
  EXPECT_EQ(block_steps(0.001), 4);
  EXPECT_EQ(block_steps(1e-6), 64);
  EXPECT_EQ(block_steps(0), 64);
  EXPECT_EQ(block_steps(0.5, /*on_host=*/false), 1);
  EXPECT_EQ(block_steps(0.02, /*on_host=*/false), 5);
  EXPECT_EQ(settle_steps(2, 0.01), 2);
  EXPECT_EQ(settle_steps(2, 0.1), 1);
  EXPECT_EQ(settle_steps(0, 0.1), 0);
}

TEST(PairedTest, AcceptsAGainOfFivePercentUnderTwoPercentNoise) {
  const Tally seen = tally(1.05, gaussian, 0.02);
  EXPECT_GE(seen.accepted, 490);
  EXPECT_LE(seen.pairs, 20);
}

TEST(PairedTest, AcceptsAGreatGainAtTheFirstLookUnderGreatNoise) {
  const Tally seen = tally(1.5, gaussian, 0.2);
  EXPECT_GE(seen.accepted, 480);
  EXPECT_GE(seen.at_first_look, 250);
}

TEST(PairedTest, AcceptsAGainThroughOutliersAndDrift) {
  EXPECT_GE(tally(1.2, heavy, 0.02).accepted, 475);
  EXPECT_GE(tally(1.2, drifting, 0.05).accepted, 475);
  EXPECT_GE(tally(1.2, autoregressive, 0.05).accepted, 475);
}

TEST(PairedTest, ReportsAnIntervalThatHoldsTheTrueRatio) {
  // Stopping when it looks good leaves a little less than the 95% of a fixed number of pairs.
  EXPECT_GE(tally(1.3, gaussian, 0.05).covered, 440);
}

TEST(PairedTest, GivesUpAMuchSlowerChallengerAfterThreePairs) {
  const PairedTestResult result = fight(0.5, gaussian(0.05), 3);
  EXPECT_EQ(result.decision, Decision::Reject);
  EXPECT_LE(result.pairs, 4);
  EXPECT_NE(result.reason.find("slower"), std::string::npos) << result.reason;
}

TEST(PairedTest, GivesUpAfterThePairThatSpendsItsBudgetWhereItIsHopelesslySlower) {
  const auto pairs = [](double slower, double budget) {
    return fight(1 / slower, gaussian(0.01), 3, {.budget_seconds = budget}).pairs;
  };
  // A pair takes a second of the challenger's.
  EXPECT_EQ(pairs(30, 2), 1);
  EXPECT_EQ(pairs(30, 5), 2) << "there is time to be sure";
  EXPECT_EQ(pairs(30, 0), 2) << "no bound";
  EXPECT_EQ(pairs(3, 2), 2);
}

TEST(PairedTest, RejectsAGainUnderTheThreshold) {
  PairedTestOptions options;
  options.threshold = 1.2;
  int accepted = 0;
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    accepted += fight(1.1, gaussian(0.02), seed, options).decision == Decision::Accept;
  }
  EXPECT_EQ(accepted, 0);
}

TEST(PairedTest, OfWhatIsProvenItselfFourUnevenPairsDecideNothing) {
  for (const bool proven : {false, true}) {
    PairedTest test(proven ? PairedTestOptions::agreement() : PairedTestOptions{});
    for (int pair = 0; pair < 4; ++pair) {  // slower by 8 to 9 percent, but once
      const double challenger = pair == 1 ? 0.99 : 1.08 + 0.003 * pair;
      for (int side = 0; side < 2 && test.next(); ++side) {
        test.record(*test.next(), *test.next() == Side::Challenger ? challenger : 1);
      }
    }
    EXPECT_EQ(test.result().decision, proven ? Decision::Open : Decision::Reject);
  }
}

TEST(PairedTest, GivesUpAGainThatIsNotWorthTheTrial) {
  const PairedTestOptions usual{.most_pairs = 200};
  const PairedTestOptions demanding{.most_pairs = 200, .worth = 1.1};
  EXPECT_EQ(fight(1.03, gaussian(0.02), 3, usual).decision, Decision::Accept);
  const PairedTestResult given_up = fight(1.03, gaussian(0.02), 3, demanding);
  EXPECT_EQ(given_up.decision, Decision::Reject);
  EXPECT_LT(given_up.pairs, 9);
  EXPECT_NE(given_up.reason.find("1.100x"), std::string::npos) << given_up.reason;
  EXPECT_EQ(fight(1.2, gaussian(0.02), 3, demanding).decision, Decision::Accept);
}

TEST(PairedTest, TakesTurnsInRandomOrderWithinPairs) {
  PairedTestOptions options;
  options.seed = 5;
  options.threshold = 0.5;  // no futility among equals
  options.least_pairs = options.most_pairs = 40;
  PairedTest paired_test(options);
  int incumbent_first = 0;
  for (int pair = 0; pair < 40; ++pair) {
    const Side first = paired_test.next().value();
    paired_test.record(first, 1);
    const Side second = paired_test.next().value();
    EXPECT_NE(first, second);
    paired_test.record(second, 1);
    incumbent_first += first == Side::Incumbent;
  }
  EXPECT_FALSE(paired_test.next().has_value());
  EXPECT_GT(incumbent_first, 8);
  EXPECT_LT(incumbent_first, 32);
}

TEST(PairedTest, UsesTheErrorOfTheLooksThatItHasNoTimeFor) {
  const auto verdict = [](double budget) {
    PairedTest paired_test({.threshold = 1, .false_accept = 0.00488, .budget_seconds = budget});
    for (int pair = 0; pair < 9; ++pair) {
      const double slower = pair == 4 ? 0.995 : 1.1;  // p = 2 / 512: above 0.8 of the error and below all of it
      for (int side = 0; side < 2; ++side) {
        const Side next = *paired_test.next();
        paired_test.record(next, next == Side::Incumbent ? slower : 1.0);
      }
    }
    return paired_test.result().decision;
  };
  EXPECT_EQ(verdict(0), Decision::Open);
  EXPECT_EQ(verdict(5), Decision::Accept);
  // The nine pairs take 18.795 s, counted from nothing.
  EXPECT_EQ(verdict(18.7), Decision::Accept);
  EXPECT_EQ(verdict(18.9), Decision::Open);
}

TEST(PairedTest, EndsAtTheFirstLookPastItsBudget) {
  PairedTestOptions options;
  options.budget_seconds = 5;
  options.threshold = 1.0;
  // 1.02 at 5% is neither clear nor hopeless at nine pairs for this seed.
  const PairedTestResult free = fight(1.03, gaussian(0.05), 11, {.threshold = 1.0});
  ASSERT_GT(free.pairs, 9);
  const PairedTestResult bound = fight(1.03, gaussian(0.05), 11, options);
  EXPECT_EQ(bound.pairs, 9);
  EXPECT_EQ(bound.decision, Decision::Reject);
  EXPECT_NE(bound.reason.find("within the time"), std::string::npos) << bound.reason;
}

TEST(PairedTest, GoesOnPastItsBudgetWhereWhatItPromisesRepaysTheNextLook) {
  const auto pairs = [](double repay_steps) {
    PairedTest paired_test(
        {.threshold = 1, .false_accept = 0.005, .most_pairs = 12, .budget_seconds = 5, .repay_steps = repay_steps});
    for (int pair = 0; paired_test.next(); ++pair) {
      // p = 2 / 512: above the error of the first interim analysis, with an interval above 1.
      const double slower = pair == 4 ? 0.995 : 1.25;
      for (int side = 0; side < 2; ++side) {
        const Side next = *paired_test.next();
        paired_test.record(next, next == Side::Incumbent ? slower : 1.0);
      }
    }
    EXPECT_GT(paired_test.result().speedup.low, 1) << paired_test.result().reason;
    return paired_test.result().pairs;
  };
  // Three pairs more take 6.75 steps of the challenger's time, and each step saves a quarter of it.
  EXPECT_EQ(pairs(26), 9);
  EXPECT_EQ(pairs(28), 12);
  EXPECT_EQ(pairs(0), 9);
}

TEST(PairedTest, GivesTheSameVerdictForTheSameSeedAndTimes) {
  const PairedTestResult one = fight(1.04, heavy(0.05), 21);
  const PairedTestResult two = fight(1.04, heavy(0.05), 21);
  EXPECT_EQ(one.speedup, two.speedup);
  EXPECT_EQ(one.pairs, two.pairs);
  EXPECT_EQ(one.reason, two.reason);
}

TEST(PairedTest, RefusesWhatItDidNotAskFor) {
  PairedTest paired_test;
  const Side first = paired_test.next().value();
  const Side other = first == Side::Incumbent ? Side::Challenger : Side::Incumbent;
  EXPECT_THROW(paired_test.record(other, 1), Error);
  EXPECT_THROW(paired_test.record(first, 0), Error);
  EXPECT_THROW(paired_test.record(first, NAN), Error);
  EXPECT_THROW(paired_test.record(first, INFINITY), Error);
  paired_test.abandon("it threw");
  EXPECT_FALSE(paired_test.next().has_value());
  EXPECT_THROW(paired_test.record(first, 1), Error);
  EXPECT_EQ(paired_test.result().decision, Decision::Reject);
  EXPECT_EQ(paired_test.result().reason, "it threw");
  EXPECT_EQ(paired_test.result().pairs, 0);
}

TEST(PairedTest, RefusesBadOptions) {
  EXPECT_THROW(PairedTest({.threshold = 0}), Error);
  EXPECT_THROW(PairedTest({.confidence = 1}), Error);
  EXPECT_THROW(PairedTest({.false_accept = 0}), Error);
  EXPECT_THROW(PairedTest({.least_pairs = 10, .most_pairs = 9}), Error);
  EXPECT_THROW(PairedTest({.most_pairs = 1001}), Error);
  EXPECT_THROW(PairedTest({.budget_seconds = -1}), Error);
  EXPECT_THROW(PairedTest({.repay_steps = -1}), Error);
  EXPECT_THROW(PairedTest({.repay_steps = INFINITY}), Error);
}

double enumerated(const std::vector<double>& differences) {
  std::vector<double> ranks(differences.size());
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    for (const double other : differences) {
      ranks[i] += std::abs(other) < std::abs(differences[i])    ? 1
                  : std::abs(other) == std::abs(differences[i]) ? 0.5
                                                                : 0;
    }
    ranks[i] = std::min(ranks[i] + 0.5, (static_cast<double>(ranks.size()) + 1) / 2);
  }
  const auto sum_of = [&](std::size_t flips) {
    double sum = 0;
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      if ((flips >> i & 1U) != 0 && differences[i] != 0) sum += ranks[i];
    }
    return sum;
  };
  std::size_t seen = 0;
  for (std::size_t i = 0; i < ranks.size(); ++i) seen |= static_cast<std::size_t>(differences[i] > 0) << i;
  std::size_t reached = 0;
  const std::size_t all = std::size_t{1} << ranks.size();
  for (std::size_t flips = 0; flips < all; ++flips) reached += sum_of(flips) >= sum_of(seen);
  return static_cast<double>(reached) / static_cast<double>(all);
}

TEST(SignTest, EqualsTheEnumerationOfAllFlips) {
  PhiloxStream random(9);
  for (std::size_t n = 1; n <= 12; ++n) {
    std::vector<double> values(n);
    for (double& value : values) value = normal(random) + 0.3;
    EXPECT_NEAR(sign_flip_p_value(values), enumerated(values), 1e-12);
    for (double& value : values) value = std::round(value);  // ties and zeros
    EXPECT_NEAR(sign_flip_p_value(values), enumerated(values), 1e-12);
  }
  EXPECT_EQ(sign_flip_p_value(std::vector<double>{0, 0, 0}), 1);
  EXPECT_EQ(sign_flip_p_value(std::vector<double>(9, 0.25)), 1.0 / 512);
}

TEST(SignTest, CenterIsTheMedianOfMeansOfTwo) {
  EXPECT_DOUBLE_EQ(center_of(std::vector<double>{1, 2, 9}), 3.5);  // 1, 1.5, 2, 5, 5.5, 9
}

TEST(PairedTest, OfAMemberAllPairsMustSayTheSame) {
  for (const int odd : {-1, 3}) {
    PairedTest paired_test(PairedTestOptions::member(1));
    for (int pair = 0; const auto side = paired_test.next(); pair += paired_test.result().pairs > pair) {
      const bool slower = pair == odd;
      paired_test.record(*side, *side == Side::Challenger ? (slower ? 1.05 : 0.95) : 1);
    }
    EXPECT_EQ(paired_test.result().decision, odd < 0 ? Decision::Accept : Decision::Reject);
    EXPECT_LE(paired_test.result().pairs, 5);
  }
}

TEST(PairedTest, EndsAtAnyPairWhereTimeIsUp) {
  PairedTest paired_test({.most_seconds = 7, .repay_steps = 1000});
  while (const auto side = paired_test.next()) paired_test.record(*side, *side == Side::Challenger ? 1 : 1.5);
  EXPECT_EQ(paired_test.result().decision, Decision::Reject);
  EXPECT_EQ(paired_test.result().pairs, 3);
  EXPECT_NE(paired_test.result().reason.find("stopped"), std::string::npos) << paired_test.result().reason;
  EXPECT_THROW(PairedTest({.most_seconds = -1}), Error);
}

}  // namespace
}  // namespace oxytorch::tune
