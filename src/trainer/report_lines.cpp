#include "oxytorch/trainer/report_lines.h"

#include <utility>

#include "tune/names.h"

namespace oxytorch {

std::string hindrance(const FirstBatch& batch) {
  if (!batch.calibrate) return "on \"auto\", and calibrate is off: nothing is tried.";
  if (batch.is_closure) return "the first batch is a closure, which trials may not call.";
  if (batch.is_iterator) return "the first batch is an iterator, which trials may not draw from.";
  if (batch.has_hooks) return "a parameter has a hook that acts in backward, and trials may not call it.";
  if (batch.is_distributed) return "each process of a distributed run might decide otherwise.";
  if (batch.has_lazy) return "a parameter is lazy and has no value yet.";
  return "";
}

std::vector<SettingLine> lines_of_optimizer(const tune::SettingLines& made_of, const SteppingOptimizer& optimizer) {
  std::vector<SettingLine> lines;
  if (optimizer.is_own) {
    lines.push_back({"step_tail", "on", "the optimizer is one of oxytorch's already."});
  } else if (optimizer.replaces) {
    std::vector<std::string> names;
    for (const char* name : {"step_tail", "int8_state"}) {
      if (tune::holds(optimizer.active, name)) names.emplace_back(name);
    }
    auto line = made_of.active_as("step_tail", names);
    line.reason += " Clip and update are one native call.";
    if (optimizer.shares_state) line.reason += " Groups and state stay shared with torch's object.";
    line.cost.clear();  // that of the state has a line of its own
    lines.push_back(std::move(line));
  } else {
    lines.push_back(made_of.of("step_tail"));
  }
  const auto wanted = made_of.config.word("optimizer_state");
  const bool reduced = optimizer.state == "bf16" || optimizer.state == "int8";
  if (tune::holds(optimizer.active, "state_in_file")) {
    lines.push_back(made_of.active_as("optimizer_state", {"state_in_file"}));
  } else if (reduced && (!optimizer.is_own || optimizer.state == wanted)) {
    lines.push_back({"optimizer_state", "on", "the optimizer's running averages are kept as " + optimizer.state + ".",
                     "averages are rounded; see decision 6 in the documentation."});
  } else if (wanted != "auto" && wanted != (reduced ? optimizer.state : "fp32")) {
    const auto why = made_of.refused.find("optimizer_state");
    lines.push_back({"optimizer_state", "refused",
                     "the optimizer's state stays as it is; " +
                         (optimizer.is_own ? "give the oxytorch optimizer its state_dtype, which is in memory."
                          : why != made_of.refused.end() ? why->second
                                                         : "the optimizer was not replaced.")});
  }
  return lines;
}

}  // namespace oxytorch
