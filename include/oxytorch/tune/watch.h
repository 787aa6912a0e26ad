/// Watch: keeps a guard over a certified run, step by step, and takes its strategies back when the guard says so.
#pragma once

#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <vector>

#include "oxytorch/api.h"
#include "oxytorch/tune/certificate.h"
#include "oxytorch/tune/guard.h"
#include "oxytorch/tune/kind.h"

namespace oxytorch::tune {

/// What one batch shows with strategies and without; nothing of it stays.
struct BothWays {
  double with = 0, without = 0;  ///< losses
  Apart gradients = {};
  double seconds = 0;  ///< that it took
};

/// The run that a watch is over. Called between steps.
class OXY_API Watched {
 public:
  Watched() = default;
  virtual ~Watched();
  Watched(const Watched&) = delete;
  Watched& operator=(const Watched&) = delete;

  /// As Workload::activate(), beside what the caller's settings keep active.
  virtual void activate(const std::vector<std::string>& strategies) = 0;
  /// With `first` active, or, where that is empty, what is; then without. May leave nothing active.
  virtual BothWays compare(const std::vector<std::string>& first) = 0;
  /// Steps are held to a budget of memory now, which compare() keeps to: it compares losses and no gradients. No step
  /// is taken without the strategies then where they lower the memory of a step.
  [[nodiscard]] virtual bool has_budget() { return false; }
  /// As Workload::told().
  [[nodiscard]] virtual std::optional<std::string> told(const std::exception& error);
};

struct WatchOptions {
  std::vector<std::string> names;        ///< active but for a step now and then, and taken back together
  std::vector<std::string> always = {};  ///< of them, those that are no part of the step and stay active meanwhile
  Kind kind = Kind::Exact;               ///< the widest of theirs
  std::uint64_t drawn_by = 0;            ///< the steps that are compared
  bool only_when_doubted = false;        ///< a step that cannot be taken twice is compared where it must be alone
};

/// Not for use from several threads at once. Run, certificate and store must outlive it.
class OXY_API Watch {
 public:
  Watch(Watched& run, Certificate& certificate, const CertificateStore* store, const WatchOptions& options);

  /// Before each step: makes active what the guard wants. False once it is over: the strategies are taken back, which
  /// the log and the certificate say, and the stored certificate is forgotten, so that the next run measures anew. What
  /// taking them back throws passes through after that.
  bool before();
  /// Seconds of the step that was taken.
  void after(double seconds);
  /// A loss or gradients were not finite: before() compares.
  void doubt();
  /// What is watched, also while a step is taken without it; or was, where it is over.
  [[nodiscard]] const std::vector<std::string>& names() const noexcept { return options_.names; }
  [[nodiscard]] bool over() const noexcept { return !guard_; }
  /// A check is under way: a device is to be waited for before and after each step, so that times mean something.
  [[nodiscard]] bool checks() const noexcept { return guard_ && guard_->is_timing(); }
  [[nodiscard]] std::int64_t step() const noexcept { return guard_ ? guard_->step() : ended_; }
  [[nodiscard]] std::string reason() const { return guard_ ? guard_->reason() : reason_; }  ///< of the last check

 private:
  void take_back(const std::string& reason);
  [[nodiscard]] bool may_time();

  Watched& run_;
  Certificate& certificate_;
  const CertificateStore* store_;
  WatchOptions options_;
  std::optional<Guard> guard_;
  std::int64_t ended_ = 0;
  std::string reason_;
  bool told_of_budget_ = false;
};

}  // namespace oxytorch::tune
