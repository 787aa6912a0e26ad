#include "oxytorch/tune/search.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <set>
#include <utility>

#include "base/spelling.h"
#include "oxytorch/error.h"
#include "oxytorch/random.h"
#include "oxytorch/tune/policy.h"
#include "tune/search_time.h"
#include "tune/words.h"

namespace oxytorch::tune {
namespace {

/// A combination of strategies: bit i is the i-th one given.
using Mask = std::uint64_t;
constexpr std::size_t kMost = 64;

constexpr Mask bit(std::size_t i) { return Mask{1} << i; }

struct Item {
  StrategyFacts facts;
  Mask needs = 0;     ///< requires_
  Mask ties = 0;      ///< interacts, both ways
  Mask rivals = 0;    ///< others of its group
  Mask renewers = 0;  ///< renewed_by
  Mask wholes = 0;    ///< part_of
  CertificateEntry entry;
  bool often_pays = false;
  bool tried = false;
  bool left_open = false;    ///< by its last trial by itself
  bool tried_again = false;  ///< by itself, since its first trial left it open
  bool settled = false;      ///< failed, refused or skipped: not asked for again
  int judged = 0;            ///< on the clock of changes
  int changed = 0;           ///< when it was last turned on or off
  double elapsed = 0;        ///< of the search when it was last turned on
};

struct Move {
  std::size_t item = 0;
  Mask challenger = 0;
  bool removal = false;
  bool alone = true;    ///< it turns on nothing else, and off only its rivals
  bool second = false;  ///< of one by itself, which need not show again what the first has shown
};

/// Groups whose gain depends on who else uses the processor.
const std::set<std::string> kPlacesThreads{"threads", "affinity"};

}  // namespace

struct Search::Impl {
  std::vector<Item> items;
  SearchTime time;
  Mask force = 0;
  int clock = 0;
  std::uint64_t trials = 0;
  std::optional<Move> pending;
  std::set<std::pair<Mask, Mask>> met;

  Impl(std::vector<StrategyFacts> strategies, const SearchOptions& given) : time{.options = given} {
    OXY_CHECK(strategies.size() <= kMost, InvalidArgument, "a search takes up to ", kMost, " strategies, not ",
              strategies.size(), '.');
    OXY_CHECK(time.options.optimizer_share >= 0 && time.options.optimizer_share <= 1, InvalidArgument,
              "optimizer_share must be between 0 and 1, not ", time.options.optimizer_share, '.');
    OXY_CHECK(time.options.steps_planned >= 0, InvalidArgument, "steps_planned must be at least 0, not ",
              time.options.steps_planned, '.');
    for (StrategyFacts& facts : strategies) {
      Item item;
      item.entry.strategy = facts.name;
      item.entry.kind = facts.kind;
      item.entry.reason = "It was not tried.";
      item.often_pays =
          facts.kind == Kind::Exact && facts.expected_cost <= 0 && facts.expected_speedup >= kPolicy.often_pays;
      item.facts = std::move(facts);
      item.facts.expected_speedup = promised(item.facts);
      items.push_back(std::move(item));
    }
    for (std::size_t i = 0; i < items.size(); ++i) tie(i);
    static_cast<void>(PairedTest(time.options.paired_test));  // checks them
  }

  /// By where the step's time goes.
  [[nodiscard]] double promised(const StrategyFacts& facts) const {
    const double share = time.options.optimizer_share;
    if (share <= 0) return facts.expected_speedup;
    if (facts.update_speedup > 0) return 1 / (1 - share * (1 - 1 / facts.update_speedup));
    if (facts.group == "optimizer") return 1 + (facts.expected_speedup - 1) * share / kPolicy.usual_optimizer_share;
    return 1 / (1 - (1 - share) * (1 - 1 / facts.expected_speedup));
  }

  void tie(std::size_t i) {
    Item& item = items[i];
    OXY_CHECK(index_of(item.facts.name) == i, InvalidArgument, "two strategies are called ", in_quotes(item.facts.name),
              "; give each its own name.");
    for (const std::string& name : item.facts.requires_) {
      const std::size_t other = index_of(name);
      OXY_CHECK(other < items.size(), InvalidArgument, "strategy ", in_quotes(item.facts.name), " requires ",
                in_quotes(name), ", which is none of the strategies; ", did_you_mean(name, names(~Mask{0})),
                "give it too.");
      item.needs |= bit(other);
    }
    for (const std::string& name : item.facts.renewed_by) {
      if (const std::size_t other = index_of(name); other < items.size() && other != i) item.renewers |= bit(other);
    }
    for (const std::string& name : item.facts.part_of) {
      if (const std::size_t other = index_of(name); other < items.size() && other != i) item.wholes |= bit(other);
    }
    for (const std::string& name : item.facts.interacts) {
      const std::size_t other = index_of(name);
      if (other >= items.size() || other == i) continue;  // a strategy that is not offered here
      item.ties |= bit(other);
      items[other].ties |= bit(i);
    }
    for (std::size_t other = 0; other < items.size(); ++other) {
      if (other != i && !item.facts.group.empty() && items[other].facts.group == item.facts.group) {
        item.rivals |= bit(other);
      }
    }
  }

  [[nodiscard]] std::size_t index_of(const std::string& name) const {
    const auto found = std::find_if(items.begin(), items.end(), [&](const Item& i) { return i.facts.name == name; });
    return static_cast<std::size_t>(found - items.begin());
  }

  [[nodiscard]] std::vector<std::string> names(Mask mask) const {
    std::vector<std::string> list;
    for (std::size_t i = 0; i < items.size(); ++i) {
      if ((mask & bit(i)) != 0) list.push_back(items[i].facts.name);
    }
    return list;
  }

  /// The one of which a speedup is said.
  Item& named(const std::string& strategy, double speedup) {
    const std::size_t i = index_of(strategy);
    OXY_CHECK(i < items.size(), InvalidArgument, "there is no strategy ", in_quotes(strategy), "; ",
              did_you_mean(strategy, names(~Mask{0})), "name one of those given.");
    OXY_CHECK(speedup > 0 && std::isfinite(speedup), InvalidArgument,
              "a speedup of a strategy must be a positive ratio, not ", speedup, '.');
    return items[i];
  }

  void ask_again(const Item& about) {
    if (pending && &items[pending->item] == &about) pending.reset();
  }

  [[nodiscard]] bool active(std::size_t i) const { return (force & bit(i)) != 0; }

  /// `mask` without those whose requirements it lacks.
  [[nodiscard]] Mask sound(Mask mask) const {
    for (bool again = true; again;) {
      again = false;
      for (std::size_t i = 0; i < items.size(); ++i) {
        if ((mask & bit(i)) == 0 || (items[i].needs & ~mask) == 0) continue;
        mask &= ~bit(i);
        again = true;
      }
    }
    return mask;
  }

  /// `mask` with the strategy in place of its rivals, or `mask` itself where it cannot be on in it.
  [[nodiscard]] Mask with(Mask mask, std::size_t i) const {
    const Mask after = sound((mask & ~items[i].rivals) | bit(i));
    return (after & bit(i)) != 0 ? after : mask;
  }

  /// Most seconds that it can save over the run, were it as good as it can be.
  [[nodiscard]] double most_saved(const Item& item) const {
    return time.step_seconds * (1 - 1 / std::max(1.0, item.facts.max_speedup)) *
           static_cast<double>(time.options.steps_planned);
  }

  [[nodiscard]] bool can_repay(const Item& item) const {
    const double cost = item.tried ? item.entry.cost_seconds : item.facts.expected_cost;
    return time.step_seconds <= 0 || cost <= 0 || most_saved(item) > cost;
  }

  [[nodiscard]] bool can_gain(const Item& item) const {
    return item.facts.max_speedup > time.options.paired_test.threshold;
  }

  [[nodiscard]] bool is_costly(std::size_t i) const { return items[i].facts.expected_cost > 0; }

  [[nodiscard]] double seconds_left() const { return time.left(force != 0); }

  /// What is exact and often pays must not lose its turn to others that were refused after a long verification, nor
  /// what is likely to save its trial's time in a part of the run.
  [[nodiscard]] bool has_turn(std::size_t i) const {
    if (is_costly(i) || !time.out_of_budget()) return !is_costly(i);
    return time.repays_trial(likely_gain(i)) || (items[i].often_pays && time.options.repay_steps > 0);
  }

  /// Another one of a group with one-off costs, which has shown that little is to be gained so.
  [[nodiscard]] std::optional<std::size_t> spoken_for(std::size_t i) const {
    for (std::size_t j = 0; j < items.size(); ++j) {
      const CertificateEntry& other = items[j].entry;
      if ((items[i].rivals & bit(j)) == 0 || !is_costly(j) || !items[j].tried) continue;
      if (other.status == Status::Rejected || other.status == Status::Refused) return j;
      if (other.status == Status::Accepted && other.speedup && other.speedup->mid < kPolicy.speaks_for) return j;
    }
    return std::nullopt;
  }

  /// Of the step as it is now: in place of one of its group, what it promises beyond that one's gain.
  [[nodiscard]] double likely_gain(std::size_t i) const {
    const Item& item = items[i];
    double gain = item.facts.expected_speedup;
    for (std::size_t j = 0; j < items.size(); ++j) {
      const bool replaces = (item.rivals & bit(j)) != 0 && active(j) && items[j].entry.speedup && !is_costly(i);
      if (replaces) gain /= std::max(1.0, items[j].entry.speedup->mid);
    }
    return std::min(std::max(gain, update_gain(item)), item.facts.max_speedup);
  }

  /// What is active, took a one-off cost and has to take it again for a change of this strategy: seconds in all.
  [[nodiscard]] double repeated_cost(std::size_t i) const {
    double cost = 0;
    const Mask changed = bit(i) | (items[i].rivals & force);
    for (std::size_t j = 0; j < items.size(); ++j) {
      if (j == i || !active(j) || !is_costly(j) || (items[i].rivals & bit(j)) != 0) continue;
      const Mask renewers = items[j].facts.renewed_by.empty() ? items[j].ties : items[j].renewers;
      if ((renewers & changed) != 0) cost += items[j].entry.cost_seconds;
    }
    return cost;
  }

  /// Whether that is little beside what the strategy promises to save soon.
  [[nodiscard]] bool worth_repeating(std::size_t i) const {
    const double cost = repeated_cost(i);
    if (cost <= 0 || time.options.repay_steps <= 0) return time.can_afford(cost, force != 0);
    const double promised = std::max(items[i].facts.expected_speedup, highest_speedup(items[i]));
    return cost < time.options.repay_steps * time.step_seconds * (1 - 1 / std::max(1.0, promised));
  }

  /// What a strategy whose update was timed by itself makes of the step as it is now; 0 where it was not.
  [[nodiscard]] double update_gain(const Item& item) const {
    if (item.facts.update_speedup <= 0 || time.options.optimizer_share <= 0 || time.step_seconds <= 0) return 0;
    double now = 1;
    for (std::size_t j = 0; j < items.size(); ++j) {
      if ((item.rivals & bit(j)) != 0 && active(j)) now = std::max(now, items[j].facts.update_speedup);
    }
    const double update = time.options.optimizer_share * time.options.step_seconds;
    const double saved = update * (1 / now - 1 / item.facts.update_speedup);
    return time.step_seconds / std::max(time.step_seconds - saved, 1e-9);
  }

  /// Another of its group whose update is clearly faster by itself, and which nothing speaks against.
  [[nodiscard]] std::optional<std::size_t> faster_update(std::size_t i) const {
    const double own = items[i].facts.update_speedup;
    if (own <= 0) return std::nullopt;
    for (std::size_t j = 0; j < items.size(); ++j) {
      const bool rival = (items[i].rivals & bit(j)) != 0 && !items[j].settled;
      if (rival && items[j].facts.update_speedup > kPolicy.clearly_faster * own) return j;
    }
    return std::nullopt;
  }

  /// Whether its update, timed by itself, shows that the step cannot become faster.
  [[nodiscard]] bool outdone(std::size_t i) const {
    const double gain = active(i) ? 0 : update_gain(items[i]);
    return faster_update(i).has_value() || (gain > 0 && gain <= time.least_gain());
  }

  /// Seconds of a trial, or outside of trials, for the account of what is on trial.
  void charge(double seconds) {
    time.used += seconds;
    if (!pending || !is_costly(pending->item)) time.elapsed += seconds;
  }

  [[nodiscard]] bool fresh(Mask challenger) const {
    return challenger != force && !met.contains(std::minmax(force, challenger));
  }

  [[nodiscard]] bool stale(const Item& item) const {
    for (std::size_t j = 0; j < items.size(); ++j) {
      if ((item.ties & bit(j)) != 0 && items[j].changed > item.judged) return true;
    }
    return false;
  }

  /// The upper end of its speedup in its last trial.
  [[nodiscard]] static double highest_speedup(const Item& item) {
    return item.entry.speedup ? item.entry.speedup->high : 1;
  }

  /// Expected speedup, with a bonus for gains that were measured before.
  [[nodiscard]] double rank(std::size_t i) const {
    const double gain = update_gain(items[i]);
    return gain > kPolicy.worth ? gain + kPolicy.known_lead : likely_gain(i);
  }

  /// What was not tried yet, of those with a one-off cost or of the others.
  [[nodiscard]] std::optional<Move> forward(bool costly) {
    std::optional<std::size_t> best;
    for (std::size_t i = 0; i < items.size(); ++i) {
      const Item& item = items[i];
      if (is_costly(i) != costly || item.tried || item.settled || (item.needs & ~force) != 0 || outdone(i)) continue;
      if ((item.wholes & force) != 0 || !can_gain(item)) continue;
      if (costly ? !worth_its_cost(i) : !has_turn(i) || !worth_repeating(i)) continue;
      if (!best || rank(i) > rank(*best)) best = i;
    }
    return best ? std::optional(Move{*best, with(force, *best), false, true}) : std::nullopt;
  }

  /// Settles what is not.
  [[nodiscard]] bool worth_its_cost(std::size_t i) {
    Item& item = items[i];
    const std::string takes = "Turning it on takes about " + monitor::format_seconds(item.facts.expected_cost);
    const auto other = spoken_for(i);
    if (other) {
      item.entry.reason = "It does much the same as " + in_quotes(items[*other].facts.name) + ", which ";
      const auto& entry = items[*other].entry;
      item.entry.reason += entry.status == Status::Refused ? "was refused."
                           : entry.speedup                 ? "gained " + ratio_text(entry.speedup->mid) + "."
                                                           : "was rejected.";
    } else if (!can_repay(item)) {
      item.entry.reason = takes + ", and in " + monitor::format_count(static_cast<double>(time.options.steps_planned)) +
                          " steps it can save " + monitor::format_seconds(most_saved(item)) + " at best.";
    } else if (time.step_seconds > 0 && time.options.repay_steps > 0 &&
               time.saved_in(kPolicy.likely_share, likely_gain(i)) < item.facts.expected_cost) {
      item.entry.reason = takes + ", and at the " + ratio_text(item.facts.expected_speedup) +
                          " that it is likely to gain, a quarter of the planned run saves " +
                          monitor::format_seconds(time.saved_in(kPolicy.likely_share, likely_gain(i))) + ".";
    } else if (!time.can_afford(item.facts.expected_cost, force != 0)) {
      const double left = std::max(0.0, std::min(time.cost_budget() - time.paid, seconds_left()));
      item.entry.reason =
          takes + ", and " + monitor::format_seconds(left) + " of the planned run are left for trying such.";
    } else {
      return true;
    }
    item.settled = true;
    return false;
  }

  /// Whether its trial left it open and seemed to gain, it can join those of `mask`, and another trial is worth its
  /// time.
  [[nodiscard]] bool is_undecided(std::size_t i, Mask mask) const {
    const Item& item = items[i];
    const bool gained = item.left_open && !item.settled && item.entry.speedup->mid > 1;
    const bool fits = ((item.rivals | item.wholes) & mask) == 0 && with(mask, i) != mask;
    return gained && fits && !is_costly(i) && !kPlacesThreads.contains(item.facts.group) && worth_repeating(i) &&
           !outdone(i);
  }

  [[nodiscard]] bool repays_second_trial(double speedup) const {
    return speedup > time.least_gain() && (time.may_try_again() || time.repays_trial(speedup));
  }

  /// All at once that trials left open, each of which seemed to gain: what is too little to be seen may add up.
  [[nodiscard]] std::optional<Move> all_undecided() const {
    Move move{0, force, false, false};
    double product = 1;
    for (std::size_t i = 0; i < items.size(); ++i) {
      if (!is_undecided(i, move.challenger)) continue;
      if (product == 1) move.item = i;
      move.challenger = with(move.challenger, i);
      product *= items[i].entry.speedup->mid;
    }
    const bool several = std::popcount(move.challenger & ~force) > 1;
    return several && fresh(move.challenger) && repays_second_trial(product) ? std::optional(move) : std::nullopt;
  }

  /// One that a trial left open although its whole interval was a gain or its update is known to be faster, and which
  /// joint trials did not turn on: of a thousand that gain nothing one comes through both trials.
  [[nodiscard]] std::optional<Move> one_undecided() const {
    std::optional<std::size_t> best;
    for (std::size_t i = 0; i < items.size(); ++i) {
      if (items[i].tried_again || !is_undecided(i, force)) continue;
      const Interval& speedup = *items[i].entry.speedup;
      const bool seems_sure = speedup.low > 1 || items[i].facts.update_proven;
      if (!seems_sure || !repays_second_trial(speedup.mid)) continue;
      if (!best || speedup.low > items[*best].entry.speedup->low) best = i;
    }
    return best ? std::optional(Move{*best, with(force, *best), false, true, true}) : std::nullopt;
  }

  /// Those whose ground has changed, one at a time.
  [[nodiscard]] std::optional<Move> again() const {
    for (std::size_t i = 0; i < items.size(); ++i) {
      const Item& item = items[i];
      if (!item.tried || item.settled || !stale(item) || !worth_repeating(i) || outdone(i)) continue;
      // What others could make of it at most would leave it worth having.
      if (active(i) && item.entry.speedup && item.entry.speedup->low > kPolicy.interplay) continue;
      const Move move{i, active(i) ? sound(force & ~bit(i)) : with(force, i), active(i), true};
      if (fresh(move.challenger) && (move.removal || (can_repay(item) && can_gain(item)))) return move;
    }
    return std::nullopt;
  }

  /// Two at a time: a rejected one in place of an accepted one, or two rejected ones.
  [[nodiscard]] std::optional<Move> two() const {
    for (std::size_t i = 0; i < items.size(); ++i) {
      const Item& item = items[i];
      if (!item.tried || item.settled || active(i) || !can_repay(item) || !worth_repeating(i)) continue;
      for (std::size_t j = 0; j < items.size(); ++j) {
        const Item& other = items[j];
        if ((item.ties & bit(j)) == 0 || (item.rivals & bit(j)) != 0 || other.settled || !other.tried) continue;
        Move move{i, 0, false, false};
        double product = kPolicy.interplay * highest_speedup(item);
        if (active(j)) {
          move.challenger = with(sound(force & ~bit(j)), i);
          product /= other.entry.speedup ? other.entry.speedup->low : 1;
        } else {
          if (j < i || !can_repay(other)) continue;
          move.challenger = with(with(force, i), j);
          product *= highest_speedup(other);
        }
        const bool turned_on = (move.challenger & bit(i)) != 0 && (active(j) || (move.challenger & bit(j)) != 0);
        if (turned_on && product > time.options.paired_test.threshold && fresh(move.challenger)) return move;
      }
    }
    return std::nullopt;
  }

  [[nodiscard]] Trial trial() const {
    Trial trial{items[pending->item].facts.name, pending->removal, names(force), names(pending->challenger),
                time.options.paired_test};
    const Item& item = items[pending->item];
    if (item.facts.update_proven && (item.rivals & force) == 0 && pending->alone && !pending->removal) {
      trial.paired_test.loosen(PairedTestOptions::agreement());
    }
    if (pending->second) trial.paired_test.loosen(PairedTestOptions::conclusion(0));
    trial.paired_test.seed = philox(time.options.seed, 0, trials).word[0];
    if (time.options.budget_seconds > 0 && !is_costly(pending->item)) {
      if (time.options.repay_steps > 0 && time.step_seconds > 0) {
        trial.paired_test.worth = std::max(trial.paired_test.worth, time.least_gain());
        trial.paired_test.repay_steps = time.options.repay_steps;
      }
      const bool is_second = pending->second || std::popcount(pending->challenger & ~force) > 1;
      const double most = time.next_trial(item.facts.expected_speedup, is_second);
      double& asked = trial.paired_test.budget_seconds;
      asked = asked > 0 ? std::min(asked, most) : most;
    }
    if (time.options.total_seconds > 0) trial.paired_test.most_seconds = std::max(seconds_left(), 1e-9);
    return trial;
  }

  /// A rejected removal, and what a trial of two found wanting, leave every entry as it was.
  void reject(const Move& move, Status status, std::string reason) {
    if (move.removal || !move.alone) return;
    CertificateEntry& entry = items[move.item].entry;
    entry.status = status;
    entry.reason = std::move(reason);
    items[move.item].settled = status != Status::Rejected;
  }

  void accept(const Move& move, const PairedTestResult& paired_test) {
    ++clock;
    const Mask off = force & ~move.challenger;
    const Mask on = move.challenger & ~force;
    for (std::size_t i = 0; i < items.size(); ++i) {
      CertificateEntry& entry = items[i].entry;
      if (((on | off) & bit(i)) != 0) items[i].changed = clock;
      if ((on & bit(i)) != 0) {
        entry.status = Status::Accepted;
        entry.reason = paired_test.reason;
        items[i].judged = clock;
        items[i].elapsed = time.elapsed;
        if (const Mask beside = on & ~bit(i); beside != 0) {
          entry.reason += " Together with " + list_of(names(beside), true, "and") + ".";
        }
        if (off != 0) entry.reason += " In place of " + list_of(names(off), true, "and") + ".";
      } else if ((off & bit(i)) != 0) {
        entry.status = Status::Rejected;
        entry.reason = on != 0 ? "It was active until " + list_of(names(on), true, "and") + " in its place was faster: "
                               : "It was active until the rest was faster without it: ";
        entry.reason += paired_test.reason;
        entry.break_even_steps.reset();
      }
    }
    force = move.challenger;
  }

  /// What the trial measured of the strategy itself.
  void note(const Move& move, const TrialOutcome& outcome) {
    Item& item = items[move.item];
    item.tried = true;
    item.tried_again = item.tried_again || move.second;
    item.judged = clock;
    if (is_costly(move.item) || repeated_cost(move.item) > 0) time.paid += outcome.cost_seconds;
    if (!move.alone || outcome.paired_test.pairs == 0) return;
    item.left_open = !move.removal && outcome.paired_test.decision != Decision::Accept;
    item.entry.pairs = outcome.paired_test.pairs;
    const auto& [low, mid, high, confidence] = outcome.paired_test.speedup;
    item.entry.speedup = move.removal ? Interval{1 / high, 1 / mid, 1 / low, confidence} : outcome.paired_test.speedup;
    if (!move.removal) item.entry.cost_seconds = std::max(item.entry.cost_seconds, outcome.cost_seconds);
  }

  void judge(const Move& move, const TrialOutcome& outcome) {
    const PairedTestResult& paired_test = outcome.paired_test;
    if (outcome.failed) return reject(move, Status::Failed, outcome.reason);
    const std::string meanwhile = outcome.disturbed ? " Other programs used the processor meanwhile." : "";
    if (paired_test.decision != Decision::Accept) {
      if (paired_test.incumbent > 0) time.step_seconds = paired_test.incumbent;
      return reject(move, Status::Rejected, paired_test.reason + meanwhile);
    }
    if (outcome.disturbed && !move.removal && kPlacesThreads.contains(items[move.item].facts.group)) {
      return reject(move, Status::Rejected, paired_test.reason + meanwhile + " On an idle machine it may be slower.");
    }
    if (!outcome.verified) return reject(move, Status::Refused, outcome.reason);
    const double saved = paired_test.incumbent * (1 - 1 / paired_test.speedup.mid);
    const double steps = outcome.cost_seconds / saved;
    if (!move.removal && steps > static_cast<double>(time.options.steps_planned)) {
      items[move.item].entry.break_even_steps = steps;
      return reject(move, Status::Rejected,
                    paired_test.reason + " Its " + monitor::format_seconds(outcome.cost_seconds) +
                        " are repaid after " + monitor::format_count(std::ceil(steps)) + " steps, and " +
                        monitor::format_count(static_cast<double>(time.options.steps_planned)) + " are planned.");
    }
    accept(move, paired_test);
    time.step_seconds = paired_test.challenger;
    if (!move.removal && outcome.cost_seconds > 0) items[move.item].entry.break_even_steps = steps;
  }

  [[nodiscard]] std::string why_untried(std::size_t i) const {
    const Item& item = items[i];
    if (const Mask whole = item.wholes & force; whole != 0) {
      return "It is a part of what " + list_of(names(whole), true, "and") + " does, which is active.";
    }
    if (!can_gain(item)) {
      return "It can make the step " + ratio_text(item.facts.max_speedup) + " as fast at best.";
    }
    if (seconds_left() <= 0) {
      return "Everything together may take " + monitor::format_seconds(time.options.total_seconds) +
             " of this run, which were over before its turn.";
    }
    if (const Mask missing = item.needs & ~force; missing != 0) {
      return "It needs " + list_of(names(missing), true, "and") + ", which is not active.";
    }
    if (item.facts.update_speedup > 0 && outdone(i)) {
      std::string why =
          "Its update by itself is " + ratio_text(item.facts.update_speedup) + " as fast as the one given";
      if (const auto faster = faster_update(i)) {
        return why + ", that of " + in_quotes(items[*faster].facts.name) + " " +
               ratio_text(items[*faster].facts.update_speedup) + ".";
      }
      return why + ", which makes the step " + ratio_text(update_gain(item)) + " as fast.";
    }
    if (!is_costly(i) && !worth_repeating(i)) {
      return "Trying it would take " + monitor::format_seconds(repeated_cost(i)) +
             " of one-off costs of what is active again.";
    }
    if (time.out_of_budget()) {
      return "The budget of " + monitor::format_seconds(time.budget()) + " was spent before its turn.";
    }
    return item.entry.reason;
  }
};

Search::Search(std::vector<StrategyFacts> strategies, SearchOptions options)
    : impl_(std::make_unique<Impl>(std::move(strategies), options)) {}
Search::~Search() = default;
Search::Search(Search&&) noexcept = default;
Search& Search::operator=(Search&&) noexcept = default;

std::optional<Trial> Search::ask() {
  Impl& self = *impl_;
  if (!self.pending) {
    if (self.seconds_left() <= 0) return std::nullopt;
    self.pending = self.forward(false);
    // Before what has a one-off cost: with that active, trials of others may take it again.
    if (!self.pending) self.pending = self.all_undecided();
    if (!self.pending) self.pending = self.one_undecided();
    if (!self.pending) self.pending = self.forward(true);
    if (!self.pending && self.time.may_try_again()) self.pending = self.again();
    if (!self.pending && self.time.may_try_again()) self.pending = self.two();
    if (!self.pending) return std::nullopt;
    ++self.trials;
  }
  return self.trial();
}

void Search::tell(const TrialOutcome& outcome) {
  OXY_CHECK(impl_->pending, InvalidState, "no trial is under way; call ask() before tell().");
  const double measured = outcome.paired_test.pairs * (outcome.paired_test.incumbent + outcome.paired_test.challenger);
  impl_->charge(outcome.elapsed_seconds > 0 ? outcome.elapsed_seconds : measured);
  impl_->time.used += outcome.cost_seconds;
  const Move move = *std::exchange(impl_->pending, std::nullopt);
  // The step as given is known better by pairs than by its first steps.
  if (impl_->force == 0 && outcome.paired_test.incumbent > 0) impl_->time.know_step(outcome.paired_test.incumbent);
  impl_->met.insert(std::minmax(impl_->force, move.challenger));
  impl_->note(move, outcome);
  impl_->judge(move, outcome);
}

void Search::skip(const std::string& strategy, std::string reason) {
  Impl& self = *impl_;
  const std::size_t i = self.index_of(strategy);
  OXY_CHECK(i < self.items.size(), InvalidArgument, "there is no strategy ", in_quotes(strategy), " to skip; ",
            did_you_mean(strategy, self.names(~Mask{0})), "skip one of those given.");
  OXY_CHECK(!self.active(i), InvalidState, "strategy ", in_quotes(strategy), " is active; it cannot be skipped.");
  Item& item = self.items[i];
  item.settled = true;
  item.entry.status = Status::Skipped;
  item.entry.reason = std::move(reason);
  if (self.pending && (self.pending->challenger & bit(i)) != 0) self.pending.reset();
}

void Search::drop(const std::string& strategy, Status status, std::string reason) {
  Impl& self = *impl_;
  const std::size_t i = self.index_of(strategy);
  OXY_CHECK(i < self.items.size() && self.active(i), InvalidState, "strategy ", in_quotes(strategy),
            " is not active; only what is can be dropped.");
  Item& dropped = self.items[i];
  const Mask rest = self.sound(self.force & ~bit(i));
  const int since = dropped.changed;
  ++self.clock;
  for (std::size_t j = 0; j < self.items.size(); ++j) {
    Item& item = self.items[j];
    if (j != i && (self.force & ~rest & bit(j)) != 0) {
      item.changed = self.clock;
      item.entry.status = Status::Rejected;
      item.entry.reason = "It needs " + in_quotes(strategy) + ", which was taken back.";
      item.tried = false;
    }
    // Judged beside it, and found wanting there.
    if ((self.force & bit(j)) == 0 && !item.settled && item.judged >= since) {
      item.tried = item.left_open = item.tried_again = false;
    }
  }
  dropped.settled = true;
  dropped.entry.status = status;
  dropped.entry.reason = std::move(reason);
  dropped.entry.break_even_steps.reset();
  self.force = rest;
  self.time.elapsed = std::min(self.time.elapsed, dropped.elapsed);
  self.time.step_seconds = self.time.options.step_seconds;  // as far as known
  self.met.clear();
  self.pending.reset();
}

void Search::expect(const std::string& strategy, double speedup) {
  Item& item = impl_->named(strategy, speedup);
  item.facts.expected_speedup = speedup;
  impl_->ask_again(item);
}

void Search::bound(const std::string& strategy, double speedup) {
  Item& item = impl_->named(strategy, speedup);
  item.facts.max_speedup = speedup;
  impl_->ask_again(item);
}

double Search::step_seconds() const { return impl_->time.step_seconds; }
double Search::seconds_left() const { return impl_->seconds_left(); }
double Search::seconds_to_conclude() const { return impl_->time.to_conclude(); }

PairedTestOptions Search::conclusion() const {
  const SearchOptions& options = impl_->time.options;
  auto paired_test = PairedTestOptions::conclusion(options.seed + 1);
  if (options.total_seconds <= 0) return paired_test;
  // Trials have shown a gain: a conclusion that time cuts short would throw it away.
  const double saved =
      static_cast<double>(options.steps_planned) * std::max(0.0, options.step_seconds - impl_->time.step_seconds);
  const double least = std::max({kPolicy.one_trial_seconds, 0.5 * options.conclude_steps * impl_->time.step_seconds,
                                 kPolicy.concluding_share * saved});
  paired_test.most_seconds = std::max(options.total_seconds - impl_->time.used, least);
  return paired_test;
}

void Search::charge(double seconds) {
  OXY_CHECK(seconds >= 0 && std::isfinite(seconds), InvalidArgument, "seconds to charge must be at least 0, not ",
            seconds, '.');
  impl_->charge(seconds);
}

std::vector<std::string> Search::best() const { return impl_->names(impl_->force); }

std::vector<CertificateEntry> Search::entries() const {
  std::vector<CertificateEntry> list;
  for (std::size_t i = 0; i < impl_->items.size(); ++i) {
    const Item& item = impl_->items[i];
    list.push_back(item.entry);
    if (!item.tried && !item.settled) list.back().reason = impl_->why_untried(i);
  }
  return list;
}

}  // namespace oxytorch::tune
