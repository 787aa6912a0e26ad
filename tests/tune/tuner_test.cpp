// The tuner on a workload that is a table of seconds: what it decides, in which order, and that it leaves no trace.
#include "oxytorch/tune/tuner.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "oxytorch/error.h"
#include "oxytorch/load.h"
#include "oxytorch/logging.h"
#include "oxytorch/tune/policy.h"
#include "oxytorch/tune/timing.h"
#include "tuner_fixture.h"

namespace oxytorch::tune {
namespace {

using testing::Contains;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Pair;

TEST_F(TunerTest, KeepsWhatPaysAndSaysWhyTheRestIsNotThere) {
  table.plant("half", 0.5);
  table.plant("worse", 1.5);
  table.plant("nothing", 1);
  table.plant({.offer = {.name = "not_here", .refused = "the loop is yours"}, .factor = 0.1});
  table.plant("rounds", 0.1, Kind::Tolerance);
  const auto made = tuned({.level = "basic"});
  EXPECT_THAT(made.accepted(), ElementsAre("half"));
  EXPECT_NEAR(made.speedup->mid, 2, 0.02);
  EXPECT_NEAR(made.baseline_seconds, 0.02, 1e-4);
  EXPECT_NEAR(made.tuned_seconds, 0.01, 1e-4);
  EXPECT_EQ(entry(made, "worse").status, Status::Rejected);
  EXPECT_EQ(entry(made, "nothing").status, Status::Rejected);
  EXPECT_EQ(entry(made, "not_here").reason, "the loop is yours");
  EXPECT_THAT(entry(made, "rounds").reason, HasSubstr("level basic does not allow the kind tolerance"));
  EXPECT_THAT(made.verification, Contains(Pair("all together, as exact", "held")));
  EXPECT_THAT(made.verification, Contains(Pair("restored", "all of it")));
  EXPECT_GT(made.tuning_seconds, 0);
  EXPECT_EQ(made.given_peak_bytes, 1000);
  EXPECT_EQ(made.tuned_peak_bytes, 900);
  EXPECT_EQ(made.tuning_peak_bytes, 1500);
  EXPECT_THAT(table.said, Contains("half against nothing"));
}

TEST_F(TunerTest, KeepsNoHeapForAStepOfWhichAPoolLeavesNoPageFaults) {
  table.faults = 1e5;
  table.keeps = "pool";
  table.plant("pool", 0.5);
  const Offer heap{.name = "heap", .traits = {.group = "host_memory", .interacts = {"pool"}}};
  table.plant({.offer = heap, .factor = 0.9});
  EXPECT_THAT(entry(tuned({.level = "basic"}), "heap").reason, HasSubstr("1.000x as fast at best"));
  table.keeps = "";
  EXPECT_THAT(tuned({.level = "basic"}).accepted(), ElementsAre("pool", "heap"));
}

TEST_F(TunerTest, TriesToKeepTheHeapWhereOtherStepsHappenToFaultNothing) {
  table.faults = 1e5;
  table.keeps = "other";
  table.plant("other", 0.5);
  table.plant({.offer = {.name = "heap", .traits = {.group = "host_memory"}}, .factor = 0.9});
  EXPECT_THAT(tuned({.level = "basic"}).accepted(), ElementsAre("other", "heap"));
}

TEST_F(TunerTest, KeepsTheHeapForPageFaultsThatTrialsHide) {
  const Offer heap{.name = "heap", .traits = {.group = "host_memory", .interacts = {"pool"}, .max_speedup = 2}};
  for (const bool has_faults : {true, false}) {
    for (const std::string name : {"heap", "pool"}) {
      table.planted.clear();
      table.order.clear();
      table.faults = has_faults ? 5e5 : 0;  // 10,000 a step of 20 ms: 2.5 ms at least
      table.hides = true;
      table.plant({.offer = heap, .factor = name == "heap" ? 1 : 1.2});
      table.plant("pool", name == "pool" ? 1 : 1.2);
      table.plant("half", 0.5);
      const auto made = tuned({.level = "basic"});
      EXPECT_EQ(testing::Value(made.accepted(), Contains(name)), has_faults) << name;
      EXPECT_THAT(made.accepted(), Contains("half"));
      if (has_faults) EXPECT_THAT(entry(made, name).reason, HasSubstr("page faults of a step as given"));
    }
  }
}

TEST_F(TunerTest, SaysWhatToSetWhereOtherProgramsKeepTheMachineBusy) {
  std::vector<std::string> said;
  const LogSink before = set_log_sink([&](const LogRecord& record) { said.emplace_back(record.message); });
  double wall = 0;
  set_load_source([&] {
    ++wall;
    return LoadSample{.wall = wall, .busy = 2 * wall, .waited = 0.5 * wall, .cores = 2};
  });
  std::map<std::string, std::optional<std::string>> given;
  for (const char* name : {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"}) {
    const char* const value = std::getenv(name);
    given[name] = value == nullptr ? std::nullopt : std::optional<std::string>(value);
    ::unsetenv(name);
  }
  tuned();
  ::setenv("OMP_WAIT_POLICY", "passive", 1);
  tuned();
  for (const auto& [name, value] : given) {
    value ? ::setenv(name.c_str(), value->c_str(), 1) : ::unsetenv(name.c_str());
  }
  set_log_sink(before);
  const std::string busy =
      "accelerate: the machine is busy: other programs used 2.0 of its 2 cores, and threads of this one waited 50 % of "
      "the time for one. ";
  ASSERT_EQ(std::count_if(said.begin(), said.end(), [&](const auto& text) { return text.starts_with(busy); }), 2);
  EXPECT_THAT(said, Contains(busy + advice_on_shared_cores(true)));
  EXPECT_THAT(advice_on_shared_cores(true), HasSubstr("OMP_WAIT_POLICY=passive"));
  EXPECT_THAT(said, Contains(busy + advice_on_shared_cores(false)));
}

TEST_F(TunerTest, StepsOfADeviceAreTimedInARow) {
  table.alone = 0.005;  // by one step at a time it would be 25 over 15, and 25 over 7
  table.plant("half", 0.5);
  EXPECT_NEAR(tuned().speedup->mid, 2, 0.1);
  Table other;
  other.alone = 0.005;
  other.plant({.offer = {.name = "tenth", .traits = {.max_speedup = 50}}, .factor = 0.1});
  EXPECT_GT(tuned(other).speedup->mid, 8);
}

TEST_F(TunerTest, APeakThatCannotBeMeasuredIsLeftOut) {
  table.plant({.offer = {.name = "half"}, .factor = 0.5, .throws = "step_bytes"});
  const auto made = tuned();
  EXPECT_THAT(made.accepted(), ElementsAre("half"));
  EXPECT_EQ(made.given_peak_bytes, 1000);
  EXPECT_FALSE(made.tuned_peak_bytes);
}

TEST_F(TunerTest, RefusesWhatIsFastAndWrong) {
  table.plant({.offer = {.name = "liar"}, .factor = 0.1, .honest = false});
  table.plant("half", 0.5);
  const auto made = tuned();
  EXPECT_THAT(made.accepted(), ElementsAre("half"));
  EXPECT_EQ(entry(made, "liar").status, Status::Refused);
  EXPECT_THAT(entry(made, "liar").reason, HasSubstr("off by half"));
  // A glance where it won, and all steps of what is kept.
  EXPECT_THAT(table.verified, Contains(Pair(ElementsAre("half"), true)));
  EXPECT_THAT(table.verified, Contains(Pair(ElementsAre("half"), false)));
}

TEST_F(TunerTest, AStrategysOwnFailureIsItsOwn) {
  for (const char* member : {"applies", "expected_cost", "apply", "step"}) {
    Table table;
    table.plant({.offer = {.name = "broken"}, .factor = 0.1, .throws = member});
    table.plant("half", 0.5);
    const auto made = tuned(table);
    EXPECT_THAT(made.accepted(), ElementsAre("half")) << member;
    EXPECT_EQ(entry(made, "broken").status, Status::Failed) << member;
    EXPECT_THAT(entry(made, "broken").reason, HasSubstr("broken throws from " + std::string(member)));
  }
}

TEST_F(TunerTest, WhatTheStepThrowsPassesThroughFromWhereverItIsWithEverythingBack) {
  const auto fill = [](Table& table) {
    table.plant("half", 0.5);
    table.plant({.offer = {.name = "compiled"}, .factor = 0.8, .cost = 0.5});
  };
  fill(table);
  static_cast<void>(tuned());
  const int all = table.calls;
  ASSERT_GT(all, 50);
  for (const bool interrupt : {false, true}) {
    for (int point = 1; point <= all; ++point) {
      Table table;
      fill(table);
      table.throw_at = point;
      table.interrupt = interrupt;
      Tuner tuner(table, {}, {});
      // One throw of the step under a strategy is that strategy's failure; an interrupt is nobody's.
      try {
        static_cast<void>(tuner.tune(nullptr));
        EXPECT_FALSE(interrupt) << point;
      } catch (const Interrupt&) {
        EXPECT_TRUE(interrupt) << point;
      } catch (const std::runtime_error& error) {
        EXPECT_THAT(error.what(), HasSubstr("the data ran out"));
      }
      EXPECT_THAT(table.now, IsEmpty()) << point;
      EXPECT_FALSE(table.moved) << point;
    }
  }
}

TEST_F(TunerTest, TriesNothingWhereNothingCanBeVerified) {
  table.plant("half", 0.5);
  table.everything = "the loss is nan";
  const auto made = tuned();
  EXPECT_THAT(made.accepted(), IsEmpty());
  EXPECT_EQ(entry(made, "half").reason, "the loss is nan");
}

TEST_F(TunerTest, ReusesWhatHoldsAndMeasuresAnewWhatDoesNot) {
  const CertificateStore store(folder_.string());
  table.plant("half", 0.5);
  table.plant("less", 0.8);
  auto made = tuned({}, &store);
  EXPECT_THAT(made.accepted(), ElementsAre("half", "less"));
  store.put(made);
  const int searched = table.calls;
  for (int run = 0; run < 15; ++run) {
    table.calls = 0;
    made = tuned({}, &store);
    EXPECT_LT(table.calls, searched);
    EXPECT_THAT(made.events.back(), HasSubstr("reused, canary"));
    EXPECT_LE(made.events.size(), 10U);
    store.put(made);
  }
  table.planted["less"].factor = 1.2;
  made = tuned({}, &store);
  EXPECT_THAT(made.accepted(), ElementsAre("half"));
  EXPECT_THAT(made.events.back(), HasSubstr("did not hold and was measured anew: the rest is faster without less"));
}

TEST_F(TunerTest, ARememberedStrategyThatThrowsIsLeftOut) {
  for (const char* member : {"applies", "expected_cost", "apply", "step"}) {
    Table table;
    const CertificateStore store((folder_ / member).string());
    table.plant("half", 0.5);
    table.plant("less", 0.8);
    store.put(tuned(table, {}, &store));
    table.planted["less"].throws = member;
    const auto made = tuned(table, {}, &store);
    EXPECT_THAT(made.accepted(), ElementsAre("half")) << member;
    EXPECT_EQ(entry(made, "less").status, Status::Failed) << member;
  }
}

TEST_F(TunerTest, EndsWithTheSecondsForEverything) {
  for (int i = 0; i < 30; ++i) table.plant("equal " + std::to_string(i), 1);
  table.step_seconds = 0.002;
  tuned({.total = 1});
  EXPECT_LT(table.time, 1.1);
  const auto most = table.time;
  table.time = 0;
  tuned({.total = 1, .total_share = 0.1});  // of 10,000 steps of 2 ms
  EXPECT_GT(table.time, most);
  EXPECT_LT(table.time, 2.1);
}

TEST_F(TunerTest, ATrialOfManyStepsABlockEndsWithTheSecondsForEverything) {
  // Of short steps a block holds forty: nine pairs take 70 ms.
  table.plant("hardly", 1 / 1.0102);
  table.step_seconds = 1e-4;
  EXPECT_THAT(tuned({.tune_seconds = 100}).accepted(), ElementsAre("hardly"));
  const auto made = tuned({.tune_seconds = 100, .total = 0.07});
  EXPECT_THAT(entry(made, "hardly").reason, HasSubstr("stopped, as tuning has taken what it may of this run"));
}

TEST_F(TunerTest, TriesNothingWhereAFewStepsTakeTheSecondsForEverything) {
  table.plant("half", 0.5);
  table.step_seconds = 0.1;
  const auto made = tuned({.total = 1});
  EXPECT_LT(table.time, 0.5);
  EXPECT_THAT(made.accepted(), IsEmpty());
  EXPECT_THAT(entry(made, "half").reason, HasSubstr("a step takes 100 ms, and everything together may take 1 s"));
  EXPECT_THAT(tuned({.total = 1, .total_share = 0.1}).accepted(), ElementsAre("half"));  // of 10,000 steps
}

TEST_F(TunerTest, MakesActiveWhatSettingsAskFor) {
  table.plant("nothing", 1);
  table.plant({.offer = {.name = "wrong"}, .honest = false});
  table.plant({.offer = {.name = "absent", .refused = "not on this device"}});
  Tuner tuner(table, {}, {.required = {{"a", "1", {"nothing"}}, {"b", "2", {"wrong"}}, {"c", "3", {"absent"}}}});
  auto made = tuner.tune(nullptr);
  EXPECT_THAT(made.accepted(), IsEmpty());
  tuner.activate(made);
  EXPECT_THAT(tuner.activate_required(made), ElementsAre("nothing"));
  EXPECT_THAT(table.now, ElementsAre("nothing"));
  EXPECT_THAT(entry(made, "nothing").reason, HasSubstr("asked for by a = '1', whatever it gains"));
  EXPECT_THAT(entry(made, "wrong").reason, HasSubstr("b = '2' asks for it, and it cannot be: wrong is off"));
  EXPECT_THAT(entry(made, "absent").reason, HasSubstr("c = '3' asks for it, and it cannot be: not on this device"));
}

TEST_F(TunerTest, NotesWhatCannotBeMadeActiveAtTheEnd) {
  table.plant("half", 0.5);
  table.plant("less", 0.8);
  Tuner tuner(table, {}, {});
  auto made = tuner.tune(nullptr);
  table.planted["half"].throws = "apply";
  tuner.activate(made);
  EXPECT_THAT(table.now, ElementsAre("less"));
  EXPECT_EQ(entry(made, "half").status, Status::Failed);
  EXPECT_THAT(entry(made, "half").reason, HasSubstr("could not be made active: half throws"));
}

TEST_F(TunerTest, AShortRunPaysForNoProofThatItCannotRepay) {
  const auto after = [](Kind kind, TunerOptions options) {
    Table table;
    table.step_seconds = 0.3;
    table.plant("two_thirds", 2.0 / 3, kind);
    auto made = tuned(table, std::move(options));
    const bool proven =
        std::any_of(table.verified.begin(), table.verified.end(), [](const auto& v) { return !v.second; });
    EXPECT_EQ(proven, !made.accepted().empty());
    return made;
  };
  const auto brief = after(Kind::Precision, {.steps_planned = 200});
  EXPECT_THAT(brief.accepted(), IsEmpty());
  EXPECT_EQ(entry(brief, "two_thirds").status, Status::Rejected);
  EXPECT_THAT(entry(brief, "two_thirds").reason,
              HasSubstr("Verifying takes about 27 s, and in the 200 steps that are planned 20 s are saved."));
  EXPECT_THAT(after(Kind::Precision, {.steps_planned = 400}).accepted(), ElementsAre("two_thirds"));
  EXPECT_THAT(after(Kind::Exact, {.steps_planned = 200}).accepted(), ElementsAre("two_thirds"));
  EXPECT_THAT(after(Kind::Precision, {.steps_planned = 200, .tune_seconds = 60}).accepted(), ElementsAre("two_thirds"));
}

TEST_F(TunerTest, SaysWhatCannotBeMeant) {
  table.plant("half", 0.5);
  const auto make = [&](TunerOptions options) { Tuner(table, {}, std::move(options)); };
  EXPECT_THROW(make({.exclude = {"hlaf"}}), Error);
  EXPECT_THROW(make({.steps_planned = 0}), Error);
  EXPECT_THROW(make({.tune_seconds = -1}), Error);
  EXPECT_THROW(make({.total = -1}), Error);
  EXPECT_THROW(make({.total = 1, .total_share = 2}), Error);
  try {
    make({.level = "utlra"});
    ADD_FAILURE() << "there is no such level";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("'basic', 'advanced' or 'ultra'"));
  }
}

}  // namespace
}  // namespace oxytorch::tune
