/// Measures tensors of a step against what they should be, in float64, a slice at a time: no more of a large tensor is
/// in float64 at once. What comes of it is judged by oxytorch/tune/verdict.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "oxytorch/api.h"
#include "oxytorch/tune/verdict.h"

namespace oxytorch::tune {

/// Takes one tensor after the other, so that none needs to stay in memory. `given` and the truth may be of any dtype
/// and layout; sparse ones are made dense.
class OXY_API ValueMeter {
 public:
  /// Of one step's loss.
  ValueMeter(double loss, double right);
  /// Of a gradient times `factor`; undefined where there is none.
  void gradient(const std::string& name, const at::Tensor& given, double factor, const at::Tensor& right);
  /// Of what a step left in a buffer; `before` the step, undefined where that is not known.
  void buffer(const std::string& name, const at::Tensor& given, const at::Tensor& right, const at::Tensor& before);
  /// Whether the optimizer is stepped on one side alone.
  void stepped(bool given, bool right);
  [[nodiscard]] ValueErrors found() const;

 private:
  ValueErrors errors_;
  double along_ = 0, square_ = 0;
  std::int64_t count_ = 0;
};

/// What the losses of a candidate's steps show by themselves, beside those of as many steps as given: one that is not
/// finite, a narrower dtype, or values that are all numbers of a narrower dtype. Empty where nothing.
[[nodiscard]] OXY_API std::string losses_fault(const std::vector<at::Tensor>& losses,
                                               const std::vector<at::Tensor>& as_given);

/// The change of one tensor from `before` (undefined: zeros) to `after` against that to `wanted`; of a device too.
[[nodiscard]] OXY_API NamedChange measured_change(std::string name, const at::Tensor& before, const at::Tensor& after,
                                                  const at::Tensor& wanted, bool state);

/// By what gradients are multiplied where they are clipped by norm, as torch's clip_grad_norm_ does, in float64; 1
/// where they are not above the norm by more than rounding: those that torch has clipped are above it by as much as its
/// own norm of them is off.
[[nodiscard]] OXY_API double clip_factor(const std::vector<at::Tensor>& gradients, double norm);

/// How far torch's own norm of gradients is from that in float64, relative; 0 of such as are well below `norm`.
[[nodiscard]] OXY_API double norm_error(const std::vector<at::Tensor>& gradients, double norm);

}  // namespace oxytorch::tune
