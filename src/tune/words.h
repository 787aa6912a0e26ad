/// Figures as the sentences of paired tests, certificates and guards write them.
#pragma once

#include <string>

#include "monitor/format.h"
#include "oxytorch/statistics.h"

namespace oxytorch::tune {

/// "1.534x"; two decimals from 10 on.
inline std::string ratio_text(double ratio) {
  std::string text = monitor::format_fixed(ratio, ratio < 10 ? 3 : 2);
  return text += 'x';
}

/// "1.534x (1.490 to 1.581)".
inline std::string interval_text(const Interval& interval) {
  std::string text = ratio_text(interval.mid);
  text.append(" (").append(monitor::format_fixed(interval.low, 3));
  text.append(" to ").append(monitor::format_fixed(interval.high, 3));
  return text += ')';
}

}  // namespace oxytorch::tune
