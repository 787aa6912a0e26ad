#include "oxytorch/config_use.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "oxytorch/error.h"

namespace oxytorch {
namespace {

using testing::HasSubstr;

constexpr ConfigUser kUsers[] = {ConfigUser::CppTrainer,           ConfigUser::Trainer, ConfigUser::Accelerate,
                                 ConfigUser::PerformanceOptimizer, ConfigUser::OwnStep, ConfigUser::PythonAccelerate};

std::string said(const PerformanceConfig& config, ConfigUser user) {
  try {
    check_settings(config, user);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

/// A value that no level has as its default.
ConfigValue other_value(const ConfigField& field) {
  const auto known = [&](const ConfigValue& v) { return v == field.basic || v == field.advanced || v == field.ultra; };
  switch (field.type) {
    case ConfigField::Type::Flag: return !std::get<bool>(field.basic);
    case ConfigField::Type::Size: return std::string("1GB");
    case ConfigField::Type::Number: return 0.5;
    case ConfigField::Type::Integer: return std::int64_t{7};
    case ConfigField::Type::Choice: break;
  }
  for (const auto& word : field.choices) {
    if (!known(word) && word != "propagate" && word != "off") return word;
  }
  return field.choices.back();
}

TEST(ConfigUseTest, EverySettingHasARowForEveryUser) {
  for (const auto& field : PerformanceConfig::fields()) {
    for (const auto user : kUsers) EXPECT_NO_THROW(refusal(field.key, user)) << field.key;
  }
  EXPECT_THROW(refusal("preicsion", ConfigUser::Trainer), Error);
  EXPECT_EQ(parse_config_user("own_step"), ConfigUser::OwnStep);
  EXPECT_THROW(parse_config_user("nobody"), Error);
}

TEST(ConfigUseTest, DefaultsAreRefusedByNobody) {
  for (const char* level : {"basic", "advanced", "ultra"}) {
    const PerformanceConfig config(level);
    const auto file = PerformanceConfig::from_json(config.to_json());  // each value is given, and asks for nothing
    for (const auto user : kUsers) {
      EXPECT_EQ(said(config, user), "");
      EXPECT_EQ(said(file, user), "");
    }
  }
}

TEST(ConfigUseTest, WhatIsGivenAndCannotBeHonouredIsRefusedWithItsValueAndWhatToDo) {
  int refused = 0;
  for (const auto& field : PerformanceConfig::fields()) {
    for (const auto user : kUsers) {
      const std::string why = refusal(field.key, user);
      if (why.empty()) continue;
      ++refused;
      PerformanceConfig config;
      config.set(field.key, other_value(field));
      ASSERT_TRUE(is_given(config, field.key)) << field.key;
      EXPECT_THAT(said(config, user),
                  HasSubstr(field.key + " = " + to_string(other_value(field)) + " (caller): " + why));
      EXPECT_EQ(why.back(), '.');
      config.unset(field.key);
      EXPECT_EQ(said(config, user), "");
    }
  }
  EXPECT_GT(refused, 25);
}

TEST(ConfigUseTest, AValueThatAsksForNothingThereIsNotRefused) {
  PerformanceConfig config;
  config.set("nonfinite", std::string("propagate"));  // what the step as given does
  config.set("grad_scaler", std::string("off"));
  EXPECT_EQ(said(config, ConfigUser::Accelerate), "");
}

TEST(ConfigUseTest, SettingsThatLeaveEachOtherWithoutEffectAreRefused) {
  const auto with = [](std::vector<std::pair<const char*, ConfigValue>> values) {
    PerformanceConfig config;
    for (const auto& [key, value] : values) config.set(key, value);
    return said(config, ConfigUser::CppTrainer);
  };
  EXPECT_THAT(with({{"warmup_steps", std::int64_t{5}}}), HasSubstr("no schedule"));
  EXPECT_THAT(with({{"schedule", std::string("cosine")}}), HasSubstr("needs max_steps"));
  EXPECT_THAT(
      with({{"schedule", std::string("one_cycle")}, {"max_steps", std::int64_t{9}}, {"warmup_steps", std::int64_t{1}}}),
      HasSubstr("at least 2 steps"));
  EXPECT_THAT(with({{"early_stopping_mode", std::string("max")}}), HasSubstr("early_stopping_patience"));
  EXPECT_THAT(with({{"allocator", std::string("system")}, {"allocator_retain_limit", std::string("1GB")}}),
              HasSubstr("keeps nothing"));
  EXPECT_THAT(with({{"precision", std::string("fp16")}, {"nonfinite", std::string("raise")}}), HasSubstr("loss scale"));
}

TEST(ConfigUseTest, WhatTorchTakesOnceBelongsIntoMain) {
  PerformanceConfig config;
  config.set("interop_threads", std::int64_t{3});
  for (const auto user : {ConfigUser::CppTrainer, ConfigUser::Accelerate}) {
    EXPECT_THAT(said(config, user), HasSubstr("at::set_num_interop_threads()"));
  }
  EXPECT_EQ(said(config, ConfigUser::Trainer), "");
  EXPECT_EQ(said(config, ConfigUser::PythonAccelerate), "");
}

TEST(ConfigUseTest, ATrainerAndItsOptimizerMayNotBeToldOtherwise) {
  PerformanceConfig config;
  config.set("clip_norm", 0.5);
  EXPECT_NO_THROW(check_own_tail(config, {}));
  EXPECT_NO_THROW(check_own_tail(config, {.clip_norm = 0.5}));
  EXPECT_THROW(check_own_tail(config, {.clip_norm = 1}), Error);
  EXPECT_THROW(check_own_tail(config, {.step_in_backward = true}), Error);
  EXPECT_NO_THROW(
      check_own_tail(PerformanceConfig(), {.clip_norm = 1, .nonfinite = "raise", .step_in_backward = true}));
  PerformanceConfig skips;
  skips.set("nonfinite", std::string("skip"));
  EXPECT_THROW(check_own_tail(skips, {.nonfinite = "raise"}), Error);
  PerformanceConfig values;
  values.set("clip_value", 0.5);
  EXPECT_THROW(check_own_tail(values, {.norm_in_backward = true}), Error);
  EXPECT_NO_THROW(check_own_tail(values, {.clip_value = 0.5, .norm_in_backward = true}));
}

}  // namespace
}  // namespace oxytorch
