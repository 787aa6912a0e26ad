/// Reuse: whether a remembered certificate may be trusted in a new run, as far as it and the step as given tell. What
/// it names is measured and verified after that, by PairedTestOptions::canary() and PairedTestOptions::member().
#pragma once

#include <string>

#include "oxytorch/api.h"
#include "oxytorch/tune/certificate.h"

namespace oxytorch::tune {

/// The step as given, measured now.
struct StepNow {
  double seconds = 0;
  double spread = 0;       ///< of its blocks, as a share
  bool disturbed = false;  ///< other programs used the processor: nothing can be told from its time
  std::string time;        ///< UTC, ISO 8601
};

/// Why it is to be measured anew, one clause; empty where it may be trusted. That is: it was measured disturbed; the
/// step as given takes another time than then, by more than a fifth and three times what either varied by; or nothing
/// is active by it, and that was found over a week ago or has been reused eight times.
[[nodiscard]] OXY_API std::string why_not_trusted(const Certificate& certificate, const StepNow& now);

/// Where nothing is active by it, the strategy that came nearest to paying and has no one-off cost, to be tried again;
/// empty where none was faster at all.
[[nodiscard]] OXY_API std::string worth_another_look(const Certificate& certificate);

}  // namespace oxytorch::tune
