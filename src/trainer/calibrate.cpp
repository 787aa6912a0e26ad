#include "trainer/calibrate.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/types.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>

#include "oxytorch/clock.h"

namespace oxytorch::calibrate {

Escrow::Escrow(const torch::nn::Module& model, std::vector<at::Tensor> parameters)
    : parameters_(std::move(parameters)), generator_(at::detail::getDefaultCPUGenerator().get_state()) {
  for (auto& parameter : parameters_) {
    gradients_.push_back(parameter.grad());
    parameter.mutable_grad().reset();
  }
  for (const auto& buffer : model.buffers()) {
    if (buffer.defined()) buffers_.emplace_back(buffer, buffer.detach().clone());
  }
}

void Escrow::rewind() {
  at::NoGradGuard no_grad;
  for (auto& parameter : parameters_) parameter.mutable_grad().reset();
  for (auto& [buffer, copy] : buffers_) buffer.copy_(copy);
  auto generator = at::detail::getDefaultCPUGenerator();
  generator.set_state(generator_);
}

Escrow::~Escrow() {
  rewind();
  for (size_t i = 0; i < parameters_.size(); ++i) parameters_[i].mutable_grad() = gradients_[i];
}

std::pair<double, double> once(Escrow& escrow, const std::function<at::Tensor()>& loss) {
  escrow.rewind();
  const auto start = std::chrono::steady_clock::now();
  const auto value = loss();
  value.backward();
  const double seconds = seconds_since(start);
  return {seconds, value.item<double>()};
}

Trial compare(Escrow& escrow, const std::function<at::Tensor()>& loss, const std::function<void(bool)>& flip) {
  struct Off {
    const std::function<void(bool)>& flip;
    ~Off() { flip(false); }
  } off{flip};
  constexpr double kBudget = 0.8;
  constexpr int kFewest = 3;      // pairs after which a clear difference ends the comparison
  constexpr double kClear = 0.9;  // the slowest of one side is below this share of the fastest of the other
  flip(true);
  const auto [warm, after] = once(escrow, loss);
  flip(false);
  const auto [cold, before] = once(escrow, loss);
  const int most = static_cast<int>(std::clamp(kBudget / std::max(warm + cold, 1e-6), 5.0, 25.0));
  Trial trial{std::numeric_limits<double>::infinity(), std::numeric_limits<double>::infinity(), 0, 0};
  double slowest_with = 0, slowest_without = 0;
  const auto clear = [&] { return slowest_with < kClear * trial.without || slowest_without < kClear * trial.with; };
  for (int i = 0; i < most && (trial.rounds < kFewest || !clear()); ++i, ++trial.rounds) {
    for (const bool on : {i % 2 != 0, i % 2 == 0}) {
      flip(on);
      const double seconds = once(escrow, loss).first;
      auto& least = on ? trial.with : trial.without;
      auto& most_seconds = on ? slowest_with : slowest_without;
      least = std::min(least, seconds);
      most_seconds = std::max(most_seconds, seconds);
    }
  }
  trial.drift = std::isfinite(after) == std::isfinite(before) ? 0 : std::numeric_limits<double>::infinity();
  if (std::isfinite(after) && std::isfinite(before)) {
    trial.drift = std::abs(after - before) / std::max(std::abs(before), 1e-3);
  }
  return trial;
}

}  // namespace oxytorch::calibrate
