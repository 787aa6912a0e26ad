#include "oxytorch/memory/recompute_plan.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <limits>
#include <map>
#include <numeric>
#include <optional>
#include <unordered_map>
#include <utility>

#include "memory/aligned.h"
#include "oxytorch/error.h"
#include "oxytorch/units.h"

namespace oxytorch::memory {
namespace {

constexpr std::int64_t kFineness = 2'000;  // parts of a peak to which the lowest one is looked for
constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();
// A search looks at about so many numbers, half a second, and at no more nodes than that.
constexpr std::size_t kMostWork = 300'000'000, kLeastNodes = 1'000, kMostNodes = 200'000;

constexpr int kTries = 8;  // choices by prediction, before the lowest one is taken

std::string size_text(std::int64_t bytes) {
  return format_size(static_cast<std::uint64_t>(std::max<std::int64_t>(bytes, 0)));
}

std::string milliseconds(double seconds) {
  char text[32];
  std::snprintf(text, sizeof text, "%.4g ms", 1e3 * seconds);
  return text;
}

struct Block {
  std::int64_t taken = 0, given_back = kNever, bytes = 0;
};

/// What `live` becomes between two moments at which a choice of blocks may change it: the peak in between, and by how
/// much each block lowers it (below 0: raises it) where it is run again.
struct Span {
  std::int64_t live = 0;
  std::vector<std::pair<std::size_t, std::int64_t>> lowered;
  /// The moment of a second forward: counts where this block is run again.
  std::optional<std::size_t> only_with;
};

class Spans {
 public:
  explicit Spans(const StepTape& tape) {
    std::vector<std::int64_t> moments{0, static_cast<std::int64_t>(tape.live.size())};
    for (const auto& call : tape.calls) {
      moments.insert(moments.end(), {call.forward_end, call.backward_begin});
      for (const auto& held : call.held) moments.push_back(held.from);
    }
    std::sort(moments.begin(), moments.end());
    moments.erase(std::unique(moments.begin(), moments.end()), moments.end());
    for (std::size_t i = 0; i + 1 < moments.size(); ++i) {
      Span span;
      const auto begin = tape.live.begin() + moments[i], end = tape.live.begin() + moments[i + 1];
      span.live = *std::max_element(begin, end);
      add_changes(tape, moments[i], moments[i] + 1, span);
      all_.push_back(std::move(span));
    }
    for (const auto& call : tape.calls) {
      // Just before its backward begins, what it saved is given up still.
      const auto moment = call.backward_begin;
      Span span;
      span.live = (moment == 0 ? 0 : tape.live[static_cast<std::size_t>(moment) - 1]) + call.forward_peak;
      add_changes(tape, moment, moment, span);
      span.only_with = call.block;
      all_.push_back(std::move(span));
    }
    // What no choice can push over another span needs no look; the highest first.
    std::sort(all_.begin(), all_.end(), [](const Span& a, const Span& b) { return a.live > b.live; });
  }

  [[nodiscard]] const std::vector<Span>& all() const { return all_; }
  [[nodiscard]] static std::int64_t live(const Span& span, const std::vector<bool>& again) {
    auto live = span.live;
    for (const auto& [block, bytes] : span.lowered) live -= again[block] ? bytes : 0;
    return live;
  }
  [[nodiscard]] std::int64_t peak(const std::vector<bool>& again) const {
    std::int64_t highest = 0;
    for (const auto& span : all_) {
      if (!span.only_with || again[*span.only_with]) highest = std::max(highest, live(span, again));
    }
    return highest;
  }

 private:
  /// Of forwards that have ended by `moment`, and backwards that begin at `next` at the earliest.
  static void add_changes(const StepTape& tape, std::int64_t moment, std::int64_t next, Span& span) {
    std::map<std::size_t, std::int64_t> lowered;
    for (const auto& call : tape.calls) {
      if (call.backward_begin < next) continue;
      if (call.forward_end <= moment) lowered[call.block] += call.saved_bytes;
      for (const auto& held : call.held) {
        if (held.from < next) lowered[call.block] -= held.bytes;
      }
    }
    for (const auto& each : lowered) {
      if (each.second != 0) span.lowered.push_back(each);
    }
  }

  std::vector<Span> all_;
};

std::vector<double> seconds_of(const StepTape& tape) {
  std::vector<double> seconds(tape.names.size());
  for (const auto& call : tape.calls) seconds[call.block] += call.seconds;
  return seconds;
}

/// Branch and bound: which blocks, at the least time, keep every span within the budget.
class Search {
 public:
  Search(const StepTape& tape, const Spans& spans, std::int64_t budget)
      : seconds_(seconds_of(tape)), budget_(budget), state_(tape.names.size(), State::Free) {
    std::size_t work = 1;
    for (const auto& span : spans.all()) {
      auto highest = span.live;
      for (const auto& each : span.lowered) highest -= std::min<std::int64_t>(each.second, 0);
      if (highest <= budget) continue;  // whatever is chosen
      spans_.push_back(&span);
      work += 1 + span.lowered.size();
    }
    most_nodes_ = std::clamp(kMostWork / work, kLeastNodes, kMostNodes);
  }

  bool run() {
    descend(0);
    return best_.has_value();
  }
  [[nodiscard]] const std::vector<bool>& best() const { return *best_; }
  [[nodiscard]] bool is_complete() const { return nodes_ < most_nodes_; }

 private:
  enum class State : char { Free, Again, Kept };

  /// By how much a span is over the budget with the free blocks kept; 0: it is not, or does not count yet.
  [[nodiscard]] std::int64_t excess(const Span& span) const {
    if (span.only_with && state_[*span.only_with] != State::Again) return 0;
    auto live = span.live;
    for (const auto& [block, bytes] : span.lowered) live -= state_[block] == State::Again ? bytes : 0;
    return std::max<std::int64_t>(live - budget_, 0);
  }

  /// The least time at which free blocks, taken in part, could bring a span down by `over`; empty: they cannot.
  [[nodiscard]] std::optional<double> least_seconds(const Span& span, std::int64_t over, std::size_t& first) const {
    std::vector<std::pair<std::size_t, std::int64_t>> helpers;
    for (const auto& each : span.lowered) {
      if (each.second > 0 && state_[each.first] == State::Free) helpers.push_back(each);
    }
    std::sort(helpers.begin(), helpers.end(), [&](const auto& a, const auto& b) {
      return static_cast<double>(a.second) * seconds_[b.first] > static_cast<double>(b.second) * seconds_[a.first];
    });
    double seconds = 0;
    auto left = static_cast<double>(over);
    if (!helpers.empty()) first = helpers.front().first;
    for (const auto& [block, bytes] : helpers) {
      const double part = std::min(1.0, left / static_cast<double>(bytes));
      seconds += part * seconds_[block];
      left -= part * static_cast<double>(bytes);
      if (left <= 0.5) return seconds;
    }
    return std::nullopt;
  }

  void descend(double spent) {
    if (nodes_ >= most_nodes_ || (best_ && spent >= best_seconds_)) return;
    ++nodes_;
    double most = 0;
    std::size_t branch = 0;
    bool is_over = false;
    for (const auto* span : spans_) {
      const auto over = excess(*span);
      if (over == 0) continue;
      std::size_t first = 0;
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
      best_.emplace(state_.size());
      for (std::size_t i = 0; i < state_.size(); ++i) (*best_)[i] = state_[i] == State::Again;
      return;
    }
    state_[branch] = State::Again;
    descend(spent + seconds_[branch]);
    state_[branch] = State::Kept;
    descend(spent);
    state_[branch] = State::Free;
  }

  std::vector<double> seconds_;
  std::vector<const Span*> spans_;
  std::int64_t budget_;
  std::vector<State> state_;
  std::size_t nodes_ = 0, most_nodes_ = 0;
  double best_seconds_ = 0;
  std::optional<std::vector<bool>> best_;
};

RecomputePlan made(const StepTape& tape, const Spans& spans, const std::vector<bool>& again, bool is_optimal) {
  return {again, spans.peak(again), tape.seconds(again), is_optimal};
}

RecomputePlan lowest(const StepTape& tape, const Spans& spans) {
  std::vector<bool> again(tape.names.size(), true);
  auto highest = spans.peak(again);
  std::int64_t lowest = -1;
  bool is_optimal = true;
  // What a search finds is within its budget: the next one looks below the half between.
  while (highest - lowest > std::max<std::int64_t>(highest / kFineness, 1)) {
    const auto budget = lowest + (highest - lowest) / 2;
    Search search(tape, spans, budget);
    if (search.run()) {
      again = search.best();
      highest = spans.peak(again);
    } else {
      is_optimal = is_optimal && search.is_complete();
      lowest = budget;
    }
  }
  return made(tape, spans, again, is_optimal);
}

}  // namespace

StepTape StepTape::of(const Timeline& timeline, const std::vector<std::string>& blocks) {
  StepTape tape;
  tape.names = blocks;
  std::unordered_map<int, std::size_t> block_of;  // by region
  for (std::size_t i = 0; i < timeline.names.size(); ++i) {
    const auto found = std::find(blocks.begin(), blocks.end(), timeline.names[i]);
    if (found != blocks.end()) block_of[static_cast<int>(i)] = static_cast<std::size_t>(found - blocks.begin());
  }
  const auto& events = timeline.events;
  std::vector<Block> taken;
  std::unordered_map<std::uint64_t, std::size_t> at_address;
  std::vector<std::vector<std::int64_t>> backward(blocks.size());  // moments at which backward comes to a block
  int previous = -1;                                               // region that backward was in
  for (std::size_t i = 0; i < events.size(); ++i) {
    const auto& event = events[i];
    tape.live.push_back(event.live_bytes);
    if (event.bytes >= 0) {
      at_address[event.address] = taken.size();
      taken.push_back({static_cast<std::int64_t>(i), kNever, event.bytes});
      const auto block = block_of.find(event.region);
      if (!event.in_backward || block == block_of.end()) continue;
      auto& moments = backward[block->second];
      if (event.region != previous || moments.empty()) moments.push_back(static_cast<std::int64_t>(i));
      previous = event.region;
    } else if (const auto found = at_address.find(event.address); found != at_address.end()) {
      taken[found->second].given_back = static_cast<std::int64_t>(i);
      at_address.erase(found);
    }
  }
  if (tape.live.empty()) tape.live.push_back(0);
  const auto live_before = [&](std::int64_t moment) {
    return moment <= 0 ? 0 : tape.live[static_cast<std::size_t>(moment) - 1];
  };
  // The block at an address at a moment.
  std::unordered_map<std::uint64_t, std::vector<const Block*>> by_address;
  for (const auto& each : taken) by_address[events[static_cast<std::size_t>(each.taken)].address].push_back(&each);
  const auto at = [&](std::uint64_t address, std::int64_t moment) -> const Block* {
    const auto found = by_address.find(address);
    if (found == by_address.end()) return nullptr;
    for (const auto* each : found->second) {
      if (each->taken < moment && moment <= each->given_back) return each;
    }
    return nullptr;
  };
  // A block that is called several times: backward comes to its last call first. A call that shares its moment with a
  // later one counts as given back too early, on the safe side.
  const auto begins_backward = [&](std::size_t block, std::int64_t forward_end) {
    const auto& moments = backward[block];
    std::vector<std::int64_t> open;
    auto next = moments.begin();
    const auto come_to = [&](std::int64_t until) {
      for (; next != moments.end() && *next < until; ++next) {
        if (open.empty()) continue;
        if (open.back() == forward_end) return *next;
        open.pop_back();
      }
      return kNever;
    };
    for (const auto& mark : timeline.marks) {
      const auto found = block_of.find(mark.region);
      if (mark.begins || mark.in_backward || found == block_of.end() || found->second != block) continue;
      if (const auto moment = come_to(mark.event); moment != kNever) return moment;
      open.push_back(mark.event);
    }
    if (const auto moment = come_to(kNever); moment != kNever) return moment;
    const auto first = std::lower_bound(moments.begin(), moments.end(), forward_end);
    return first == moments.end() ? kNever : *first;
  };
  for (std::size_t begin = 0; begin < timeline.marks.size(); ++begin) {
    const auto& entered = timeline.marks[begin];
    const auto block = block_of.find(entered.region);
    if (!entered.begins || entered.in_backward || block == block_of.end()) continue;
    const auto end =
        std::find_if(timeline.marks.begin() + static_cast<std::ptrdiff_t>(begin), timeline.marks.end(),
                     [&](const RegionMark& mark) { return !mark.begins && mark.region == entered.region; });
    if (end == timeline.marks.end()) continue;
    BlockCall call;
    call.block = block->second;
    call.forward_begin = entered.event;
    call.forward_end = end->event;
    call.seconds = static_cast<double>(end->time_ns - entered.time_ns) * 1e-9;
    call.backward_begin = begins_backward(call.block, call.forward_end);
    if (call.backward_begin == kNever) continue;  // it does not come by
    for (auto i = call.forward_begin; i < call.forward_end; ++i) {
      call.forward_peak =
          std::max(call.forward_peak, tape.live[static_cast<std::size_t>(i)] - live_before(call.forward_begin));
    }
    std::vector<const Block*> outputs;
    for (const auto address : end->addresses) outputs.push_back(at(address, call.forward_end));
    for (const auto& each : taken) {
      const bool is_output = std::find(outputs.begin(), outputs.end(), &each) != outputs.end();
      if (call.forward_begin <= each.taken && each.taken < call.forward_end && !is_output &&
          each.given_back >= call.backward_begin && each.given_back != kNever)
        call.saved_bytes += each.bytes;
    }
    for (const auto address : entered.addresses) {
      const auto* input = at(address, call.forward_begin);
      if (input != nullptr && input->given_back < call.backward_begin)
        call.held.push_back({std::max(input->given_back, call.forward_end), input->bytes});
    }
    tape.calls.push_back(std::move(call));
  }
  return tape;
}

StepTape StepTape::steady(std::vector<StepTape> recordings) {
  OXY_CHECK(!recordings.empty(), InvalidArgument, "there is no recording of a step. Give at least one.");
  StepTape last = std::move(recordings.back());
  recordings.pop_back();
  const auto is_alike = [&](const StepTape& other) {
    return std::equal(last.calls.begin(), last.calls.end(), other.calls.begin(), other.calls.end(),
                      [](const BlockCall& a, const BlockCall& b) { return a.block == b.block; });
  };
  std::erase_if(recordings, [&](const StepTape& other) { return other.names != last.names || !is_alike(other); });
  for (std::size_t i = 0; i < last.calls.size(); ++i) {
    std::vector<double> seconds{last.calls[i].seconds};
    for (const auto& other : recordings) seconds.push_back(other.calls[i].seconds);
    const auto middle = seconds.begin() + static_cast<std::ptrdiff_t>((seconds.size() - 1) / 2);
    std::nth_element(seconds.begin(), middle, seconds.end());
    last.calls[i].seconds = *middle;
  }
  return last;
}

std::int64_t StepTape::peak(const std::vector<bool>& again) const { return Spans(*this).peak(again); }

double StepTape::seconds(const std::vector<bool>& again) const {
  const auto each = seconds_of(*this);
  double all = 0;
  for (std::size_t i = 0; i < each.size(); ++i) all += again[i] ? each[i] : 0;
  return all;
}

RecomputePlan plan_recomputation(const StepTape& tape, std::int64_t budget) {
  const Spans spans(tape);
  Search search(tape, spans, budget);
  if (search.run()) return made(tape, spans, search.best(), search.is_complete());
  detail::raise(ErrorCode::OutOfMemory, "no choice of blocks to run again keeps a step within ", size_text(budget),
                ": the lowest peak is ", size_text(lowest(tape, spans).peak_bytes),
                ". Give a larger budget, smaller blocks or a smaller batch.");
}

RecomputePlan lowest_peak(const StepTape& tape) { return lowest(tape, Spans(tape)); }

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

std::optional<std::vector<std::string>> BudgetSearch::next() {
  if (is_over_ || measured_peak_ <= budget_) return std::nullopt;
  if (tried_lowest_) refuse("the lowest peak of tensors that was reached is " + size_text(floor_));
  const Spans spans(tape_);
  while (tries_++ < kTries) {
    Search search(tape_, spans, target_ - base_);
    if (!search.run()) break;
    if (choose(made(tape_, spans, search.best(), search.is_complete()))) return recomputed_;
    target_ = predicted_peak_ - 1;  // that choice was measured, and is too much
  }
  // Predicted to be too much as well; what it takes is for the step to say.
  tried_lowest_ = true;
  if (!choose(lowest(tape_, spans))) refuse("the lowest peak of tensors that was reached is " + size_text(floor_));
  return recomputed_;
}

/// False where these blocks are those of the choice before.
bool BudgetSearch::choose(const RecomputePlan& plan) {
  std::vector<std::string> names;
  for (std::size_t i = 0; i < tape_.names.size(); ++i) {
    if (plan.again[i]) names.push_back(tape_.names[i]);
  }
  predicted_peak_ = base_ + plan.peak_bytes;
  is_optimal_ = plan.is_optimal;
  return std::exchange(recomputed_, names) != names;
}

void BudgetSearch::measured(std::int64_t peak) {
  measured_peak_ = peak;
  floor_ = std::min(floor_, peak);
  is_over_ = peak <= budget_;
  if (is_over_) return;
  // At the last choice, the lowest that was reached.
  if (tried_lowest_) floor_ = peak;
  target_ -= peak - budget_;
}

void BudgetSearch::timed(double plain_seconds, double seconds) {
  plain_seconds_ = plain_seconds;
  seconds_ = seconds;
}

void BudgetSearch::refuse(const std::string& found) const {
  detail::raise(ErrorCode::OutOfMemory, "no choice of blocks to run again keeps a step within ", size_text(budget_),
                ": ", found, ". Give a larger budget, smaller blocks or a smaller batch.");
}

std::vector<std::pair<std::int64_t, double>> BudgetSearch::curve(int points) const {
  std::vector<std::pair<std::int64_t, double>> found;
  const Spans spans(tape_);
  for (int i = 0; i < points; ++i) {
    const auto budget = plain_peak_ - (plain_peak_ - floor_) * i / std::max(points - 1, 1);
    Search search(tape_, spans, budget - base_);
    if (!search.run()) continue;  // the floor is known to a 2,000th
    const auto plan = made(tape_, spans, search.best(), search.is_complete());
    const std::pair point{base_ + plan.peak_bytes, plan.seconds};
    if (found.empty() || found.back() != point) found.push_back(point);
  }
  return found;
}

std::string BudgetSearch::summary() const {
  const auto within = " of the budget of " + size_text(budget_);
  if (recomputed_.empty()) return "a step takes " + size_text(measured_peak_) + within + " as it is.";
  return std::to_string(recomputed_.size()) + " of " + std::to_string(tape_.names.size()) +
         " blocks are run again in backward: a step takes " + size_text(measured_peak_) + within + ", and " +
         size_text(plain_peak_) + " without.";
}

std::string BudgetSearch::cost() const {
  if (recomputed_.empty() || plain_seconds_ <= 0) return {};
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), "a step takes %.2f times as long.", seconds_ / plain_seconds_);
  return text.data();
}

std::string BudgetSearch::table() const {
  const auto seconds = seconds_of(tape_);
  std::vector<std::int64_t> saved(tape_.names.size());
  for (const auto& call : tape_.calls) saved[call.block] += call.saved_bytes;
  std::vector<std::vector<std::string>> rows{{"block", "keeps for backward", "forward", "now"}};
  for (std::size_t i = 0; i < saved.size(); ++i) {
    const bool again = std::find(recomputed_.begin(), recomputed_.end(), tape_.names[i]) != recomputed_.end();
    rows.push_back({tape_.names[i], size_text(saved[i]), milliseconds(seconds[i]), again ? "run again" : "kept"});
  }
  auto text = aligned(std::move(rows), 1) + "Peak " + size_text(measured_peak_) + " (predicted " +
              size_text(predicted_peak_) + ") of a budget of " + size_text(budget_) + "; " + size_text(plain_peak_) +
              " with every block kept, and " + size_text(floor_) + " at the least.";
  if (seconds_ > 0) {
    text += " A step takes " + milliseconds(seconds_) + " instead of " + milliseconds(plain_seconds_) + ".";
  }
  if (recomputed_.empty()) return text + '\n';
  if (!same_bits_) return text + " Two steps with every block kept differ from each other: bits cannot be compared.\n";
  return text + (*same_bits_ ? " A step leaves the same bits." : " A step leaves other bits.") + '\n';
}

}  // namespace oxytorch::memory
