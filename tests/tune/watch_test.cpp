// The watch over a run: what it goes on with, takes back and forgets.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "oxytorch/error.h"
#include "oxytorch/tune/watch.h"
#include "tuner_fixture.h"

namespace oxytorch::tune {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

struct Seen : Watched {
  std::vector<std::string> now{"half"};
  BothWays shown{1, 1};
  int comparisons = 0;
  std::string throws = {};
  bool budget = false;
  bool has_budget() override { return budget; }
  void activate(const std::vector<std::string>& names) override {
    now = names;
    if (throws == "activate") throw std::runtime_error("a hook is in the way");
  }
  Apart rounding;
  BothWays compare(const std::vector<std::string>& first) override {
    if (!first.empty()) return {1, 1, rounding};
    ++comparisons;
    if (throws == "compare") throw std::runtime_error("the batch is gone");
    return shown;
  }
};

class WatchTest : public TunerTest {
 protected:
  WatchTest() : store(folder_.string()) {
    made.key = {"here", "2", "model", "options"};
    made.entries.push_back({.strategy = "half", .status = Status::Accepted, .reason = ""});
    made.entries.push_back({.strategy = "other", .status = Status::Rejected, .reason = "slow"});
    store.put(made);
  }
  Watch watch() { return {seen, made, &store, {.names = {"half"}, .drawn_by = 7}}; }

  Seen seen;
  Certificate made;
  CertificateStore store;
};

TEST_F(WatchTest, GoesOnWhileItHolds) {
  auto on = watch();
  int without = 0;
  for (int i = 0; i < 1'000; ++i) {
    ASSERT_TRUE(on.before());
    without += seen.now.empty() ? 1 : 0;
    on.after(seen.now.empty() ? 0.02 : 0.01);
  }
  EXPECT_GT(without, 0);
  EXPECT_GE(seen.comparisons, 2);
  EXPECT_THAT(made.accepted(), ElementsAre("half"));
  EXPECT_THAT(on.reason(), HasSubstr("still pay"));
}

TEST_F(WatchTest, TakesBackWhatStopsPayingAndForgetsTheCertificate) {
  auto on = watch();
  int steps = 0;
  for (; on.before(); ++steps) on.after(seen.now.empty() ? 0.01 : 0.02);
  EXPECT_LT(steps, 200);
  EXPECT_TRUE(on.over());
  EXPECT_THAT(seen.now, IsEmpty());
  EXPECT_EQ(made.entries[0].status, Status::RolledBack);
  EXPECT_EQ(made.entries[1].status, Status::Rejected);
  EXPECT_THAT(made.events, ElementsAre(HasSubstr("half taken back: The changes stopped paying")));
  EXPECT_FALSE(store.find(made.key));
  EXPECT_FALSE(on.before());
  EXPECT_THAT(made.events, testing::SizeIs(1));
}

TEST_F(WatchTest, TakesNoStepWithoutWhatKeepsItWithinABudget) {
  made.given_peak_bytes = 200;
  for (const std::int64_t tuned : {100, 200}) {
    made.tuned_peak_bytes = tuned;
    made.events.clear();
    auto on = watch();
    int without = 0;
    for (int i = 0; i < 1'000; ++i) {
      seen.budget = i >= 52 && i < 500;  // it begins in the middle of a check, which is dropped
      ASSERT_TRUE(on.before());
      without += seen.budget && seen.now.empty() ? 1 : 0;
      on.after(seen.now.empty() ? 0.02 : 0.01);
    }
    EXPECT_EQ(without > 0, tuned == 200);
    EXPECT_THAT(made.events, ElementsAre(HasSubstr(tuned == 200 ? "losses, and no gradients" : "and no times")));
    EXPECT_THAT(on.reason(), HasSubstr("still pay"));  // once there is no budget any more
  }
  EXPECT_GE(seen.comparisons, 4);
}

TEST_F(WatchTest, GradientsThatWereNoiseAsGivenMayBeFurtherApart) {
  for (const double usual : {0.04, 0.4, 40.0}) {
    made.entries[0].evidence["usual_error"] = usual;
    made.entries[1].evidence["usual_error"] = 1e9;  // of what is not active
    for (const auto kind : {Kind::Exact, Kind::Tolerance, Kind::Precision}) {
      Watch on(seen, made, nullptr, {.names = {"half"}, .kind = kind});
      const double may = kind == Kind::Tolerance ? 0.1 : 0.5;
      seen.shown.gradients = {.gradient = 3.9 * usual, .factor = 3.9 * usual};
      on.doubt();
      EXPECT_EQ(on.before(), kind != Kind::Exact && usual > may) << usual;
    }
  }
}

TEST_F(WatchTest, GradientsThatStockAutocastRoundsAwayAreNoFault) {
  for (const double usual : {0.0, 0.1, 0.53}) {
    for (const auto* autocast : {"bf16_autocast", "other"}) {
      Watch on(seen, made, nullptr, {.names = {"half", autocast}, .kind = Kind::Precision});
      seen.shown.gradients = {.gradient = 0.54};
      seen.rounding = {.gradient = usual};
      on.doubt();
      EXPECT_EQ(on.before(), usual > 0.5 && autocast != std::string("other")) << usual << ' ' << autocast;
    }
  }
}

TEST_F(WatchTest, WhatCannotBeComparedOrSwitchedIsTakenBackOnce) {
  for (const char* member : {"compare", "activate"}) {
    seen.throws = member;
    auto on = watch();
    on.doubt();
    if (seen.throws == "compare") {
      EXPECT_FALSE(on.before());
    } else {
      EXPECT_THROW(on.before(), std::runtime_error);  // and cannot be taken back either
    }
    EXPECT_TRUE(on.over());
    EXPECT_THAT(made.events.back(), HasSubstr("they could not be switched"));
    EXPECT_FALSE(on.before());
  }
  EXPECT_THAT(made.events, testing::SizeIs(2));
}

}  // namespace
}  // namespace oxytorch::tune
