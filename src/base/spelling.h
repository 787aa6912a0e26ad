/// User's text: trimmed, made safe to print in messages, and the nearest right name to a wrong one.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "oxytorch/api.h"

namespace oxytorch {

/// `text` in single quotes, with bytes outside printable ASCII as hexadecimal escapes and the middle of a long text
/// left out.
OXY_API std::string in_quotes(std::string_view text);

/// Without spaces, tabs and line ends at both ends.
OXY_API std::string_view trim(std::string_view text);

/// Insertions, deletions, substitutions and swaps of neighbours that turn `a` into `b` (optimal string alignment).
OXY_API std::size_t edit_distance(std::string_view a, std::string_view b);

/// The candidate nearest to `text`, ignoring case, or "" where none is near enough to be what was meant.
OXY_API std::string nearest(std::string_view text, const std::vector<std::string>& candidates);

/// "did you mean 'x'? ", or "" where nearest() finds none.
OXY_API std::string did_you_mean(std::string_view text, const std::vector<std::string>& candidates);

/// "a, b or c", or another word than that; each in single quotes where `quote`.
OXY_API std::string list_of(const std::vector<std::string>& names, bool quote = true, std::string_view word = "or");

}  // namespace oxytorch
