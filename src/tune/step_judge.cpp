#include "oxytorch/tune/step_judge.h"

#include <algorithm>

namespace oxytorch::tune {

StepJudge::StepJudge(ValueErrors usual, bool reduced_precision, bool has_float64, bool short_look)
    : usual_(std::move(usual)),
      allowance_(reduced_precision ? kReduced
                 : has_float64     ? kFloat32
                                   : kUnknown),
      has_float64_(has_float64),
      small_(short_look ? 0.02 : 0) {}

std::vector<Excess> StepJudge::beyond(const ValueErrors& found, const ValueErrors& usual) const {
  auto excess = values_beyond(found, usual, allowance_);
  std::erase_if(excess, [&](const auto& one) { return one.relative < small_; });
  return excess;
}

void StepJudge::note(const ValueErrors& found) {
  ++float64_steps_;
  gradient_error_ = std::max(gradient_error_, found.worst());
  loss_error_ = std::max(loss_error_, found.loss / std::max(found.loss_size, 1e-12));
}

std::string StepJudge::fault(ComparedStep& step, bool wide) {
  const auto words = [](const std::vector<Excess>& excess) {
    return excess.empty() ? std::string() : excess.front().words;
  };
  const auto given = step.take_as_given();
  auto found = step.errors();
  auto excess = beyond(found, usual_);
  if (!excess.empty() && !wide && found.wrong.empty() && !given.empty() && kinks_.speak()) {
    excess = beyond(step.errors_with(kinks_.unexplained(step.gradients(), given)), usual_);
    across_kinks_ |= excess.empty();
  }
  if (!has_float64_ || given.empty() || (excess.empty() && !wide)) return words(excess);

  const auto right = step.take_in_float64();
  found = step.errors();
  note(found);
  excess = beyond(found, usual_);
  if (excess.empty()) return {};
  const auto yardstick = step.yardstick_errors();
  excess = beyond(found, yardstick);
  if (excess.empty() || !found.wrong.empty()) return words(excess);
  Kinks kinks(step.gradients(), right);
  for (int state = 0; state < kKinkStates; ++state) {
    const auto [mine, reference] = step.take_apart(state);
    kinks.add(mine, reference);
  }
  kinks_.learn(kinks);
  excess = values_beyond(step.errors_with(kinks.unexplained()), yardstick, allowance_);
  across_kinks_ |= excess.empty();
  return words(excess);
}

void StepJudge::add_to(std::map<std::string, double>& evidence) const {
  if (across_kinks_) evidence["across_kinks"] = 1;
  if (float64_steps_ == 0) return;
  evidence["float64_steps"] = float64_steps_;
  evidence["gradient_error"] = gradient_error_;
  evidence["usual_error"] = usual_.worst();
  evidence["loss_error"] = loss_error_;
}

}  // namespace oxytorch::tune
