/// Brings a training step within a budget of memory: what is done with each block is chosen by recorded steps, and
/// corrected by what is measured. Knows no torch.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "oxytorch/api.h"
#include "oxytorch/memory/block_plan.h"
#include "oxytorch/monitor/report.h"

namespace oxytorch::memory {

/// Finds a choice whose measured peak is within a budget: the caller takes the steps. What a peak is above the budget
/// is taken off what the next choice is made for. A budget is refused after the choice of the lowest peak was measured
/// too.
class OXY_API BudgetSearch {
 public:
  /// `base`: bytes that live before the recorded step begins. `plain_peak`: of a step with everything kept, those
  /// included. Error(InvalidArgument) for a budget under 1, and where the step called none of the blocks.
  BudgetSearch(StepTape tape, std::int64_t base, std::int64_t plain_peak, std::int64_t budget);

  /// In place of a budget: the lowest peak at which a step takes at most `max_slowdown` times as long as a plain one,
  /// which takes `plain_seconds`. Error(InvalidArgument) for less than 1.
  static BudgetSearch least(StepTape tape, std::int64_t base, std::int64_t plain_peak, double plain_seconds,
                            double max_slowdown);
  /// Where no step with everything kept fits in memory, so that none can be recorded: the last blocks are kept, as many
  /// as the budget allows by steps that are measured, and the others run again. `names`: as a step calls them.
  static BudgetSearch unrecorded(std::vector<std::string> names, std::int64_t budget);
  [[nodiscard]] bool is_unrecorded() const noexcept { return most_kept_.has_value(); }

  /// Whether timed() is to be called for each choice, since it decides, and not for the last one alone.
  [[nodiscard]] bool is_bound_by_time() const noexcept { return max_slowdown_ > 0; }

  /// What is to be done with blocks in the step that is to be measured next; empty: the search is over.
  /// Error(OutOfMemory), with the lowest peak, where no choice is within the budget.
  [[nodiscard]] std::optional<BlockChoice> next();
  void measured(std::int64_t peak);
  /// Of unrecorded(), in place of measured(): the step ran out of memory, as `error` says.
  void ran_out(const std::string& error);
  /// Medians of steps with everything kept and with the choice.
  void timed(double plain_seconds, double seconds);
  /// Whether a step leaves the same bits as with everything kept; empty: two such steps differ from each other, or none
  /// fits.
  void compared(std::optional<bool> same) { same_bits_ = same; }
  /// What a step with every block under that action threw: none is put under it, and summary() says why.
  void without(BlockAction action, const std::string& error);
  /// The error of what was rounded, relative to its size.
  void rounded(double relative_error);

  [[nodiscard]] const BlockChoice& choice() const noexcept { return choice_; }
  /// Bytes; the measured peak where there is none.
  [[nodiscard]] std::int64_t budget() const noexcept { return budget_; }
  /// Of a step with everything kept; 0 where none fits.
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
  /// The same as a document, with the curve as a plot.
  [[nodiscard]] monitor::Report report() const;
  /// What the choice comes to, in a sentence; and what it costs, empty where every block is kept.
  [[nodiscard]] std::string summary() const;
  [[nodiscard]] std::string cost() const;

 private:
  explicit BudgetSearch(std::int64_t budget);
  [[nodiscard]] std::optional<BlockChoice> next_least();
  [[nodiscard]] std::optional<BlockChoice> next_unrecorded();
  [[nodiscard]] BlockChoice keeping_last(std::size_t count) const;
  [[nodiscard]] std::string slowdown_text() const;
  [[nodiscard]] std::vector<std::vector<std::string>> block_rows() const;
  [[nodiscard]] std::string outcome() const;
  [[nodiscard]] monitor::LineChart curve_chart() const;
  [[nodiscard]] bool choose(const BlockPlan& plan);
  [[noreturn]] void refuse(const std::string& found) const;

  StepTape tape_;
  std::int64_t base_, budget_, target_, plain_peak_, predicted_peak_, measured_peak_, floor_;
  BlockChoice choice_;
  double plain_seconds_ = 0, seconds_ = 0;
  double max_slowdown_ = 0, allowed_seconds_ = 0;  // in place of a budget; that the choice adds
  bool is_optimal_ = true, is_over_ = false, tried_lowest_ = false;
  int tries_ = 0;
  std::optional<bool> same_bits_ = true;
  std::string left_out_;
  double relative_error_ = 0;
  // Of unrecorded(): how many blocks a step keeps now, at the most that fit, and the fewest that do not.
  std::size_t kept_ = 0, too_many_ = 0;
  std::optional<std::size_t> most_kept_;
  std::string why_;  // the least that was tried does not fit
};

}  // namespace oxytorch::memory
