#include "oxytorch/tune/kind.h"

#include <string>
#include <vector>

#include "base/spelling.h"
#include "oxytorch/error.h"

namespace oxytorch::tune {

Kind parse_kind(std::string_view text) {
  static const std::vector<std::string> kNames{"exact", "tolerance", "precision", "trade"};
  for (std::size_t i = 0; i < kNames.size(); ++i) {
    if (kNames[i] == text) return static_cast<Kind>(i);
  }
  detail::raise(ErrorCode::InvalidArgument, "unknown kind of change ", in_quotes(text), "; ",
                did_you_mean(text, kNames), "use ", list_of(kNames, true), '.');
}

std::string_view name(Kind kind) noexcept {
  switch (kind) {
    case Kind::Exact: return "exact";
    case Kind::Tolerance: return "tolerance";
    case Kind::Precision: return "precision";
    case Kind::Trade: break;
  }
  return "trade";
}

bool allows(std::string_view level, Kind kind) {
  static const std::vector<std::string> kLevels{"basic", "advanced", "ultra"};
  if (level == kLevels[0]) return kind == Kind::Exact;
  if (level == kLevels[1]) return kind != Kind::Trade;
  OXY_CHECK(level == kLevels[2], InvalidArgument, "unknown level ", in_quotes(level), "; ",
            did_you_mean(level, kLevels), "use ", list_of(kLevels, true), '.');
  return true;
}

}  // namespace oxytorch::tune
