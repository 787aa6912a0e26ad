#include "oxytorch/tune/guard.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <tuple>
#include <utility>
#include <vector>

#include "normal.h"
#include "oxytorch/error.h"
#include "oxytorch/random.h"

namespace oxytorch::tune {
namespace {

struct Run {
  double speedup = 1.3;  ///< of a step with the changes
  double later = 1.3;    ///< from step `turn` on
  std::int64_t turn = 1'000'000;
  double noise = 0.05;
  std::int64_t steps = 10'000;
  double loss_with = 1;
  double loss_without = 1;
};

struct Driven {
  std::int64_t rolled_back = -1;
  std::int64_t without = 0;  ///< before it was rolled back
  std::int64_t compared = 0;
  std::string reason;
};

Driven drive(const Run& run, GuardOptions options) {
  Guard guard(options);
  PhiloxStream random(options.seed, 3);
  Driven seen;
  while (guard.step() < run.steps) {
    const Action action = guard.before();
    if (action == Action::CompareLosses) {
      ++seen.compared;
      guard.compared(run.loss_with, run.loss_without);
      continue;
    }
    if (action == Action::RollBack) {
      EXPECT_EQ(seen.rolled_back, -1) << "said once";
      seen.rolled_back = guard.step();
    }
    const bool with = action == Action::Run && seen.rolled_back < 0;
    seen.without += action == Action::RunWithout;
    const double speedup = guard.step() < run.turn ? run.speedup : run.later;
    guard.after(std::exp(run.noise * normal(random)) / (with ? speedup : 1));
  }
  seen.reason = guard.reason();
  return seen;
}

TEST(Guard, TakesBackAChangeThatStoppedPayingWithinOneCheck) {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    const Driven seen = drive({.later = 0.8, .turn = 1000}, {.seed = seed});
    EXPECT_GT(seen.rolled_back, 1000);
    EXPECT_LE(seen.rolled_back, 2050 + 100);  // the check after the turn
    EXPECT_NE(seen.reason.find("stopped paying"), std::string::npos) << seen.reason;
    EXPECT_EQ(drive({.later = 0.8, .turn = 1000}, {.seed = seed}).rolled_back, seen.rolled_back);
  }
}

TEST(Guard, KeepsWhatPaysAndSaysSo) {
  const Driven seen = drive({}, {});
  EXPECT_EQ(seen.rolled_back, -1);
  EXPECT_NE(seen.reason.find("still pay"), std::string::npos) << seen.reason;
  EXPECT_GT(seen.without, 0);
  EXPECT_LT(seen.without, 100);  // of 10,000
}

TEST(Guard, ChecksHalfAsOftenAfterEachCheckThatHeld) {
  Guard guard({.check_every = 500});
  std::vector<std::int64_t> ended;
  std::string reason;
  for (PhiloxStream random(1, 3); guard.step() < 8'000;) {
    const Action action = guard.before();
    if (action == Action::CompareLosses) {
      guard.compared(1, 1);
      continue;
    }
    guard.after(std::exp(0.02 * normal(random)) / (action == Action::Run ? 1.3 : 1));
    if (std::exchange(reason, guard.reason()) != guard.reason()) ended.push_back(guard.step());
  }
  ASSERT_GE(ended.size(), 4U);
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_GE(ended[i + 1] - ended[i], 500 << i) << i;
    EXPECT_LE(ended[i + 1] - ended[i], (500 << i) + 50) << "and what the check itself takes; " << i;
  }
}

TEST(Guard, TakesBackAtMostOneInAHundredHealthyRuns) {
  int rolled_back = 0;
  double without = 0;
  for (std::uint64_t seed = 0; seed < 1000; ++seed) {
    // Equal sides are the hardest of the healthy ones.
    const Driven seen =
        drive({.speedup = 1, .later = 1, .noise = 0.01 + 0.0002 * static_cast<double>(seed)}, {.seed = seed});
    rolled_back += seen.rolled_back >= 0;
    without += static_cast<double>(seen.without) / 1000;
  }
  EXPECT_LE(rolled_back, 10);
  EXPECT_LT(without, 100) << "of 10,000 steps";
}

TEST(Guard, TakesBackAChangeWhoseLossDrifts) {
  constexpr std::int64_t kFirst = 26;  // the first step that seed 0 draws
  const Driven seen = drive({.loss_with = 1.001}, {.loss_tolerance = 1e-4});
  EXPECT_EQ(seen.rolled_back, kFirst);
  EXPECT_NE(seen.reason.find("1.001"), std::string::npos) << seen.reason;
  EXPECT_EQ(drive({.loss_with = 1.00001}, {.loss_tolerance = 1e-4}).rolled_back, -1);
  EXPECT_EQ(drive({.loss_with = std::nextafter(1, 2)}, {}).rolled_back, kFirst) << "to the bit, unless told otherwise";
  EXPECT_EQ(drive({.loss_with = NAN}, {.loss_tolerance = 1}).rolled_back, kFirst);
}

/// Steps at which losses are compared in a run without a fault.
std::vector<std::int64_t> compared_at(std::uint64_t seed, std::int64_t steps = 20'000) {
  Guard guard({.seed = seed});
  std::vector<std::int64_t> at;
  while (guard.step() < steps) {
    if (guard.before() == Action::CompareLosses) {
      at.push_back(guard.step());
      guard.compared(1, 1);
    } else {
      guard.after(1);
    }
  }
  return at;
}

TEST(Guard, DrawsTheStepsAtWhichNumbersAreCompared) {
  EXPECT_EQ(compared_at(5), compared_at(5));
  EXPECT_NE(compared_at(5), compared_at(6));
  std::vector<int> seen(500);
  std::size_t most = 0;
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    const auto at = compared_at(seed);
    ASSERT_FALSE(at.empty());
    EXPECT_LE(at.front(), 50);
    for (std::size_t i = 1; i < at.size(); ++i) EXPECT_LE(at[i] - at[i - 1], 850) << "a check may hold one up";
    for (const auto step : at) seen[static_cast<std::size_t>(step % 500)] += 1;
    most = std::max(most, at.size());
  }
  EXPECT_LT(most, 80U) << "of 20,000 steps";
  // No schedule keeps out of their way: nearly every phase of 500 steps has been looked at.
  EXPECT_LT(std::count(seen.begin(), seen.end(), 0), 5);
}

TEST(Guard, TakesBackAChangeWhoseGradientsAreOff) {
  const auto after = [](const Apart& apart, Kind kind) {
    GuardOptions options;
    options.allow(kind);
    Guard guard(options);
    guard.suspicious();
    EXPECT_EQ(guard.before(), Action::CompareLosses);
    guard.compared(1, 1, apart);
    return std::pair(guard.before() == Action::RollBack, guard.reason());
  };
  EXPECT_TRUE(after({.gradient = 1e-9}, Kind::Exact).first);
  EXPECT_FALSE(after({}, Kind::Exact).first);
  EXPECT_FALSE(after({.gradient = 1e-3, .factor = 1e-3}, Kind::Tolerance).first);
  EXPECT_TRUE(after({.gradient = 1}, Kind::Tolerance).first);
  EXPECT_TRUE(after({.gradient = 1}, Kind::Precision).first) << "a gradient of zeros";
  EXPECT_TRUE(after({.factor = 0.019}, Kind::Tolerance).first);
  EXPECT_TRUE(after({.gradient = NAN}, Kind::Precision).first);
  EXPECT_NE(after({.factor = 0.019}, Kind::Tolerance).second.find("0.019"), std::string::npos);
}

TEST(Guard, AllowsGradientsThatAreOffAsThoseOfStockAutocast) {
  const auto after = [](const Apart& apart, const Apart& usual) {
    GuardOptions options;
    options.allow(Kind::Precision);
    Guard guard(options);
    guard.suspicious();
    EXPECT_EQ(guard.before(), Action::CompareLosses);
    EXPECT_TRUE(guard.doubts(apart));
    guard.compared(1, 1, apart, usual);
    return guard.before() == Action::RollBack;
  };
  EXPECT_FALSE(after({.gradient = 0.54}, {.gradient = 0.53})) << "of a BERT whose attention had no gradient";
  EXPECT_TRUE(after({.gradient = 0.54}, {.gradient = 0.1}));
  EXPECT_TRUE(after({.gradient = 0.54}, {.gradient = NAN}));
  EXPECT_TRUE(after({.gradient = 0.54, .factor = 0.9}, {.gradient = 0.53, .factor = 0.01}));
  EXPECT_FALSE(Guard({.gradient_tolerance = 0.5, .factor_tolerance = 0.1}).doubts({.gradient = 0.4, .factor = 0.01}));
}

TEST(Guard, ComparisonsTakeAHundredthOfTheRun) {
  const auto compared = [](double seconds) {
    GuardOptions options;
    options.seed = 3;
    Guard guard(options);
    int count = 0;
    for (int step = 0; step < 100'000; ++step) {
      while (guard.before(/*timed=*/false) == Action::CompareLosses) {
        guard.compared(1, 1, {}, {}, seconds);
        ++count;
      }
      guard.after(0.014);
    }
    return count;
  };
  EXPECT_GT(compared(0.014), 150);
  EXPECT_LT(compared(0.5), 50);  // 36 steps each
  EXPECT_GT(compared(0.5), 25);
}

TEST(Guard, StepsAreWaitedForInChecksOfTheTimeAlone) {
  Guard guard({.first_check = 3, .loss_tolerance = -1});
  std::vector<int> timed;
  for (int step = 0; step < 300; ++step) {
    const auto action = guard.before();
    EXPECT_TRUE(action == Action::Run || guard.is_timing());
    if (guard.is_timing()) timed.push_back(step);
    guard.after(action == Action::RunWithout ? 2 : 1);
  }
  ASSERT_FALSE(timed.empty());
  EXPECT_EQ(timed.front(), 3);
  EXPECT_LT(timed.size(), 100U);
}

/// What a guard of that kind does where a run's losses of one batch fell from 2.3 to `without`.
bool takes_back(Kind kind, double with, double without, const Apart& apart = {}) {
  GuardOptions options;
  options.allow(kind);
  Guard guard(options);
  for (const auto& [one, other, gradients] : {std::tuple{2.3, 2.3, Apart{}}, std::tuple{with, without, apart}}) {
    guard.suspicious();
    EXPECT_EQ(guard.before(), Action::CompareLosses);
    guard.compared(one, other, gradients);
  }
  return guard.before() == Action::RollBack;
}

// Figures of an MLP that learnt eight batches by heart; see kSmallLoss.
TEST(Guard, BlamesNoChangeForRoundingOfALossNearZero) {
  EXPECT_FALSE(takes_back(Kind::Precision, 3.91155446e-08, 3.07336414e-08, {.gradient = 13}));
  EXPECT_FALSE(takes_back(Kind::Tolerance, 6.16e-6, 6.13e-6, {.gradient = 0.012}));
  EXPECT_FALSE(takes_back(Kind::Tolerance, 7.38e-7, 7.06e-7, {.gradient = 0.19}));
}

TEST(Guard, StillComparesASmallLoss) {
  EXPECT_TRUE(takes_back(Kind::Tolerance, 0.101, 0.1));
  EXPECT_TRUE(takes_back(Kind::Precision, 0.01, 1e-3)) << "less than it was, and not nothing";
  EXPECT_TRUE(takes_back(Kind::Precision, NAN, 1e-9));
  EXPECT_TRUE(takes_back(Kind::Tolerance, 1e-3, 1e-3, {.gradient = 0.2}));
  EXPECT_FALSE(takes_back(Kind::Precision, 4.2e-5, 2.3e-6));
  EXPECT_TRUE(takes_back(Kind::Exact, 3.1e-8, 3.07e-8));
  EXPECT_TRUE(takes_back(Kind::Exact, 3e-8, 3e-8, {.gradient = 1e-9}));
}

TEST(Guard, DoesNotBlameTheChangesForALossThatIsBadWithoutThem) {
  EXPECT_EQ(drive({.loss_with = NAN, .loss_without = NAN}, {}).rolled_back, -1);
}

TEST(Guard, LooksAtOnceWhenSuspicious) {
  Guard guard({.loss_tolerance = -1});
  EXPECT_EQ(guard.before(), Action::Run);
  guard.after(1);
  guard.suspicious();
  EXPECT_EQ(guard.before(), Action::CompareLosses);
  EXPECT_EQ(guard.before(), Action::CompareLosses);
  EXPECT_THROW(guard.after(1), Error);
  guard.compared(2, 2);
  EXPECT_EQ(guard.before(), Action::Run);
  guard.after(1);
  EXPECT_EQ(guard.step(), 2);
  guard.suspicious();
  EXPECT_EQ(guard.before(), Action::CompareLosses);
  guard.compared(NAN, 2);
  EXPECT_EQ(guard.before(), Action::RollBack);
  guard.after(1);
  EXPECT_EQ(guard.before(), Action::Run);
}

TEST(Guard, ComparesNoLossesWhereToldNotTo) { EXPECT_EQ(drive({}, {.loss_tolerance = -1}).compared, 0); }

TEST(Guard, RefusesWhatItDidNotAskFor) {
  Guard guard;
  EXPECT_THROW(guard.after(1), Error);
  EXPECT_THROW(guard.compared(1, 1), Error);
  EXPECT_EQ(guard.before(), Action::Run);
  EXPECT_THROW(guard.after(0), Error);
  EXPECT_THROW(guard.after(NAN), Error);
  EXPECT_THROW(Guard({.check_every = 0}), Error);
  EXPECT_THROW(Guard({.pairs = 0}), Error);
  EXPECT_THROW(Guard({.threshold = 0}), Error);
}

}  // namespace
}  // namespace oxytorch::tune
