// What a configuration asks of a tuner, by value and by "off".
#include "oxytorch/tune/asked.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "oxytorch/error.h"

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

}  // namespace
}  // namespace oxytorch::tune
