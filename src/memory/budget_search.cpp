#include "oxytorch/memory/budget_search.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <utility>

#include "base/size_text.h"
#include "memory/aligned.h"
#include "memory/block_search.h"
#include "oxytorch/error.h"

namespace oxytorch::memory {
namespace {

constexpr int kTries = 8;                    // choices by prediction, before the lowest one is taken, or none
constexpr std::int64_t kTimeFineness = 500;  // parts of a peak to which the one that time allows is looked for
constexpr int kReportPoints = 9;             // of the curve
constexpr double kLessTime = 0.9;            // of the time that was allowed, where its choice took too long

/// How a block is under it, as the table has it.
std::string now_text(BlockAction action) {
  switch (action) {
    case BlockAction::Keep: return "kept";
    case BlockAction::Full: return "run again";
    case BlockAction::Selective: return "selective";
    case BlockAction::Lossless: return "packed";
    case BlockAction::BFloat16: return "packed as bf16";
    case BlockAction::Int8: return "packed as int8";
    case BlockAction::File: return "written to a file";
  }
  return "";
}

std::string milliseconds(double seconds) {
  char text[32];
  std::snprintf(text, sizeof text, "%.4g ms", 1e3 * seconds);
  return text;
}

}  // namespace

BudgetSearch::BudgetSearch(StepTape tape, std::int64_t base, std::int64_t plain_peak, std::int64_t budget)
    : tape_(std::move(tape)),
      base_(base),
      budget_(budget),
      target_(budget),
      plain_peak_(plain_peak),
      predicted_peak_(plain_peak),
      measured_peak_(plain_peak) {
  OXY_CHECK(budget >= 1, InvalidArgument, "a memory budget of ", budget, " bytes, expected at least 1.");
  OXY_CHECK(
      !tape_.calls.empty(), InvalidArgument, "the step calls none of the ", tape_.names.size(),
      " blocks with gradients", tape_.names.empty() ? std::string() : " (" + tape_.names.front() + " is the first)",
      ". Name those it calls; of a compiled model torch._functorch.config.activation_memory_budget bounds what is "
      "kept.");
  floor_ = base_ + lowest_peak(tape_).peak_bytes;
}

BudgetSearch BudgetSearch::least(StepTape tape, std::int64_t base, std::int64_t plain_peak, double plain_seconds,
                                 double max_slowdown) {
  OXY_CHECK(max_slowdown >= 1, InvalidArgument, "max_slowdown is ", max_slowdown,
            ", expected at least 1: times as long as a step with everything kept.");
  BudgetSearch search(std::move(tape), base, plain_peak, std::max<std::int64_t>(plain_peak, 1));
  search.max_slowdown_ = max_slowdown;
  search.allowed_seconds_ = (max_slowdown - 1) * plain_seconds;
  return search;
}

BudgetSearch::BudgetSearch(std::int64_t budget)
    : base_(0),
      budget_(budget),
      target_(budget),
      plain_peak_(0),
      predicted_peak_(0),
      measured_peak_(0),
      floor_(0),
      is_optimal_(false),
      same_bits_(std::nullopt) {
  OXY_CHECK(budget >= 1, InvalidArgument, "a memory budget of ", budget, " bytes, expected at least 1.");
}

BudgetSearch BudgetSearch::unrecorded(std::vector<std::string> names, std::int64_t budget) {
  OXY_CHECK(!names.empty(), InvalidArgument, "a step does not fit in memory, and it calls no blocks to run again.");
  BudgetSearch search(budget);
  search.too_many_ = names.size();  // all
  search.tape_.names = std::move(names);
  search.most_kept_ = 0;
  return search;
}

BlockChoice BudgetSearch::keeping_last(std::size_t count) const {
  BlockChoice choice;
  for (std::size_t i = 0; i + count < tape_.names.size(); ++i) choice.add(BlockAction::Full, tape_.names[i]);
  return choice;
}

/// None kept first; then the number that is known least about.
std::optional<BlockChoice> BudgetSearch::next_unrecorded() {
  if (tries_++ == 0) return choice_ = keeping_last(0);
  if (!why_.empty()) refuse("with every block run again " + why_);
  if (*most_kept_ + 1 >= too_many_) {
    choice_ = keeping_last(*most_kept_);
    return std::nullopt;
  }
  kept_ = *most_kept_ + (too_many_ - *most_kept_) / 2;
  return choice_ = keeping_last(kept_);
}

void BudgetSearch::ran_out(const std::string& error) {
  if (kept_ == 0) why_ = "it ran out of memory: " + error;
  too_many_ = kept_;
}

/// The smallest peak whose seconds are allowed; nothing where none is smaller than that of a plain step.
std::optional<BlockChoice> BudgetSearch::next_least() {
  const auto spans = tape_.spans();
  const auto plain = peak_of(spans, std::vector(tape_.names.size(), BlockAction::Keep));
  while (!is_over_ && tries_++ < kTries) {
    std::optional<BlockPlan> best;
    std::int64_t low = floor_ - base_ - 1, high = plain;
    while (high - low > std::max<std::int64_t>(plain / kTimeFineness, 1)) {
      const auto budget = low + (high - low) / 2;
      auto plan = find_plan(tape_, spans, budget);
      if (plan && plan->seconds <= allowed_seconds_) {
        high = std::min(budget, plan->peak_bytes);
        best = std::move(plan);
      } else {
        low = budget;
      }
    }
    if (!best) break;
    if (choose(*best)) return choice_;
    allowed_seconds_ *= kLessTime;  // that choice took too long
  }
  if (!is_over_) {
    choice_ = {};
    measured_peak_ = predicted_peak_ = budget_ = plain_peak_;
    is_over_ = true;
  }
  return std::nullopt;
}

std::optional<BlockChoice> BudgetSearch::next() {
  if (is_unrecorded()) return next_unrecorded();
  if (is_bound_by_time()) return next_least();
  if (is_over_ || measured_peak_ <= budget_) return std::nullopt;
  if (tried_lowest_) refuse("the lowest peak of tensors that was reached is " + size_text(floor_));
  const auto spans = tape_.spans();
  while (tries_++ < kTries) {
    const auto plan = find_plan(tape_, spans, target_ - base_);
    if (!plan) break;
    if (choose(*plan)) return choice_;
    target_ = predicted_peak_ - 1;  // that choice was measured, and is too much
  }
  // Predicted to be too much as well; what it takes is for the step to say.
  tried_lowest_ = true;
  if (!choose(find_lowest(tape_, spans))) {
    floor_ = measured_peak_;  // of that choice, which was measured just now
    refuse("the lowest peak of tensors that was reached is " + size_text(floor_));
  }
  return choice_;
}

/// False where it is the choice before.
bool BudgetSearch::choose(const BlockPlan& plan) {
  BlockChoice choice;
  for (std::size_t i = 0; i < tape_.names.size(); ++i) choice.add(plan.choice[i], tape_.names[i]);
  predicted_peak_ = base_ + plan.peak_bytes;
  is_optimal_ = plan.is_optimal;
  return std::exchange(choice_, choice) != choice;
}

void BudgetSearch::measured(std::int64_t peak) {
  if (is_unrecorded()) {
    if (kept_ == 0) floor_ = peak;
    if (peak > budget_) {
      if (kept_ == 0) why_ = "it takes " + size_text(peak);
      too_many_ = kept_;
    } else {
      most_kept_ = kept_;
      measured_peak_ = predicted_peak_ = peak;
    }
    return;
  }
  measured_peak_ = peak;
  floor_ = std::min(floor_, peak);
  if (is_bound_by_time()) {
    budget_ = peak;
    return;
  }
  is_over_ = peak <= budget_;
  if (is_over_) return;
  // At the last choice, the lowest that was reached.
  if (tried_lowest_) floor_ = peak;
  target_ -= peak - budget_;
}

void BudgetSearch::timed(double plain_seconds, double seconds) {
  plain_seconds_ = plain_seconds;
  seconds_ = seconds;
  if (!is_bound_by_time()) return;
  is_over_ = seconds <= max_slowdown_ * plain_seconds;
  if (!is_over_) {
    const double fits = (max_slowdown_ - 1) * plain_seconds / (seconds - plain_seconds);
    allowed_seconds_ *= std::min(kLessTime, fits);
  }
}

void BudgetSearch::without(BlockAction action, const std::string& error) {
  left_out_ += left_out_.empty() ? "" : " ";
  left_out_ += action == BlockAction::Selective
                   ? "Results of cheap operators are kept, as a step that made them again failed: " + error
                   : "No block is " + now_text(action) + ", as a step with all of them so failed: " + error;
}

void BudgetSearch::rounded(double relative_error) { relative_error_ = relative_error; }

void BudgetSearch::refuse(const std::string& found) const {
  detail::raise(ErrorCode::OutOfMemory, "no choice of actions for blocks keeps a step within ", size_text(budget_),
                ": ", found, ". Give a larger budget, smaller blocks or a smaller batch.");
}

std::vector<std::pair<std::int64_t, double>> BudgetSearch::curve(int points) const {
  std::vector<std::pair<std::int64_t, double>> found;
  if (is_unrecorded()) return found;
  const auto spans = tape_.spans();
  for (int i = 0; i < points; ++i) {
    const auto budget = plain_peak_ - (plain_peak_ - floor_) * i / std::max(points - 1, 1);
    const auto plan = find_plan(tape_, spans, budget - base_);
    if (!plan) continue;  // the floor is known to a 2,000th
    const std::pair point{base_ + plan->peak_bytes, plan->seconds};
    if (found.empty() || found.back() != point) found.push_back(point);
  }
  return found;
}

std::string BudgetSearch::summary() const {
  const auto within = is_bound_by_time() ? std::string() : " of the budget of " + size_text(budget_);
  const auto note = left_out_.empty() ? "" : " " + left_out_;
  if (choice_.empty()) return "a step takes " + size_text(measured_peak_) + within + " as it is." + note;
  const auto of = " of " + std::to_string(tape_.names.size()) + " blocks";
  std::vector<std::string> parts;
  if (const auto& full = choice_[BlockAction::Full]; !full.empty()) {
    parts.push_back(std::to_string(full.size()) + of + " are run again in backward");
  }
  for (const auto action : kRecordedActions) {
    if (choice_[action].empty()) continue;
    const auto count = std::to_string(choice_[action].size()) + of;
    parts.push_back(action == BlockAction::Selective ? "results of cheap operators of " + count + " are made again"
                                                     : "saved tensors of " + count + " are " + now_text(action));
  }
  std::string text = parts.front();
  for (std::size_t i = 1; i < parts.size(); ++i) text += (i + 1 < parts.size() ? ", " : ", and ") + parts[i];
  text += ": a step takes " + size_text(measured_peak_) + within +
          (is_unrecorded() ? ", and does not fit without." : ", and " + size_text(plain_peak_) + " without.");
  if (is_bound_by_time()) text += " That is the least " + slowdown_text() + '.';
  return text + note;
}

std::string BudgetSearch::slowdown_text() const {
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), "where a step may take %.3g times as long", max_slowdown_);
  return text.data();
}

std::string BudgetSearch::cost() const {
  if (choice_.empty() || plain_seconds_ <= 0) return {};
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), "a step takes %.2f times as long.", seconds_ / plain_seconds_);
  return text.data();
}

/// A row for each block, after one of titles.
std::vector<std::vector<std::string>> BudgetSearch::block_rows() const {
  const auto seconds = tape_.seconds();
  std::vector<std::array<std::int64_t, kBlockActions>> bytes(tape_.names.size());  // that are kept, by action
  for (const auto& call : tape_.calls) {
    bytes[call.block][index_of(BlockAction::Keep)] += call.saved_bytes;
    for (const auto action : kRecordedActions) {
      if (const auto& under = call.under[index_of(action)]) bytes[call.block][index_of(action)] += under->saved_bytes;
    }
  }
  std::vector<BlockAction> known;
  std::vector<std::vector<std::string>> rows{{"block", "keeps for backward"}};
  if (is_unrecorded()) {
    rows = {{"block", "now"}};
    for (const auto& name : tape_.names) rows.push_back({name, now_text(choice_.action_of(name))});
    return rows;
  }
  for (const auto action : kRecordedActions) {
    if (!tape_.has(action)) continue;
    known.push_back(action);
    for (const auto* what : {" keeps", " takes"}) rows.front().push_back(std::string(name(action)) + what);
  }
  rows.front().insert(rows.front().end(), {"forward takes", "now"});
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    auto& row = rows.emplace_back();
    row = {tape_.names[i], size_text(bytes[i][index_of(BlockAction::Keep)])};
    for (const auto action : known) {
      row.push_back(size_text(bytes[i][index_of(action)]));
      const double taken = seconds[i][index_of(action)];
      row.push_back(std::isfinite(taken) ? milliseconds(taken) : "saves nothing");
    }
    row.push_back(milliseconds(seconds[i][index_of(BlockAction::Full)]));
    row.push_back(now_text(choice_.action_of(tape_.names[i])));
  }
  return rows;
}

/// What the choice comes to, in sentences.
std::string BudgetSearch::outcome() const {
  if (is_unrecorded()) {
    return "Peak " + size_text(measured_peak_) + " of a budget of " + size_text(budget_) + "; " + size_text(floor_) +
           " with every block run again. With every block kept a step does not fit, so that none was recorded.";
  }
  auto text = "Peak " + size_text(measured_peak_) + " (predicted " + size_text(predicted_peak_) + ')' +
              (is_bound_by_time() ? ", the least " + slowdown_text() : " of a budget of " + size_text(budget_)) + "; " +
              size_text(plain_peak_) + " with every block kept, and " + size_text(floor_) + " at the least.";
  if (!left_out_.empty()) text += " " + left_out_;
  if (seconds_ > 0) {
    text += " A step takes " + milliseconds(seconds_) + " instead of " + milliseconds(plain_seconds_) + ".";
  }
  if (choice_.empty()) return text;
  if (relative_error_ > 0) {
    std::array<char, 96> error{};
    std::snprintf(error.data(), error.size(), " What is packed is rounded by %.2g of its size.", relative_error_);
    text += error.data();
  }
  if (!same_bits_) return text + " Two steps with every block kept differ from each other: bits cannot be compared.";
  return text + (*same_bits_ ? " A step leaves the same bits." : " A step leaves other bits.");
}

std::string BudgetSearch::table() const { return aligned(block_rows(), 1) + outcome() + '\n'; }

monitor::Report BudgetSearch::report() const {
  monitor::Report report("Memory of a step");
  report.paragraph(choice_.empty() ? "A step takes " + size_text(plain_peak_) + " with every block kept, and " +
                                         size_text(floor_) + " at the least."
                                   : outcome());
  if (!is_unrecorded()) report.add(curve_chart());
  auto rows = block_rows();
  monitor::Table blocks{.title = "Blocks"};
  for (auto& title : rows.front()) blocks.columns.push_back({std::move(title)});
  for (std::size_t i = 1; i < blocks.columns.size() - 1; ++i) blocks.columns[i].align = monitor::Align::Right;
  for (std::size_t i = 1; i < rows.size(); ++i) blocks.rows.emplace_back(rows[i].begin(), rows[i].end());
  report.add(std::move(blocks));
  return report;
}

monitor::LineChart BudgetSearch::curve_chart() const {
  constexpr double kMiB = 1 << 20;
  monitor::Series predicted{.name = "predicted"};
  for (const auto& [peak, seconds] : curve(kReportPoints)) {
    predicted.x.push_back(static_cast<double>(peak) / kMiB);
    predicted.y.push_back(1e3 * seconds);
  }
  monitor::LineChart chart{.title = "What less memory costs",
                           .x_label = "peak, MiB",
                           .y_label = "added to a step, ms",
                           .series = {std::move(predicted)},
                           .zero_based = true};
  if (seconds_ > 0) {
    const double peak = static_cast<double>(measured_peak_) / kMiB;
    const double added = 1e3 * std::max(0.0, seconds_ - plain_seconds_);
    chart.series.push_back({.name = "this choice, measured", .x = {peak, peak}, .y = {0, added}, .dashed = true});
  }
  return chart;
}

}  // namespace oxytorch::memory
