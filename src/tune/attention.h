/// Which kernel scaled dot-product attention runs.
#pragma once

namespace oxytorch::tune {

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
