/// Torch's random masks, by the kernel of this library.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <optional>

namespace oxytorch::ops {

/// Fills `self` as torch's bernoulli_(p) does, to the bit, and leaves the generator (none: the default one) where that
/// leaves it. False, and nothing is drawn, where it does not take them: float32, bfloat16, float16 and bool, dense, on
/// the CPU, by the Mersenne Twister.
bool bernoulli_cpu(at::Tensor& self, double p, const std::optional<at::Generator>& generator);

/// Whether torch draws so on this machine; on processors of Intel's it may ask MKL, which draws otherwise.
[[nodiscard]] bool bernoulli_cpu_is_torchs();

}  // namespace oxytorch::ops
