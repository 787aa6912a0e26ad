/// What a trainer says of its first batch and of its optimizer. One set of sentences for both languages.
#pragma once

#include <string>
#include <vector>

#include "oxytorch/api.h"
#include "oxytorch/tune/setting_lines.h"

namespace oxytorch {

/// What may keep a tuner from trying anything on a trainer's first batch.
struct FirstBatch {
  bool calibrate = true;        ///< whether anything may be tried
  bool is_closure = false;      ///< a function that returns the loss
  bool is_iterator = false;     ///< something that batches are drawn from
  bool has_hooks = false;       ///< a parameter's, that act in backward
  bool is_distributed = false;  ///< the run is one of several processes
  bool has_lazy = false;        ///< a parameter that has no value yet
};

/// Why nothing may be tried on it; empty where nothing speaks against it.
[[nodiscard]] OXY_API std::string hindrance(const FirstBatch& batch);

/// The optimizer that a trainer steps.
struct SteppingOptimizer {
  bool is_own = false;              ///< one of oxytorch's, and the caller's
  bool replaces = false;            ///< one of oxytorch's in the place of the caller's
  bool shares_state = false;        ///< and the caller's goes on holding groups and state
  std::string state = "fp32";       ///< format of one of oxytorch's; see optim::name(StateFormat)
  std::vector<std::string> active;  ///< strategies that are
};

/// The lines of the settings step_tail and, where there is anything to say of it, optimizer_state.
[[nodiscard]] OXY_API std::vector<SettingLine> lines_of_optimizer(const tune::SettingLines& made_of,
                                                                  const SteppingOptimizer& optimizer);

}  // namespace oxytorch
