/// Files without a name, which go with their last descriptor and mapping.
#pragma once

#include <string>

namespace oxytorch::memory {

/// A descriptor of a new file in `folder`, which shows up as "oxytorch-<purpose>" in /proc; -1 with errno where none
/// can be made there.
[[nodiscard]] int nameless_file(const std::string& folder, const char* purpose);

}  // namespace oxytorch::memory
