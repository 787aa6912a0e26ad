#include "oxytorch/tune/watch.h"

#include <algorithm>
#include <utility>

#include "oxytorch/logging.h"
#include "tune/names.h"

namespace oxytorch::tune {
namespace {

constexpr const char* kStockAutocast = "bf16_autocast";  // the yardstick of what lowers precision, as of the verifier

GuardOptions guarded_by(const WatchOptions& options, const Certificate& certificate) {
  GuardOptions found;
  found.allow(options.kind);
  for (const auto& entry : certificate.entries) {
    const bool active = holds(options.names, entry.strategy);
    const auto usual = entry.evidence.find("usual_error");
    if (!active || options.kind == Kind::Exact || usual == entry.evidence.end()) continue;
    if (usual->second <= found.gradient_tolerance) continue;
    found.gradient_tolerance = found.factor_tolerance = kOfUsual * usual->second;
  }
  found.seed = options.drawn_by;
  if (options.only_when_doubted) found.loss_tolerance = -1;
  return found;
}

}  // namespace

Watched::~Watched() = default;
std::optional<std::string> Watched::told(const std::exception& error) { return error.what(); }

Watch::Watch(Watched& run, Certificate& certificate, const CertificateStore* store, const WatchOptions& options)
    : run_(run),
      certificate_(certificate),
      store_(store),
      options_(options),
      guard_(guarded_by(options, certificate)) {}

bool Watch::before() {
  if (!guard_) return false;
  std::optional<std::string> fault;
  try {
    const bool timed = may_time();
    auto action = guard_->before(timed);
    while (action == Action::CompareLosses) {
      const auto seen = run_.compare({});
      Apart usual;
      if (guard_->doubts(seen.gradients) && holds(options_.names, kStockAutocast)) {
        usual = run_.compare({kStockAutocast}).gradients;
      }
      guard_->compared(seen.with, seen.without, seen.gradients, usual, seen.seconds);
      action = guard_->before(timed);
    }
    if (action == Action::RollBack) {
      fault = guard_->reason();
    } else {
      run_.activate(action == Action::RunWithout ? options_.always : options_.names);
    }
  } catch (const std::exception& error) {  // the run goes on as it was given
    const auto told = run_.told(error);
    if (!told) throw;
    fault = "they could not be switched: " + *told;
  }
  if (fault) {
    take_back(*fault);
    return false;
  }
  return true;
}

bool Watch::may_time() {
  if (!run_.has_budget()) return true;
  const auto &given = certificate_.given_peak_bytes, &tuned = certificate_.tuned_peak_bytes;
  const bool timed = given && tuned && *given <= *tuned;
  if (!std::exchange(told_of_budget_, true)) {
    certificate_.events.push_back("step " + std::to_string(guard_->step()) +
                                  ": steps are held to a budget of memory, so checks of the run compare losses" +
                                  (timed ? ", and no gradients" : ", no gradients and no times"));
  }
  return timed;
}

void Watch::after(double seconds) {
  if (guard_) guard_->after(std::max(seconds, 1e-9));
}

void Watch::doubt() {
  if (guard_) guard_->suspicious();
}

void Watch::take_back(const std::string& reason) {
  ended_ = guard_->step();
  guard_.reset();
  reason_ = reason;
  const std::string at = "step " + std::to_string(ended_) + ": ";
  const auto note = [&](const std::string& event) {
    certificate_.events.push_back(at + event);
    log(LogLevel::Warn, "accelerate: " + certificate_.events.back(), "tune");
  };
  std::string named;
  for (auto& entry : certificate_.entries) {
    if (!holds(options_.names, entry.strategy)) continue;
    entry.status = Status::RolledBack;
    entry.reason = at + reason;
    named += (named.empty() ? "" : ", ") + entry.strategy;
  }
  note(named + " taken back: " + reason);
  const auto why = store_ != nullptr ? store_->try_forget(certificate_.key) : "";
  if (!why.empty()) note("the stored plan could not be deleted: " + why);
  run_.activate({});
}

}  // namespace oxytorch::tune
