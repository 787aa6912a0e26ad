/// The sum of squares of a gradient, taken before the step and good for as long as the gradient is the same.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "oxytorch/kernels/step_tail.h"

namespace oxytorch::optim {

class KnownSum {
 public:
  /// Measures a gradient that the kernels can read.
  void take(const at::Tensor& grad, const kernels::Parallel& pool);
  void forget() noexcept { sum_ = -1; }
  /// The sum if `grad` is still what was measured, else -1; forgotten in either case.
  double spend(const at::Tensor& grad) noexcept;

 private:
  double sum_ = -1;
  const void* at_ = nullptr;
  std::int64_t version_ = -1;
  // An element by which a gradient that was written without a new version is told from what it was: C++'s
  // clip_grad_norm_ and clip_grad_value_ write through data(). It is the largest of up to 256, so that both show in it.
  std::int64_t witness_ = 0;
  std::uint32_t witness_bits_ = 0;  // 0: none of them was other than zero
};

}  // namespace oxytorch::optim
