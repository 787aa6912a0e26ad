/// Guard: watches a certified run and says, at a step boundary, when to look again and when to take a change back.
///
/// Two things are looked at. Speed: checks on a schedule, each of some steps with and without the changes. Numbers: one
/// batch's loss and gradients with and without, at steps that are drawn, so that no fault can keep out of their way.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "oxytorch/api.h"
#include "oxytorch/tune/kind.h"
#include "oxytorch/tune/paired_test.h"

namespace oxytorch::tune {

/// Where a yardstick was further off than a kind's gradients may be, they are noise: those with the changes may be
/// three times as far off, as for the verifier, and those of the step as given once.
inline constexpr double kOfUsual = 4;

struct GuardOptions {
  std::int64_t first_check = 50;     ///< step of the first check
  std::int64_t check_every = 2'000;  ///< steps between checks; doubled after each that held, up to 16 times
  int pairs = 9;  ///< steps with and without, live, in random order, before a check may end in RollBack; a check that
                  ///< sees a loss goes on up to four times as long, one that sees a gain ends earlier
  std::int64_t compare_every = 500;  ///< steps between two comparisons in the mean, at the most, or what makes them
                                     ///< 1 % of the run (10 % at first): gaps are drawn, the first within first_check,
                                     ///< and grow by half
  double loss_tolerance = 0;         ///< largest relative distance of the losses of one batch with and without; 0: the
                                     ///< same bits; negative: compared only after suspicious(). Of a loss under a
                                     ///< hundredth of the largest compared so far, and of 1, relative to that
  double gradient_tolerance = 0;     ///< largest Apart::gradient; above 0, not where the loss is under a ten-thousandth
  double factor_tolerance = 0;       ///< largest Apart::factor
  double threshold = 0.99;           ///< taken back where the speedup's whole interval lies under it
  std::uint64_t seed = 0;

  /// Sets the three tolerances to what a kind of change may do to a batch, rounding across kinks included.
  OXY_API void allow(Kind kind);
};

/// What to do with the step about to be taken. CompareLosses: answer with compared(), then ask before() again.
/// RollBack: take the changes back, then take the step; said once, Run from then on.
enum class Action { Run, RunWithout, CompareLosses, RollBack };

/// How far one batch's gradients with the changes are from those without.
struct Apart {
  double gradient = 0;  ///< root mean square error of the worst tensor, relative to its size
  double factor = 0;    ///< |f - 1| of the factor f that is common to all
};

/// Driven once a step: before() says how to take it, after() reports its seconds. No step is lost: a step without the
/// changes is the user's own step. Pure arithmetic, as PairedTest.
class OXY_API Guard {
 public:
  explicit Guard(GuardOptions options = {});
  ~Guard();
  Guard(Guard&&) noexcept;
  Guard& operator=(Guard&&) noexcept;

  /// Not `timed`: no check of the time begins, and one under way is dropped; it is made once steps may be timed.
  [[nodiscard]] Action before(bool timed = true);
  void after(double seconds);
  /// Answers CompareLosses: the losses of one held batch with and without the changes, and how far its gradients are.
  /// Those that are further off than allowed pass where `usual`, those of stock autocast, are a quarter as far: of a
  /// gradient that is all but zero rounding is all there is. `seconds` that it took space the next ones.
  void compared(double with, double without, const Apart& gradients = {}, const Apart& usual = {}, double seconds = 0);
  /// Whether gradients are further off than allowed, so that it matters how far stock autocast's are.
  [[nodiscard]] bool doubts(const Apart& gradients) const;
  /// A check of the time is under way: the steps from before() to after() are to be timed to their end.
  [[nodiscard]] bool is_timing() const noexcept;
  /// A loss of the run that is not finite: the next before() is CompareLosses.
  void suspicious();
  [[nodiscard]] const std::string& reason() const noexcept;  ///< of the last RollBack, or of the last check that held
  [[nodiscard]] std::int64_t step() const noexcept;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace oxytorch::tune
