/// Which part of the library honours which setting of a PerformanceConfig: one table for both languages. A setting that
/// was given and cannot be honoured is refused with a sentence, never dropped.
#pragma once

#include <string>
#include <string_view>

#include "oxytorch/api.h"
#include "oxytorch/config.h"

namespace oxytorch {

/// What takes a configuration.
enum class ConfigUser {
  CppTrainer,            ///< oxytorch::Trainer
  Trainer,               ///< oxytorch.Trainer of Python
  Accelerate,            ///< oxytorch::accelerate
  PerformanceOptimizer,  ///< its trainer takes the steps, one batch or micro-batch at a time
  OwnStep,               ///< the same where the user's own function takes whole steps: step=
  PythonAccelerate,      ///< oxytorch.accelerate
};

/// "cpp_trainer", "trainer", "cpp_accelerate", "performance_optimizer", "own_step" or, of Python, "accelerate";
/// Error(InvalidArgument) for another.
OXY_API ConfigUser parse_config_user(std::string_view name);

/// Why `user` can do nothing with `key`, and what to do instead, as the end of a sentence; empty where it honours it.
/// Error(InvalidArgument) for an unknown key.
OXY_API std::string refusal(std::string_view key, ConfigUser user);

/// True where a file or the caller set `key` to another value than the level's default.
OXY_API bool is_given(const PerformanceConfig& config, std::string_view key);

/// What `gradient_checkpointing` comes to: a size, "off", "auto" or "least", which `goal` = memory stands for too.
OXY_API std::string checkpointing_of(const PerformanceConfig& config);

/// Throws for the first setting that was given and that `user` would have to drop: Error(NotSupported) where it cannot
/// honour it, Error(InvalidArgument) where another setting leaves it without effect or contradicts it. The message has
/// the setting, its value, why, and what to do.
OXY_API void check_settings(const PerformanceConfig& config, ConfigUser user);

/// What an optimizer of oxytorch::optim was told when it was made; 0: nothing.
struct OwnTail {
  double clip_norm = 0;
  double clip_value = 0;
  double ema_decay = 0;
  std::string nonfinite = {};
  bool norm_in_backward = false;
  bool step_in_backward = false;
};

/// Throws where a trainer is asked for one thing and its optimizer for another: Error(InvalidArgument) for two values
/// of one option, Error(NotSupported) for clipping that comes too late for an optimizer that works in backward.
OXY_API void check_own_tail(const PerformanceConfig& config, const OwnTail& own);

}  // namespace oxytorch
