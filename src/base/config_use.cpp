#include "oxytorch/config_use.h"

#include <algorithm>
#include <array>
#include <utility>

#include "base/spelling.h"
#include "oxytorch/error.h"

namespace oxytorch {
namespace {

constexpr std::size_t kUsers = 6;
constexpr std::array<std::pair<const char*, ConfigUser>, kUsers> kNames{
    {{"cpp_trainer", ConfigUser::CppTrainer},
     {"trainer", ConfigUser::Trainer},
     {"cpp_accelerate", ConfigUser::Accelerate},
     {"performance_optimizer", ConfigUser::PerformanceOptimizer},
     {"own_step", ConfigUser::OwnStep},
     {"accelerate", ConfigUser::PythonAccelerate}}};

/// One row: the setting, why each user cannot honour it ("": it does), and a value that asks for nothing there.
struct Row {
  const char* key;
  std::array<const char*, kUsers> refusals;
  const char* neutral = "";
};

constexpr std::array<const char*, kUsers> kHonoured{"", "", "", "", "", ""};

constexpr std::array<const char*, kUsers> all(const char* sentence) {
  return {sentence, sentence, sentence, sentence, sentence, sentence};
}

/// Of settings that belong to the training loop, which is the user's beside accelerate().
constexpr std::array<const char*, kUsers> loop_only(const char* sentence, const char* own_step = "") {
  return {"", "", sentence, "", own_step, sentence};
}

constexpr const char* kYourLoop =
    "accelerate() leaves the loop to you, so nothing would use it. Do it in your loop, or use "
    "PerformanceOptimizer(...).prepare(...), whose trainer does.";
constexpr const char* kFirstThing =
    "torch takes their number once, before it has run operators beside each other. Call at::set_num_interop_threads() "
    "first thing in main(), and leave it at 'keep'.";
constexpr const char* kLoaderOfCpp =
    "accelerate() of C++ takes no loader. Give it to oxytorch::data::LoaderOptions (threads, prefetch, cache), or to "
    "oxytorch::Trainer.";
constexpr std::array<const char*, kUsers> kLoader{"", "", kLoaderOfCpp, "", "", ""};
constexpr const char* kOwnStep =
    "step= is called once a batch and does all of a step itself. Do it in there, or leave step= out and give loss_fn, "
    "so that the trainer takes the steps.";

/// Every setting has a row; a test compares them with PerformanceConfig::fields().
constexpr Row kRows[] = {
    {"level", kHonoured},
    {"precision", kHonoured},
    {"channels_last", kHonoured},
    {"threads", kHonoured},
    {"interop_threads", {kFirstThing, "", kFirstThing, "", "", ""}},
    {"flush_denormals", kHonoured},
    {"allocator", kHonoured},
    {"allocator_retain_limit", kHonoured},
    {"step_tail", kHonoured},
    {"optimizer_state", kHonoured},
    {"attention", kHonoured},
    {"compile",
     {"C++ has no torch.compile. Leave it at 'off'; oxytorch.Trainer of Python compiles.", "", "", "", "", ""}},
    {"accumulation_steps", {"", "", "", "", kOwnStep, ""}},
    {"clip_norm", kHonoured},
    {"clip_value",
     loop_only("the step that accelerate() measures can clip by clip_norm alone. Give step=, which clips as your loop "
               "does, or use PerformanceOptimizer(...).prepare(...), whose trainer clips.",
               kOwnStep)},
    {"ema_decay", loop_only(kYourLoop)},
    {"nonfinite", loop_only(kYourLoop, kOwnStep), "propagate"},
    {"grad_scaler", loop_only(kYourLoop, kOwnStep), "off"},
    {"schedule", loop_only(kYourLoop)},
    {"warmup_steps", loop_only(kYourLoop)},
    {"min_lr_ratio", loop_only(kYourLoop)},
    {"max_steps", kHonoured},
    {"steps_planned", kHonoured},
    {"tune_seconds", kHonoured},
    {"remember", kHonoured},
    {"early_stopping_patience", loop_only(kYourLoop)},
    {"early_stopping_min_delta", loop_only(kYourLoop)},
    {"early_stopping_mode", loop_only(kYourLoop)},
    {"early_stopping_restore_best", loop_only(kYourLoop)},
    {"memory_limit", kHonoured},
    {"goal", kHonoured},
    {"max_slowdown", kHonoured},
    {"max_growth", kHonoured},
    {"gradient_checkpointing", kHonoured},
    {"saved_tensors", kHonoured},
    {"num_workers", kLoader, "keep"},
    {"prefetch", kLoader, "keep"},
    {"pin_memory", kLoader},
    {"cache", kLoader},
    {"seed", kHonoured},
    {"deterministic", kHonoured},
    {"progress", kHonoured},
    {"log_every",
     all("no setting has the loss logged every so many steps. Leave it out, and read what step() returns, "
         "give fit() a callback, or in Python give the trainer monitor=PerformanceMonitor(), which records "
         "it.")},
    {"monitor", all("a configuration does not switch monitoring on or off. Leave it out; in Python give the trainer "
                    "monitor=PerformanceMonitor(), in C++ put oxytorch::monitor::Step and Phase around your steps.")},
};

const Row& use_of(std::string_view key) {
  const auto* found = std::find_if(std::begin(kRows), std::end(kRows), [&](const Row& row) { return key == row.key; });
  OXY_ASSERT(found != std::end(kRows), "setting '", key, "' has no row in src/base/config_use.cpp.");
  return *found;
}

std::string shown(const PerformanceConfig& config, std::string_view key) {
  return std::string(key) + " = " + to_string(config.get(key)) + " (" + config.origin(key) + ")";
}

/// Settings that do nothing without another one.
void check_dependent(const PerformanceConfig& config, ConfigUser user) {
  const auto refuse = [&](const char* key, const auto&... sentence) {
    detail::raise(ErrorCode::InvalidArgument, shown(config, key), ": ", sentence...);
  };
  if (is_given(config, "allocator_retain_limit") && config.word("allocator") == "system") {
    refuse("allocator_retain_limit",
           "allocator is 'system', which keeps nothing. Set allocator = 'retain', or leave "
           "the limit out.");
  }
  if (is_given(config, "max_slowdown") && checkpointing_of(config) != "least") {
    refuse("max_slowdown",
           "the goal is speed, for which nothing is made slower. Set goal = 'memory' or gradient_checkpointing = "
           "'least', or leave it out.");
  }
  if (is_given(config, "max_growth") && config.word("goal") == "memory") {
    refuse("max_growth",
           "the goal is memory, for which nothing may take more than as given. Leave it out, or set goal = 'speed'.");
  }
  if (is_given(config, "saved_tensors") && checkpointing_of(config) == "off") {
    refuse("saved_tensors",
           "gradient_checkpointing is 'off', which keeps them as they are. Set that to a budget, 'auto' or 'least', or "
           "leave it out.");
  }
  if (config.word("optimizer_state") == "file" && is_given(config, "step_tail") && config.word("step_tail") == "on") {
    refuse("optimizer_state",
           "step_tail is 'on', which steps all of the state at once, in memory. Leave out one of them.");
  }
  const char* const checkpoints = is_given(config, "goal") ? "goal" : "gradient_checkpointing";
  if (is_given(config, checkpoints) && config.word("compile") != "off") {
    refuse(checkpoints, "compile is '", config.word("compile"),
           "', and a compiled model calls none of its blocks, which would be run again. Leave out one of them; torch "
           "compiles within a budget of its own, torch._functorch.config.activation_memory_budget.");
  }
  if (user == ConfigUser::Accelerate || user == ConfigUser::PythonAccelerate) return;  // the rest belongs to a trainer
  const std::string schedule = config.word("schedule");
  const auto steps = config.integer("max_steps").value_or(0);
  const auto warmup = config.integer("warmup_steps").value_or(0);
  if (schedule == "none") {
    for (const char* key : {"warmup_steps", "min_lr_ratio"}) {
      if (is_given(config, key)) {
        refuse(key,
               "there is no schedule that it would shape. Set schedule = 'cosine' or 'one_cycle', or leave it "
               "out.");
      }
    }
  } else {
    OXY_CHECK(steps > 0, InvalidArgument, "schedule '", schedule,
              "' needs max_steps, the number of optimizer steps of the run.");
    OXY_CHECK(warmup < steps, InvalidArgument, "warmup_steps is ", warmup, " and max_steps ", steps,
              ". Warm up for fewer steps.");
    OXY_CHECK(schedule != "one_cycle" || warmup != 1, InvalidArgument,
              "warmup_steps is 1, and a cycle rises over at least 2 steps. Make it 2 or more, or 0 for 30 % of them.");
  }
  if (config.integer("early_stopping_patience").value_or(0) == 0) {
    for (const char* key : {"early_stopping_min_delta", "early_stopping_mode", "early_stopping_restore_best"}) {
      if (is_given(config, key)) {
        refuse(key, "early stopping is off. Set early_stopping_patience, or leave it out.");
      }
    }
  }
  const std::string scaler = config.word("grad_scaler");
  const bool scales = scaler == "on" || (scaler == "auto" && config.word("precision") == "fp16");
  if (is_given(config, "nonfinite") && config.word("nonfinite") != "skip" && scales) {
    refuse("nonfinite",
           "with a loss scale a step that overflows is always skipped: that is how the scale is found. "
           "Use nonfinite = 'skip', or grad_scaler = 'off'.");
  }
}

}  // namespace

ConfigUser parse_config_user(std::string_view name) {
  std::vector<std::string> known;
  for (const auto& [text, user] : kNames) {
    if (name == text) return user;
    known.emplace_back(text);
  }
  detail::raise(ErrorCode::InvalidArgument, "there is no user of settings ", in_quotes(name), "; there are ",
                list_of(known), '.');
}

std::string refusal(std::string_view key, ConfigUser user) {
  return use_of(PerformanceConfig::field(key).key).refusals[static_cast<std::size_t>(user)];
}

std::string checkpointing_of(const PerformanceConfig& config) {
  const bool of_goal = config.word("goal") == "memory" && !is_given(config, "gradient_checkpointing");
  return of_goal ? "least" : config.word("gradient_checkpointing");
}

bool is_given(const PerformanceConfig& config, std::string_view key) {
  return config.source(key) != ConfigSource::Level && config.get(key) != config.default_value(key);
}

void check_settings(const PerformanceConfig& config, ConfigUser user) {
  for (const ConfigField& field : PerformanceConfig::fields()) {
    const Row& row = use_of(field.key);
    const std::string why = row.refusals[static_cast<std::size_t>(user)];
    if (why.empty() || !is_given(config, field.key)) continue;
    if (config.get(field.key) == ConfigValue(std::string(row.neutral))) continue;
    detail::raise(ErrorCode::NotSupported, shown(config, field.key), ": ", why);
  }
  check_dependent(config, user);
}

void check_own_tail(const PerformanceConfig& config, const OwnTail& own) {
  const auto agree = [&](const char* key, const auto& wanted, const auto& has, bool both) {
    OXY_CHECK(!both || wanted == has, InvalidArgument, key, " = ", wanted, " was given to the trainer (",
              config.origin(key), "), and the optimizer was made with ", key, " = ", has,
              ". Make them equal, or leave out one of them.");
  };
  for (const auto& [key, has] : {std::pair{"clip_norm", own.clip_norm}, std::pair{"clip_value", own.clip_value},
                                 std::pair{"ema_decay", own.ema_decay}}) {
    agree(key, config.number(key), has, config.number(key) > 0 && has > 0);
  }
  // What comes with the level yields to the optimizer's own.
  const bool asked = config.source("nonfinite") != ConfigSource::Level;
  agree("nonfinite", config.word("nonfinite"), own.nonfinite, asked && !own.nonfinite.empty());
  const double norm = config.number("clip_norm"), value = config.number("clip_value");
  OXY_CHECK(norm <= 0 || !own.step_in_backward, NotSupported, "clip_norm=", norm,
            " needs all gradients at once, and the optimizer has step_in_backward: it has updated the parameters "
            "before the last gradient is there. Leave out one of them.");
  OXY_CHECK(value <= 0 || own.clip_value > 0 || !(own.step_in_backward || own.norm_in_backward), NotSupported,
            "clip_value=", value, " clips after backward, and the optimizer has used the gradients by then (",
            own.step_in_backward ? "step_in_backward" : "norm_in_backward",
            "). Give clip_value to the optimizer, or leave out one of them.");
}

}  // namespace oxytorch
