/// Rows of text in columns.
#pragma once

#include <string>
#include <vector>

#include "oxytorch/api.h"

namespace oxytorch {

/// Columns as wide as their widest cell, flush right but for the first `left` ones; dashes under the first row. Rows
/// have as many cells as the first.
[[nodiscard]] OXY_API std::string aligned(std::vector<std::vector<std::string>> rows, std::size_t left = 0);

}  // namespace oxytorch
