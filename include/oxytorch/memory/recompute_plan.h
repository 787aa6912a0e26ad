/// Which blocks of a model are run again in backward, so that a step stays within a budget of memory at the least cost
/// in time. Knows no torch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "oxytorch/api.h"
#include "oxytorch/memory/timeline.h"

namespace oxytorch::memory {

/// One call of a block in a recorded step. Moments are indices of events.
struct BlockCall {
  std::size_t block = 0;  ///< index into StepTape::names
  std::int64_t forward_begin = 0;
  std::int64_t forward_end = 0;
  std::int64_t backward_begin = 0;  ///< the first that backward of it takes
  double seconds = 0;               ///< of its forward
  std::int64_t saved_bytes = 0;     ///< made in forward, kept for its backward alone
  std::int64_t forward_peak = 0;    ///< the most that forward had live beyond what was live before it
  /// Inputs that the plain step gives back before backward of the block, and a second forward has to wait for.
  struct Held {
    std::int64_t from = 0;  ///< the moment at which the plain step gives it back
    std::int64_t bytes = 0;
  };
  std::vector<Held> held{};
};

/// A step as it was recorded: what was live, and the blocks that could be run again.
struct OXY_API StepTape {
  std::vector<std::int64_t> live;  ///< bytes after each event
  std::vector<std::string> names;  ///< of blocks
  std::vector<BlockCall> calls;    ///< in the order of forward

  /// From a meter's timeline of one step: calls of the regions `blocks`, which do not nest, that backward comes by.
  static StepTape of(const Timeline& timeline, const std::vector<std::string>& blocks);
  /// The last of some recordings of one step, at least one; each call takes the median of its seconds in those that
  /// have the same calls. One recording alone mistakes a page fault for a slow block.
  static StepTape steady(std::vector<StepTape> recordings);

  /// The most that is live where these blocks (one flag each) are run again.
  [[nodiscard]] std::int64_t peak(const std::vector<bool>& again) const;
  /// Seconds that running them again takes.
  [[nodiscard]] double seconds(const std::vector<bool>& again) const;
};

struct RecomputePlan {
  std::vector<bool> again;      ///< one flag for each of StepTape::names
  std::int64_t peak_bytes = 0;  ///< predicted
  double seconds = 0;           ///< that it adds to a step, predicted
  bool is_optimal = false;      ///< no other choice of blocks is faster within the budget
};

/// The choice of blocks that adds the least time with a peak of at most `budget` bytes. Branch and bound over the
/// replayed timeline, for half a second at most; is_optimal tells whether that was enough.
///
/// Error(OutOfMemory) where no choice of blocks is within the budget: its message has the lowest peak.
[[nodiscard]] OXY_API RecomputePlan plan_recomputation(const StepTape& tape, std::int64_t budget);

/// The lowest peak that a choice of blocks reaches, to a 2,000th of it, and that choice.
[[nodiscard]] OXY_API RecomputePlan lowest_peak(const StepTape& tape);

/// Finds a choice of blocks whose measured peak is within a budget: the caller takes the steps. What a peak is above
/// the budget is taken off what the next choice is made for. A budget is refused after the choice of the lowest peak
/// was measured too.
class OXY_API BudgetSearch {
 public:
  /// `base`: bytes that live before the recorded step begins. `plain_peak`: of a step with every block kept, those
  /// included. Error(InvalidArgument) for a budget under 1, and where the step called none of the blocks.
  BudgetSearch(StepTape tape, std::int64_t base, std::int64_t plain_peak, std::int64_t budget);

  /// Names of the blocks to run again in the step that is to be measured next; empty: the search is over.
  /// Error(OutOfMemory), with the lowest peak, where no choice is within the budget.
  [[nodiscard]] std::optional<std::vector<std::string>> next();
  void measured(std::int64_t peak);
  /// Medians of steps with every block kept and with the choice.
  void timed(double plain_seconds, double seconds);
  /// Whether a step leaves the same bits as with every block kept; empty: two such steps differ from each other.
  void compared(std::optional<bool> same) { same_bits_ = same; }

  [[nodiscard]] const std::vector<std::string>& recomputed() const noexcept { return recomputed_; }
  [[nodiscard]] std::int64_t budget() const noexcept { return budget_; }
  [[nodiscard]] std::int64_t plain_peak() const noexcept { return plain_peak_; }
  [[nodiscard]] std::int64_t predicted_peak() const noexcept { return predicted_peak_; }
  [[nodiscard]] std::int64_t measured_peak() const noexcept { return measured_peak_; }
  /// The lowest peak: predicted, or measured where that is lower.
  [[nodiscard]] std::int64_t floor() const noexcept { return floor_; }
  [[nodiscard]] double plain_seconds() const noexcept { return plain_seconds_; }
  [[nodiscard]] double seconds() const noexcept { return seconds_; }
  [[nodiscard]] bool is_optimal() const noexcept { return is_optimal_; }
  [[nodiscard]] std::optional<bool> same_bits() const noexcept { return same_bits_; }

  /// (peak in bytes, seconds added to a step), predicted, from the plain step down to the floor.
  [[nodiscard]] std::vector<std::pair<std::int64_t, double>> curve(int points) const;
  /// What each block saves and costs, and what the choice comes to, as text.
  [[nodiscard]] std::string table() const;
  /// What the choice comes to, in a sentence; and what it costs, empty where nothing is run again.
  [[nodiscard]] std::string summary() const;
  [[nodiscard]] std::string cost() const;

 private:
  [[nodiscard]] bool choose(const RecomputePlan& plan);
  [[noreturn]] void refuse(const std::string& found) const;

  StepTape tape_;
  std::int64_t base_, budget_, target_, plain_peak_, predicted_peak_, measured_peak_, floor_;
  std::vector<std::string> recomputed_;
  double plain_seconds_ = 0, seconds_ = 0;
  bool is_optimal_ = true, is_over_ = false, tried_lowest_ = false;
  int tries_ = 0;
  std::optional<bool> same_bits_ = true;
};

}  // namespace oxytorch::memory
