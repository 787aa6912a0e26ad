#include "optim/generators.h"

#include <ATen/Context.h>

#include <mutex>

namespace oxytorch::optim {

std::vector<at::Generator> generators(at::Device device) {
  std::vector<at::Generator> found = {at::globalContext().defaultGenerator(at::kCPU)};
  if (device.is_cpu()) return found;
  try {
    found.push_back(at::globalContext().defaultGenerator(device));
  } catch (const c10::Error&) {
    // A device without a generator of its own has no random state.
  }
  return found;
}

std::vector<at::Tensor> generator_states(at::Device device) {
  std::vector<at::Tensor> states;
  for (at::Generator& generator : generators(device)) {
    const std::lock_guard<std::mutex> lock(generator.mutex());
    states.push_back(generator.get_state());
  }
  return states;
}

void set_generator_states(at::Device device, const std::vector<at::Tensor>& states) {
  std::size_t at = 0;
  for (at::Generator& generator : generators(device)) {
    if (at == states.size()) return;
    const std::lock_guard<std::mutex> lock(generator.mutex());
    generator.set_state(states[at++]);
  }
}

}  // namespace oxytorch::optim
