#include "generators/generators.h"

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>

#include <mutex>

namespace oxytorch::generators {

std::vector<at::Generator> all(at::Device device) {
  std::vector<at::Generator> found = {at::globalContext().defaultGenerator(at::kCPU)};
  if (device.is_cpu()) return found;
  try {
    found.push_back(at::globalContext().defaultGenerator(device));
  } catch (const c10::Error&) {
    // A device without a generator of its own has no random state.
  }
  return found;
}

std::vector<at::Tensor> states(at::Device device) {
  std::vector<at::Tensor> states;
  for (at::Generator& generator : all(device)) {
    const std::lock_guard<std::mutex> lock(generator.mutex());
    states.push_back(generator.get_state());
  }
  return states;
}

void set_states(at::Device device, const std::vector<at::Tensor>& states) {
  std::size_t at = 0;
  for (at::Generator& generator : all(device)) {
    if (at == states.size()) return;
    const std::lock_guard<std::mutex> lock(generator.mutex());
    generator.set_state(states[at++]);
  }
}

}  // namespace oxytorch::generators
