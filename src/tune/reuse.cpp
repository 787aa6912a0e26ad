#include "oxytorch/tune/reuse.h"

#include <algorithm>
#include <cmath>
#include <ctime>
#include <optional>

#include "oxytorch/tune/policy.h"
#include "tune/words.h"

namespace oxytorch::tune {
namespace {

constexpr const char* kReused = "reused";

std::optional<double> seconds_of(const std::string& time) {
  std::tm parts{};
  if (strptime(time.c_str(), "%Y-%m-%dT%H:%M:%SZ", &parts) == nullptr) return std::nullopt;
  return static_cast<double>(timegm(&parts));
}

std::string nothing_expires(const Certificate& certificate, const StepNow& now) {
  const auto made = seconds_of(certificate.created);
  const auto today = seconds_of(now.time);
  if (!made || !today) return "when it was made cannot be read";
  const double days = (*today - *made) / 86400;
  if (days > kPolicy.nothing_days) {
    return "that nothing pays was found " + monitor::format_count(std::floor(days)) + " days ago";
  }
  const auto reused = std::count_if(certificate.events.begin(), certificate.events.end(),
                                    [](const std::string& e) { return e.find(kReused) != std::string::npos; });
  if (reused >= kPolicy.nothing_reuses) return "that nothing pays was reused " + std::to_string(reused) + " times";
  return "";
}

}  // namespace

std::string why_not_trusted(const Certificate& certificate, const StepNow& now) {
  if (!certificate.disturbance.empty()) return "it was measured on a busy machine: " + certificate.disturbance;
  if (certificate.accepted().empty()) {
    if (auto why = nothing_expires(certificate, now); !why.empty()) return why;
  }
  if (now.disturbed || certificate.step_seconds <= 0 || now.seconds <= 0) return "";
  const double noise = kPolicy.spreads * std::hypot(certificate.step_spread, now.spread);
  if (std::abs(std::log(now.seconds / certificate.step_seconds)) <=
      std::max(std::log1p(kPolicy.least_difference), noise)) {
    return "";
  }
  return "a step as given takes " + monitor::format_seconds(now.seconds) + ", and took " +
         monitor::format_seconds(certificate.step_seconds) + " then";
}

std::string worth_another_look(const Certificate& certificate) {
  if (!certificate.accepted().empty()) return "";
  const CertificateEntry* best = nullptr;
  for (const CertificateEntry& entry : certificate.entries) {
    if (entry.status != Status::Rejected || !entry.speedup || entry.cost_seconds > 1) continue;
    if (entry.speedup->high > 1 && (best == nullptr || entry.speedup->high > best->speedup->high)) best = &entry;
  }
  return best == nullptr ? "" : best->strategy;
}

}  // namespace oxytorch::tune
