// What a configuration asks of a tuner, by value and by "off".
#include "oxytorch/tune/asked.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "oxytorch/error.h"
#include "oxytorch/tune/setting_lines.h"

namespace oxytorch::tune {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

std::vector<Offer> offers() {
  const auto offer = [](const char* name, Kind kind, const char* group) { return Offer{name, kind, {.group = group}}; };
  return {offer("allocator", Kind::Exact, "host_memory"),       offer("bf16_autocast", Kind::Precision, "precision"),
          offer("fp16_autocast", Kind::Precision, "precision"), offer("tf32", Kind::Precision, ""),
          offer("channels_last", Kind::Tolerance, "layout"),    offer("one_thread", Kind::Tolerance, "threads"),
          offer("step_tail", Kind::Tolerance, "optimizer"),     offer("int8_state", Kind::Trade, "optimizer"),
          offer("native_step", Kind::Exact, "optimizer"),       offer("of_ones_own", Kind::Exact, "")};
}

PerformanceConfig with(const char* key, const ConfigValue& value, const char* level = "advanced") {
  PerformanceConfig config(level);
  config.set(key, value);
  return config;
}

std::vector<std::string> skipped(const char* key, const ConfigValue& value) {
  std::vector<std::string> names;
  for (const auto& [name, why] : asked_of(with(key, value), offers(), {}).skipped) {
    EXPECT_THAT(why, HasSubstr(std::string(key) + " is "));
    names.push_back(name);
  }
  return names;
}

std::string refusal(const PerformanceConfig& config, const std::vector<std::string>& excluded, ErrorCode code) {
  try {
    static_cast<void>(asked_of(config, offers(), excluded));
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code);
    return error.what();
  }
  return "it was taken";
}

TEST(AskedTest, StepsAreHeldToABudgetThatIsNamedOrThatBlocksAreRunAgainFor) {
  EXPECT_FALSE(has_budget(Goal::Speed, "off", std::nullopt));
  EXPECT_TRUE(has_budget(Goal::Memory, "off", std::nullopt));
  for (const char* value : {"2 GiB", "90 %", "auto", "least"}) {
    EXPECT_FALSE(has_budget(Goal::Speed, value, std::nullopt)) << value;  // refused, or no step was fitted yet
    EXPECT_TRUE(has_budget(Goal::Speed, value, true)) << value;
  }
  EXPECT_TRUE(has_budget(Goal::Speed, "2 GiB", false));
  EXPECT_FALSE(has_budget(Goal::Speed, "auto", false));  // all fits as it is
  EXPECT_FALSE(has_budget(Goal::Speed, "least", false));
}

TEST(AskedTest, WhatIsNotNamedAsksForNothing) {
  for (const char* level : {"basic", "advanced", "ultra"}) {
    const auto asked = asked_of(PerformanceConfig(level), offers(), {});
    EXPECT_THAT(asked.skipped, IsEmpty());
    EXPECT_THAT(asked.required, IsEmpty());
  }
}

TEST(AskedTest, OffTakesOutWhatIsOfTheSetting) {
  using text = std::string;
  EXPECT_THAT(skipped("precision", text("fp32")), ElementsAre("bf16_autocast", "fp16_autocast", "tf32"));
  EXPECT_THAT(skipped("channels_last", text("off")), ElementsAre("channels_last"));
  EXPECT_THAT(skipped("threads", text("keep")), ElementsAre("one_thread"));
  EXPECT_THAT(skipped("threads", std::int64_t{1}), ElementsAre("one_thread")) << "it is applied, not found out";
  EXPECT_THAT(skipped("allocator", text("system")), ElementsAre("allocator"));
  EXPECT_THAT(skipped("allocator", text("retain")), ElementsAre("allocator"));
  EXPECT_THAT(skipped("step_tail", text("off")), ElementsAre("step_tail"));
}

TEST(AskedTest, AValueRequiresWhatBringsItAboutAndLeavesOutTheOthersOfItsGroup) {
  const auto bf16 = asked_of(with("precision", std::string("bf16")), offers(), {});
  ASSERT_EQ(bf16.required.size(), 1U);
  EXPECT_EQ(bf16.required[0].setting, "precision");
  EXPECT_EQ(bf16.required[0].value, "bf16");
  EXPECT_THAT(bf16.required[0].strategies, ElementsAre("bf16_autocast"));
  EXPECT_EQ(bf16.skipped.count("fp16_autocast"), 1U);
  EXPECT_EQ(bf16.skipped.count("tf32"), 0U);
  const auto tail = asked_of(with("step_tail", std::string("on")), offers(), {});
  EXPECT_THAT(tail.required.at(0).strategies, ElementsAre("step_tail")) << "the level does not allow int8_state";
  EXPECT_EQ(tail.skipped.count("native_step"), 1U);
}

TEST(AskedTest, WhatNothingBringsAboutIsRefused) {
  using text = std::string;
  EXPECT_THAT(refusal(with("precision", text("fp16")), {}, ErrorCode::NotSupported), HasSubstr("loss scale"));
  EXPECT_THAT(refusal(with("optimizer_state", text("bf16")), {}, ErrorCode::NotSupported), HasSubstr("state_dtype"));
  EXPECT_THAT(refusal(with("precision", text("bf16"), "basic"), {}, ErrorCode::InvalidArgument),
              HasSubstr("level 'basic' does not allow it"));
  EXPECT_THAT(refusal(with("channels_last", text("on")), {"channels_last"}, ErrorCode::InvalidArgument),
              HasSubstr("channels_last is not to be tried"));
  EXPECT_THAT(refusal(with("attention", text("math")), {}, ErrorCode::InvalidArgument),
              HasSubstr("math_attention is not to be tried"));
}

/// What activate() makes active, where only `possible` can be.
struct Brought {
  Brought(const PerformanceConfig& config, const std::vector<std::string>& possible)
      : asked(asked_of(config, offers(), {}, AskedBy::Trainer)) {
    activate(
        asked, config, offers(),
        [&](const std::string& name) { return std::find(active.begin(), active.end(), name) != active.end(); },
        [&](const std::string& name) -> std::string {
          if (std::find(possible.begin(), possible.end(), name) == possible.end()) return name + " cannot be";
          active.push_back(name);
          return "";
        });
  }
  Asked asked;
  std::vector<std::string> active;
};

TEST(AskedTest, WhatATrainerNamesIsBroughtAndItsKindIsNotTried) {
  const Brought bf16(with("precision", std::string("bf16"), "basic"), {"bf16_autocast"});
  EXPECT_THAT(bf16.active, ElementsAre("bf16_autocast"));
  EXPECT_THAT(bf16.asked.required, IsEmpty());
  EXPECT_EQ(bf16.asked.skipped.at("fp16_autocast"), "precision is 'bf16' in the configuration");
  EXPECT_EQ(bf16.asked.skipped.count("tf32"), 0U);
  const Brought tail(with("step_tail", std::string("on")), {"int8_state"});
  EXPECT_THAT(tail.active, ElementsAre("int8_state")) << "the next that can be";
  EXPECT_EQ(tail.asked.skipped.count("native_step"), 1U);
  auto both = with("step_tail", std::string("on"));
  both.set("optimizer_state", std::string("int8"));
  EXPECT_THAT(Brought(both, {"step_tail", "int8_state"}).active, ElementsAre("int8_state")) << "which is a tail too";
}

TEST(AskedTest, WhatCannotBeBroughtIsRefusedWithEachReason) {
  const Brought tail(with("step_tail", std::string("on")), {});
  EXPECT_THAT(tail.active, IsEmpty());
  EXPECT_EQ(tail.asked.refused.at("step_tail"), "step_tail cannot be; int8_state cannot be.");
  // channels_last_3d is on offer in the other language alone.
  EXPECT_EQ(Brought(with("channels_last", std::string("on")), {}).asked.refused.at("channels_last"),
            "channels_last cannot be.");
  EXPECT_EQ(Brought(with("attention", std::string("math")), {}).asked.refused.at("attention"),
            "there is no strategy math_attention.");
}

TEST(TunerOptionsTest, OfATrainerFollowItsConfiguration) {
  auto config = with("goal", std::string("memory"));
  config.set("max_slowdown", 1.5);
  config.set("max_growth", 1.75);
  config.set("seed", std::int64_t{7});
  auto given = offers();
  given.push_back({"split_batch", Kind::Tolerance, {.group = "split"}});
  const auto options = tuning_of_trainer(config, 2'000, given);
  EXPECT_EQ(options.goal, Goal::Memory);
  EXPECT_DOUBLE_EQ(options.max_slowdown, 1.5);
  EXPECT_DOUBLE_EQ(options.max_growth, 1.75);
  EXPECT_EQ(options.seed, 7U);
  EXPECT_EQ(options.steps_planned, 2'000);
  EXPECT_THAT(options.exclude, ElementsAre("split_batch"));
  EXPECT_EQ(tuning_of_trainer(PerformanceConfig(), 2'000, given).goal, Goal::Speed);
}

TEST(SettingLinesTest, SayWhatCameOfEachSetting) {
  PerformanceConfig config("advanced");
  config.set("precision", std::string("bf16"));
  config.set("threads", std::string("keep"));
  Certificate certificate;
  certificate.entries = {
      {.strategy = "step_tail", .status = Status::Rejected, .reason = "1.00x"},
      {.strategy = "native_step", .status = Status::Rejected, .reason = "1.01x"},
      {.strategy = "of_ones_own", .status = Status::Accepted, .reason = "2x", .speedup = Interval{1.9, 2, 2.1, 1}}};
  SettingLines lines{.config = config,
                     .certificate = certificate,
                     .offers = offers(),
                     .refused = {{"channels_last", "there is no convolution."}},
                     .active = {"bf16_autocast", "of_ones_own", "allocator"},
                     .required = {"bf16_autocast"},
                     .untried = "nothing of it applies here.",
                     .slow = "no instructions."};
  const auto said = [&](const char* setting) {
    const auto line = lines.of(setting);
    return line.state + ": " + line.reason;
  };
  EXPECT_EQ(said("precision"), "on: bf16 autocast was asked for.");
  EXPECT_EQ(lines.of("precision").cost, "products are rounded to 16 bits. Slow here: no instructions.");
  EXPECT_EQ(said("threads"), "off: 'keep' was asked for (caller).");
  EXPECT_EQ(said("channels_last"), "refused: there is no convolution.");
  EXPECT_EQ(said("step_tail"), "refused: step_tail: 1.00x.");
  EXPECT_EQ(said("attention"), "off: nothing of it applies here.");
  EXPECT_EQ(said("allocator"), "on: allocator: found by the run that is continued here.");
  EXPECT_EQ(lines.active_as("layout", {"allocator", "of_ones_own"}).reason,
            "allocator: found by the run that is continued here. of_ones_own: 2x.");
  EXPECT_EQ(lines.active_as("layout", {"allocator", "of_ones_own"}).cost, "");
  lines.offers[0].traits.cost = "memory";
  lines.offers[1].traits.cost = "digits.";
  EXPECT_EQ(lines.active_as("layout", {"allocator", "of_ones_own", "bf16_autocast"}).cost, "memory. digits.");
  const auto beside = lines.beside_settings();
  ASSERT_EQ(beside.size(), 1U);
  EXPECT_EQ(beside[0].name, "of_ones_own");
  EXPECT_EQ(beside[0].reason, "of_ones_own: 2x.");
  EXPECT_EQ(beside[0].gain, 2.0);
}

TEST(SlowdownLeft, WhatWasMadeFasterMayBeSlowerByMore) {
  Certificate certificate;
  certificate.baseline_seconds = 3;
  certificate.tuned_seconds = 2;
  EXPECT_DOUBLE_EQ(slowdown_left(certificate, 1.2), 1.2) << "nothing is active";
  certificate.entries = {{.strategy = "half", .status = Status::Accepted, .reason = {}}};
  EXPECT_DOUBLE_EQ(slowdown_left(certificate, 1.2), 1.8);
  certificate.tuned_seconds = 3.9;
  EXPECT_DOUBLE_EQ(slowdown_left(certificate, 1.2), 1);
}

}  // namespace
}  // namespace oxytorch::tune
