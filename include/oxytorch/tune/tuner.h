/// Tuner: finds what makes a workload's step faster, proves it, and says so in a certificate.
///
/// In this order:
///  1. the step as given is timed (baseline), before anything is tried;
///  2. a remembered certificate is checked on that step and one verified step, and reused where it holds;
///  3. strategies are asked whether they apply; updates of optimizers are timed by themselves;
///  4. the search names trials; each is a paired test of two combinations, with a check by the verifier where it won;
///  5. what is kept is verified over all steps and measured against nothing; what spoils it is dropped, and 4 goes on;
///     With Goal::Memory, what makes the step smaller is added before that, as far as it may be slower;
///  6. what the caller's settings ask for is verified beside it;
///  7. everything is reverted and restored; then finish() makes active what the certificate says.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "oxytorch/api.h"
#include "oxytorch/tune/certificate.h"
#include "oxytorch/tune/search.h"
#include "oxytorch/tune/workload.h"

namespace oxytorch::tune {

/// What is to be made small.
enum class Goal : std::uint8_t {
  Speed,  ///< the seconds of a step
  Memory  ///< the bytes of a step: after what makes it faster, what makes it smaller
};

/// A setting of the caller's that wants a strategy active whatever it gains.
struct Requirement {
  std::string setting;                  ///< "precision"
  std::string value;                    ///< "bf16"
  std::vector<std::string> strategies;  ///< any one of these satisfies it; the first that may be tried is taken
};

struct TunerOptions {
  std::string level = "advanced";
  std::int64_t steps_planned = 10'000;
  double tune_seconds = 0;  ///< seconds for all trials; 0: as SearchOptions::for_run()
  std::uint64_t seed = 0;
  std::vector<std::string> exclude = {};
  std::vector<Requirement> required = {};
  /// Seconds for everything, verifying included, or this share of the planned run where that is more; 0: as
  /// SearchOptions::for_run(). What is under way when they are over is concluded.
  double total = 0;
  double total_share = 0;
  Goal goal = Goal::Speed;
  double max_slowdown = 1.25;  ///< times as long as given that a step may take, with Goal::Memory
  /// Times the bytes as given that a faster step may take, with Goal::Speed; infinite: any, and none are counted for
  /// it.
  double max_growth = 1.05;
};

/// One tuning of one workload. Not for use from several threads at once.
class OXY_API Tuner {
 public:
  /// Error(InvalidArgument) for an unknown level, a name in `exclude` that is not offered, options out of range.
  Tuner(Workload& workload, CertificateKey key, TunerOptions options);
  ~Tuner();
  Tuner(const Tuner&) = delete;
  Tuner& operator=(const Tuner&) = delete;

  /// Steps 1 to 7: the certificate, remembered in `store` or measured. Nothing is active at the end and the state is
  /// restored, also where something throws: what the step as given throws passes through.
  [[nodiscard]] Certificate tune(const CertificateStore* store);

  /// Makes active what the certificate accepted. What cannot be is noted in it as failed.
  void activate(Certificate& certificate);
  /// Makes active what settings ask for beside that, and notes it; returns the names that are now active by that.
  std::vector<std::string> activate_required(Certificate& certificate);

  /// The kind that may do most to the numbers, of these.
  [[nodiscard]] Kind widest(const std::vector<std::string>& strategies) const;
  [[nodiscard]] double seconds() const;  ///< since it was made

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// "2026-01-31T12:00:00Z".
[[nodiscard]] OXY_API std::string utc_now();

}  // namespace oxytorch::tune
