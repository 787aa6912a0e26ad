/// The random generators that a training step may draw from.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>

#include <vector>

namespace oxytorch::optim {

/// torch's default generator of the CPU and, second, that of `device` where it is another one and has one.
std::vector<at::Generator> generators(at::Device device);

std::vector<at::Tensor> generator_states(at::Device device);
/// Puts back what `generator_states` returned for the same device.
void set_generator_states(at::Device device, const std::vector<at::Tensor>& states);

}  // namespace oxytorch::optim
