/// The strategies that come with the library.
#pragma once

#include <vector>

#include "oxytorch/tune/strategy.h"

namespace oxytorch::tune {

/// In the order in which they are tried: exact ones first, what changes much before what changes little.
std::vector<RegisteredStrategy> own_strategies();

}  // namespace oxytorch::tune
