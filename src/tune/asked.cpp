#include "oxytorch/tune/asked.h"

#include <algorithm>
#include <utility>
#include <variant>

#include "oxytorch/config_use.h"
#include "oxytorch/error.h"
#include "oxytorch/tune/policy.h"
#include "tune/names.h"

namespace oxytorch::tune {
namespace {

/// The setting that a strategy or a group of them is of, and the value that takes it out.
struct Key {
  const char* name;
  const char* setting;
  const char* off;
};
constexpr Key kKeys[] = {
    {"host_memory", "allocator", "system"},
    {"host_pool", "allocator", "system"},
    {"threads", "threads", "keep"},
    {"affinity", "threads", "keep"},
    {"flush_denormals", "flush_denormals", "off"},
    {"layout", "channels_last", "off"},
    {"attention", "attention", "default"},
    {"precision", "precision", "fp32"},
    {"step_tail", "step_tail", "off"},
    {"int8_state", "optimizer_state", "fp32"},
    {"state_in_file", "optimizer_state", "fp32"},
    {"compile", "compile", "off"},
    {"loader_workers", "num_workers", "keep"},
    {"prefetch", "prefetch", "keep"},
};

/// A value is what these strategies do, the first that applies; the others of their group are something else.
struct Meaning {
  const char* setting;
  const char* value;
  std::vector<std::string> strategies;
};
const std::vector<Meaning>& meanings() {
  static const std::vector<Meaning> all{
      {"precision", "bf16", {"bf16_autocast"}},
      {"channels_last", "on", {"channels_last", "channels_last_3d"}},
      {"attention", "math", {"math_attention", "math_attention_bf16"}},
      {"attention", "native", {"native_attention"}},
      {"step_tail", "on", {"step_tail", "int8_state"}},
      {"optimizer_state", "int8", {"int8_state"}},
      {"optimizer_state", "file", {"state_in_file"}},
      {"compile", "default", {"compile", "compile_dynamic"}},
      {"compile", "max-autotune", {"compile_max_autotune"}},
  };
  return all;
}

/// A value that no strategy can bring about, and what can.
constexpr Key kNothing[] = {
    {"float16 needs a loss scale in the loop. Use a Trainer with precision = 'fp16', or 'bf16'", "precision", "fp16"},
    {"give the optimizer state_dtype='bf16' before (oxytorch.optim.replace), or use 'int8'", "optimizer_state", "bf16"},
};

/// Settings that decide neither how long a step takes nor what is tried.
constexpr std::string_view kOfNoConsequence[] = {
    "level",    "seed",         "max_steps",    "steps_planned",           "remember",
    "progress", "log_every",    "monitor",      "early_stopping_patience", "early_stopping_min_delta",
    "schedule", "warmup_steps", "min_lr_ratio", "early_stopping_mode",     "early_stopping_restore_best"};

/// A configuration, and which of its values count as named.
struct Settings {
  const PerformanceConfig& config;
  AskedBy by;

  bool is_named(const char* key) const { return tune::is_named(config, key, by); }
  bool is(const char* key, const char* word) const {
    return is_named(key) && config.get(key) == ConfigValue(std::string(word));
  }
  std::string because(const char* key) const {
    return std::string(key) + " is " + to_string(config.get(key)) + " in the configuration";
  }
};

/// The strategies of a value that may be tried.
std::vector<std::string> allowed_of(const Meaning& meaning, const PerformanceConfig& config,
                                    const std::vector<Offer>& offers, const std::vector<std::string>& excluded) {
  std::vector<std::string> allowed;
  bool here = false;
  for (const auto& name : meaning.strategies) {
    for (const auto& offer : offers) {
      if (offer.name != name || holds(excluded, name)) continue;
      here = true;
      if (allows(config.level(), offer.kind)) allowed.push_back(name);
    }
  }
  OXY_CHECK(
      !allowed.empty(), InvalidArgument, meaning.setting, " = '", meaning.value, "' was asked for, and ",
      here ? "level '" + config.level() + "' does not allow it" : meaning.strategies.front() + " is not to be tried",
      ". Change the one or the other, or leave ", meaning.setting, " at its default.");
  return allowed;
}

const Key* key_of(const std::string& strategy, Kind kind, const std::string& group) {
  const auto named = [](const std::string& name) {
    const auto* found =
        std::find_if(std::begin(kKeys), std::end(kKeys), [&](const Key& key) { return key.name == name; });
    return found == std::end(kKeys) ? nullptr : found;
  };
  if (const auto* own = named(strategy)) return own;
  return named(kind == Kind::Precision ? "precision" : group);
}

bool checkpoints(const PerformanceConfig& config) { return checkpointing_of(config) != "off"; }

/// What a loop asks for is tried like the rest, and kept whatever it gains.
void require_in_loop(const Settings& settings, const std::vector<Offer>& offers,
                     const std::vector<std::string>& excluded, Asked& found) {
  for (const auto& [why, setting, value] : kNothing) {
    OXY_CHECK(!settings.is(setting, value), NotSupported, setting, " = '", value,
              "': accelerate() has no strategy for it; ", why, '.');
  }
  for (const auto& meaning : meanings()) {
    if (!settings.is(meaning.setting, meaning.value)) continue;
    auto allowed = allowed_of(meaning, settings.config, offers, excluded);
    const auto first =
        std::find_if(offers.begin(), offers.end(), [&](const Offer& o) { return o.name == allowed.front(); });
    for (const auto& offer : offers) {
      if (offer.traits.group != first->traits.group || holds(meaning.strategies, offer.name)) continue;
      found.skipped.emplace(offer.name, settings.because(meaning.setting));
    }
    found.required.push_back({meaning.setting, meaning.value, std::move(allowed)});
  }
}

/// What a trainer asks for, what says more of the optimizer before step_tail, which it is too.
void require_in_trainer(const Settings& settings, Asked& found) {
  auto& required = found.required;
  for (const auto& meaning : meanings()) {
    if (settings.is(meaning.setting, meaning.value)) {
      required.push_back({meaning.setting, meaning.value, meaning.strategies});
    }
  }
  if (settings.is("optimizer_state", "bf16")) required.push_back({"optimizer_state", "bf16", {"step_tail"}});
  // What is in a file is stepped by the user's own optimizer.
  const auto of_state = [](const Requirement& one) { return one.setting == "optimizer_state" && one.value != "file"; };
  if (settings.is("step_tail", "off") && std::erase_if(required, of_state) != 0) {
    found.refused.emplace("optimizer_state", "step_tail is 'off'.");
  }
  std::stable_partition(required.begin(), required.end(), [](const auto& one) { return one.setting != "step_tail"; });
}

}  // namespace

bool is_named(const PerformanceConfig& config, std::string_view key, AskedBy by) {
  if (by == AskedBy::Trainer) return config.get(key) != ConfigValue(std::string("auto"));
  return config.source(key) != ConfigSource::Level;
}

std::string closures_unplanned() {
  return "the first batch is a closure, and steps of a loss_fn on a batch are planned.";
}

std::string fitted_anew(std::int64_t step) {
  return "step " + std::to_string(step) + " ran out of memory and was fitted anew: ";
}

bool may_fit_again(std::string_view checkpointing, int fits) {
  constexpr int kMost = 5;  // 0.9 to the fifth: 0.59 of what the first plan took
  return fits < (checkpointing == "least" ? 1 : kMost);
}

std::int64_t tighter_budget(std::int64_t peak) { return peak - peak / 10; }

void set_goal(const PerformanceConfig& config, TunerOptions& options) {
  options.goal = config.word("goal") == "memory" ? Goal::Memory : Goal::Speed;
  options.max_slowdown = config.number("max_slowdown");
  options.max_growth = config.number("max_growth");
}

bool has_budget(Goal goal, std::string_view checkpointing, std::optional<bool> recomputes) {
  if (goal == Goal::Memory) return true;
  if (!recomputes) return false;
  const bool is_size = checkpointing != "off" && checkpointing != "auto" && checkpointing != "least";
  return is_size || *recomputes;
}

double slowdown_left(const Certificate& certificate, double max_slowdown) {
  if (certificate.accepted().empty()) return max_slowdown;
  return std::max(1.0, max_slowdown * certificate.baseline_seconds / certificate.tuned_seconds);
}

std::int64_t planned_steps(const PerformanceConfig& config, std::int64_t otherwise) {
  const auto planned = config.integer("steps_planned").value_or(TunerOptions().steps_planned);
  if (is_given(config, "steps_planned")) return planned;
  const auto length = config.integer("max_steps").value_or(0);
  return length > 0 ? length : otherwise > 0 ? otherwise : planned;
}

std::string decided_by(const PerformanceConfig& config, const std::vector<std::string>& strategies,
                       std::int64_t steps_planned, AskedBy by) {
  std::string text = "strategies";
  for (const auto& name : strategies) text += ' ' + name;
  text += "; steps " + std::to_string(steps_planned) + (by == AskedBy::Trainer ? "; a trainer's" : ";") + " settings";
  for (const auto& field : PerformanceConfig::fields()) {
    const bool counts =
        std::find(std::begin(kOfNoConsequence), std::end(kOfNoConsequence), field.key) == std::end(kOfNoConsequence);
    if (counts && is_named(config, field.key, by)) text += ' ' + field.key + '=' + to_string(config.get(field.key));
  }
  return text;
}

TunerOptions tuning_of_trainer(const PerformanceConfig& config, std::int64_t length, const std::vector<Offer>& offers) {
  const double seconds = config.number("tune_seconds");
  TunerOptions options{.level = config.level(),
                       .steps_planned = planned_steps(config, length),
                       .seed = static_cast<std::uint64_t>(config.integer("seed").value_or(0)),
                       .total = seconds > 0 ? seconds : kPolicy.least_trainer_seconds,
                       .total_share = seconds > 0 ? 0 : kPolicy.total_share};
  set_goal(config, options);
  for (const auto& offer : offers) {
    if (offer.traits.group == "split") options.exclude.push_back(offer.name);
  }
  return options;
}

std::string_view setting_of(const std::string& name, Kind kind, const std::string& group) {
  const auto* key = key_of(name, kind, group);
  return key == nullptr ? "" : key->setting;
}

Asked asked_of(const PerformanceConfig& config, const std::vector<Offer>& offers,
               const std::vector<std::string>& excluded, AskedBy by) {
  Asked found;
  const Settings settings{config, by};
  if (by == AskedBy::Trainer) {
    require_in_trainer(settings, found);
  } else {
    require_in_loop(settings, offers, excluded, found);
  }
  for (const auto& offer : offers) {
    const auto* key = key_of(offer.name, offer.kind, offer.traits.group);
    if (key != nullptr && key->setting == std::string_view("compile") && checkpoints(config)) {
      found.skipped.emplace(offer.name,
                            "a compiled model calls no blocks, and " +
                                settings.because(is_given(config, "goal") ? "goal" : "gradient_checkpointing"));
    }
    if (key == nullptr || !settings.is_named(key->setting)) continue;
    // Of settings of the process the value that was given is applied, and nothing else is to be found out.
    const bool applied = ((offer.traits.group == "threads" || offer.traits.feeds) &&
                          std::holds_alternative<std::int64_t>(config.get(key->setting))) ||
                         (offer.name == "flush_denormals" && settings.is("flush_denormals", "on")) ||
                         (offer.name == "allocator" && settings.is("allocator", "retain"));
    const bool scaled = settings.is(key->setting, "fp16");  // by the loop itself
    if (applied || scaled || settings.is(key->setting, key->off)) {
      found.skipped.emplace(offer.name, settings.because(key->setting));
    }
  }
  return found;
}

void activate(Asked& asked, const PerformanceConfig& config, const std::vector<Offer>& offers,
              const std::function<bool(const std::string&)>& is_active,
              const std::function<std::string(const std::string&)>& put) {
  const Settings settings{config, AskedBy::Trainer};
  const auto offered = [&](const std::string& name) {
    const auto found = std::find_if(offers.begin(), offers.end(), [&](const Offer& o) { return o.name == name; });
    return found == offers.end() ? nullptr : &*found;
  };
  for (const auto& [setting, value, names] : std::exchange(asked.required, {})) {
    if (std::any_of(names.begin(), names.end(), is_active)) continue;
    const Offer* brought = nullptr;
    std::string whys;
    for (const auto& name : names) {
      const auto* const offer = offered(name);  // a language has not all of them
      const auto why = offer != nullptr ? put(name) : name == names.front() ? "there is no strategy " + name : "";
      if (offer != nullptr && why.empty()) {
        brought = offer;
        break;
      }
      whys += (whys.empty() || why.empty() ? "" : "; ") + why;
    }
    if (brought == nullptr) {
      asked.refused[setting] = whys.ends_with('.') ? whys : whys + '.';
      continue;
    }
    for (const auto& offer : offers) {
      const bool alike = !offer.traits.group.empty() && offer.traits.group == brought->traits.group;
      if (alike || offer.name == brought->name) asked.skipped.emplace(offer.name, settings.because(setting.c_str()));
    }
  }
}

}  // namespace oxytorch::tune
