/// The random generators that a training step may draw from.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>

#include <vector>

namespace oxytorch::generators {

/// torch's default generator of the CPU and, second, that of `device` where it is another one and has one.
std::vector<at::Generator> all(at::Device device);

std::vector<at::Tensor> states(at::Device device);
/// Puts back what `states` returned for the same device.
void set_states(at::Device device, const std::vector<at::Tensor>& states);

}  // namespace oxytorch::generators
