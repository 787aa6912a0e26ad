/// A standard normal number, by Box and Muller.
#pragma once

#include <cmath>
#include <numbers>

#include "oxytorch/random.h"

namespace oxytorch::tune {

inline double normal(PhiloxStream& random) {
  const double radius = std::sqrt(-2 * std::log(1 - random.uniform_double()));
  return radius * std::cos(2 * std::numbers::pi * random.uniform_double());
}

}  // namespace oxytorch::tune
