#include "oxytorch/tune/block.h"

#include <algorithm>
#include <cmath>

namespace oxytorch::tune {
namespace {

constexpr double kBlockSeconds = 0.004;
constexpr double kMostSteps = 64;
constexpr double kLongStep = 0.05;

}  // namespace

int block_steps(double step_seconds) {
  return static_cast<int>(std::clamp(std::round(kBlockSeconds / std::max(step_seconds, 1e-6)), 1.0, kMostSteps));
}

int settle_steps(int wanted, double step_seconds) {
  return step_seconds > kLongStep ? std::max(0, wanted - 1) : wanted;
}

}  // namespace oxytorch::tune
