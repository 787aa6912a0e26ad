/// Verdicts: how far a step may be from what it should be, and the sentence that says what is further off. Pure
/// arithmetic on what was measured (oxytorch/tune/measure.h, oxytorch/tune/change.h); knows no torch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "oxytorch/api.h"
#include "oxytorch/tune/change.h"
#include "oxytorch/tune/kind.h"

namespace oxytorch::tune {

/// An error may be so many times what the yardstick is off by.
inline constexpr double kTimes = 3;

// -- loss, gradients, buffers -----------------------------------------------------------------------------------------

/// What is allowed beside three times the error of the yardstick, relative to the value.
struct Allowance {
  double tensor = 0;  ///< to a tensor's root mean square
  double whole = 0;   ///< to that of all gradients together, for tensors whose own gradient cancels
  double slope = 0;
  double loss = 0;
  double buffer = 0;  ///< to that of a buffer's change
};
/// Sums in another order. A buffer may be a mean of many rows that all but cancels.
inline constexpr Allowance kFloat32{3e-5, 1e-6, 3e-5, 1e-5, 1.2e-4};
/// Products of 8 to 10 bits of mantissa.
inline constexpr Allowance kReduced{1e-2, 1e-3, 1e-2, 5e-3, 1e-2};
/// Where float64 cannot say how far off the step as given is itself.
inline constexpr Allowance kUnknown{1e-3, 1e-5, 1e-3, 1e-4, 1e-3};

/// Root mean squares of one tensor: of its error, and of what it should be (of a buffer: of its change).
struct TensorError {
  std::string name;
  double error = 0, size = 0;
  std::int64_t count = 0;
};

/// How far one step was from what it should be.
struct OXY_API ValueErrors {
  double loss = 0, loss_size = 0;
  double slope = 0;  ///< of all gradients: the error along what they should be, relative to it
  double whole = 0;  ///< root mean square of all gradients together
  std::vector<TensorError> gradients = {}, buffers = {};
  std::vector<std::string> wrong = {};  ///< what is missing, of another shape or not finite

  /// Largest error of a gradient, against its size or that of all together where its own cancels.
  [[nodiscard]] double worst() const noexcept;
};

/// Something beyond what is allowed; `relative` is the error against the size of what it should be.
struct Excess {
  std::string words;
  double relative = 0;
};

/// What is further off than the yardstick's own error and the allowance explain. A tensor of at most 500 elements may
/// be ten times as far off as the yardstick, as its own error is a matter of luck.
[[nodiscard]] OXY_API std::vector<Excess> values_beyond(const ValueErrors& found, const ValueErrors& usual,
                                                        const Allowance& allowance);

// -- the optimizer's update -------------------------------------------------------------------------------------------

/// The change of a parameter or of its optimizer state in one step, as measured against float64.
struct NamedChange {
  std::string name;
  Change change;
  std::int64_t count = 0;
  bool state = false;  ///< of the optimizer's state

  /// Error against the size of the change, or the last place where the change is smaller.
  [[nodiscard]] double relative() const noexcept { return change.error / std::max({change.size, change.unit, 1e-300}); }
};

struct UpdateFaults {
  std::vector<std::string> words;
  double worst = 0;  ///< the largest error over what is allowed
};

/// What of one step's update is further off than three times what the step as given is (`base`; a name that is missing
/// there made no error), a unit in the last place and float32's own arithmetic allow: its error, a factor on it, one
/// element, a bias of its rounding. `clipping`: how far each moves by what torch's own norm is off by. State is not
/// held where it is kept in fewer bits (`loose_state`).
[[nodiscard]] OXY_API UpdateFaults update_faults(std::span<const NamedChange> found, std::span<const NamedChange> base,
                                                 const std::map<std::string, double>& clipping, bool loose_state);

// -- random numbers ---------------------------------------------------------------------------------------------------

/// Losses of one batch with other random numbers each time, and how far outputs or gradients are from their mean.
struct Draws {
  std::vector<double> losses = {}, spreads = {};
  const char* spread_of = "outputs";
};

/// What is wrong with what was drawn, against the step as given; empty where nothing.
[[nodiscard]] OXY_API std::string draws_fault(const Draws& found, const Draws& usual);

/// Whether generators stand still where they move as given, or move where they stand still; empty where neither.
/// Hashes of their states: at the start, and after each step.
[[nodiscard]] OXY_API std::string generators_fault(const std::string& start, const std::vector<std::string>& found,
                                                   const std::vector<std::string>& usual);

/// Of a gradient, how far it may be from a difference quotient of the loss with the same random numbers, relative.
[[nodiscard]] OXY_API double quotient_allowance(Kind kind, double usual);

// -- trajectories -----------------------------------------------------------------------------------------------------

/// Between which mean losses seeds and orders of batches end, of those that were seen.
struct Band {
  double low = 0, high = 0;
  [[nodiscard]] bool holds(double end) const noexcept { return low <= end && end <= high; }
};
/// `reduced`: where stock torch in a lower precision ends, which the band of a change of precision reaches as well.
[[nodiscard]] OXY_API Band band_of(std::span<const double> ends, std::optional<double> reduced = {});
/// So near to the end as given that it lies in any band: no seeds need to be run. A run that learns its few batches by
/// heart ends near 0, so the loss that it began with is a measure too.
[[nodiscard]] OXY_API bool in_any_band(double end, double usual, double first);

/// Where a run of a candidate ended, and how others are run that say whether it may end there.
struct RunEnd {
  int steps = 0;                                       ///< that were taken
  double end = 0;                                      ///< mean of its last losses
  double usual = 0;                                    ///< that of the run as given
  double first = 0;                                    ///< the loss that the run as given began with
  std::function<std::vector<double>()> as_given = {};  ///< runs as given, of its own and of other seeds
  std::function<double()> reduced = {};  ///< stock torch in a lower precision; empty where the candidate's kind is none
};
/// Why it may not end there; empty where it may. Other runs are taken only where they decide. Figures go into
/// `evidence`: end_loss, given_loss, and where seeds were run band_low and band_high.
[[nodiscard]] OXY_API std::string end_fault(const RunEnd& run, std::map<std::string, double>& evidence);

// -- which steps are compared -----------------------------------------------------------------------------------------

struct ComparedSteps {
  int count = 0;              ///< steps that are taken
  std::vector<int> compared;  ///< in order
  std::set<int> wide;         ///< of them, taken in float64 whatever the cheap comparison says
};
/// All of the first `dense`, and of the rest the last and others drawn by `drawn_by`: nothing that was active before
/// the draw can know them. Of those in float64 the first is always one.
[[nodiscard]] OXY_API ComparedSteps draw_steps(int count, int dense, std::uint64_t drawn_by);

}  // namespace oxytorch::tune
