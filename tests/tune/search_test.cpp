#include "oxytorch/tune/search.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <map>

#include "oxytorch/error.h"
#include "oxytorch/random.h"
#include "search_world.h"

namespace oxytorch::tune {
namespace {

using testing::AllOf;
using testing::Contains;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

TEST(Search, FindsTheBestOfLayoutPrecisionAndCompiler) {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    Search search(cnn_strategies(), {.step_seconds = 0.4, .seed = seed});
    const Spent spent = explore(search, {.seconds = cnn, .cost = {{"compile", 15}, {"compile_max", 60}}}, seed);
    EXPECT_THAT(spent.best, ElementsAre("allocator", "math_attention", "bf16", "compile")) << "seed " << seed;
    EXPECT_GT(spent.removals, 0);
  }
}

TEST(Search, GoesForwardInTheOrderGiven) {
  Search search(cnn_strategies(), {.step_seconds = 0.4});
  const Spent spent = explore(search, {.seconds = cnn});
  EXPECT_EQ(spent.all[0].strategy, "allocator");
  EXPECT_THAT(spent.all[0].incumbent, IsEmpty());
  EXPECT_THAT(spent.all[0].challenger, ElementsAre("allocator"));
  EXPECT_EQ(spent.all[1].strategy, "channels_last");
  EXPECT_THAT(spent.all[1].incumbent, ElementsAre("allocator"));
}

TEST(Search, LeavesEveryStrategyWithAReason) {
  Search search(cnn_strategies(), {.step_seconds = 0.4});
  explore(search, {.seconds = cnn, .broken = {"bf16"}, .wrong = {"channels_last"}});
  std::map<std::string, CertificateEntry> entries;
  for (const CertificateEntry& entry : search.entries()) {
    EXPECT_FALSE(entry.reason.empty()) << entry.strategy;
    entries[entry.strategy] = entry;
  }
  EXPECT_EQ(entries.size(), 6);
  EXPECT_EQ(entries["allocator"].status, Status::Accepted);
  EXPECT_TRUE(entries["allocator"].speedup->contains(1 / 0.47));
  EXPECT_EQ(entries["bf16"].status, Status::Failed);
  EXPECT_EQ(entries["bf16"].reason, "it threw");
  EXPECT_EQ(entries["channels_last"].status, Status::Refused);
  EXPECT_EQ(entries["channels_last"].reason, "the loss differs");
  EXPECT_EQ(entries["math_attention"].status, Status::Rejected);
  EXPECT_THAT(search.best(), Not(Contains("channels_last")));
}

TEST(Search, KeepsAtMostOneOfAGroup) {
  Search search({{.name = "one", .group = "g"}, {.name = "two", .group = "g"}, {.name = "three", .group = "g"}}, {});
  const Landscape seconds = [](const Names& on) {
    return has(on, "one") ? 0.9 : has(on, "two") ? 0.5 : has(on, "three") ? 0.7 : 1.0;
  };
  const Spent spent = explore(search, {.seconds = seconds});
  EXPECT_THAT(spent.best, ElementsAre("two"));
  for (const Trial& trial : spent.all) EXPECT_LE(trial.challenger.size(), 1);
  EXPECT_THAT(search.entries()[0].reason, HasSubstr("It was active until 'two' in its place was faster: "));
  EXPECT_THAT(search.entries()[1].reason, HasSubstr(" In place of 'one'."));
}

TEST(Search, TriesWhatRequiresAnotherOnlyBesideIt) {
  const std::vector<StrategyFacts> strategies{{.name = "needy", .requires_ = {"base"}}, {.name = "base"}};
  const auto seconds = [](double base) -> Landscape {
    return [=](const Names& on) { return (has(on, "base") ? base : 1) * (has(on, "needy") ? 0.8 : 1); };
  };
  Search good(strategies, {});
  EXPECT_THAT(explore(good, {.seconds = seconds(0.9)}).best, ElementsAre("needy", "base"));
  Search bad(strategies, {});
  const Spent spent = explore(bad, {.seconds = seconds(1.2)});
  EXPECT_THAT(spent.best, IsEmpty());
  EXPECT_EQ(spent.trials, 1);
  EXPECT_EQ(bad.entries()[0].status, Status::Skipped);
  EXPECT_THAT(bad.entries()[0].reason, HasSubstr("'base'"));
}

TEST(Search, TriesTwoThatFailedTogetherOnlyWhereEachLostLittle) {
  const auto together = [](double alone) {
    Search search({{.name = "one", .interacts = {"two"}}, {.name = "two", .interacts = {"one"}}}, {});
    const auto seconds = [alone](const Names& on) { return on.size() == 2 ? 0.5 : on.size() == 1 ? 1 / alone : 1.0; };
    const auto best = explore(search, {.seconds = seconds}).best;
    for (const int i : {0, 1}) {
      const auto& reason = search.entries()[static_cast<std::size_t>(i)].reason;
      EXPECT_EQ(reason.ends_with(i == 0 ? " Together with 'two'." : " Together with 'one'."), best.size() == 2);
    }
    return best;
  };
  EXPECT_THAT(together(0.95), ElementsAre("one", "two"));
  EXPECT_THAT(together(0.7), IsEmpty()) << "they would have to make more of each other than is ever seen";
}

TEST(Search, TriesAtOnceWhatEachGainsTooLittleToBeSeen) {
  // Each gains less than the 1 % that a trial must show.
  const auto together = [](double one, double loser, const std::string& group) {
    Search search(
        {{.name = "one", .group = group}, {.name = "two", .group = group}, {.name = "three"}, {.name = "loser"}}, {});
    const Spent spent = explore(search, {.seconds =
                                             [=](const Names& on) {
                                               double seconds = 1;
                                               for (const auto& name : on) seconds /= name == "loser" ? loser : one;
                                               return seconds;
                                             },
                                         .noise = 0.004});
    for (const auto& entry : search.entries()) {
      if (entry.status != Status::Accepted) continue;
      EXPECT_THAT(entry.reason, HasSubstr(" Together with '")) << entry.strategy;
    }
    return spent.best;
  };
  EXPECT_THAT(together(1.009, 0.98, ""), ElementsAre("one", "two", "three"));
  EXPECT_THAT(together(1.009, 0.98, "g"), ElementsAre("one", "three")) << "one of a group";
  EXPECT_THAT(together(1.002, 0.98, ""), IsEmpty()) << "all of them gain too little";
  EXPECT_THAT(together(0.997, 1.009, ""), IsEmpty()) << "one alone";
}

TEST(Search, TriesAtOnceWhatIsLeftOpenBeforeWhatHasACost) {
  // With "compile" active neither of the others, which renew it, is worth a trial any more.
  Search search({{.name = "one"},
                 {.name = "two"},
                 {.name = "compile", .interacts = {"one", "two"}, .expected_cost = 100, .expected_speedup = 1.5}},
                {.steps_planned = 100'000, .step_seconds = 1, .budget_seconds = 1000, .repay_steps = 240});
  std::vector<Names> challengers;
  while (const auto trial = search.ask()) {
    challengers.push_back(trial->challenger);
    PairedTestResult result;
    result.decision = trial->challenger.size() > 1 ? Decision::Accept : Decision::Reject;
    result.speedup = {0.98, 1.04, 1.1, 0.95};
    result.pairs = 5;
    result.incumbent = result.challenger = 1;
    search.tell({.paired_test = result, .elapsed_seconds = 10});
  }
  EXPECT_THAT(challengers,
              ElementsAre(Names{"one"}, Names{"two"}, Names{"one", "two"}, Names{"one", "two", "compile"}));
}

TEST(Search, TakesDependentsOutWithWhatTheyRequire) {
  // "late" is much better than "base", with which it cannot be; "needy" falls with "base".
  Search search(
      {{.name = "base", .group = "g"}, {.name = "needy", .requires_ = {"base"}}, {.name = "late", .group = "g"}}, {});
  const Spent spent =
      explore(search, {.seconds = [](const Names& on) {
                return has(on, "late") ? 0.4 : (has(on, "base") ? 0.9 : 1) * (has(on, "needy") ? 0.9 : 1);
              }});
  EXPECT_THAT(spent.best, ElementsAre("late"));
  EXPECT_THAT(search.entries()[2].reason, AllOf(HasSubstr("In place of"), HasSubstr("'base'"), HasSubstr("'needy'")));
  EXPECT_THAT(search.entries()[1].reason, HasSubstr("It was active until 'late' in its place was faster"));
  for (const Trial& trial : spent.all) {
    EXPECT_TRUE(!has(trial.challenger, "needy") || has(trial.challenger, "base"));
  }
}

TEST(Search, GoesOnWithoutWhatIsDropped) {
  // "lie" takes all that "honest" would gain; "needy" falls with it.
  const World world{.seconds = [](const Names& on) {
    return (has(on, "lie") || has(on, "honest") ? 0.5 : 1) * (has(on, "needy") ? 0.9 : 1);
  }};
  Search search({{.name = "lie", .expected_speedup = 2}, {.name = "honest"}, {.name = "needy", .requires_ = {"lie"}}},
                {.step_seconds = 1, .budget_seconds = 90});
  EXPECT_THAT(explore(search, world).best, ElementsAre("lie", "needy"));
  EXPECT_THROW(search.drop("honest", Status::Refused, ""), Error);
  search.drop("lie", Status::Refused, "step 7 is wrong");
  EXPECT_THAT(search.best(), IsEmpty());
  EXPECT_THAT(explore(search, world).best, ElementsAre("honest"));
  EXPECT_EQ(search.entries()[0].status, Status::Refused);
  EXPECT_EQ(search.entries()[0].reason, "step 7 is wrong");
  EXPECT_THAT(search.entries()[2].reason, HasSubstr("'lie'"));
}

TEST(Search, TriesWhatPromisesMostFirst) {
  Search search({{.name = "one"}, {.name = "two", .expected_speedup = 2}, {.name = "three"}}, {});
  const Spent spent = explore(search, {.seconds = [](const Names&) { return 1.0; }});
  EXPECT_EQ(spent.all[0].strategy, "two");
  EXPECT_EQ(spent.all[1].strategy, "one");
}

TEST(Search, WhatIsPromisedDependsOnWhereTheTimeGoes) {
  const auto first = [](double share, double forward = 1.3) {
    Search search({{.name = "forward", .expected_speedup = forward},
                   {.name = "update", .group = "optimizer", .expected_speedup = 1.2}},
                  {.optimizer_share = share});
    return search.ask()->strategy;
  };
  EXPECT_EQ(first(0), "forward");
  EXPECT_EQ(first(0, 1.1), "update") << "where the share is not known, what is expected of each";
  EXPECT_EQ(first(0.02), "forward");
  EXPECT_EQ(first(0.6), "update");
  EXPECT_THROW(first(1.5), Error);
}

TEST(Search, TriesOfUpdatesTimedByThemselvesOnlyTheFastest) {
  const auto make = [](double share) {
    return Search({{.name = "hoped", .expected_speedup = 1.3},
                   {.name = "fast", .group = "optimizer", .update_speedup = 2},
                   {.name = "near", .group = "optimizer", .update_speedup = 3.95},
                   {.name = "fastest", .group = "optimizer", .update_speedup = 4},
                   {.name = "slower", .group = "optimizer", .update_speedup = 0.9}},
                  {.step_seconds = 1, .optimizer_share = share});
  };
  const Landscape seconds = [](const Names& on) {
    return 0.8 + 0.2 / (has(on, "fastest") ? 4 : has(on, "near") ? 3.95 : has(on, "fast") ? 2 : 1);
  };
  Search search = make(0.2);
  const Spent spent = explore(search, {.seconds = seconds});
  EXPECT_THAT(spent.best, ElementsAre("fastest"));
  // The second is as good as the first, so that it cannot be told apart; what is known to pay goes before what is
  // hoped.
  EXPECT_THAT(tried(spent), ElementsAre("fastest", "hoped"));
  EXPECT_THAT(search.entries()[1].reason, HasSubstr("2.000x as fast as the one given, that of 'near'"));
  EXPECT_THAT(search.entries()[2].reason, HasSubstr("makes the step 0.99"));

  Search after_failure = make(0.2);
  const Spent second = explore(after_failure, {.seconds = seconds, .broken = {"fastest", "near"}});
  EXPECT_THAT(second.best, ElementsAre("fast"));
  EXPECT_THAT(tried(second), ElementsAre("fastest", "near", "fast", "hoped"));

  Search little = make(0.005);
  EXPECT_THAT(tried(explore(little, {.seconds = seconds})), ElementsAre("hoped"));
  EXPECT_THAT(little.entries()[3].reason, HasSubstr("makes the step 1.004x as fast"));
}

TEST(Search, OfAnUpdateThatWasProvenTheStepNeedOnlyAgree) {
  Search search(
      {{.name = "proven", .group = "optimizer", .update_speedup = 4, .update_proven = true}, {.name = "other"}},
      {.step_seconds = 1, .optimizer_share = 0.2});
  const Spent spent =
      explore(search, {.seconds = [](const Names& on) { return has(on, "proven") ? 0.85 : 1; }, .noise = 0.005});
  ASSERT_EQ(spent.all.size(), 2U);
  EXPECT_EQ(spent.all[0].strategy, "proven");
  EXPECT_EQ(spent.all[0].paired_test.false_accept, PairedTestOptions::agreement().false_accept);
  EXPECT_EQ(spent.all[0].paired_test.threshold, 1);
  EXPECT_EQ(search.entries()[0].pairs, 5);
  EXPECT_EQ(spent.all[1].paired_test.false_accept, PairedTestOptions{}.false_accept);
}

TEST(Search, RefusedStrategiesDoNotTakeTheTurnOfExactOnes) {
  Search search({{.name = "bf16", .kind = Kind::Precision, .expected_speedup = 2},
                 {.name = "null", .kind = Kind::Tolerance},
                 {.name = "keep_heap", .expected_speedup = 1.08},
                 {.name = "likely", .kind = Kind::Tolerance, .expected_speedup = 1.3},
                 {.name = "rarely", .expected_speedup = 1.02}},
                SearchOptions::for_run(1'000, 0.2, 0, 1));
  Names names;
  while (const auto trial = search.ask()) {
    names.push_back(trial->strategy);
    EXPECT_GT(trial->paired_test.budget_seconds, 0);
    search.charge(trial->strategy == "bf16" ? 6 : 0);  // verifying it takes the budget of 4 s
    PairedTestResult paired_test;
    paired_test.decision = Decision::Accept;
    paired_test.speedup = {1.4, 1.5, 1.6, 0.95};
    search.tell({.paired_test = paired_test, .verified = false});
  }
  // Half of the run is 100 s, and a trial may take 40 steps, 8 s; a tenth of the run is 20 s.
  EXPECT_THAT(names, ElementsAre("bf16", "likely", "keep_heap"));
  EXPECT_THAT(search.entries()[1].reason, HasSubstr("budget"));
  EXPECT_THAT(search.entries()[4].reason, HasSubstr("budget"));
}

TEST(Search, WhatCanGainNothingIsNotTried) {
  Search search({{.name = "keep_heap", .max_speedup = 1.004}}, {});
  EXPECT_FALSE(search.ask().has_value());
  EXPECT_THAT(search.entries()[0].reason, HasSubstr("1.004x as fast at best"));
}

TEST(Search, WhatTheStepLeavesNoGainIsNotTriedUntilItDoes) {
  Search search({{.name = "pool"}, {.name = "heap", .interacts = {"pool"}}}, {});
  const auto first = search.ask();
  search.bound("heap", 1.005);
  ASSERT_EQ(search.ask()->strategy, "pool");
  search.tell({.paired_test = {.decision = Decision::Accept, .speedup = {1.9, 2, 2.1, 0.95}, .pairs = 9}});
  search.bound("heap", 1);
  EXPECT_FALSE(search.ask());
  EXPECT_THAT(search.entries()[1].reason, HasSubstr("1.000x as fast at best"));
  search.drop("pool", Status::Refused, "the numbers are others");
  search.bound("heap", 1.5);
  EXPECT_EQ(search.ask()->strategy, "heap");
  EXPECT_THROW(search.bound("hepa", 2), Error);
  EXPECT_THROW(search.bound("heap", 0), Error);
}

TEST(Search, WhatWouldTakeAnothersPlaceIsJudgedByWhatItGainsBeyondIt) {
  Search search({{.name = "bf16", .group = "precision", .expected_speedup = 2},
                 {.name = "other_bf16", .group = "precision", .expected_speedup = 1.5},
                 {.name = "linear", .expected_speedup = 1.1}},
                {});
  ASSERT_EQ(search.ask()->strategy, "bf16");
  search.tell({.paired_test = {.decision = Decision::Accept, .speedup = {1.4, 1.45, 1.5, 0.95}, .pairs = 9}});
  EXPECT_EQ(search.ask()->strategy, "linear");
}

TEST(Search, OneOfAGroupWithCostsSpeaksForTheOthers) {
  const auto trials = [](double compiled, const Names& wrong) {
    Search search({{.name = "compile", .group = "compile", .expected_cost = 10, .expected_speedup = 1.5},
                   {.name = "compile_max", .group = "compile", .expected_cost = 20, .expected_speedup = 1.4}},
                  SearchOptions::for_run(100'000, 0.1, 0, 1));
    const Spent spent = explore(
        search, {.seconds = [=](const Names& on) { return on.empty() ? 0.1 : 0.1 / compiled; }, .wrong = wrong});
    if (spent.trials == 1) {
      EXPECT_THAT(search.entries()[1].reason, HasSubstr("much the same as 'compile'"));
    }
    return spent.trials;
  };
  EXPECT_EQ(trials(0.97, {}), 1);
  EXPECT_EQ(trials(1.06, {}), 1);
  EXPECT_EQ(trials(1.5, {"compile"}), 1);
  EXPECT_EQ(trials(1.5, {}), 2);
}

TEST(Search, ChoosesNoThreadsBesideOtherPrograms) {
  for (const bool disturbed : {false, true}) {
    Search search({{.name = "one_thread", .group = "threads"}, {.name = "pool"}}, {.step_seconds = 1});
    while (const auto trial = search.ask()) {
      PairedTestResult paired_test;
      paired_test.decision = trial->removal ? Decision::Reject : Decision::Accept;
      paired_test.speedup = {1.4, 1.5, 1.6, 0.95};
      paired_test.incumbent = 1.5;
      paired_test.challenger = 1;
      paired_test.pairs = 9;
      search.tell({.paired_test = paired_test, .disturbed = disturbed});
    }
    EXPECT_EQ(search.best(), disturbed ? Names{"pool"} : (Names{"one_thread", "pool"}));
    EXPECT_EQ(search.entries()[0].reason.find(" Other programs used the processor") != std::string::npos, disturbed);
  }
}

TEST(Search, DoesTheSameForTheSameSeed) {
  const auto names_of = [] {
    Search search(cnn_strategies(), {.step_seconds = 0.4, .seed = 3});
    Names list;
    for (const Trial& trial : explore(search, {.seconds = cnn, .noise = 0.1}).all) {
      list.push_back(trial.strategy + std::to_string(trial.paired_test.seed) + std::to_string(trial.challenger.size()));
    }
    return list;
  };
  EXPECT_EQ(names_of(), names_of());
}

TEST(Search, NamesTheSameTrialUntilItIsTold) {
  Search search(cnn_strategies(), {});
  EXPECT_EQ(search.ask()->paired_test.seed, search.ask()->paired_test.seed);
  search.skip("allocator", "no glibc");
  EXPECT_EQ(search.ask()->strategy, "channels_last");
  EXPECT_EQ(search.entries()[0].reason, "no glibc");
  EXPECT_EQ(search.entries()[0].status, Status::Skipped);
}

TEST(Search, RefusesWhatDoesNotFitTogether) {
  EXPECT_THROW(Search({{.name = "a"}, {.name = "a"}}, {}), Error);
  EXPECT_THROW(Search({{.name = "a", .requires_ = {"b"}}}, {}), Error);
  EXPECT_NO_THROW(Search({{.name = "a", .interacts = {"b"}}}, {}));
  EXPECT_THROW(Search(std::vector<StrategyFacts>(65), {}), Error);
  Search search({{.name = "a"}}, {});
  EXPECT_THROW(search.tell({}), Error);
  EXPECT_THROW(search.skip("b", ""), Error);
  try {
    Search({{.name = "alpha"}, {.name = "beta"}}, {}).skip("alpa", "");
    ADD_FAILURE() << "it was skipped";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("'alpha'"));
  }
  EXPECT_THROW(search.charge(-1), Error);
}

TEST(Search, AcceptsAtMostOneInAHundredStrategiesThatDoNothing) {
  int accepted = 0;
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    std::vector<StrategyFacts> strategies;
    for (int i = 0; i < 20; ++i) {
      strategies.push_back({.name = "s" + std::to_string(i), .interacts = {"s" + std::to_string((i + 1) % 20)}});
    }
    Search search(strategies, {.seed = seed});
    accepted += static_cast<int>(
        explore(search, {.seconds = [](const Names&) { return 0.01; }, .noise = 0.05}, seed).best.size());
  }
  EXPECT_LE(accepted, 10) << "of 1,000";
}

/// Eight strategies, two of them in a group, with their own effects and effects of two.
struct Random {
  static constexpr std::size_t kCount = 8;
  double own[kCount];
  double both[kCount][kCount] = {};
  std::vector<StrategyFacts> strategies;

  explicit Random(std::uint64_t seed) {
    PhiloxStream random(seed, 17);
    for (std::size_t i = 0; i < kCount; ++i) {
      // Most do little, some help a lot, some hurt.
      const double dice = random.uniform_double();
      own[i] = dice < 0.3 ? 0 : dice < 0.7 ? -0.5 * random.uniform_double() : 0.3 * random.uniform_double();
      strategies.push_back({.name = std::to_string(i), .group = i >= kCount - 2 ? "g" : ""});
    }
    for (std::size_t i = 0; i < kCount; ++i) {
      for (std::size_t j = i + 1; j < kCount; ++j) {
        if (random.uniform_double() > 0.25) continue;
        both[i][j] = 0.8 * (random.uniform_double() - 0.5);
        strategies[i].interacts.push_back(strategies[j].name);
      }
    }
  }

  [[nodiscard]] double seconds(unsigned mask) const {
    double log_time = 0;
    for (std::size_t i = 0; i < kCount; ++i) {
      if ((mask >> i & 1U) == 0) continue;
      log_time += own[i];
      for (std::size_t j = i + 1; j < kCount; ++j) log_time += (mask >> j & 1U) != 0 ? both[i][j] : 0;
    }
    return 0.1 * std::exp(log_time);
  }
  [[nodiscard]] double seconds(const Names& on) const {
    unsigned mask = 0;
    for (const std::string& name : on) mask |= 1U << std::stoul(name);
    return seconds(mask);
  }
  /// Of all combinations, those with both of the group left out.
  [[nodiscard]] std::pair<double, int> best() const {
    double least = 1e9;
    int count = 0;
    for (unsigned mask = 0; mask < 1U << kCount; ++mask) {
      if (mask >> (kCount - 2) == 3) continue;
      ++count;
      least = std::min(least, seconds(mask));
    }
    return {least, count};
  }
};

TEST(Search, ComesWithinThreePercentOfExhaustiveSearchAtATenthOfItsCost) {
  int close = 0;
  double steps = 0;
  double exhaustive_steps = 0;
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    const Random world(seed);
    Search search(world.strategies, {.step_seconds = 0.1, .seed = seed});
    const Spent spent =
        explore(search, {.seconds = [&](const Names& on) { return world.seconds(on); }, .noise = 0.03}, seed);
    const auto [least, combinations] = world.best();
    close += world.seconds(spent.best) <= 1.03 * least;
    steps += spent.steps;
    exhaustive_steps += 40.0 * combinations;  // 20 pairs of each against the run as given
  }
  EXPECT_GE(close, 170);
  EXPECT_LE(steps, exhaustive_steps / 10);
  RecordProperty("close", close);
  RecordProperty("share", std::to_string(steps / exhaustive_steps));
}

}  // namespace
}  // namespace oxytorch::tune
