// What the search may spend: on a trial, on one-off costs, on everything.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "oxytorch/error.h"
#include "oxytorch/tune/policy.h"
#include "oxytorch/tune/search.h"
#include "search_world.h"

namespace oxytorch::tune {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

TEST(Search, TriesWhatTakesACostAnewOnlyWhereItRepaysThatSoon) {
  const Landscape seconds = [](const Names& on) {
    return (has(on, "compile") ? 0.5 : 1.0) / (has(on, "other") ? 1.2 : 1.0) / (has(on, "beside") ? 1.2 : 1.0);
  };
  const auto best = [&](double expected, double repay_steps) {
    Search search({{.name = "compile",
                    .interacts = {"other", "beside"},
                    .renewed_by = {"other"},
                    .expected_cost = 30,
                    .expected_speedup = 2},
                   {.name = "other", .requires_ = {"compile"}, .expected_speedup = expected},
                   {.name = "beside"}},
                  {.steps_planned = 100'000, .step_seconds = 1, .budget_seconds = 1000, .repay_steps = repay_steps});
    const Spent spent = explore(search, {.seconds = seconds, .cost = {{"compile", 30}}});
    if (!has(spent.best, "other")) {
      EXPECT_THAT(search.entries()[1].reason, HasSubstr("one-off costs"));
    }
    return spent.best;
  };
  EXPECT_THAT(best(1.1, 240), ElementsAre("compile", "beside"));
  EXPECT_THAT(best(1.5, 240), ElementsAre("compile", "other", "beside"));
  EXPECT_THAT(best(1.1, 0), ElementsAre("compile", "other", "beside"));
}

TEST(Search, MaySpendWhatTheSavingRepaysSoon) {
  std::vector<StrategyFacts> strategies{{.name = "good", .expected_speedup = 2}};
  for (int i = 0; i < 30; ++i) strategies.push_back({.name = "null_" + std::to_string(i), .expected_speedup = 1.005});
  const Landscape seconds = [](const Names& on) { return has(on, "good") ? 0.5 : 1; };
  const auto trials = [&](double repay_steps) {
    Search search(strategies, {.step_seconds = 1, .budget_seconds = 10, .repay_steps = repay_steps});
    return explore(search, {.seconds = seconds}).trials;
  };
  EXPECT_EQ(trials(0), 1);
  EXPECT_GT(trials(100), 5);
  EXPECT_LT(trials(100), 25);
}

TEST(Search, TriesAgainOnlyWhatTheSavingRepays) {
  const Landscape seconds = [](const Names& on) { return has(on, "good") ? has(on, "late") ? 0.4 : 0.7 : 1; };
  const auto best = [&](double repay_steps) {
    Search search({{.name = "late", .interacts = {"good"}, .expected_speedup = 3}, {.name = "good"}},
                  {.step_seconds = 1, .budget_seconds = 1000, .repay_steps = repay_steps});
    return explore(search, {.seconds = seconds}).best;
  };
  EXPECT_THAT(best(1000), ElementsAre("late", "good"));
  EXPECT_THAT(best(10), ElementsAre("good"));
  EXPECT_THAT(best(0), ElementsAre("late", "good"));
}

TEST(Search, TriesAtOnceWhatWasLeftOpenWhereTheRunRepaysIt) {
  const auto asked_at_once = [](std::int64_t steps, double gain, double repay_steps) {
    Search search({{.name = "one"}, {.name = "two"}},
                  {.steps_planned = steps, .step_seconds = 1, .budget_seconds = 60, .repay_steps = repay_steps});
    for (int i = 0; i < 2; ++i) {
      EXPECT_TRUE(search.ask()->incumbent.empty());
      PairedTestResult open;
      open.speedup = {0.9, gain, 1.3, 0.95};
      open.pairs = 5;
      search.tell({.paired_test = open, .elapsed_seconds = 25});
    }
    const auto trial = search.ask();
    if (trial && trial->challenger == Names{"one", "two"}) {
      EXPECT_DOUBLE_EQ(trial->paired_test.budget_seconds, 40) << "a whole trial";
    }
    return trial.has_value();
  };
  // Of 10,000 steps half saves 870 s, of the 40 that the trial takes, and a tenth is 1,000 s; of 490 it is 42 and 49.
  EXPECT_TRUE(asked_at_once(10'000, 1.1, 240));
  EXPECT_FALSE(asked_at_once(10'000, 1.005, 240)) << "both at once gain too little";
  EXPECT_FALSE(asked_at_once(490, 1.1, 240)) << "a tenth was spent";
  EXPECT_TRUE(asked_at_once(510, 1.1, 240));
}

TEST(Search, TriesOnceMoreWhatItsWholeIntervalSpeaksFor) {
  const auto trials = [](double low, bool cost_too_much, bool proven = false) {
    Search search(
        {{.name = "one", .group = "optimizer", .update_speedup = 8, .update_proven = proven}},
        {.steps_planned = 10'000, .step_seconds = 1, .budget_seconds = 60, .repay_steps = 240, .optimizer_share = 0.1});
    std::vector<PairedTestOptions> found;
    while (const auto trial = search.ask()) {
      found.push_back(trial->paired_test);
      PairedTestResult result;
      result.decision = cost_too_much ? Decision::Accept : Decision::Reject;
      result.speedup = {low, 1.1, 1.2, 0.95};
      result.pairs = 5;
      result.incumbent = 1;
      search.tell({.paired_test = result, .cost_seconds = cost_too_much ? 1e6 : 0, .elapsed_seconds = 70});
    }
    return found;
  };
  const auto two = trials(1.01, false);
  ASSERT_EQ(two.size(), 2U);
  EXPECT_DOUBLE_EQ(two[1].budget_seconds, 40) << "a whole trial";
  EXPECT_GT(two[1].false_accept, 2 * two[0].false_accept) << "what the first has shown need not be shown again";
  EXPECT_EQ(trials(0.99, false).size(), 1U);
  EXPECT_EQ(trials(0.99, false, true).size(), 2U) << "its update by itself has shown it";
  EXPECT_EQ(trials(1.01, true).size(), 1U) << "it was shown, and does not pay";
}

TEST(Search, TriesByItselfWhatATrialOfSeveralDidNotTurnOn) {
  const auto challengers = [](double low_of_two, bool together) {
    Search search({{.name = "one"}, {.name = "two"}, {.name = "three"}},
                  {.steps_planned = 10'000, .step_seconds = 1, .budget_seconds = 60, .repay_steps = 240});
    std::vector<Names> found;
    while (const auto trial = search.ask()) {
      found.push_back(trial->challenger);
      const bool first = found.size() <= 3;
      PairedTestResult result;
      result.decision = !first && (trial->challenger.size() == 1 || together) ? Decision::Accept : Decision::Reject;
      const double low = trial->strategy == "two" ? low_of_two : trial->strategy == "three" ? 1.01 : 0.98;
      result.speedup = {low, first && trial->strategy == "one" ? 1.04 : 1.1, 1.2, 0.95};
      result.pairs = 5;
      result.incumbent = result.challenger = 1;
      search.tell({.paired_test = result, .elapsed_seconds = 20});
    }
    return std::vector<Names>(found.begin() + 3, found.end());
  };
  const Names all{"one", "two", "three"};
  EXPECT_THAT(challengers(1.05, true), ElementsAre(all));
  // What is left open beside it has a trial of its own, now that the ground is another.
  EXPECT_THAT(challengers(1.05, false), ElementsAre(all, Names{"two"}, all, Names{"two", "three"}));
  EXPECT_THAT(challengers(0.99, false), ElementsAre(all, Names{"three"}, all));
}

TEST(Search, BudgetsByTheStepTheRunAndTheUser) {
  const auto usual = SearchOptions::for_run(10'000, 0.5, 0, 7);
  EXPECT_DOUBLE_EQ(usual.budget_seconds, 60 * 0.5);
  EXPECT_DOUBLE_EQ(usual.repay_steps, 240);
  EXPECT_DOUBLE_EQ(usual.conclude_steps, 50);
  EXPECT_EQ(usual.seed, 7);
  const auto brief = SearchOptions::for_run(1'000, 0.5, 0, 7);
  EXPECT_DOUBLE_EQ(brief.budget_seconds, 20 * 0.5);
  EXPECT_DOUBLE_EQ(brief.repay_steps, 30);
  EXPECT_DOUBLE_EQ(SearchOptions::for_run(10'000, 0.001, 0, 7).budget_seconds, 3);
  const auto named = SearchOptions::for_run(10'000, 0.5, 1, 7);
  EXPECT_DOUBLE_EQ(named.budget_seconds, 1);
  EXPECT_DOUBLE_EQ(named.repay_steps, 0);
}

TEST(Search, LetsNoTrialTakeMoreThanAQuarterOfTheBudget) {
  Search search({{.name = "one"}}, {.step_seconds = 1, .budget_seconds = 100});
  EXPECT_DOUBLE_EQ(search.ask()->paired_test.budget_seconds, 25);
}

TEST(Search, GivesATrialTimeByWhatItPromises) {
  const auto seconds = [](double expected) {
    Search search({{.name = "one", .expected_speedup = expected}},
                  {.step_seconds = 1, .budget_seconds = 40, .repay_steps = 200});
    EXPECT_GT(search.ask()->paired_test.worth, 1);
    return search.ask()->paired_test.budget_seconds;
  };
  EXPECT_DOUBLE_EQ(seconds(1.05), 10);
  EXPECT_DOUBLE_EQ(seconds(2), 25);
  EXPECT_DOUBLE_EQ(seconds(100), 40);
}

TEST(Search, GivesNoTrialMoreThanFortyStepsOrAThirdOfASecond) {
  const auto seconds = [](double step) {
    Search search({{.name = "one", .expected_speedup = 4}},
                  {.step_seconds = step, .budget_seconds = 4'000 * step, .repay_steps = 2'000});
    return search.ask()->paired_test.budget_seconds;
  };
  EXPECT_DOUBLE_EQ(seconds(1), 40);
  EXPECT_DOUBLE_EQ(seconds(0.001), 0.3);
}

TEST(Search, LetsATrialGoOnForWhatTheRunRepays) {
  const auto repay = [](double repay_steps) {
    Search search({{.name = "one"}}, {.step_seconds = 1, .budget_seconds = 40, .repay_steps = repay_steps});
    return search.ask()->paired_test.repay_steps;
  };
  EXPECT_DOUBLE_EQ(repay(200), 200);
  EXPECT_DOUBLE_EQ(repay(0), 0);
}

TEST(Search, HasAnAccountOfItsOwnForOneOffCosts) {
  const World world{.seconds = [](const Names& on) { return has(on, "null") ? 1.0 : 1.0 - 0.3 * has(on, "compile"); },
                    .noise = 0,
                    .cost = {{"compile", 60}}};
  const std::vector<StrategyFacts> strategies{{.name = "null", .expected_speedup = 2},
                                              {.name = "compile", .expected_cost = 60}};
  // The first trial spends all of the budget; compiling has a tenth of the planned run.
  Search lasting(strategies, {.steps_planned = 1000, .step_seconds = 1, .budget_seconds = 1});
  EXPECT_THAT(explore(lasting, world).best, ElementsAre("compile"));
  Search brief(strategies, {.steps_planned = 500, .step_seconds = 1, .budget_seconds = 1});
  EXPECT_THAT(explore(brief, world).best, IsEmpty());
  EXPECT_THAT(brief.entries()[1].reason, HasSubstr("50 s of the planned run"));
}

TEST(Search, KeepsOnlyWhatRepaysItsCost) {
  const World world{.seconds = [](const Names& on) { return has(on, "compile") ? 0.08 : 0.1; },
                    .cost = {{"compile", 30}}};
  Search brief({{.name = "compile"}}, {.steps_planned = 1000, .step_seconds = 0.1});
  EXPECT_THAT(explore(brief, world).best, IsEmpty());  // saves 20 s
  EXPECT_EQ(brief.entries()[0].status, Status::Rejected);
  EXPECT_NEAR(brief.entries()[0].break_even_steps.value(), 1500, 100);
  Search lasting({{.name = "compile"}}, {.steps_planned = 2000, .step_seconds = 0.1});
  EXPECT_THAT(explore(lasting, world).best, ElementsAre("compile"));
  EXPECT_NEAR(lasting.entries()[0].break_even_steps.value(), 1500, 100);
  EXPECT_EQ(lasting.entries()[0].cost_seconds, 30);
}

TEST(Search, SkipsWhatCannotRepayItselfEvenAtBest) {
  Search search({{.name = "compile", .expected_cost = 30, .max_speedup = 1.25}},
                {.steps_planned = 1000, .step_seconds = 0.1});
  EXPECT_FALSE(search.ask().has_value());
  EXPECT_EQ(search.entries()[0].status, Status::Skipped);
  EXPECT_THAT(search.entries()[0].reason, HasSubstr("30"));
}

TEST(Search, TriesWhatIsFreeBeforeWhatHasACost) {
  // As on a language model: the compiler has the highest expected speedup, and the allocator pays.
  Search search({{.name = "allocator", .group = "host_memory", .expected_speedup = 1.1},
                 {.name = "keep_heap", .group = "host_memory", .part_of = {"allocator"}, .expected_speedup = 1.08},
                 {.name = "bf16", .kind = Kind::Precision, .expected_speedup = 2},
                 {.name = "compile", .kind = Kind::Tolerance, .expected_cost = 16, .expected_speedup = 3},
                 {.name = "step_tail", .kind = Kind::Tolerance}},
                SearchOptions::for_run(10'000, 0.2, 0, 1));
  const Spent spent = explore(search, {.seconds = [](const Names& on) { return has(on, "allocator") ? 0.14 : 0.2; }});
  EXPECT_THAT(tried(spent), ElementsAre("bf16", "allocator", "step_tail", "compile"));
  EXPECT_THAT(search.entries()[1].reason, HasSubstr("a part of what 'allocator' does"));
}

TEST(Search, DoesNotTryWhatIsNotLikelyToRepayItsCost) {
  const auto make = [] {
    return Search({{.name = "compile", .kind = Kind::Tolerance, .expected_cost = 16, .expected_speedup = 1.3}},
                  SearchOptions::for_run(10'000, 0.1, 0, 1));
  };
  Search hoped = make();
  ASSERT_EQ(hoped.ask()->strategy, "compile");
  hoped.expect("compile", 1.05);  // convolutions take nearly all of the step
  EXPECT_FALSE(hoped.ask().has_value());
  EXPECT_EQ(hoped.entries()[0].status, Status::Skipped);
  EXPECT_THAT(hoped.entries()[0].reason, HasSubstr("likely"));
  Search likely = make();
  likely.expect("compile", 1.2);
  EXPECT_TRUE(likely.ask().has_value());
  EXPECT_THROW(likely.expect("compiler", 1.2), Error);
  EXPECT_THROW(likely.expect("compile", 0), Error);
}

TEST(Search, EverythingTogetherHasABound) {
  const auto options = SearchOptions::for_run(400, 0.033, 0, 1);
  EXPECT_DOUBLE_EQ(options.total_seconds, 6);
  EXPECT_DOUBLE_EQ(SearchOptions::for_run(10'000, 0.5, 0, 1).total_seconds, 750);
  EXPECT_DOUBLE_EQ(SearchOptions::for_run(10'000, 0.5, 20, 1).total_seconds, 790);
  std::vector<StrategyFacts> strategies;
  for (int i = 0; i < 20; ++i) strategies.push_back({.name = "s" + std::to_string(i), .expected_speedup = 1.2});
  strategies.push_back({.name = "compile", .expected_cost = 5, .expected_speedup = 3});
  // A step of 33 ms takes 2.5 s beside another program.
  Search search(strategies, options);
  double seconds = 0;
  while (const auto trial = search.ask()) {
    EXPECT_NE(trial->strategy, "compile");
    PairedTest paired_test(trial->paired_test);
    while (const auto side = paired_test.next()) {
      paired_test.record(*side, 2.5);
      seconds += 2.5;
    }
    EXPECT_EQ(paired_test.result().decision, Decision::Reject);
    search.tell({.paired_test = paired_test.result()});
  }
  EXPECT_LE(seconds, 12);
  EXPECT_LE(search.seconds_left(), 0);
  EXPECT_THAT(search.entries()[19].reason, HasSubstr("Everything together may take 6"));
  auto used = options;
  used.used_seconds = 7;
  Search late(strategies, used);
  EXPECT_FALSE(late.ask().has_value());
  Search charged(strategies, options);
  charged.charge(6);  // a verification
  EXPECT_FALSE(charged.ask().has_value());
}

TEST(Search, WhatIsFoundIsMeasuredAsLongAsATenthOfItsSaving) {
  // Half of each of 3,600 steps of 14 ms is saved; verifying has taken all of the seconds there were.
  const auto seconds_to_conclude = [](double factor) {
    auto options = SearchOptions::for_run(3600, 0.014, 0, 1);
    Search search({{.name = "prefetch", .expected_speedup = 1.6}}, options);
    explore(search, {.seconds = [=](const Names& on) { return on.empty() ? 0.014 : 0.014 * factor; }, .noise = 0});
    search.charge(options.total_seconds);
    return search.conclusion().most_seconds;
  };
  EXPECT_NEAR(seconds_to_conclude(0.5), 0.1 * 3600 * 0.007, 0.1);
  EXPECT_LT(seconds_to_conclude(0.97), 0.5) << "of which little is saved";
}

TEST(Search, EndsWithItsBudget) {
  std::vector<StrategyFacts> strategies;
  for (int i = 0; i < 20; ++i) strategies.push_back({.name = "s" + std::to_string(i)});
  Search search(strategies, {.step_seconds = 1, .budget_seconds = 60});
  const Spent spent = explore(search, {.seconds = [](const Names& on) { return std::pow(0.97, on.size()); }});
  EXPECT_LT(spent.steps, 60 + 30);
  EXPECT_GT(spent.trials, 1);
  EXPECT_THAT(search.entries().back().reason, HasSubstr("budget"));
  Search charged(strategies, {.budget_seconds = 60});
  charged.charge(60);
  EXPECT_FALSE(charged.ask().has_value());
}

}  // namespace
}  // namespace oxytorch::tune
