#include "tune/attention.h"

#include <ATen/Context.h>

namespace oxytorch::tune {

MathAttention::MathAttention(bool reduced)
    : flash_before_(at::globalContext().userEnabledFlashSDP()),
      reduced_before_(at::globalContext().allowFP16BF16ReductionMathSDP()) {
  at::globalContext().setSDPUseFlash(false);
  at::globalContext().setAllowFP16BF16ReductionMathSDP(reduced);
}

MathAttention::~MathAttention() {
  at::globalContext().setSDPUseFlash(flash_before_);
  at::globalContext().setAllowFP16BF16ReductionMathSDP(reduced_before_);
}

}  // namespace oxytorch::tune
