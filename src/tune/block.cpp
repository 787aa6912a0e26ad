#include "oxytorch/tune/block.h"

#include <algorithm>
#include <cmath>

namespace oxytorch::tune {
namespace {

constexpr double kBlockSeconds = 0.004;
// GPT-2 small on an H200: 5 ms of a step pass before the card works and after the host is done.
constexpr double kDeviceBlockSeconds = 0.1;
constexpr double kMostSteps = 64;
constexpr double kLongStep = 0.05;

}  // namespace

int block_steps(double step_seconds, bool on_host) {
  const double seconds = on_host ? kBlockSeconds : kDeviceBlockSeconds;
  return static_cast<int>(std::clamp(std::round(seconds / std::max(step_seconds, 1e-6)), 1.0, kMostSteps));
}

int settle_steps(int wanted, double step_seconds) {
  return step_seconds > kLongStep ? std::max(0, wanted - 1) : wanted;
}

}  // namespace oxytorch::tune
