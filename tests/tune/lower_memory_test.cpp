// The goal memory, and what it may cost: in a world where every byte and second is known.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <string>

#include "oxytorch/error.h"
#include "oxytorch/tune/policy.h"
#include "tuner_fixture.h"

namespace oxytorch::tune {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

TEST_F(TunerTest, TheGoalMemoryAddsWhatMakesAStepSmallerAsFarAsItMayBeSlower) {
  table.plant({.offer = {.name = "half"}, .factor = 0.5, .bytes = 0});
  table.plant({.offer = {.name = "small"}, .factor = 1.5, .bytes = -200});
  table.plant({.offer = {.name = "smaller"}, .factor = 1.6, .bytes = -300});
  table.plant({.offer = {.name = "smallest"}, .factor = 3.5, .bytes = -500});
  table.plant({.offer = {.name = "liar"}, .factor = 1, .honest = false, .bytes = -400});
  table.plant({.offer = {.name = "grows"}, .factor = 0.4, .bytes = 300});
  table.plant({.offer = {.name = "process", .traits = {.group = "threads"}}, .factor = 1.01, .bytes = -600});
  const auto fast = tuned();
  EXPECT_THAT(fast.accepted(), ElementsAre("half", "grows"));
  EXPECT_EQ(fast.tuned_peak_bytes, 1300);
  const auto made = tuned({.goal = Goal::Memory, .max_slowdown = 1.3});
  EXPECT_THAT(made.accepted(), ElementsAre("half", "small", "smaller"));
  EXPECT_EQ(made.given_peak_bytes, 1000);
  EXPECT_EQ(made.tuned_peak_bytes, 500);
  EXPECT_NEAR(1 / made.speedup->mid, 0.5 * 1.5 * 1.6, 0.02);
  EXPECT_THAT(entry(made, "smaller").reason, HasSubstr("a step takes 700 B of memory instead of 1000 B; 0.8"));
  EXPECT_EQ(entry(made, "smallest").status, Status::Rejected);
  EXPECT_THAT(entry(made, "smallest").reason, HasSubstr("its time"));
  EXPECT_EQ(entry(made, "liar").status, Status::Refused);
  EXPECT_EQ(entry(made, "grows").status, Status::Refused);
  EXPECT_THAT(entry(made, "grows").reason, HasSubstr("a step takes 1.27 KiB of memory, and 1000 B as given"));
  EXPECT_NE(entry(made, "process").status, Status::Accepted) << "a setting of the process is not asked";
  EXPECT_EQ(tuned({.goal = Goal::Memory, .max_slowdown = 1}).tuned_peak_bytes, 700) << "0.5 * 1.6 is faster than given";
  EXPECT_THROW(tuned({.max_slowdown = 0.9}), Error);
}

TEST_F(TunerTest, WhatIsFasterMayTakeAsMuchMoreMemoryAsIsAllowed) {
  constexpr std::int64_t kMiB = 1 << 20;
  table.given_bytes = 100 * kMiB;
  table.plant({.offer = {.name = "within"}, .factor = 0.8, .bytes = 5 * kMiB});
  table.plant({.offer = {.name = "grows"}, .factor = 0.4, .bytes = 30 * kMiB});
  const auto made = tuned();
  EXPECT_THAT(made.accepted(), ElementsAre("within"));
  EXPECT_EQ(entry(made, "grows").status, Status::Refused);
  EXPECT_THAT(entry(made, "grows").reason,
              HasSubstr("a step takes 135 MiB of memory, and 100 MiB as given; max_growth allows 1.050x"));
  EXPECT_THAT(tuned({.max_growth = 1.5}).accepted(), ElementsAre("within", "grows"));
  EXPECT_THAT(tuned({.max_growth = std::numeric_limits<double>::infinity()}).accepted(),
              ElementsAre("within", "grows"));
  EXPECT_THROW(tuned({.max_growth = 0.9}), Error);
}

TEST_F(TunerTest, WhatSavesMemoryTakesThePlaceOfWhatSavesLess) {
  table.plant({.offer = {.name = "fast", .traits = {.group = "one"}}, .factor = 0.8, .bytes = 0});
  table.plant({.offer = {.name = "small", .traits = {.group = "one"}}, .factor = 1.1, .bytes = -200});
  table.plant({.offer = {.name = "needy", .traits = {.requires_ = {"fast"}}}, .factor = 1.2, .bytes = -50});
  const auto made = tuned({.goal = Goal::Memory});
  EXPECT_THAT(made.accepted(), ElementsAre("small"));
  EXPECT_EQ(entry(made, "fast").status, Status::Rejected);
  EXPECT_THAT(entry(made, "fast").reason, HasSubstr("small saves more memory in its place"));
  EXPECT_NE(entry(made, "needy").status, Status::Accepted);
}

TEST_F(TunerTest, WhatMakesAStepSmallerHasItsTurnInAShortRun) {
  table.step_seconds = 0.5;
  table.plant("half", 0.5);
  for (int i = 0; i < 10; ++i)
    table.plant({.offer = {.name = "slightly_" + std::to_string(i)}, .factor = 0.98, .bytes = 0});
  for (const char* name : {"small_0", "small_1", "small_2"}) {
    table.plant({.offer = {.name = name}, .factor = 1.02, .bytes = -200});
  }
  const auto made = tuned({.steps_planned = 1000, .goal = Goal::Memory});
  EXPECT_THAT(made.accepted(), testing::IsSupersetOf({"small_0", "small_1", "small_2"}));
  EXPECT_LT(made.tuning_seconds, kPolicy.total_share * 1000 * 0.5);
}

TEST_F(TunerTest, WhatSavedLittleIsMeasuredAgainOnlyAtTheEnd) {
  table.given_bytes = 10'000;
  for (int i = 0; i < 10; ++i) table.plant({.offer = {.name = "idle_" + std::to_string(i)}, .factor = 1, .bytes = 0});
  for (int i = 0; i < 4; ++i) {
    table.plant({.offer = {.name = "small_" + std::to_string(i)}, .factor = 1.01, .bytes = -1000 * (i + 1)});
  }
  EXPECT_THAT(tuned({.goal = Goal::Memory}).accepted(), ElementsAre("small_0", "small_1", "small_2", "small_3"));
  // As given and each by itself; then one for each that is added, and the idle ones once more.
  EXPECT_EQ(table.measured, 1 + 14 + 3 + 10);
}

TEST_F(TunerTest, WhatNothingKeptCouldMakeUpForIsNotLookedAtForItsMemory) {
  table.plant("half", 0.5);
  table.plant({.offer = {.name = "slow"}, .factor = 1.8, .bytes = -300});
  table.plant({.offer = {.name = "hopeless"}, .factor = 30, .bytes = -500});
  const auto made = tuned({.goal = Goal::Memory, .max_slowdown = 1.3});
  EXPECT_THAT(made.accepted(), ElementsAre("half", "slow"));
  EXPECT_THAT(entry(made, "hopeless").reason, HasSubstr("slower"));
  EXPECT_EQ(table.measured, 3) << "as given, with half of the time, and slow beside that";
}

TEST_F(TunerTest, SaysOfTheRestWhyItMakesNoStepSmaller) {
  table.given_bytes = 10'000;
  table.step_seconds = 0.5;
  table.plant({.offer = {.name = "small", .traits = {.max_speedup = 1}}, .factor = 1.1, .bytes = -5000});
  table.plant({.offer = {.name = "little", .traits = {.max_speedup = 1}}, .factor = 1.1, .bytes = -50});
  table.plant({.offer = {.name = "idle", .traits = {.max_speedup = 1}}, .factor = 1.1, .bytes = 0});
  const auto made = tuned({.goal = Goal::Memory});
  EXPECT_THAT(made.accepted(), ElementsAre("small"));
  EXPECT_EQ(entry(made, "little").reason,
            "It saves 50 B of the 4.88 KiB that a step takes, which is too little for a trial.");
  EXPECT_EQ(entry(made, "idle").reason, "A step takes no less memory with it.");
  table.step_seconds = 2;
  const auto late = tuned({.steps_planned = 60, .goal = Goal::Memory});
  EXPECT_THAT(late.accepted(), IsEmpty());
  EXPECT_EQ(entry(late, "idle").reason, "The time for what makes a step smaller was over before its turn.");
}

TEST_F(TunerTest, TheAllocatorThatLeavesLeastInMemoryIsTheLastChoice) {
  table.faults = 1e7;  // or no allocator could make a step faster
  table.plant(
      {.offer = {.name = "keeps", .traits = {.group = "host_memory"}}, .factor = 0.8, .bytes = 0, .resident = 900});
  table.plant({.offer = {.name = "small"}, .factor = 1.1, .bytes = -300, .resident = 200});
  table.plant({.offer = {.name = "host_pool"}, .factor = 1.05, .bytes = 0, .resident = -600});
  EXPECT_THAT(tuned().accepted(), ElementsAre("keeps"));
  const auto made = tuned({.goal = Goal::Memory, .max_slowdown = 1.3});
  EXPECT_THAT(made.accepted(), ElementsAre("small", "host_pool"));
  EXPECT_NEAR(1 / made.speedup->mid, 1.1 * 1.05, 0.02);
  EXPECT_NEAR(made.tuned_seconds / made.baseline_seconds, 1.1 * 1.05, 0.02) << "over a step as given";
  EXPECT_NEAR(made.baseline_seconds, table.step_seconds, 0.1 * table.step_seconds);
  EXPECT_THAT(entry(made, "host_pool").reason,
              testing::StartsWith("the process has 4.49 KiB in memory instead of 5.96 KiB; 1.15"));
  EXPECT_EQ(entry(made, "keeps").status, Status::Rejected);
  EXPECT_THAT(entry(made, "keeps").reason, HasSubstr("without it the process has 4.49 KiB in memory"));

  table.planted["host_pool"].factor = 1.4;  // too slow: the next best
  const auto without = tuned({.goal = Goal::Memory, .max_slowdown = 1.3});
  EXPECT_THAT(without.accepted(), ElementsAre("small"));
  EXPECT_THAT(entry(without, "host_pool").reason, HasSubstr("and its time in place of what was kept is 0.57"));
  table.planted["host_pool"].throws = "step_resident";
  table.planted["keeps"].resident = 50;  // without it 50 bytes less, and not 10% of a step as given
  EXPECT_THAT(tuned({.goal = Goal::Memory, .max_slowdown = 1.3}).accepted(), ElementsAre("keeps", "small"));
}

TEST_F(TunerTest, WhatTakesMemoryThatNobodySeesIsForSpeedAlone) {
  table.plant({.offer = {.name = "graph"}, .factor = 0.5, .unseen = true});
  table.plant({.offer = {.name = "small"}, .factor = 1.1, .bytes = -300});
  const auto fast = tuned();
  EXPECT_THAT(fast.accepted(), ElementsAre("graph"));
  EXPECT_EQ(fast.given_peak_bytes, 1000);
  EXPECT_EQ(fast.tuned_peak_bytes, std::nullopt);
  const auto made = tuned({.goal = Goal::Memory});
  EXPECT_THAT(made.accepted(), ElementsAre("small"));
  EXPECT_THAT(entry(made, "graph").reason, HasSubstr("is not known"));
  EXPECT_EQ(made.tuned_peak_bytes, 700);
}

TEST_F(TunerTest, WhatIsRefusedBesideOthersTakesNoMemoryGainWithIt) {
  table.plant({.offer = {.name = "late_liar"}, .factor = 0.8, .honest = false, .bytes = 0, .shows_late = true});
  table.plant({.offer = {.name = "small"}, .factor = 1.1, .bytes = -300});
  const auto made = tuned({.goal = Goal::Memory});
  EXPECT_THAT(made.accepted(), ElementsAre("small"));
  EXPECT_EQ(made.tuned_peak_bytes, 700);
  EXPECT_EQ(entry(made, "late_liar").status, Status::Refused);
  EXPECT_THAT(entry(made, "late_liar").reason, HasSubstr("is off by half"));
}

TEST_F(TunerTest, ARememberedPlanForMemoryHoldsThoughItIsSlower) {
  table.plant({.offer = {.name = "small"}, .factor = 1.1, .bytes = -200});
  const CertificateStore store(folder_.string());
  const auto first = tuned({.goal = Goal::Memory}, &store);
  EXPECT_THAT(first.accepted(), ElementsAre("small"));
  ASSERT_EQ(store.try_put(first), "");
  const auto again = tuned({.goal = Goal::Memory}, &store);
  ASSERT_FALSE(again.events.empty());
  EXPECT_THAT(again.events.back(), HasSubstr("reused"));
  table.planted["small"].factor = 1.4;
  EXPECT_THAT(tuned({.goal = Goal::Memory}, &store).accepted(), IsEmpty());
}

}  // namespace
}  // namespace oxytorch::tune
