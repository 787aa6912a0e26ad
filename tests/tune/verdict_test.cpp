// Verdicts: what is right passes, what is wrong by little more than rounding does not, and the sentence says what.
#include "oxytorch/tune/verdict.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>

#include "oxytorch/random.h"

namespace oxytorch::tune {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Pair;
using testing::SizeIs;
using testing::UnorderedElementsAre;

ValueErrors right() {
  return {.loss = 1e-7,
          .loss_size = 1,
          .slope = 1e-7,
          .whole = 0.1,
          .gradients = {{"a", 1e-7, 0.1, 10'000}, {"b", 1e-8, 1e-9, 100}},
          .buffers = {{"mean", 1e-9, 0.01, 10}}};
}

TEST(VerdictTest, RoundingIsWithinWhatIsAllowed) {
  EXPECT_THAT(values_beyond(right(), {}, kFloat32), IsEmpty());
  EXPECT_NEAR(right().worst(), 1e-6, 1e-9) << "a gradient that cancels is held against all of them";
}

TEST(VerdictTest, EachPartIsHeld) {
  const auto beyond = [](const auto& change, const Allowance& allowance = kFloat32) {
    auto errors = right();
    change(errors);
    const auto found = values_beyond(errors, {}, allowance);
    return found.empty() ? std::string() : found.front().words;
  };
  EXPECT_EQ(beyond([](auto& e) { e.loss = 2e-5; }), "the loss is off by 2e-05");
  EXPECT_EQ(beyond([](auto& e) { e.slope = -0.019; }), "gradients are 0.9810 times what they should be");
  EXPECT_EQ(beyond([](auto& e) { e.gradients[0].error = 1e-3; }),
            "the gradient of a is off by 0.01 of its size, 0 as given");
  EXPECT_EQ(beyond([](auto& e) { e.buffers[0].error = 1e-3; }),
            "the buffer mean is off by 0.1 of its size, 0 as given");
  EXPECT_EQ(beyond([](auto& e) { e.wrong = {"b has no gradient"}; }), "b has no gradient");
  EXPECT_THAT(beyond([](auto& e) { e.loss = std::numeric_limits<double>::quiet_NaN(); }), HasSubstr("the loss"));
  EXPECT_EQ(beyond([](auto& e) { e.gradients[0].error = 1e-3; }, kReduced), "");
}

TEST(VerdictTest, TheYardsticksOwnErrorIsAllowedThreeTimesAndOfFewElementsTen) {
  auto usual = right();
  usual.gradients = {{"a", 1e-3, 0.1, 10'000}, {"b", 1e-3, 1e-9, 100}};
  auto found = right();
  found.gradients[0].error = 2.9e-3;
  found.gradients[1].error = 9e-3;
  EXPECT_THAT(values_beyond(found, usual, kFloat32), IsEmpty());
  found.gradients[0].error = 3.1e-3;
  found.gradients[1].error = 1.1e-2;
  EXPECT_THAT(values_beyond(found, usual, kFloat32), SizeIs(2));
}

TEST(VerdictTest, OfASumThatCancelsTenTimesTheAllowanceIsRounding) {
  auto usual = right();
  usual.gradients = {{"a", 1e-7, 0.1, 10'000}, {"b", 1e-8, 1e-12, 100}};
  auto found = right();
  found.gradients[1] = {"b", 1e-6, 1e-12, 100};  // 1e-5 of all gradients together
  EXPECT_THAT(values_beyond(found, usual, kFloat32), IsEmpty());
  found.gradients[1].error = 1.3e-6;
  EXPECT_THAT(values_beyond(found, usual, kFloat32), SizeIs(1));
  found.gradients[1] = {"b", 1e-6, 1e-7, 100};
  EXPECT_THAT(values_beyond(found, usual, kFloat32), SizeIs(1)) << "a small gradient does not cancel";
}

NamedChange update(const char* name, bool state = false) {
  return {name, {.error = 1e-9, .size = 1e-3, .unit = 1e-9, .bias_error = 1e-3, .ratio = 100}, 10'000, state};
}

TEST(VerdictTest, UpdatesAreHeldByErrorFactorElementAndBias) {
  const auto faults = [](const auto& change, std::vector<NamedChange> base = {}, bool loose = false) {
    std::vector<NamedChange> found{update("weight"), update("average", true)};
    change(found);
    return update_faults(found, base, {}, loose).words;
  };
  EXPECT_THAT(faults([](auto&) {}), IsEmpty());
  EXPECT_THAT(faults([](auto& f) { f[0].change.error = 1e-6; }),
              ElementsAre("the update of weight is off by 0.001 of its size"));
  EXPECT_THAT(faults([](auto& f) { f[0].change.slope = 0.01; }),
              ElementsAre("the update of weight is 1.0100 times what it should be"));
  EXPECT_THAT(faults([](auto& f) { f[0].change.worst = 1.5; }),
              ElementsAre("an element of the update of weight is off by 1.5 times what is allowed"));
  EXPECT_THAT(faults([](auto& f) { f[1].change.error = 1e-6; }),
              ElementsAre("the update of optimizer state average is off by 0.001 of its size"));
  EXPECT_THAT(faults([](auto& f) { f[1].change.error = 1e-6; }, {}, /*loose=*/true), IsEmpty());
  EXPECT_THAT(faults([](auto& f) { f[0].change.upwards = 0.4; }),
              ElementsAre("rounding is biased: +0.40 of the last place upwards in the mean, +0.00 as given"));
  EXPECT_THAT(faults([](auto& f) { f[0].change.outwards = -0.4; }), ElementsAre(HasSubstr("outwards from zero")));
  // What the step as given errs is allowed three times, and a bias of its own once.
  auto base = update("weight");
  base.change.error = 1e-6;
  base.change.upwards = 0.5;
  EXPECT_THAT(faults(
                  [](auto& f) {
                    f[0].change.error = 2.9e-6;
                    f[0].change.upwards = 0.4;
                  },
                  {base}),
              IsEmpty());
  EXPECT_THAT(faults([](auto& f) { f[0].change.upwards = -0.4; }, {base}), SizeIs(1));
}

TEST(VerdictTest, LimitsOfUpdatesAreWhereTheyAreSaid) {
  const auto passes = [](const auto& change, std::vector<NamedChange> base = {}) {
    std::vector<NamedChange> found{update("weight")};
    change(found[0].change);
    return update_faults(found, base, {}, false).words.empty();
  };
  // 5e-5 of the size and a unit, a factor of 2e-4, an element once, 0.15 of the last place and eight standard errors.
  EXPECT_TRUE(passes([](auto& c) { c.error = 4.95e-8; }));
  EXPECT_FALSE(passes([](auto& c) { c.error = 5.2e-8; }));
  for (const double sign : {-1.0, 1.0}) {
    EXPECT_TRUE(passes([&](auto& c) { c.slope = sign * 1.95e-4; }));
    EXPECT_FALSE(passes([&](auto& c) { c.slope = sign * 2.05e-4; }));
    EXPECT_TRUE(passes([&](auto& c) { c.upwards = sign * 0.157; }));
    EXPECT_FALSE(passes([&](auto& c) { c.upwards = sign * 0.160; }));
    EXPECT_TRUE(passes([&](auto& c) { c.outwards = sign * 0.157; }));
    EXPECT_FALSE(passes([&](auto& c) { c.outwards = sign * 0.160; }));
  }
  EXPECT_TRUE(passes([](auto& c) { c.worst = 0.99; }));
  EXPECT_FALSE(passes([](auto& c) { c.worst = 1.01; }));
  // Three times what the step as given errs.
  auto base = update("weight");
  base.change.slope = -1e-2;
  base.change.worst = 2;
  EXPECT_TRUE(passes([](auto& c) { c.slope = 3.01e-2; }, {base}));
  EXPECT_FALSE(passes([](auto& c) { c.slope = 3.03e-2; }, {base}));
  EXPECT_TRUE(passes([](auto& c) { c.worst = 5.9; }, {base}));
  EXPECT_FALSE(passes([](auto& c) { c.worst = 6.1; }, {base}));
}

TEST(VerdictTest, FewElementsAreFiveHundred) {
  for (const std::int64_t count : {500, 501}) {
    auto usual = right(), found = right();
    usual.gradients = {{"a", 1e-3, 0.1, count}};
    found.gradients = {{"a", 5e-3, 0.1, count}};
    EXPECT_EQ(values_beyond(found, usual, kFloat32).empty(), count == 500);
  }
}

TEST(VerdictTest, AShiftOfFourAndAHalfStandardErrorsIsSeen) {
  // 16 losses at 1 +- d with the sample variance 16 d^2 / 15, in both draws.
  const auto draws = [](double mean, double spread) {
    Draws found;
    for (int i = 0; i < 16; ++i) {
      found.losses.push_back(mean + (i % 2 == 0 ? 0.1 : -0.1) * (1 + 1e-9 * i));
      found.spreads.push_back(spread + (i % 2 == 0 ? 0.1 : -0.1));
    }
    return found;
  };
  const double error = std::sqrt(2 * 16 * 0.01 / 15 / 16);
  for (const double sign : {-1.0, 1.0}) {
    EXPECT_EQ(draws_fault(draws(1 + sign * 4.4 * error, 1), draws(1, 1)), "");
    EXPECT_THAT(draws_fault(draws(1 + sign * 4.6 * error, 1), draws(1, 1)), HasSubstr("4.6 standard errors"));
    EXPECT_EQ(draws_fault(draws(1, 1 + sign * 4.4 * error), draws(1, 1)), "");
    EXPECT_THAT(draws_fault(draws(1, 1 + sign * 4.6 * error), draws(1, 1)), HasSubstr("variance"));
  }
}

TEST(VerdictTest, QuotientsMayDifferByWhatTheGivenStepErrsAndAShareOfTheirKind) {
  EXPECT_DOUBLE_EQ(quotient_allowance(Kind::Tolerance, 0), 0.01);
  EXPECT_DOUBLE_EQ(quotient_allowance(Kind::Precision, 0), 0.06);
  EXPECT_DOUBLE_EQ(quotient_allowance(Kind::Tolerance, 0.1), 0.31);
}

TEST(VerdictTest, WhatStaysWhereItIsHasNoFault) {
  const NamedChange frozen{.name = "frozen", .change = {}, .count = 100};
  EXPECT_THAT(update_faults(std::vector{frozen}, {}, {}, false).words, IsEmpty());
}

TEST(VerdictTest, WhatClippingMovesIsAllowed) {
  auto found = update("weight");
  found.change.error = 1e-6;
  EXPECT_THAT(update_faults(std::vector{found}, {}, {{"weight", 1e-6}}, false).words, IsEmpty());
  EXPECT_GT(update_faults(std::vector{found}, {}, {}, false).worst, 1);
}

TEST(VerdictTest, RandomNumbersThatRepeatOrAreOthersAreSeen) {
  PhiloxStream random(3);
  const auto some = [&](double mean, double spread) {
    Draws found;
    for (int i = 0; i < 24; ++i) {
      found.losses.push_back(mean + spread * (random.uniform_double() - 0.5));
      found.spreads.push_back(spread * (1 + 0.1 * random.uniform_double()));
    }
    return found;
  };
  const auto usual = some(1, 0.1);
  EXPECT_EQ(draws_fault(some(1, 0.1), usual), "");
  EXPECT_THAT(draws_fault(some(1.1, 0.1), usual), HasSubstr("standard errors"));
  EXPECT_THAT(draws_fault(some(1, 0.05), usual), HasSubstr("variance 0.5"));
  auto same = some(1, 0.1);
  std::fill(same.losses.begin(), same.losses.end(), 1.0);
  EXPECT_EQ(draws_fault(same, usual), "random numbers repeat: 1 different losses in 24 draws of one batch");
}

TEST(VerdictTest, GeneratorsMoveWhereTheyMoveAsGiven) {
  EXPECT_EQ(generators_fault("0", {"a", "b"}, {"1", "2"}), "");
  EXPECT_EQ(generators_fault("0", {"0", "0"}, {"0", "0"}), "");
  EXPECT_THAT(generators_fault("0", {"a", "a"}, {"1", "2"}), HasSubstr("step 2: the random generators stand still"));
  EXPECT_THAT(generators_fault("0", {"a"}, {"0"}), HasSubstr("draws none"));
}

TEST(VerdictTest, TheBandIsAsWideAsSeedsAndAHundredth) {
  const std::vector<double> ends{2, 2.1, 1.9};
  const auto band = band_of(ends);
  EXPECT_NEAR(band.low, 1.9 - 0.2 - 0.02, 1e-12);
  EXPECT_NEAR(band.high, 2.1 + 0.2 + 0.02, 1e-12);
  EXPECT_TRUE(band.holds(1.9) && band.holds(2.1) && !band.holds(1.6) && !band.holds(2.4));
  const std::vector<double> same{2, 2, 2};
  EXPECT_NEAR(band_of(same, 1.9).low, 1.88, 1e-12);
  EXPECT_NEAR(band_of(same, 1.9).high, 2.02, 1e-12);
  EXPECT_NEAR(band_of(same, 2.1).high, 2.12, 1e-12);
  EXPECT_NEAR(band_of(same, 2.001).high, 2.021, 1e-12);
  EXPECT_TRUE(in_any_band(2.009, 2, 2.5));
  EXPECT_FALSE(in_any_band(2.011, 2, 2.5));
  EXPECT_TRUE(in_any_band(0.0066, 0.0070, 2.3)) << "learnt by heart";
  EXPECT_FALSE(in_any_band(0.0095, 0.0070, 2.3));
}

TEST(VerdictTest, OtherRunsAreTakenOnlyWhereTheyDecide) {
  std::map<std::string, double> evidence;
  int given = 0, narrow = 0;
  RunEnd run{12, 2.009, 2, 2.5, [&] { return ++given, std::vector<double>{2, 2.1, 1.9}; }};
  EXPECT_EQ(end_fault(run, evidence), "");
  EXPECT_EQ(given, 0);
  EXPECT_THAT(evidence, UnorderedElementsAre(Pair("end_loss", 2.009), Pair("given_loss", 2)));

  run.end = 2.3;  // below 2.32
  EXPECT_EQ(end_fault(run, evidence), "");
  EXPECT_EQ(given, 1);
  EXPECT_NEAR(evidence["band_low"], 1.68, 1e-12);
  EXPECT_NEAR(evidence["band_high"], 2.32, 1e-12);

  run.end = 2.4;
  EXPECT_EQ(end_fault(run, evidence), "after 12 steps the loss is 2.4, outside of 1.68 to 2.32 that seeds span");
  run.reduced = [&] { return ++narrow, 2.5; };
  EXPECT_EQ(end_fault(run, evidence), "") << "stock torch ends there in a lower precision";
  EXPECT_EQ(narrow, 1);
  EXPECT_NEAR(evidence["band_high"], 2.52, 1e-12);
  run.end = 2.3;
  EXPECT_EQ(end_fault(run, evidence), "");
  EXPECT_EQ(narrow, 1) << "seeds alone explain it";
  run.end = std::nan("");
  EXPECT_NE(end_fault(run, evidence), "");
}

TEST(VerdictTest, ComparedStepsAreDrawn) {
  std::set<std::vector<int>> seen;
  std::set<int> ever, wide;
  for (std::uint64_t by = 0; by < 300; ++by) {
    const auto steps = draw_steps(24, 12, by);
    ASSERT_THAT(steps.compared, SizeIs(16));
    ASSERT_TRUE(std::is_sorted(steps.compared.begin(), steps.compared.end()));
    for (int i = 0; i < 12; ++i) ASSERT_EQ(steps.compared[static_cast<std::size_t>(i)], i);
    ASSERT_EQ(steps.compared.back(), 23);
    ASSERT_THAT(steps.wide, SizeIs(3));
    ASSERT_TRUE(steps.wide.contains(0));
    seen.insert(steps.compared);
    ever.insert(steps.compared.begin(), steps.compared.end());
    wide.insert(steps.wide.begin(), steps.wide.end());
    ASSERT_EQ(draw_steps(24, 12, by).compared, steps.compared);
  }
  EXPECT_GT(seen.size(), 100U);
  EXPECT_THAT(ever, SizeIs(24));
  EXPECT_THAT(wide, SizeIs(24));
  EXPECT_THAT(draw_steps(1, 12, 5).compared, ElementsAre(0));
  EXPECT_THAT(draw_steps(1, 12, 5).wide, ElementsAre(0));
  EXPECT_THAT(draw_steps(14, 12, 5).compared, SizeIs(14));
}

}  // namespace
}  // namespace oxytorch::tune
