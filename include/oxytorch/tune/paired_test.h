/// PairedTest: a paired, randomised, sequential comparison of two ways to take the same training step.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "oxytorch/api.h"
#include "oxytorch/statistics.h"

namespace oxytorch::tune {

enum class Side { Incumbent, Challenger };

struct PairedTestOptions {
  double threshold = 1.01;   ///< the challenger must be faster by more than this ratio
  double confidence = 0.95;  ///< of the bootstrap interval that is reported and must lie above the threshold
  /// Probability, over all interim analyses, that two equal sides end in Accept: held by a sign-flip randomisation
  /// test, which the random order within pairs makes exact.
  double false_accept = 0.0085;
  int least_pairs = 9;  ///< before the first interim analysis that may accept
  int most_pairs = 40;
  int patience = 4;  ///< pairs before it may end as hopeless; a far slower challenger ends it before
  double worth = 1;  ///< ratio; ends as soon as the challenger is not going to be faster than it, or than threshold
  double most_seconds = 0;  ///< measured seconds after which it ends at any pair, as rejected; 0: no bound
  double budget_seconds =
      0;  ///< measured seconds after which the paired test ends at the next interim analysis; 0: no bound
  /// Above 0: out of time, it goes on to an interim analysis that costs less than the challenger, as it looks now,
  /// saves in so many steps.
  double repay_steps = 0;
  std::uint64_t seed = 0;  ///< of the order within pairs and of the resamples

  /// Everything against nothing at the end of a search: each change has been accepted by a stricter paired test
  /// already.
  [[nodiscard]] OXY_API static PairedTestOptions conclusion(std::uint64_t seed);
  /// The whole step under an update that a paired test by itself has shown to be faster: of a hundred equal ones not
  /// one has come so far, so that the step need only agree.
  [[nodiscard]] OXY_API static PairedTestOptions agreement();
  /// Whether what a remembered certificate names is faster without one of it: all of five pairs must say so.
  [[nodiscard]] OXY_API static PairedTestOptions member(std::uint64_t seed);
  /// A short look at whether a remembered certificate still pays.
  [[nodiscard]] OXY_API static PairedTestOptions canary(std::uint64_t seed);
  /// Accepts what `other` would, and gives up no sooner.
  OXY_API void loosen(const PairedTestOptions& other);
};

/// Accept: the challenger pays. Reject: it does not, or is not going to. Open: still measuring.
enum class Decision { Open, Accept, Reject };

struct PairedTestResult {
  Decision decision = Decision::Open;
  Interval speedup{};    ///< incumbent seconds over challenger seconds, median over pairs
  double incumbent = 0;  ///< median seconds a step
  double challenger = 0;
  int pairs = 0;
  double p_value = 1;  ///< of the sign-flip test at the last interim analysis
  std::string reason;  ///< one sentence with the figures
};

/// Ask which side to run with next(), report it with record(), until next() is empty. Both sides of a pair run back to
/// back in random order. Rejection may come early (futility), acceptance only at interim analyses whose error adds up
/// to `false_accept`; without `repay_steps`, the interim analysis at which the time is up has all that is left of it.
/// Pure arithmetic: no clock, no thread; the same seed and times give the same verdict.
class OXY_API PairedTest {
 public:
  explicit PairedTest(PairedTestOptions options = {});
  ~PairedTest();
  PairedTest(PairedTest&&) noexcept;
  PairedTest& operator=(PairedTest&&) noexcept;

  [[nodiscard]] std::optional<Side> next() const;
  /// Seconds of one step (or the mean over a block of steps) of the side that next() named; Error(InvalidArgument) for
  /// the other side, for a value that is not positive and finite, and after the end.
  void record(Side side, double seconds);
  /// Ends it as Reject, for example because a side failed.
  void abandon(std::string reason);
  [[nodiscard]] PairedTestResult result() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace oxytorch::tune
