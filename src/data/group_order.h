/// The order of samples inside of a group of an epoch.
#pragma once

#include <cstdint>

#include "oxytorch/data/order.h"

namespace oxytorch::data {

Permutation group_order(std::int64_t size, std::int64_t group, std::uint64_t epoch, std::uint64_t seed);

}  // namespace oxytorch::data
