#include "optim/known_sum.h"

#include <ATen/core/Tensor.h>

#include <cstring>
#include <utility>

#include "optim/dense.h"

namespace oxytorch::optim {
namespace {

std::uint32_t bits_at(const void* elements, std::size_t width, std::int64_t index) {
  std::uint32_t bits = 0;
  std::memcpy(&bits, static_cast<const char*>(elements) + static_cast<std::size_t>(index) * width, width);
  return bits;
}

std::int64_t version_of(const at::Tensor& grad) { return grad.is_inference() ? -1 : grad._version(); }

}  // namespace

void KnownSum::take(const at::Tensor& grad, const kernels::Parallel& pool) {
  constexpr std::int64_t kSamples = 256;
  sum_ = kernels::sum_squares(address(grad), *element_type(grad), grad.numel(), pool);
  at_ = grad.const_data_ptr();
  version_ = version_of(grad);
  witness_ = 0;
  witness_bits_ = 0;
  const std::size_t width = grad.element_size();
  const std::uint32_t magnitude = width == 4 ? 0x7FFFFFFF : 0x7FFF;
  const std::int64_t stride = (grad.numel() + kSamples - 1) / kSamples;
  for (std::int64_t i = 0; i < grad.numel(); i += stride) {
    const std::uint32_t bits = bits_at(at_, width, i);
    if ((bits & magnitude) > (witness_bits_ & magnitude)) {
      witness_ = i;
      witness_bits_ = bits;
    }
  }
  if (sum_ != 0 && witness_bits_ == 0) forget();
}

double KnownSum::spend(const at::Tensor& grad) noexcept {
  const double sum = std::exchange(sum_, -1);
  if (sum < 0 || !grad.defined() || grad.const_data_ptr() != at_ || version_of(grad) != version_ ||
      (sum != 0 && bits_at(at_, grad.element_size(), witness_) != witness_bits_)) {
    return -1;
  }
  return sum;
}

}  // namespace oxytorch::optim
