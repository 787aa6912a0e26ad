/// What proofs of operators have in common: values to try, and how near to fp64 results must be.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <cstdint>
#include <limits>
#include <vector>

namespace oxytorch::tune {

/// No further from fp64 than twice torch's own; where torch happens to be exact, one rounding is allowed.
inline bool is_near(const at::Tensor& ours, const at::Tensor& theirs, const at::Tensor& exact, double rounding) {
  const auto error = [&](const at::Tensor& of) { return (of - exact).norm().item<double>(); };
  return error(ours) <= 2 * error(theirs) + rounding * exact.norm().item<double>();
}

/// The same of results, in float64, that were computed in `type`.
inline bool are_near(const std::vector<at::Tensor>& ours, const std::vector<at::Tensor>& theirs,
                     const std::vector<at::Tensor>& exact, at::ScalarType type) {
  for (std::size_t i = 0; i < exact.size(); ++i) {
    if (!is_near(ours[i], theirs[i], exact[i], type == at::kFloat ? 0x1p-22 : 0x1p-8)) return false;
  }
  return true;
}

/// Normal values by a generator of its own, times `scale` and plus `offset`.
class Values {
 public:
  at::Tensor normal(at::IntArrayRef sizes, double scale = 1, double offset = 0) {
    return at::empty(sizes, at::kFloat).normal_(offset, scale, generator_);
  }
  /// With ties, zeros of both signs, infinities and NaN, some of each.
  at::Tensor odd(at::IntArrayRef sizes) {
    at::Tensor values = normal(sizes, 2).round_();
    auto* data = values.mutable_data_ptr<float>();
    constexpr float kInf = std::numeric_limits<float>::infinity();
    const float rare[] = {-0.0F, kInf, -kInf, std::numeric_limits<float>::quiet_NaN()};
    for (std::int64_t i = 3; i < values.numel(); i += 11) data[i] = rare[i % 4];
    return values;
  }

 private:
  at::Generator generator_ = at::detail::createCPUGenerator(20);
};

}  // namespace oxytorch::tune
