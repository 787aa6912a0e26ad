/// A signed count of bytes, as figures that may come to less than nothing are kept, as text.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "oxytorch/units.h"

namespace oxytorch {

/// As format_size(); what is below 0 is nothing.
inline std::string size_text(std::int64_t bytes) {
  return format_size(static_cast<std::uint64_t>(std::max<std::int64_t>(bytes, 0)));
}

}  // namespace oxytorch
