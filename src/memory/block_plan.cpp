#include "memory/block_search.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <string>

#include "base/size_text.h"
#include "memory/relaxation.h"
#include "oxytorch/error.h"

namespace oxytorch::memory {
namespace {

constexpr std::int64_t kFineness = 2'000;  // parts of a peak to which the lowest one is looked for
// A search looks at about so many numbers, half a second, and at no more nodes than that.
constexpr std::size_t kMostWork = 300'000'000, kLeastNodes = 1'000, kMostNodes = 200'000;
constexpr int kRounds = 240;          // of prices
constexpr int kRoundsPerChoice = 20;  // of which the last one's is repaired and improved
constexpr double kProven = 1e-6;      // over the bound, relative

constexpr auto kFull = index_of(BlockAction::Full);

using Seconds = std::array<double, kBlockActions>;

/// Of forwards that have ended by `moment`, and backwards that begin at `next` at the earliest.
void add_changes(const StepTape& tape, std::int64_t moment, std::int64_t next, Span& span) {
  std::map<std::size_t, Span::Bytes> lowered;
  for (const auto& call : tape.calls) {
    if (call.backward_begin < next) continue;
    const auto hold = [&](BlockAction action, const std::vector<BlockCall::Held>& inputs) {
      for (const auto& held : inputs) {
        if (held.from < next) lowered[call.block][index_of(action)] -= held.bytes;
      }
    };
    const bool has_ended = call.forward_end <= moment;
    if (has_ended) lowered[call.block][kFull] += call.saved_bytes;
    hold(BlockAction::Full, call.held);
    for (const auto action : kRecordedActions) {
      const auto& under = call.under[index_of(action)];
      if (!under) continue;
      if (has_ended) {
        lowered[call.block][index_of(action)] += call.saved_bytes - under->saved_bytes + under->released_bytes;
      }
      for (const auto& output : under->released) {
        if (output.from <= moment) lowered[call.block][index_of(action)] += output.bytes;
      }
      hold(action, under->held);
    }
  }
  for (const auto& each : lowered) {
    if (each.second != Span::Bytes{}) span.lowered.push_back(each);
  }
}

bool counts(const Span& span, const std::vector<BlockAction>& choice) {
  return !span.only_with || span.only_with->counts[index_of(choice[span.only_with->block])];
}

std::int64_t live(const Span& span, const std::vector<BlockAction>& choice) {
  auto live = span.live;
  for (const auto& [block, bytes] : span.lowered) live -= bytes[index_of(choice[block])];
  return live;
}

/// Branch and bound: what is done with which blocks, at the least time, keeps every span within the budget.
class Search {
 public:
  Search(const StepTape& tape, const std::vector<Span>& spans, std::int64_t budget)
      : seconds_(tape.seconds()),
        budget_(budget),
        choice_(tape.names.size(), BlockAction::Keep),
        is_free_(tape.names.size(), true) {
    std::size_t work = 1;
    for (const auto& span : spans) {
      if (most_live(span) <= budget) continue;  // whatever is chosen
      spans_.push_back(&span);
      work += 1 + 2 * span.lowered.size();
    }
    most_nodes_ = std::clamp(kMostWork / work, kLeastNodes, kMostNodes);
  }

  bool run() {
    descend(0);
    return best_.has_value();
  }
  [[nodiscard]] const std::vector<BlockAction>& best() const { return *best_; }
  [[nodiscard]] bool is_complete() const { return nodes_ < most_nodes_; }

 private:
  /// An action for a block, instead of the one before it: what that saves and costs more.
  struct Gain {
    std::size_t block = 0;
    BlockAction action = BlockAction::Keep;
    double bytes = 0, seconds = 0;
  };

  /// By how much a span is over the budget with free blocks kept; 0: it is not, or does not count yet.
  [[nodiscard]] std::int64_t excess(const Span& span) const {
    return counts(span, choice_) ? std::max<std::int64_t>(live(span, choice_) - budget_, 0) : 0;
  }

  /// The actions for a block, from the most bytes a second to the least: the lower hull of their costs.
  void add_gains(std::size_t block, const Span::Bytes& bytes) {
    const auto& seconds = seconds_[block];
    double bytes_before = 0, seconds_before = 0;
    while (true) {
      Gain best;
      for (std::size_t i = 1; i < kBlockActions; ++i) {
        const double more = static_cast<double>(bytes[i]) - bytes_before, longer = seconds[i] - seconds_before;
        if (more <= 0 || !std::isfinite(longer)) continue;
        // Across, so that nothing is divided by 0.
        const double mine = longer * best.bytes, its = best.seconds * more;
        if (best.bytes == 0 || mine < its || (mine == its && more > best.bytes)) {
          best = {block, static_cast<BlockAction>(i), more, longer};
        }
      }
      if (best.bytes == 0) return;
      gains_.push_back(best);
      bytes_before += best.bytes;
      seconds_before += best.seconds;
    }
  }

  /// The least time at which free blocks, taken in part, could bring a span down by `over`; empty: they cannot.
  [[nodiscard]] std::optional<double> least_seconds(const Span& span, std::int64_t over, Gain& first) {
    gains_.clear();
    const auto* const only = span.only_with && is_free_[span.only_with->block] ? &*span.only_with : nullptr;
    bool is_added = only == nullptr;
    const auto with_condition = [&](Span::Bytes bytes) {
      for (std::size_t i = 1; i < kBlockActions; ++i) {
        if (!only->counts[i]) bytes[i] = std::max(bytes[i], over);  // it would not count
      }
      is_added = true;
      return bytes;
    };
    for (const auto& [block, bytes] : span.lowered) {
      if (!is_free_[block]) continue;
      add_gains(block, only != nullptr && only->block == block ? with_condition(bytes) : bytes);
    }
    if (!is_added) add_gains(only->block, with_condition({}));
    std::sort(gains_.begin(), gains_.end(),
              [](const Gain& a, const Gain& b) { return a.bytes * b.seconds > b.bytes * a.seconds; });
    if (!gains_.empty()) first = gains_.front();
    double seconds = 0;
    auto left = static_cast<double>(over);
    for (const auto& gain : gains_) {
      const double part = std::min(1.0, left / gain.bytes);
      seconds += part * gain.seconds;
      left -= part * gain.bytes;
      if (left <= 0.5) return seconds;
    }
    return std::nullopt;
  }

  void descend(double spent) {
    if (nodes_ >= most_nodes_ || (best_ && spent >= best_seconds_)) return;
    ++nodes_;
    double most = 0;
    Gain branch;
    bool is_over = false;
    for (const auto* span : spans_) {
      const auto over = excess(*span);
      if (over == 0) continue;
      Gain first;
      const auto seconds = least_seconds(*span, over, first);
      if (!seconds || (best_ && spent + *seconds >= best_seconds_)) return;
      if (!is_over || *seconds > most) {
        most = *seconds;
        branch = first;
      }
      is_over = true;
    }
    if (!is_over) {
      best_seconds_ = spent;
      best_ = choice_;
      return;
    }
    const auto block = branch.block;
    is_free_[block] = false;
    const auto take = [&](std::size_t action) {
      if (!std::isfinite(seconds_[block][action])) return;
      choice_[block] = static_cast<BlockAction>(action);
      descend(spent + seconds_[block][action]);
    };
    take(index_of(branch.action));
    for (std::size_t action = kBlockActions; action-- > 0;) {
      if (action != index_of(branch.action)) take(action);
    }
    choice_[block] = BlockAction::Keep;
    is_free_[block] = true;
  }

  std::vector<Seconds> seconds_;
  std::vector<const Span*> spans_;
  std::int64_t budget_;
  std::vector<BlockAction> choice_;
  std::vector<bool> is_free_;
  std::vector<Gain> gains_;
  std::size_t nodes_ = 0, most_nodes_ = 0;
  double best_seconds_ = 0;
  std::optional<std::vector<BlockAction>> best_;
};

/// Improves a choice within a budget by changing one block, or two at once, as long as that takes less time: for tapes
/// of so many blocks that a search ends before it has seen all.
class Descent {
 public:
  Descent(const StepTape& tape, const std::vector<Span>& spans, std::int64_t budget, std::vector<BlockAction> choice)
      : seconds_(tape.seconds()), choice_(std::move(choice)), lowered_(choice_.size()), slack_(spans.size()) {
    for (auto& each : lowered_) each.assign(kBlockActions, std::vector<std::int64_t>(spans.size()));
    for (std::size_t i = 0; i < spans.size(); ++i) {
      for (const auto& [block, bytes] : spans[i].lowered) {
        for (std::size_t way = 0; way < kBlockActions; ++way) lowered_[block][way][i] = bytes[way];
      }
      // A way in which it does not count is one that lowers it without end.
      for (std::size_t way = 0; spans[i].only_with && way < kBlockActions; ++way) {
        if (!spans[i].only_with->counts[way]) lowered_[spans[i].only_with->block][way][i] += kEndless;
      }
      slack_[i] = budget - spans[i].live;
      for (std::size_t block = 0; block < choice_.size(); ++block) slack_[i] += lowered_[block][now(block)][i];
    }
  }

  std::vector<BlockAction> run() {
    while (auto best = best_change()) {
      for (const auto& move : *best) apply(move);
    }
    return choice_;
  }

  /// Brings what is over the budget within it, the worst first, by what lowers that most for its time; false where
  /// that comes to no end.
  bool repair() {
    for (std::size_t tries = 0; tries < 2 * choice_.size(); ++tries) {
      const auto worst = std::min_element(slack_.begin(), slack_.end());
      if (worst == slack_.end() || *worst >= 0) return true;
      const auto span = static_cast<std::size_t>(worst - slack_.begin());
      std::optional<Move> best;
      double most = 0;
      for (const auto& move : moves()) {
        const auto lower = std::min(change(move.block, move.way, span), -*worst);
        const auto rate = static_cast<double>(lower) / std::max(-saved(move), kLeastSaved);
        if (rate > most) {
          most = rate;
          best = move;
        }
      }
      if (!best) return false;
      apply(*best);
    }
    return false;
  }

 private:
  struct Move {
    std::size_t block, way;
  };
  static constexpr std::int64_t kEndless = std::int64_t{1} << 50;

  [[nodiscard]] std::size_t now(std::size_t block) const { return index_of(choice_[block]); }
  [[nodiscard]] std::int64_t change(std::size_t block, std::size_t way, std::size_t span) const {
    return lowered_[block][way][span] - lowered_[block][now(block)][span];
  }
  [[nodiscard]] double saved(const Move& move) const {
    return seconds_[move.block][now(move.block)] - seconds_[move.block][move.way];
  }

  void apply(const Move& move) {
    for (std::size_t i = 0; i < slack_.size(); ++i) slack_[i] += change(move.block, move.way, i);
    choice_[move.block] = static_cast<BlockAction>(move.way);
  }

  [[nodiscard]] std::vector<Move> moves() const {
    std::vector<Move> moves;
    for (std::size_t block = 0; block < choice_.size(); ++block) {
      for (std::size_t way = 0; way < kBlockActions; ++way) {
        if (way != now(block) && std::isfinite(seconds_[block][way])) moves.push_back({block, way});
      }
    }
    return moves;
  }

  /// Whether all spans stay within the budget; those most likely to be over it are looked at first.
  [[nodiscard]] bool fits(const Move& one, const Move* other) {
    const auto is_over = [&](std::size_t span) {
      return slack_[span] + change(one.block, one.way, span) +
                 (other == nullptr ? 0 : change(other->block, other->way, span)) <
             0;
    };
    if (is_over(last_over_)) return false;
    for (std::size_t i = 0; i < slack_.size(); ++i) {
      if (!is_over(i)) continue;
      last_over_ = i;
      return false;
    }
    return true;
  }

  /// The change that saves the most time: of one block, or of two, of which one may take more.
  std::optional<std::vector<Move>> best_change() {
    auto all = moves();
    std::sort(all.begin(), all.end(), [&](const Move& a, const Move& b) { return saved(a) > saved(b); });
    std::optional<std::vector<Move>> best;
    double most = kLeastSaved;
    for (const auto& one : all) {
      if (saved(one) <= kLeastSaved) break;
      if (saved(one) > most && fits(one, nullptr)) {
        most = saved(one);
        best = {one};
      }
      for (const auto& other : all) {
        const auto both = saved(one) + saved(other);
        if (both <= most) break;
        if (one.block == other.block || !fits(one, &other)) continue;
        most = both;
        best = {one, other};
      }
    }
    return best;
  }

  static constexpr double kLeastSaved = 1e-9;  // seconds
  std::vector<Seconds> seconds_;
  std::vector<BlockAction> choice_;
  std::vector<std::vector<std::vector<std::int64_t>>> lowered_;  // by block, way and span
  std::vector<std::int64_t> slack_;                              // of each span
  std::size_t last_over_ = 0;
};

BlockPlan made(const StepTape& tape, const std::vector<Span>& spans, const std::vector<BlockAction>& choice,
               bool is_optimal) {
  return {choice, peak_of(spans, choice), tape.seconds(choice), is_optimal};
}

}  // namespace

std::vector<Span> StepTape::spans() const {
  std::vector<Span> all;
  std::vector<std::int64_t> moments{0, static_cast<std::int64_t>(live.size())};
  for (const auto& call : calls) {
    moments.insert(moments.end(), {call.forward_end, call.backward_begin, call.backward_end});
    for (const auto& held : call.held) moments.push_back(held.from);
    for (const auto& output : call.kept_outputs) moments.push_back(output.from);
  }
  std::sort(moments.begin(), moments.end());
  moments.erase(std::unique(moments.begin(), moments.end()), moments.end());
  for (std::size_t i = 0; i + 1 < moments.size(); ++i) {
    Span span;
    span.live = *std::max_element(live.begin() + moments[i], live.begin() + moments[i + 1]);
    add_changes(*this, moments[i], moments[i] + 1, span);
    for (const auto& call : calls) {
      // What backward takes under some actions was recorded as well.
      const bool is_known = std::any_of(call.under.begin(), call.under.end(), [](const auto& one) { return one; });
      if (!is_known || moments[i] < call.backward_begin || call.backward_end <= moments[i]) continue;
      Span::Condition condition{call.block, {}};
      for (std::size_t action = 0; action < kBlockActions; ++action) condition.counts[action] = !call.under[action];
      span.only_with = condition;
    }
    all.push_back(std::move(span));
  }
  for (const auto& call : calls) {
    // Just before its backward begins, what it saved is given up still.
    const auto moment = call.backward_begin;
    const auto before = moment == 0 ? 0 : live[static_cast<std::size_t>(moment) - 1];
    Span span{before + call.forward_peak, {}, Span::Condition{call.block, {}}};
    add_changes(*this, moment, moment, span);
    span.only_with->counts[kFull] = true;
    all.push_back(span);
    for (const auto action : kRecordedActions) {
      const auto& under = call.under[index_of(action)];
      if (!under) continue;
      span.live = before + under->backward_peak;
      span.only_with->counts = {};
      span.only_with->counts[index_of(action)] = true;
      all.push_back(span);
    }
  }
  // What no choice can push over another span needs no look.
  std::sort(all.begin(), all.end(), [](const Span& a, const Span& b) { return a.live > b.live; });
  return all;
}

std::int64_t most_live(const Span& span) {
  auto highest = span.live;
  for (const auto& [block, bytes] : span.lowered) highest -= *std::min_element(bytes.begin(), bytes.end());
  return highest;
}

std::int64_t peak_of(const std::vector<Span>& spans, const std::vector<BlockAction>& choice) {
  std::int64_t highest = 0;
  for (const auto& span : spans) {
    if (counts(span, choice)) highest = std::max(highest, live(span, choice));
  }
  return highest;
}

std::optional<BlockPlan> find_plan(const StepTape& tape, const std::vector<Span>& spans, std::int64_t budget) {
  Search search(tape, spans, budget);
  const bool found = search.run();
  if (search.is_complete()) return found ? std::optional(made(tape, spans, search.best(), true)) : std::nullopt;
  // A search that was cut off goes on from several choices: each descent ends where no small change helps.
  std::vector<std::vector<BlockAction>> starts;
  if (found) starts.push_back(search.best());
  const auto seconds = tape.seconds();
  const std::vector all_again(tape.names.size(), BlockAction::Full);
  starts.push_back(all_again);
  for (const auto action : kRecordedActions) {
    auto start = all_again;
    for (std::size_t block = 0; block < start.size(); ++block) {
      if (std::isfinite(seconds[block][index_of(action)])) start[block] = action;
    }
    if (start != all_again) starts.push_back(std::move(start));
  }
  std::optional<BlockPlan> best;
  for (const auto& start : starts) {
    if (peak_of(spans, start) > budget) continue;
    auto plan = made(tape, spans, Descent(tape, spans, budget, start).run(), false);
    if (!best || plan.seconds < best->seconds) best = std::move(plan);
  }
  if (!best) return std::nullopt;
  Relaxation relaxation(seconds, spans, budget);
  for (int round = 1; round <= kRounds; ++round) {
    auto choice = relaxation.next(best->seconds);
    if (round % kRoundsPerChoice != 0) continue;
    Descent descent(tape, spans, budget, std::move(choice));
    if (!descent.repair()) continue;
    auto plan = made(tape, spans, descent.run(), false);
    if (plan.seconds < best->seconds) best = std::move(plan);
  }
  best->is_optimal = best->seconds <= (1 + kProven) * relaxation.bound();
  return best;
}

BlockPlan find_lowest(const StepTape& tape, const std::vector<Span>& spans) {
  auto found = made(tape, spans, std::vector(tape.names.size(), BlockAction::Full), true);
  std::int64_t lowest = -1;
  // What a search finds is within its budget: the next one looks below the half between.
  while (found.peak_bytes - lowest > std::max<std::int64_t>(found.peak_bytes / kFineness, 1)) {
    const auto budget = lowest + (found.peak_bytes - lowest) / 2;
    Search search(tape, spans, budget);
    if (search.run()) {
      found = made(tape, spans, search.best(), found.is_optimal);
    } else {
      found.is_optimal = found.is_optimal && search.is_complete();
      lowest = budget;
    }
  }
  return found;
}

BlockPlan plan_blocks(const StepTape& tape, std::int64_t budget) {
  const auto spans = tape.spans();
  if (auto plan = find_plan(tape, spans, budget)) return *std::move(plan);
  detail::raise(ErrorCode::OutOfMemory, "no choice of what to make again keeps a step within ", size_text(budget),
                ": the lowest peak is ", size_text(find_lowest(tape, spans).peak_bytes),
                ". Give a larger budget, smaller blocks or a smaller batch.");
}

BlockPlan lowest_peak(const StepTape& tape) { return find_lowest(tape, tape.spans()); }

}  // namespace oxytorch::memory
