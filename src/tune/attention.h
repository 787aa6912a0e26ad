/// Which kernel scaled dot-product attention runs.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

namespace oxytorch::tune {

/// True where `forward` runs flash attention on this thread; run without gradients.
bool uses_flash(const std::function<at::Tensor()>& forward);

/// The math path for the end of the scope; with `reduced`, its sums stay in bf16 where the tensors are, which would
/// otherwise go through float32 copies.
class MathAttention {
 public:
  explicit MathAttention(bool reduced);
  ~MathAttention();
  MathAttention(const MathAttention&) = delete;
  MathAttention& operator=(const MathAttention&) = delete;

 private:
  bool flash_before_, reduced_before_;
};

}  // namespace oxytorch::tune
