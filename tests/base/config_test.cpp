#include "oxytorch/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <set>
#include <string>

#include "oxytorch/error.h"
#include "oxytorch/random.h"

namespace oxytorch {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
using namespace std::string_literals;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Refusal {
  ErrorCode code = ErrorCode::Internal;
  std::string message = "accepted";
};

Refusal refusal(const std::function<void()>& act) {
  try {
    act();
  } catch (const Error& error) {
    return {error.code(), error.what()};
  }
  return {};
}

std::string set_refusal(std::string_view key, const ConfigValue& value) {
  return refusal([&] { PerformanceConfig().set(key, value); }).message;
}

TEST(Config, DefaultsByLevel) {
  const PerformanceConfig basic("basic");
  const PerformanceConfig advanced;
  const PerformanceConfig ultra("ultra");
  EXPECT_EQ(advanced.level(), "advanced");
  EXPECT_EQ(basic.word("precision"), "fp32");
  EXPECT_EQ(advanced.word("precision"), "auto");
  EXPECT_EQ(basic.word("channels_last"), "off");
  EXPECT_EQ(basic.word("threads"), "keep");
  EXPECT_EQ(advanced.word("threads"), "auto");
  EXPECT_EQ(basic.word("flush_denormals"), "off");
  EXPECT_EQ(basic.word("step_tail"), "off");
  EXPECT_EQ(basic.word("attention"), "default");
  EXPECT_EQ(basic.word("nonfinite"), "propagate");
  EXPECT_EQ(advanced.word("nonfinite"), "skip");
  EXPECT_EQ(basic.word("allocator"), "auto");  // the one that changes no bit
  EXPECT_EQ(advanced.integer("accumulation_steps"), 1);
  EXPECT_EQ(advanced.number("clip_norm"), 0);
  EXPECT_FALSE(advanced.flag("deterministic"));
  for (const ConfigField& field : PerformanceConfig::fields()) {
    if (field.key == "level" || field.key == "optimizer_state") continue;
    EXPECT_EQ(ultra.get(field.key), advanced.get(field.key)) << field.key;
  }
  EXPECT_EQ(advanced.word("optimizer_state"), "auto");
  EXPECT_EQ(ultra.word("optimizer_state"), "int8");
  EXPECT_NE(basic, advanced);
  EXPECT_NE(ultra, advanced);
}

TEST(Config, EveryRowIsWhole) {
  std::set<std::string> keys;
  for (const ConfigField& field : PerformanceConfig::fields()) {
    EXPECT_TRUE(keys.insert(field.key).second) << field.key;
    EXPECT_GT(field.reason.size(), 20u) << field.key;
    EXPECT_EQ(field.reason.back(), '.') << field.key;
    EXPECT_FALSE(field.allowed().empty());
    // A basic default that differs must say why; each default must be a value that the row allows.
    const bool differs = field.basic != field.advanced && field.key != "level";
    EXPECT_EQ(differs, !field.basic_reason.empty()) << field.key;
    for (const ConfigValue& value : {field.basic, field.advanced, field.ultra}) {
      PerformanceConfig config;
      EXPECT_NO_THROW(config.set(field.key, value)) << field.key;
      EXPECT_EQ(config.get(field.key), value) << field.key;
    }
  }
  EXPECT_EQ(keys.size(), 44u);
}

TEST(Config, SettingTheLevelKeepsWhatWasSet) {
  PerformanceConfig config;
  config.set("precision", "bf16"s);
  config.set("level", "basic"s);
  EXPECT_EQ(config.level(), "basic");
  EXPECT_EQ(config.word("precision"), "bf16");
  EXPECT_EQ(config.word("channels_last"), "off");
  config.unset("precision");
  EXPECT_EQ(config.word("precision"), "fp32");
  config.unset("level");
  EXPECT_EQ(config, PerformanceConfig());
}

TEST(Config, ValuesAreKeptInOneForm) {
  PerformanceConfig config;
  config.set("threads", 4.0);
  EXPECT_EQ(config.get("threads"), ConfigValue(std::int64_t{4}));
  config.set("clip_norm", std::int64_t{1});
  EXPECT_EQ(config.get("clip_norm"), ConfigValue(1.0));
  config.set("clip_norm", -0.0);
  EXPECT_FALSE(std::signbit(config.number("clip_norm")));
  config.set("channels_last", true);
  EXPECT_EQ(config.word("channels_last"), "on");
  config.set("compile", false);
  EXPECT_EQ(config.word("compile"), "off");
  config.set("memory_limit", "1.50 gib"s);
  EXPECT_EQ(config.word("memory_limit"), "1.5GiB");
  config.set("memory_limit", std::int64_t{4096});
  EXPECT_EQ(config.size("memory_limit"), Size::bytes(4096));
  config.set("memory_limit", 1e9);
  EXPECT_EQ(config.size("memory_limit"), Size::bytes(1'000'000'000));
  config.set("memory_limit", "90%"s);
  EXPECT_EQ(config.size("memory_limit").resolve(1000), 900u);
  config.set("seed", std::int64_t{0});
  EXPECT_EQ(config.integer("seed"), 0);
  config.set("seed", "auto"s);
  EXPECT_FALSE(config.integer("seed"));
  EXPECT_TRUE(config.is_auto("seed"));
  EXPECT_TRUE(config.is_auto("allocator_retain_limit"));
  EXPECT_FALSE(config.is_auto("schedule"));
}

TEST(Config, RangesAtTheirEnds) {
  PerformanceConfig config;
  for (const double value : {0.0, 0.5, 0.999999}) EXPECT_NO_THROW(config.set("ema_decay", value));
  for (const double value : {1.0, -0.1, std::nan(""), kInfinity}) EXPECT_THROW(config.set("ema_decay", value), Error);
  for (const double value : {0.0, 1.0}) EXPECT_NO_THROW(config.set("min_lr_ratio", value));
  EXPECT_THROW(config.set("min_lr_ratio", 1.0000001), Error);
  EXPECT_NO_THROW(config.set("clip_norm", 1e300));
  for (const double value : {kInfinity, -1.0, std::nan("")}) EXPECT_THROW(config.set("clip_norm", value), Error);
  EXPECT_THROW(config.set("threads", std::int64_t{0}), Error);
  EXPECT_THROW(config.set("threads", std::int64_t{4097}), Error);
  EXPECT_THROW(config.set("threads", 2.5), Error);
  EXPECT_NO_THROW(config.set("seed", std::numeric_limits<std::int64_t>::max()));
  EXPECT_THROW(config.set("seed", 0x1p63), Error);
  EXPECT_THROW(config.set("seed", std::int64_t{-1}), Error);
  EXPECT_THROW(config.set("memory_limit", -1.0), Error);
  EXPECT_THROW(config.set("memory_limit", std::nan("")), Error);
  EXPECT_THROW(config.set("memory_limit", std::int64_t{-1}), Error);
}

TEST(Config, RefusalsNameKeyValueAndWhatIsAllowed) {
  EXPECT_EQ(set_refusal("preicsion", "bf16"s),
            "unknown setting 'preicsion'; did you mean 'precision'? PerformanceConfig.explain() lists them all.");
  EXPECT_EQ(set_refusal("precision", "bf61"s),
            "setting 'precision' must be 'auto', 'fp32', 'bf16' or 'fp16', not 'bf61'. Did you mean 'bf16'?");
  EXPECT_EQ(set_refusal("clip_norm", -1.0), "setting 'clip_norm' must be a number >= 0, not -1.");
  EXPECT_EQ(set_refusal("ema_decay", 1.5), "setting 'ema_decay' must be a number from 0 to below 1, not 1.5.");
  EXPECT_EQ(set_refusal("threads", std::int64_t{0}),
            "setting 'threads' must be a whole number from 1 to 4096 or 'auto' or 'keep', not 0.");
  EXPECT_EQ(set_refusal("monitor", "yes"s), "setting 'monitor' must be true or false, not 'yes'.");
  EXPECT_THAT(set_refusal("memory_limit", "10 gigs"s), AllOf(HasSubstr("'memory_limit'"), HasSubstr("'10 gigs'")));
  EXPECT_THAT(set_refusal("max_steps", 2.5), AllOf(HasSubstr("whole number >= 0"), HasSubstr("not 2.5")));
  EXPECT_THAT(set_refusal("log_every", true), HasSubstr("not true"));
  EXPECT_THAT(set_refusal("", 1.0), HasSubstr("unknown setting ''"));
  EXPECT_THAT(refusal([] { PerformanceConfig("advnaced"); }).message, HasSubstr("Did you mean 'advanced'?"));
}

TEST(Config, WrongTypesAndWrongReadersAreInvalidType) {
  for (const auto& [key, value] : std::vector<std::pair<std::string, ConfigValue>>{{"monitor", std::int64_t{1}},
                                                                                   {"clip_norm", "1.0"s},
                                                                                   {"clip_norm", true},
                                                                                   {"accumulation_steps", "two"s},
                                                                                   {"precision", 16.0},
                                                                                   {"precision", true},
                                                                                   {"memory_limit", true}}) {
    const Refusal seen = refusal([&] { PerformanceConfig().set(key, value); });
    EXPECT_EQ(seen.code, ErrorCode::InvalidType) << key << ": " << seen.message;
  }
  const PerformanceConfig config;
  EXPECT_EQ(refusal([&] { (void)config.flag("seed"); }).code, ErrorCode::InvalidType);
  EXPECT_EQ(refusal([&] { (void)config.number("precision"); }).code, ErrorCode::InvalidType);
  EXPECT_EQ(refusal([&] { (void)config.word("monitor"); }).code, ErrorCode::InvalidType);
  EXPECT_EQ(refusal([&] { (void)config.size("precision"); }).code, ErrorCode::InvalidType);
  EXPECT_EQ(refusal([&] { (void)config.integer("clip_norm"); }).code, ErrorCode::InvalidType);
  EXPECT_EQ(refusal([&] { (void)config.get("sede"); }).code, ErrorCode::InvalidArgument);
}

TEST(Config, ARefusedValueChangesNothing) {
  PerformanceConfig config("basic");
  config.set("clip_norm", 2.0);
  const PerformanceConfig before = config;
  EXPECT_THROW(config.set("clip_norm", -1.0), Error);
  EXPECT_THROW(config.set("level", "expert"s), Error);
  EXPECT_EQ(config, before);
}

TEST(Config, ExplainSaysValueOriginAndReason) {
  PerformanceConfig config = PerformanceConfig::from_yaml("level: basic\nclip_norm: 0.5\n", "file run.yaml");
  config.set("threads", std::int64_t{2});
  const std::string text = config.explain();
  EXPECT_THAT(text, testing::ContainsRegex("clip_norm +0.5 +file run.yaml +Greatest global gradient norm"));
  EXPECT_THAT(text, testing::ContainsRegex("threads +2 +caller "));
  EXPECT_THAT(text, testing::ContainsRegex("precision +fp32 +level basic +Level basic changes no bit"));
  EXPECT_EQ(config.source("clip_norm"), ConfigSource::File);
  EXPECT_EQ(config.source("threads"), ConfigSource::Caller);
  EXPECT_EQ(config.source("seed"), ConfigSource::Level);
  for (const ConfigField& field : PerformanceConfig::fields()) EXPECT_THAT(text, HasSubstr(field.key));
  EXPECT_THAT(PerformanceConfig().explain(), testing::ContainsRegex("precision +auto +level advanced +auto computes"));
}

/// A configuration with every setting drawn at random.
PerformanceConfig random_config(PhiloxStream& random) {
  PerformanceConfig config;
  for (const ConfigField& field : PerformanceConfig::fields()) {
    if (random.below(3) == 0) continue;
    switch (field.type) {
      case ConfigField::Type::Flag: config.set(field.key, random.below(2) == 0); break;
      case ConfigField::Type::Choice: config.set(field.key, field.choices[random.below(field.choices.size())]); break;
      case ConfigField::Type::Size:
        config.set(field.key, random.below(2) == 0 ? Size::bytes(random.next64() >> random.below(64)).to_string()
                                                   : Size::percent(100 * random.uniform_double()).to_string());
        break;
      case ConfigField::Type::Integer: {
        const auto most = static_cast<std::uint64_t>(std::min(field.high, 1e18));
        config.set(field.key, static_cast<std::int64_t>(std::max<std::uint64_t>(1, random.below(most))));
        break;
      }
      case ConfigField::Type::Number:
        config.set(field.key, field.low + random.uniform_double() * std::pow(10.0, -double(random.below(200))));
        break;
    }
  }
  return config;
}

TEST(Config, TextRoundTripsExactly) {
  PhiloxStream random(31);
  for (int i = 0; i < 300; ++i) {
    const PerformanceConfig config = random_config(random);
    ASSERT_EQ(PerformanceConfig::from_json(config.to_json()), config) << config.to_json();
    ASSERT_EQ(PerformanceConfig::from_yaml(config.to_yaml()), config) << config.to_yaml();
    ASSERT_EQ(PerformanceConfig::from_yaml(config.to_json()), config) << "JSON is YAML";
  }
}

TEST(ConfigYaml, ReadsWhatPeopleWrite) {
  const PerformanceConfig config = PerformanceConfig::from_yaml(R"(
# my run
level: basic
precision: "bf16"
channels_last: on
threads: 4
clip_norm: 1e0
ema_decay: .999
memory_limit: 90%
schedule: ~
monitor: False
compile: !!str off
warmup_steps: +10
)");
  EXPECT_EQ(config.level(), "basic");
  EXPECT_EQ(config.word("precision"), "bf16");
  EXPECT_EQ(config.word("channels_last"), "on");
  EXPECT_EQ(config.integer("threads"), 4);
  EXPECT_EQ(config.number("clip_norm"), 1.0);
  EXPECT_EQ(config.number("ema_decay"), 0.999);
  EXPECT_EQ(config.size("memory_limit"), Size::percent(90));
  EXPECT_EQ(config.word("schedule"), "none");
  EXPECT_FALSE(config.flag("monitor"));
  EXPECT_EQ(config.word("compile"), "off");
  EXPECT_EQ(config.integer("warmup_steps"), 10);
  EXPECT_EQ(PerformanceConfig::from_yaml(""), PerformanceConfig());
  EXPECT_EQ(PerformanceConfig::from_yaml("# nothing\n"), PerformanceConfig());
  EXPECT_EQ(PerformanceConfig::from_yaml("{precision: bf16, level: ultra}").level(), "ultra");
}

TEST(ConfigJson, ReadsWhatPeopleWrite) {
  const PerformanceConfig config = PerformanceConfig::from_json(
      R"({"precision": "bf16", "level": "basic", "channels_last": true, "schedule": null, "max_steps": 1e3})");
  EXPECT_EQ(config.level(), "basic");
  EXPECT_EQ(config.word("precision"), "bf16");
  EXPECT_EQ(config.word("channels_last"), "on");
  EXPECT_EQ(config.word("schedule"), "none");
  EXPECT_EQ(config.integer("max_steps"), 1000);
}

TEST(ConfigText, WordsOfTheFieldAreTheSettingsTheyMean) {
  const auto config = PerformanceConfig::from_yaml(R"(
compile_model: true
max_grad_norm: 0.5
training:
  mixed_precision: true
  gradient_accumulation_steps: 4
  early_stopping: {patience: 3, mode: max}
hardware:
  cpu: {num_threads: 2, inter_op_threads: 3}
)");
  EXPECT_EQ(config.word("compile"), "default");
  EXPECT_EQ(config.number("clip_norm"), 0.5);
  EXPECT_EQ(config.word("precision"), "auto");
  EXPECT_EQ(config.integer("accumulation_steps"), 4);
  EXPECT_EQ(config.integer("early_stopping_patience"), 3);
  EXPECT_EQ(config.word("early_stopping_mode"), "max");
  EXPECT_EQ(config.integer("threads"), 2);
  EXPECT_EQ(config.integer("interop_threads"), 3);
  EXPECT_TRUE(PerformanceConfig::from_json(config.to_json()) == config) << "written by its own names";
  const auto json = PerformanceConfig::from_json(R"({"training": {"amp": "bf16", "flash_attention": false}})");
  EXPECT_EQ(json.word("precision"), "bf16");
  EXPECT_EQ(json.word("attention"), "math");
  EXPECT_EQ(json.word("model.mixed_precision"), "bf16");
}

TEST(ConfigText, WhatMemoryOffersIsNamedInPlaceOfItsWords) {
  EXPECT_THAT(set_refusal("cpu_offload", true), AllOf(HasSubstr("optimizer_state='file'"), HasSubstr("oxytorch::fit")));
  EXPECT_THAT(set_refusal("gc_interval", std::int64_t{10}), AllOf(HasSubstr("clean_every"), HasSubstr("MemoryConfig")));
}

TEST(ConfigText, EveryOtherWordIsASettingOrSaysWhatToDo) {
  std::set<std::string> seen;
  for (const auto& field : PerformanceConfig::fields()) seen.insert(field.key);
  for (const auto& one : PerformanceConfig::words()) {
    SCOPED_TRACE(one.word);
    EXPECT_TRUE(seen.insert(one.word).second) << "twice";
    EXPECT_EQ(one.key.empty(), !one.advice.empty());
    PerformanceConfig config;
    if (!one.key.empty()) {
      const auto& field = PerformanceConfig::field(one.key);
      EXPECT_EQ(PerformanceConfig::key_of(one.word), one.key);
      for (const auto& [value, meaning] : one.values) {
        EXPECT_NO_THROW(config.set("training." + one.word, value)) << to_string(value);
        EXPECT_EQ(config.get(one.word), config.get(field.key));
        EXPECT_EQ(config.get(field.key), meaning);
      }
      continue;
    }
    EXPECT_TRUE(one.advice.ends_with('.'));
    const auto refused = refusal([&] { config.set("training." + one.word, std::string("auto")); });
    EXPECT_EQ(refused.code, ErrorCode::NotSupported);
    EXPECT_EQ(refused.message, one.word + " = 'auto' (caller): " + one.advice);
    if (one.is_switch) {
      EXPECT_NO_THROW(config.set(one.word, false)) << "false asks for nothing";
    }
    EXPECT_THROW((void)config.get(one.word), Error);
  }
  for (const auto& section : PerformanceConfig::sections()) EXPECT_EQ(seen.count(section), 0U) << section;
}

TEST(ConfigText, WhatASectionHoldsIsNeverIgnored) {
  const auto yaml = [](std::string_view text) {
    return refusal([&] { PerformanceConfig::from_yaml(text, "file a.yaml"); }).message;
  };
  EXPECT_THAT(yaml("training: {batch_size: auto}\n"),
              AllOf(HasSubstr("batch_size = 'auto' (file a.yaml)"), HasSubstr("largest_batch")));
  EXPECT_THAT(yaml("gpu: {max_gpu_memory: '90%'}\n"), HasSubstr("memory_fraction='90%'"));
  EXPECT_THAT(yaml("training: {max_grad_nrom: 1}\n"), HasSubstr("did you mean 'max_grad_norm'?"));
  EXPECT_THAT(yaml("trianing: {clip_norm: 1}\n"),
              AllOf(HasSubstr("unknown section 'trianing'"), HasSubstr("did you mean 'training'?")));
  EXPECT_THAT(yaml("clip_norm: 1\ntraining: {max_grad_norm: 2}\n"),
              HasSubstr("'training.max_grad_norm' is there twice, also as 'clip_norm'"));
  EXPECT_THAT(yaml("training: {}\n"), HasSubstr("'training' is an empty mapping"));
  EXPECT_THAT(yaml("training:\n"), HasSubstr("'training'"));
  EXPECT_THAT(yaml("data: {run: {cpu: {gpu: {system: {seed: 1}}}}}\n"), HasSubstr("is a mapping"));
  EXPECT_THAT(yaml("early_stopping: {patiense: 1}\n"), HasSubstr("did you mean 'early_stopping_patience'?"));
}

TEST(ConfigText, RefusalsNameTheFileAndTheKey) {
  const auto json = [](std::string_view text) {
    return refusal([&] { PerformanceConfig::from_json(text, "file a.json"); }).message;
  };
  const auto yaml = [](std::string_view text) {
    return refusal([&] { PerformanceConfig::from_yaml(text, "file a.yaml"); }).message;
  };
  EXPECT_THAT(json(R"({"sede": 1})"), AllOf(HasSubstr("file a.json: "), HasSubstr("did you mean 'seed'?")));
  EXPECT_THAT(yaml("clip_norm: -2\n"), AllOf(HasSubstr("file a.yaml: "), HasSubstr("'clip_norm'"), HasSubstr("-2")));
  EXPECT_THAT(json(R"({"seed": 1, "seed": 2})"), HasSubstr("'seed' is there twice"));
  EXPECT_THAT(yaml("seed: 1\nseed: 2\n"), HasSubstr("'seed' is there twice"));
  EXPECT_THAT(json(R"({"seed": [1]})"), HasSubstr("'seed' is a list"));
  EXPECT_THAT(json(R"({"seed": {"a": 1}})"), HasSubstr("'seed' is a mapping"));
  EXPECT_THAT(yaml("seed: [1]\n"), HasSubstr("'seed' is a list"));
  EXPECT_THAT(yaml("seed: {a: 1}\n"), HasSubstr("'seed' is a mapping"));
  for (const char* text : {"[]", "1", "\"x\"", "null"}) EXPECT_THAT(json(text), HasSubstr("flat mapping")) << text;
  for (const char* text : {"- a\n", "word", "? [a]\n: b\n"}) EXPECT_THAT(yaml(text), HasSubstr("flat mapping")) << text;
  EXPECT_THAT(json(""), HasSubstr("not JSON"));
  EXPECT_THAT(json("{\"seed\": 1,}"), HasSubstr("not JSON"));
  EXPECT_THAT(json("{\"seed\": 1} x"), HasSubstr("not JSON"));
  EXPECT_THAT(yaml("a: b: c\n"), AllOf(HasSubstr("not YAML"), HasSubstr("line 1")));
  EXPECT_THAT(yaml("seed: 1\n---\nseed: 2\n"), HasSubstr("more than one YAML document"));
  EXPECT_THAT(yaml("seed: 1\0"s), HasSubstr("zero byte"));
  EXPECT_THAT(json("{\"seed\": 1e400}"), Not(HasSubstr("accepted")));
  EXPECT_THAT(yaml("clip_norm: .inf\n"), HasSubstr("not infinity"));
  EXPECT_THAT(yaml("clip_norm: 1e400\n"), HasSubstr("not infinity"));
  EXPECT_THAT(json(std::string(2 << 20, ' ')), HasSubstr("too many"));
}

class ConfigFile : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::temp_directory_path() / ("oxytorch-config-" + std::to_string(getpid()));
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  std::string path(const std::string& name) { return (folder_ / name).string(); }
  std::filesystem::path folder_;
};

TEST_F(ConfigFile, SavesAndReadsByExtension) {
  PerformanceConfig config("basic");
  config.set("clip_norm", 0.1);
  for (const char* name : {"a.json", "a.yaml", "a.yml", "A.JSON"}) {
    config.save(path(name));
    const PerformanceConfig back = PerformanceConfig::from_file(path(name));
    EXPECT_EQ(back, config) << name;
    EXPECT_EQ(back.origin("clip_norm"), "file " + path(name));
  }
  std::size_t files = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(folder_)) ++files;
  EXPECT_EQ(files, 4u) << "a draft was left behind";
}

TEST_F(ConfigFile, FailuresAreNamed) {
  const PerformanceConfig config;
  EXPECT_EQ(refusal([&] { PerformanceConfig::from_file(path("none.json")); }).code, ErrorCode::NotFound);
  EXPECT_EQ(refusal([&] { PerformanceConfig::from_file(folder_.string() + "/x.toml"); }).code,
            ErrorCode::InvalidArgument);
  EXPECT_EQ(refusal([&] { config.save(path("no/such/folder.json")); }).code, ErrorCode::NotFound);
  std::filesystem::create_directories(folder_ / "folder.json");
  EXPECT_EQ(refusal([&] { PerformanceConfig::from_file(path("folder.json")); }).code, ErrorCode::Io);
  EXPECT_EQ(refusal([&] { config.save(path("folder.json")); }).code, ErrorCode::Io);
  std::size_t files = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(folder_)) ++files;
  EXPECT_EQ(files, 1u) << "a draft was left behind";
}

TEST_F(ConfigFile, AFileThatEndsNeverIsRefused) {
  std::filesystem::create_symlink("/dev/zero", folder_ / "endless.yaml");
  EXPECT_THAT(refusal([&] { PerformanceConfig::from_file(path("endless.yaml")); }).message, HasSubstr("too many"));
}

/// Edits of `text` with random bytes and with pieces that the grammars know.
std::string mutated(std::string text, PhiloxStream& random) {
  const std::vector<std::string> pieces{
      "{",   "}",    "[",  "]",       ":",        ",",   "\"",   "'", "\n",          "  ",    "- ",
      "&a ", "*a",   "!!", "---",     "<<: ",     "|\n", ">-\n", "#", "%YAML 9.9\n", "1e999", "\xEF\xBB\xBF",
      "\t",  "null", "? ", "\\u0000", "\xC0\xAF", "-",   ".nan"};
  for (std::uint64_t edits = 1 + random.below(2); edits > 0; --edits) {
    const std::size_t place = random.below(text.size() + 1);
    switch (random.below(5)) {
      case 0: text.erase(place, 1 + random.below(10)); break;
      case 1: text.insert(place, 1, static_cast<char>(random.below(256))); break;
      case 2: text.insert(place, text.substr(random.below(text.size() + 1), random.below(40))); break;
      default: text.insert(place, pieces[random.below(pieces.size())]);
    }
  }
  return text;
}

TEST(ConfigFuzz, AnyTextGivesAConfigurationOrAnError) {
  PhiloxStream random(41);
  int accepted = 0;
  for (int i = 0; i < 4000; ++i) {
    std::string text;
    if (i % 5 == 0) {
      for (std::uint64_t length = random.below(200); length > 0; --length) text += static_cast<char>(random.below(256));
    } else {
      PerformanceConfig config;
      config.set("clip_norm", random.uniform_double());
      text = mutated(i % 2 == 0 ? config.to_json() : config.to_yaml(), random);
    }
    for (const bool json : {true, false}) {
      try {
        const PerformanceConfig config = json ? PerformanceConfig::from_json(text) : PerformanceConfig::from_yaml(text);
        ASSERT_EQ(PerformanceConfig::from_json(config.to_json()), config);
        ++accepted;
      } catch (const Error& error) {
        ASSERT_NE(error.code(), ErrorCode::Internal) << error.what();
        for (const char* c = error.what(); *c != 0; ++c) ASSERT_TRUE(*c >= 0x20 && *c < 0x7F) << error.what();
      }
    }
  }
  EXPECT_GT(accepted, 50);
}

TEST(ConfigFuzz, DeepNestingIsRefusedNotFollowed) {
  for (const char* piece : {"[", "{\"a\":", "{a: ", "- ", "? "}) {
    std::string text;
    for (int i = 0; i < 20'000; ++i) text += piece;
    EXPECT_NE(refusal([&] { PerformanceConfig::from_json(text); }).message, "accepted");
    EXPECT_NE(refusal([&] { PerformanceConfig::from_yaml(text); }).message, "accepted");
  }
}

}  // namespace
}  // namespace oxytorch
