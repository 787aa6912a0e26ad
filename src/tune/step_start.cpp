#include "tune/step_start.h"

#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>

#include "generators/generators.h"

namespace oxytorch::tune {

StepStart::StepStart(const TrainingStep& step, bool generators) : step_(step) {
  if (generators) generators_ = generators::states(step.device());
  for (auto& buffer : step.model().buffers()) {
    auto was = buffer.detach().clone();
    buffers_.emplace_back(std::move(buffer), std::move(was));
  }
}

void StepStart::restore() const {
  const at::NoGradGuard no_grad;
  for (const auto& [buffer, was] : buffers_) buffer.copy_(was);
  generators::set_states(step_.device(), generators_);
}

}  // namespace oxytorch::tune
