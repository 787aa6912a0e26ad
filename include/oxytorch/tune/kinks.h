/// Tells a rounding across a kink from a fault of gradients.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <vector>

#include "oxytorch/api.h"

namespace oxytorch::tune {

/// Gradients of one step by a candidate and by the reference, where the model may have kinks.
///
/// A unit whose input is within rounding of a kink (of ReLU, of a maximum) may be on either side of it, and gradients
/// jump there by far more than a rounding: a candidate that rounds otherwise is as right as the reference. So both take
/// the step again at states whose parameters are moved a little (Nudge). The reference's own gradients jump from
/// one to the next. Of a tensor, the error in the step itself is a rounding where
///  - it is no larger than the largest jump, and along the gradient no larger than four times as far as one goes there
///    (jumps of single units hardly scale a gradient, many faults do nothing else);
///  - what the jumps, by least squares over all tensors, leave of it is no larger than what they leave of one of their
///    own: where few units are near a kink, jumps say which, and elsewhere nothing is excused;
///  - the errors at all the states have no part in common beyond chance: roundings cross other kinks at each of them,
///    a fault is there at all of them.
///
/// All lists are by parameter, undefined where there is no gradient.
class OXY_API Kinks {
 public:
  /// Of the step itself. Throws Error(InvalidArgument) where the lists differ in length.
  Kinks(std::vector<at::Tensor> given, std::vector<at::Tensor> right);
  /// Of a state apart.
  void add(const std::vector<at::Tensor>& given, const std::vector<at::Tensor>& right);
  /// The candidate's gradients less what of their error is such a rounding, then in float64.
  [[nodiscard]] std::vector<at::Tensor> unexplained() const;

 private:
  friend class KnownKinks;
  struct Errors {
    double jump = 0, jump_along = 0;        ///< of the reference, largest
    at::Tensor sum;                         ///< of the errors at the states apart
    std::vector<at::Tensor> errors, jumps;  ///< some elements of each, in float64, on the CPU; in files
  };
  /// By tensor, whether the jumps leave no more of its error than of one of their own.
  [[nodiscard]] std::vector<bool> spanned() const;
  /// What is such a rounding, or has such a part: errors as large as a jump, in the directions of jumps.
  [[nodiscard]] std::vector<bool> within() const;

  std::vector<at::Tensor> given_, right_;
  std::vector<Errors> found_;
};

/// What the kinks of some steps of a candidate say of its other steps, each of which would else take a step at two
/// dozen states: an error of a tensor that was such a rounding in all of these may be as large, relative to its
/// gradient, as the largest jump in any of them. Not for use from several threads at once.
class OXY_API KnownKinks {
 public:
  /// Of one more step; its states apart are known.
  void learn(const Kinks& kinks);
  /// Whether enough steps are known to speak for another.
  [[nodiscard]] bool speak() const noexcept { return steps_ >= 2; }
  /// A step's gradients with those of the reference in the place of those whose error is no larger. All of them before
  /// it may speak.
  [[nodiscard]] std::vector<at::Tensor> unexplained(const std::vector<at::Tensor>& given,
                                                    const std::vector<at::Tensor>& right) const;

 private:
  struct Jump {
    double size = 0, along = 0;  ///< relative to the gradient; not above 0: nothing is excused
  };
  std::vector<Jump> jumps_;
  int steps_ = 0;
};

/// How many states apart are looked at: a single unit near its kink crosses it in every second one.
inline constexpr int kKinkStates = 12;

/// The way to one of these states of a step: moves one parameter after the other, the same way each time it is made.
class OXY_API Nudge {
 public:
  /// `parameters` say what their dtypes can hold; `reduced_precision`: a candidate that multiplies in half precision.
  Nudge(const std::vector<at::Tensor>& parameters, bool reduced_precision, int step, int state);
  /// How far each parameter is moved, relative to itself: several times what sums in another order, or products in half
  /// precision, do to the inputs of units.
  [[nodiscard]] double size() const noexcept { return size_; }
  /// The next parameter, moved by a random part of itself; itself where it is of no floating-point dtype.
  [[nodiscard]] at::Tensor moved(const at::Tensor& parameter);

 private:
  double size_;
  at::Generator random_;
};

}  // namespace oxytorch::tune
