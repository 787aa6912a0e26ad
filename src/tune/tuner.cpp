#include "oxytorch/tune/tuner.h"

#include <algorithm>
#include <cmath>
#include <ctime>
#include <initializer_list>
#include <string_view>
#include <tuple>

#include "base/size_text.h"
#include "base/spelling.h"
#include "oxytorch/error.h"
#include "oxytorch/host.h"
#include "oxytorch/logging.h"
#include "oxytorch/tune/asked.h"
#include "oxytorch/tune/policy.h"
#include "oxytorch/tune/reuse.h"
#include "oxytorch/tune/timing.h"
#include "tune/combinations.h"
#include "tune/lower_memory.h"
#include "tune/names.h"
#include "tune/words.h"

namespace oxytorch::tune {
namespace {

constexpr std::size_t kEventsKept = 9;  // of a remembered certificate, beside that of its reuse

void set_status(Certificate& certificate, const std::string& name, Status status, const std::string& reason) {
  for (auto& entry : certificate.entries) {
    if (entry.strategy != name) continue;
    entry.status = status;
    entry.reason = reason;
  }
}

/// What a loop is likely to gain where batches are drawn beside its steps: most of the shorter of the two is hidden.
double drawn_beside(double fetch_share) {
  return 1 / (1 - kPolicy.hidden_share * std::min(fetch_share, 1 - fetch_share));
}

}  // namespace

std::string utc_now() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  gmtime_r(&now, &parts);
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &parts);
  return text;
}

struct Tuner::Impl : Combinations {
  CertificateKey key;
  TunerOptions options;
  double began;
  bool looked = false;
  bool goes_on = true;  // a few steps take less than the seconds for everything
  double compiling = 0;
  double trials_end = 0;  // with the goal memory: seconds since it began
  std::vector<std::string> events;
  std::map<std::string, std::string> skipped;                    // why a strategy is not tried
  std::map<std::string, std::string> failed;                     // what a strategy threw before the search
  std::map<std::string, std::pair<Status, std::string>> judged;  // what became of it after the search
  std::set<std::string> compiles;                                // whose turning on is charged apart
  std::set<std::pair<std::string, Names>> seen;  // looked at for what a cost is likely to gain, beside what
  std::optional<Search> search;
  std::pair<Names, PairedTestResult> alone;                       // the last trial against nothing
  std::map<std::string, std::map<std::string, double>> evidence;  // of the look at each strategy that was faster
  std::vector<std::pair<std::string, std::string>> asked;         // strategies that settings ask for, and the sentence

  Impl(Workload& w, CertificateKey k, TunerOptions o)
      : Combinations(w), key(std::move(k)), options(std::move(o)), began(w.seconds()) {
    charge = [this](double seconds) {
      if (search) search->charge(seconds);
    };
    Names known;
    for (const auto& offer : offers) known.push_back(offer.name);
    for (const auto& name : options.exclude) {
      OXY_CHECK(holds(known, name), InvalidArgument, "exclude names ", in_quotes(name),
                ", which is not among the strategies here: ", joined(known, "there are none"), '.');
      skipped[name] = "excluded by the caller";
    }
    for (const auto& offer : offers) {
      if (!offer.refused.empty()) skipped.emplace(offer.name, offer.refused);
      if (allows(options.level, offer.kind)) continue;
      skipped.emplace(offer.name,
                      "level " + options.level + " does not allow the kind " + std::string(tune::name(offer.kind)));
    }
  }

  // -- what may be tried ----------------------------------------------------------------------------------------------

  [[nodiscard]] bool may_be_tried(const std::string& name) const {
    return offer_of(name) != nullptr && !skipped.contains(name);
  }

  [[nodiscard]] Names offered_of(const Names& names) const {
    Names found;
    for (const auto& name : names) {
      if (offer_of(name) != nullptr) found.push_back(name);
    }
    return found;
  }

  void fail(const std::string& name, const std::string& reason) {
    failed[name] = reason;
    skipped[name] = reason;
    warn(name + " failed and is left out: " + reason);
  }

  /// What a strategy's own question throws is its own failure.
  template <class Ask>
  void ask(const std::string& name, const char* question, const Ask& answer) {
    std::optional<std::string> told;
    try {
      answer();
    } catch (const std::exception& error) {
      told = workload.told(error);
      if (!told) throw;
    }
    if (told) fail(name, std::string(question) + " threw " + *told);
  }

  /// Where `options.total` bounds the run.
  [[nodiscard]] double seconds_for_everything(double step) const {
    return std::max(options.total, options.total_share * static_cast<double>(options.steps_planned) * step);
  }

  /// Times the step as given, once, and asks the strategies whether they apply to it.
  void look() {
    workload.say("the step as it is");
    if (std::exchange(looked, true)) return;
    goes_on = timing.baseline(
        [&](double step) { return options.total <= 0 || kPolicy.least_steps * step <= seconds_for_everything(step); });
    if (timing.disturbed()) {
      warn("the machine is busy: " + timing.load().evidence() + ". " + advice_on_shared_cores(waiting_threads_spin()));
    }
    const auto everything =
        goes_on
            ? workload.hindrance()
            : "a step takes " + monitor::format_seconds(timing.step_seconds()) + ", and everything together may take " +
                  monitor::format_seconds(seconds_for_everything(timing.step_seconds())) + " of this run";
    if (!everything.empty()) warn("nothing was tried: " + everything + '.');
    for (const auto& offer : offers) {
      if (skipped.contains(offer.name)) continue;
      if (!everything.empty()) {
        skipped[offer.name] = everything;
        continue;
      }
      const auto& needs = offer.traits.requires_;
      const auto missing = std::find_if(needs.begin(), needs.end(), [&](const auto& n) { return !offer_of(n); });
      if (missing != needs.end()) {
        skipped[offer.name] = "needs " + *missing + ", which is not offered";
        continue;
      }
      ask(offer.name, "applies()", [&] {
        if (const auto answer = workload.applies(offer.name); !answer.holds) skipped[offer.name] = answer.reason;
      });
    }
    const bool keeps_memory = std::any_of(offers.begin(), offers.end(), [&](const auto& offer) {
      return offer.traits.group == "host_memory" && !skipped.contains(offer.name);
    });
    if (keeps_memory) note_heap();
  }

  // -- the search -----------------------------------------------------------------------------------------------------

  void make_search() {
    workload.say("each update of the optimizer by itself");
    Names of_optimizer;
    for (const auto& offer : offers) {
      const bool may_gain = offer.traits.group == "optimizer" && offer.traits.max_speedup > 1;
      if (may_gain && !skipped.contains(offer.name)) of_optimizer.push_back(offer.name);
    }
    auto [updates, proven] = timing.updates(of_optimizer, options.seed);
    std::vector<StrategyFacts> facts;
    for (const auto& offer : offers) {
      const auto& name = offer.name;  // Clang before 16 lets no lambda capture a structured binding
      const auto& traits = offer.traits;
      StrategyFacts one{.name = name, .kind = offer.kind, .group = traits.group};
      one.requires_ = offered_of(traits.requires_);
      one.interacts = offered_of(traits.interacts);
      one.part_of = offered_of(traits.part_of);
      one.renewed_by = offered_of(traits.renewed_by);
      one.max_speedup = traits.max_speedup;
      one.expected_speedup = traits.feeds ? drawn_beside(timing.fetch_share()) : traits.expected_speedup;
      one.update_speedup = updates[name];
      one.update_proven = name == proven;
      if (!skipped.contains(name)) {
        ask(name, "expected_cost()", [&] { one.expected_cost = workload.expected_cost(name); });
        if (one.expected_cost > 0) compiles.insert(name);
      }
      facts.push_back(std::move(one));
    }
    auto bounds = SearchOptions::for_run(options.steps_planned, timing.fastest(), options.tune_seconds, options.seed);
    if (options.total > 0) {
      bounds.total_seconds = seconds_for_everything(timing.fastest());
      bounds.conclude_steps = kPolicy.reserved_steps;
      bounds.conclude_share = kPolicy.reserved_share;
    }
    bounds.used_seconds = workload.seconds() - began;
    if (options.goal == Goal::Memory) {
      const double verifying =
          std::min(bounds.conclude_steps * timing.fastest(), bounds.conclude_share * bounds.total_seconds);
      trials_end = bounds.total_seconds - verifying;
      bounds.total_seconds =
          bounds.used_seconds + kPolicy.faster_share * std::max(0.0, trials_end - bounds.used_seconds);
    }
    bounds.optimizer_share = timing.optimizer_share();
    search.emplace(std::move(facts), bounds);
    for (const auto& [name, reason] : skipped) search->skip(name, reason);
    bound_heap();
  }

  /// What keeps the heap's memory saves the page faults of a step at best: beside a pool those that it has left, else
  /// those as given, since without one it is luck of a process how much the heap gives back.
  void bound_heap() {
    const auto active = search->best();
    for (const auto& offer : offers) {
      if (offer.traits.group != "host_memory" || holds(active, offer.name)) continue;
      const double most = holds_any(active, offer.traits.interacts)
                              ? most_heap_speedup(timing.challenger_faults(), search->step_seconds())
                              : most_heap_speedup(timing.faults(), timing.step_seconds());
      search->bound(offer.name, std::min(offer.traits.max_speedup, most));
    }
  }

  void explore() {
    while (const auto trial = search->ask()) {
      if (expected(*trial)) continue;
      workload.say(trial->strategy + (trial->removal ? " taken away" : "") + " against " +
                   joined(trial->incumbent, "nothing"));
      search->tell(outcome_of(*trial));
      if (search->best() != trial->incumbent) bound_heap();
    }
  }

  /// Before a cost is paid, tells the search once what it is likely to gain; true where it is to be asked again.
  bool expected(const Trial& trial) {
    if (!compiles.contains(trial.strategy) || !seen.emplace(trial.strategy, trial.incumbent).second) return false;
    const double start = workload.seconds();
    std::optional<double> gain;
    try {
      gain = timing.guarded(trial.incumbent, [&] { return workload.likely_speedup(trial.strategy); });
    } catch (const SideFailed&) {  // its trial will say so
      return false;
    }
    search->charge(workload.seconds() - start);
    if (gain) search->expect(trial.strategy, *gain);
    return gain.has_value();
  }

  TrialOutcome outcome_of(const Trial& trial) {
    const double start = workload.seconds();
    auto outcome = tried(trial, start);
    const auto costly = [&](const auto& name) { return compiles.contains(name); };
    if (costly(trial.strategy)) {
      compiling += workload.seconds() - start;  // its trial is part of what it costs, and it says when that is repaid
    } else if (std::any_of(trial.challenger.begin(), trial.challenger.end(), costly)) {
      compiling += outcome.cost_seconds;
    }
    return outcome;
  }

  TrialOutcome tried(const Trial& trial, double start) {
    TrialOutcome outcome;
    try {
      std::tie(outcome.paired_test, outcome.cost_seconds) =
          timing.compare(trial.incumbent, trial.challenger, trial.paired_test);
      outcome.disturbed = timing.disturbed();
      outcome.elapsed_seconds = std::max(1e-9, workload.seconds() - start - outcome.cost_seconds);
      if (trial.incumbent.empty()) alone = {trial.challenger, outcome.paired_test};
      if (outcome.paired_test.decision != Decision::Accept) return outcome;
      if (const auto why = grown(trial.challenger); !why.empty()) {
        outcome.verified = false;
        outcome.reason = why;
        return outcome;
      }
      const auto ruling = verify(trial.challenger, /*glance=*/true);
      evidence[trial.strategy] = ruling.evidence;
      outcome.verified = ruling.held;
      outcome.reason = ruling.reason;
      if (!ruling.held) warn(trial.strategy + " is refused and left out: " + ruling.reason);
    } catch (const SideFailed& failure) {
      outcome.failed = true;
      outcome.reason = timing.blame(failure);
      warn(trial.strategy + " failed and is left out: " + outcome.reason);
    }
    return outcome;
  }

  /// Searches, then verifies and measures everything against nothing; what spoils it is dropped and the search goes
  /// on. The result of that last comparison; empty of nothing.
  std::optional<PairedTestResult> conclude(Names& chosen) {
    while (true) {
      explore();
      chosen = search->best();
      if (chosen.empty()) return std::nullopt;
      if (const auto why = not_repaid(chosen); !why.empty()) {
        drop_all(chosen, Status::Rejected, why, /*is_fault=*/false);
        continue;
      }
      try {
        const auto ruling = verify(chosen);
        const bool over = search->seconds_left() <= 0;  // then what fails is not looked into
        if (!ruling.held) {
          over || chosen.size() == 1 ? drop_all(chosen, Status::Refused, "all together were refused: " + ruling.reason)
                                     : drop_culprits(chosen, ruling);
          continue;
        }
        const auto result = against_nothing(chosen);
        if (result.decision == Decision::Accept) return result;
        drop_all(over ? chosen : Names{chosen.back()}, Status::Rejected, "all together did not pay: " + result.reason);
      } catch (const SideFailed& failure) {
        drop(chosen.back(), Status::Failed, "all together failed: " + timing.blame(failure));
      }
    }
  }

  /// Why verifying what was found takes longer than tuning may and than it saves in the planned run; empty where it
  /// does not, or where the user said how long tuning may take.
  [[nodiscard]] std::string not_repaid(const Names& names) const {
    if (options.tune_seconds > 0 || options.goal != Goal::Speed || rulings.contains({names, false})) return "";
    const double given = timing.step_seconds(), steps = static_cast<double>(options.steps_planned);
    const double takes = given * (widest(names) == Kind::Exact ? kPolicy.verify_exact_steps : kPolicy.verify_steps);
    const double saves = steps * std::max(0.0, given - search->step_seconds());
    if (takes < std::max(search->seconds_to_conclude(), saves)) return "";
    return "Verifying takes about " + monitor::format_seconds(takes) + ", and in the " + monitor::format_count(steps) +
           " steps that are planned " + monitor::format_seconds(saves) + " are saved.";
  }

  PairedTestResult against_nothing(const Names& chosen) {
    if (chosen == alone.first) return alone.second;  // that was the trial by which it was accepted
    workload.say("everything against nothing");
    return timing.compare({}, chosen, search->conclusion()).first;
  }

  void drop(const std::string& name, Status status, const std::string& reason, bool is_fault = true) {
    if (!holds(search->best(), name)) return;  // it went with what it requires
    if (is_fault) warn(name + " is taken back: " + reason);
    search->drop(name, status, reason);
    bound_heap();
  }

  void drop_all(const Names& chosen, Status status, const std::string& reason, bool is_fault = true) {
    for (auto name = chosen.rbegin(); name != chosen.rend(); ++name) drop(*name, status, reason, is_fault);
  }

  /// What is refused by itself in a combination that is refused; else its last.
  void drop_culprits(const Names& chosen, const Ruling& together) {
    const auto found = culprits(chosen, together);
    for (const auto& [name, reason] : found) drop(name, Status::Refused, reason);
    if (found.empty()) drop(chosen.back(), Status::Refused, "all together were refused: " + together.reason);
  }

  // -- memory ---------------------------------------------------------------------------------------------------------

  /// Why a combination that is faster takes too much memory for that; empty where it does not.
  std::string grown(const Names& names) {
    const bool may_grow = options.goal == Goal::Speed;
    if (may_grow && std::isinf(options.max_growth)) return "";
    const auto given = bytes_with({}), now = bytes_with(names);
    if (!given) return "";
    if (!now) return may_grow ? "" : "what a step takes of memory with it is not known.";
    const auto bytes = static_cast<double>(*given);
    if (static_cast<double>(*now) <= (may_grow ? bytes * options.max_growth + kPolicy.uncounted_bytes : bytes))
      return "";
    const auto why = sentence({"a step takes ", size_text(*now), " of memory, and ", size_text(*given), " as given"});
    if (!may_grow) return why;
    return sentence({why, "; max_growth allows ", ratio_text(options.max_growth)});
  }

  /// With the goal memory: what makes the step faster, as far as that has its time, and then what makes it smaller.
  std::optional<PairedTestResult> conclude_small(Names& chosen) {
    explore();
    chosen = search->best();
    std::map<std::string, std::pair<Status, std::string>> out;
    const double gained = timing.step_seconds() / search->step_seconds();
    for (const auto& entry : search->entries()) {
      // Those that were only not faster are tried, unless all that is kept could not make up for it.
      const bool too_slow =
          entry.speedup && entry.speedup->high * kPolicy.interplay * std::max(1.0, gained) < 1 / options.max_slowdown;
      if (too_slow || entry.status == Status::Refused || entry.status == Status::Failed)
        out[entry.strategy] = {entry.status, entry.reason};
    }
    for (const auto& [name, reason] : skipped) out[name] = {Status::Skipped, reason};
    for (const auto& name : compiles) out.emplace(name, std::pair(Status::Skipped, "it is compiled anew each time"));
    LowerMemory lower(*this, options, out, [this] { return trials_end - (workload.seconds() - began); });
    auto result = lower.add_to(chosen);
    for (const auto& entry : search->entries()) {
      const auto found = lower.judged().find(entry.strategy);
      if (found == lower.judged().end() || out.contains(entry.strategy)) continue;
      // A trial's figures say more than that it was not looked at.
      if (found->second.first != Status::Skipped || entry.pairs == 0) judged[entry.strategy] = found->second;
    }
    if (result) return result;
    result = conclude(chosen);
    for (const auto& name : chosen) judged.erase(name);
    return result;
  }

  Certificate measure() {
    look();
    make_search();
    Names chosen;
    const auto result = options.goal == Goal::Memory ? conclude_small(chosen) : conclude(chosen);
    Certificate made;
    made.key = key;
    made.level = options.level;
    made.created = utc_now();
    made.steps_planned = options.steps_planned;
    made.step_seconds = timing.step_seconds();
    made.step_spread = timing.spread();
    made.step_faults = timing.faults();
    if (timing.load().disturbed()) made.disturbance = timing.load().evidence();
    made.baseline_seconds = result ? result->incumbent : timing.step_seconds();
    made.tuned_seconds = result ? result->challenger : timing.step_seconds();
    if (result) made.speedup = result->speedup;
    made.entries = search->entries();
    for (auto& entry : made.entries) {
      entry.cost = offer_of(entry.strategy)->traits.cost;
      entry.evidence = evidence[entry.strategy];
      if (const auto why = failed.find(entry.strategy); why != failed.end()) {
        entry.status = Status::Failed;
        entry.reason = why->second;
      }
      if (const auto found = judged.find(entry.strategy); found != judged.end()) {
        std::tie(entry.status, entry.reason) = found->second;
      }
    }
    made.verification = workload.covered();
    if (!chosen.empty()) {
      const auto reason = verify(chosen).reason;
      made.verification["all together, as " + std::string(tune::name(widest(chosen)))] =
          reason.empty() ? "held" : reason;
    }
    made.events = events;
    const auto [seconds, faults] = goes_on ? timing.untouched() : std::pair(timing.step_seconds(), timing.faults());
    made.relate(seconds, faults);
    made.given_peak_bytes = bytes_with({});
    made.tuned_peak_bytes = chosen.empty() ? made.given_peak_bytes : bytes_with(chosen);
    made.tuning_peak_bytes = workload.tuning_bytes();
    made.compile_seconds = compiling;
    made.tuning_seconds = std::max(0.0, workload.seconds() - began - compiling);
    return made;
  }

  // -- remembering ----------------------------------------------------------------------------------------------------

  std::optional<Certificate> reuse(const CertificateStore& store) {
    auto found = store.find(key);
    if (!found) return found;
    look();
    workload.say("the remembered certificate");
    std::string shown;
    if (const auto fault = fault_of(*found, shown); !fault.empty()) {
      events.push_back("step 0: the certificate of " + found->created +
                       " did not hold and was measured anew: " + fault);
      warn(events.back());
      return std::nullopt;
    }
    if (found->events.size() > kEventsKept) {
      found->events.erase(found->events.begin(), found->events.end() - static_cast<std::ptrdiff_t>(kEventsKept));
    }
    found->events.push_back("step 0: reused, " + shown);
    for (auto& [check, outcome] : workload.covered()) found->verification[check] = outcome;
    return found;
  }

  /// What is wrong with a remembered certificate; empty where it holds, by what was `shown`.
  std::string fault_of(const Certificate& found, std::string& shown) {
    const StepNow now{timing.step_seconds(), timing.spread(), timing.disturbed(), utc_now()};
    if (auto why = why_not_trusted(found, now); !why.empty()) return why;
    const auto names = found.accepted();
    for (const auto& name : names) {
      if (may_be_tried(name)) continue;
      return name + ": " + (skipped.contains(name) ? skipped[name] : "not offered");
    }
    const auto canary = PairedTestOptions::canary(options.seed);
    try {
      if (names.empty()) {
        shown = "nothing pays here";
        const auto again = worth_another_look(found);
        if (again.empty() || !may_be_tried(again)) return "";
        const auto result = timing.compare({}, {again}, canary).first;
        return result.decision == Decision::Accept ? again + " pays now: " + result.reason : "";
      }
      if (const auto ruling = verify(names, /*glance=*/true); !ruling.held) return ruling.reason;
      const auto [result, cost] = timing.compare({}, names, canary);
      compiling += cost;
      const bool for_memory = options.goal == Goal::Memory;
      if (!(result.speedup.mid > (for_memory ? 1 / options.max_slowdown : 1))) return result.reason;
      shown = "canary " + ratio_text(result.speedup.mid) + " over " + std::to_string(result.pairs) +
              " pairs, one step verified";
      return for_memory ? "" : hindered_by(names);
    } catch (const SideFailed& failure) {
      return timing.blame(failure);
    }
  }

  /// Which of several makes the others slower, if one does; what would be compiled anew is left out.
  std::string hindered_by(const Names& names) {
    for (const auto& name : names) {
      double cost = 0;
      ask(name, "expected_cost()", [&] { cost = workload.expected_cost(name); });
      if (skipped.contains(name)) return skipped[name];
      if (cost > 0) return "";
    }
    if (names.size() < 2) return "";
    for (const auto& name : names) {
      Names rest;
      std::copy_if(names.begin(), names.end(), std::back_inserter(rest),
                   [&](const auto& other) { return other != name && !requires_it(other, name); });
      const auto result = timing.compare(names, rest, PairedTestOptions::member(options.seed)).first;
      if (result.decision == Decision::Accept) return "the rest is faster without " + name + ": " + result.reason;
    }
    return "";
  }

  // -- what was asked for ---------------------------------------------------------------------------------------------

  /// Of what settings ask for and the search did not keep: the verifier judges it beside what was kept.
  void judge_required(Certificate& certificate) {
    const auto accepted = certificate.accepted();
    Names beside = accepted;
    for (const auto& [key, value, names] : options.required) {
      const auto setting = std::string(key).append(" = '").append(value).append("'");
      if (holds_any(beside, names)) continue;
      const auto free = std::find_if(names.begin(), names.end(), [&](const auto& name) { return may_be_tried(name); });
      const auto& name = free == names.end() ? names.front() : *free;
      std::string why;
      if (free == names.end()) {
        why = skipped.contains(name) ? skipped[name] : "not offered";
      } else {
        Names together = beside;
        together.push_back(name);
        try {
          if (const auto ruling = verify(together); !ruling.held) why = ruling.reason;
        } catch (const SideFailed& failure) {
          why = timing.blame(failure);
        }
      }
      if (why.empty()) {
        beside.push_back(name);
        asked.emplace_back(name, "asked for by " + setting + ", whatever it gains");
      } else {
        set_status(certificate, name, Status::Refused, sentence({setting, " asks for it, and it cannot be: ", why}));
        warn(sentence({setting, " is refused: ", why}));
      }
    }
  }

  /// Adds one to what is active; what it threw, empty where it is.
  std::string add(const std::string& name) {
    try {
      auto names = workload.active();
      names.push_back(name);
      workload.activate(names);
    } catch (const std::exception& error) {
      const auto told = workload.told(error);
      if (!told) throw;
      warn(name + " failed and is left out: " + *told);
      return *told;
    }
    return "";
  }
};

Tuner::Tuner(Workload& workload, CertificateKey key, TunerOptions options) {
  OXY_CHECK(options.steps_planned >= 1, InvalidArgument, "steps_planned is ", options.steps_planned,
            ", expected at least 1.");
  OXY_CHECK(options.tune_seconds >= 0 && std::isfinite(options.tune_seconds), InvalidArgument, "tune_seconds is ",
            options.tune_seconds,
            " s, expected a finite number of seconds, or 0 for what SearchOptions::for_run() allows.");
  OXY_CHECK(options.total >= 0 && std::isfinite(options.total), InvalidArgument, "total is ", options.total,
            " s, expected a finite number of seconds, or 0 for what SearchOptions::for_run() allows.");
  OXY_CHECK(options.total_share >= 0 && options.total_share <= 1, InvalidArgument, "total_share is ",
            options.total_share, ", expected a share of the planned run between 0 and 1.");
  OXY_CHECK(options.max_slowdown >= 1 && std::isfinite(options.max_slowdown), InvalidArgument, "max_slowdown is ",
            options.max_slowdown, ", expected at least 1: times as long as given.");
  OXY_CHECK(options.max_growth >= 1, InvalidArgument, "max_growth is ", options.max_growth,
            ", expected at least 1: times the memory as given.");
  static_cast<void>(allows(options.level, Kind::Exact));
  impl_ = std::make_unique<Impl>(workload, std::move(key), std::move(options));
}
Tuner::~Tuner() = default;

Certificate Tuner::tune(const CertificateStore* store) {
  Impl& all = *impl_;
  try {
    std::optional<Certificate> certificate;
    if (store != nullptr) certificate = all.reuse(*store);
    if (!certificate) certificate = all.measure();
    all.judge_required(*certificate);
    all.timing.rewind();
    return std::move(*certificate);
  } catch (...) {
    all.timing.recover();
    throw;
  }
}

void Tuner::activate(Certificate& certificate) {
  for (const auto& name : certificate.accepted()) {
    if (const auto why = impl_->add(name); !why.empty()) {
      set_status(certificate, name, Status::Failed, "could not be made active: " + why);
    }
  }
}

std::vector<std::string> Tuner::activate_required(Certificate& certificate) {
  Names added;
  for (const auto& [name, asked] : impl_->asked) {
    if (const auto why = impl_->add(name); !why.empty()) {
      set_status(certificate, name, Status::Failed, sentence({asked, "; it could not be made active: ", why}));
      continue;
    }
    added.push_back(name);
    for (auto& entry : certificate.entries) {
      if (entry.strategy != name) continue;
      entry.status = Status::Accepted;
      entry.reason = asked + (entry.reason.empty() ? "" : "; " + entry.reason);
    }
  }
  return added;
}

Kind Tuner::widest(const std::vector<std::string>& strategies) const { return impl_->widest(strategies); }
double Tuner::seconds() const { return impl_->workload.seconds() - impl_->began; }

}  // namespace oxytorch::tune
