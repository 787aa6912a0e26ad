/// How a step of a candidate is judged by loss, gradients and buffers: what it is held against, and in which order.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "oxytorch/api.h"
#include "oxytorch/tune/kinks.h"
#include "oxytorch/tune/verdict.h"

namespace oxytorch::tune {

/// A step that a candidate took. The judge asks for it to be taken again; a language knows how.
///
/// Lists are by parameter, undefined where there is no gradient. Every way of taking it starts where the candidate
/// stood before the step.
class OXY_API ComparedStep {
 public:
  using Gradients = std::vector<at::Tensor>;
  virtual ~ComparedStep() = default;

  /// The candidate's own gradients, as its optimizers use them.
  virtual Gradients gradients() = 0;
  /// Takes the step as given, in its own precision. It is the reference of errors() then; returns its gradients.
  virtual Gradients take_as_given() = 0;
  /// Computes the step in float64, and is the reference in its place.
  virtual Gradients take_in_float64() = 0;
  /// How far the candidate's step is from the reference.
  virtual ValueErrors errors() = 0;
  /// The same with other gradients in the place of its own.
  virtual ValueErrors errors_with(const Gradients& gradients) = 0;
  /// How far the yardstick is from the reference: the step as given, or stock torch's in a lower precision.
  virtual ValueErrors yardstick_errors() = 0;
  /// Gradients of the candidate and of the step as given from a state apart, where a Nudge of this number leads.
  virtual std::pair<Gradients, Gradients> take_apart(int state) = 0;
};

/// Judges steps of one candidate, one after the other.
///
/// The step as given in its own precision is a reference good to 1e-6 at the price of one step; float64 costs three to
/// four. So every step is held against the first, by what float64 said at the start of how far off the yardstick is
/// (`usual`), and float64 decides where that shows more than rounding, and at the steps that are `wide`. What is too
/// far off there is held against the yardstick in this very step; and of gradients that are further off still, what
/// lies along the jumps that the reference makes across kinks is taken away (oxytorch/tune/kinks.h).
class OXY_API StepJudge {
 public:
  /// `reduced_precision`: of a candidate that multiplies in half precision, whose yardstick is stock torch's own.
  /// `has_float64`: whether the model runs in float64. `short_look`: at one step, which lets relative errors below 0.02
  /// pass.
  StepJudge(ValueErrors usual, bool reduced_precision, bool has_float64, bool short_look = false);

  /// What is wrong with a step; empty where nothing is. What the step throws passes through.
  [[nodiscard]] std::string fault(ComparedStep& step, bool wide);

  /// Adds figures of the steps so far: float64_steps, and where there are any gradient_error, usual_error, loss_error
  /// (relative); across_kinks = 1 where an error was a rounding across a kink.
  void add_to(std::map<std::string, double>& evidence) const;

 private:
  [[nodiscard]] std::vector<Excess> beyond(const ValueErrors& found, const ValueErrors& usual) const;
  void note(const ValueErrors& found);

  ValueErrors usual_;
  Allowance allowance_;
  bool has_float64_;
  double small_;
  KnownKinks kinks_;
  int float64_steps_ = 0;
  double gradient_error_ = 0, loss_error_ = 0;
  bool across_kinks_ = false;
};

}  // namespace oxytorch::tune
