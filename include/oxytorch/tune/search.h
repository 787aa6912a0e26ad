/// Search: which combination of strategies to try next, from what the trials so far have shown.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "oxytorch/api.h"
#include "oxytorch/tune/certificate.h"
#include "oxytorch/tune/kind.h"
#include "oxytorch/tune/paired_test.h"

namespace oxytorch::tune {

/// What the search knows of a strategy.
struct StrategyFacts {
  std::string name;
  Kind kind = Kind::Exact;
  std::string group = {};                   ///< at most one strategy of a group is active; empty: alone
  std::vector<std::string> requires_ = {};  ///< tried only where all of these are active
  std::vector<std::string> interacts = {};  ///< tried again, on or off, when one of these changed since; mutual
  std::vector<std::string> part_of = {};    ///< not tried where one of these is active: they do all that it does
  /// Of one with an expected cost: it takes that cost anew where one of these is turned on or off. Empty: interacts.
  std::vector<std::string> renewed_by = {};
  double expected_cost = 0;  ///< seconds that turning it on takes once (compiling), before it was tried
  double max_speedup = 3;  ///< speedup that it cannot exceed; where even that cannot repay expected_cost, it is skipped
  double expected_speedup = 1.05;  ///< where it pays at all; the highest is tried first
  /// Of the group "optimizer": how many times as fast as given its update was, timed by itself; 0: not timed.
  double update_speedup = 0;
  /// That was shown by a paired test of the two updates: of the whole step it is then enough that it agrees.
  bool update_proven = false;
};

struct SearchOptions {
  std::int64_t steps_planned = 10'000;  ///< length of the run over which a one-off cost must be repaid
  double step_seconds = 0;              ///< of the step as it was given; needed to judge repayment
  double budget_seconds = 0;            ///< for all trials together, one-off costs apart; 0: no bound
  double repay_steps = 0;           ///< trials may spend more where the saving so far repays all of it in so many steps
  double conclude_steps = 0;        ///< steps as given that verifying and measuring what is kept takes at the end
  double conclude_share = 1.0 / 3;  ///< of total_seconds, what is kept back for that at most
  /// For everything, verifying and one-off costs included; 0: no bound. Then ask() names nothing more.
  double total_seconds = 0;
  double used_seconds = 0;  ///< of that, before the search
  double cost_share = 0.1;  ///< of the planned run that one-off costs (compiling) of all trials together may take
  /// Of the step as given, what its optimizer takes; 0: not known. What a strategy promises depends on it.
  double optimizer_share = 0;
  std::uint64_t seed = 0;
  PairedTestOptions paired_test = {};  ///< of each trial; seed and what is left of the budget are filled in

  /// What every driver of a search uses: trials may take what 60 steps take as given, at least 3 s, or what
  /// the saving so far repays within 240 steps, less 50 steps for concluding; of a short run no more than 2 % and 3 %.
  /// What was on trial before may be again while half of what is repaid is left.
  /// What trials left open, though it seemed to gain, has one more trial together (alone, where its whole interval was
  /// a gain), also where it is likely to repay that in half of the run. `budget_seconds` above 0 is all instead.
  /// Everything together may take 15 % of the planned run, at least 6 s, and twice `budget_seconds` more.
  /// `step_seconds` is the fastest step seen: a disturbed one would allow more.
  [[nodiscard]] OXY_API static SearchOptions for_run(std::int64_t steps_planned, double step_seconds,
                                                     double budget_seconds, std::uint64_t seed);
};

/// One trial: both combinations run the same batches, in the order that its paired test asks for.
struct Trial {
  std::string strategy;                ///< the one in question
  bool removal = false;                ///< true: is it still worth having?
  std::vector<std::string> incumbent;  ///< active names, in the order of the strategies given
  std::vector<std::string> challenger;
  PairedTestOptions paired_test;
};

/// What came of a trial. A removal is accepted where the rest is faster without the strategy.
struct TrialOutcome {
  PairedTestResult paired_test;
  double cost_seconds = 0;  ///< one-off seconds that turning it on took: compiling, warm-up
  /// All that the trial took beside that, steps that were not measured included; 0: only the paired test's own count.
  double elapsed_seconds = 0;
  bool disturbed = false;   ///< other programs used the processor meanwhile
  bool failed = false;      ///< it could not be applied or threw
  bool verified = true;     ///< numbers were checked and held; looked at where the paired test accepted
  std::string reason = {};  ///< of a failure or a refusal by the verifier
};

/// Greedy with a way back. Forward: first what is free of one-off costs, so that its gain is known when it is judged
/// whether a cost is likely to be repaid. Each strategy, the most promising first and equals in the order given (the
/// group "optimizer" promises by the optimizer's share of the step, others by the rest of it; Amdahl's law), against
/// what is active, in place of the one of its group: an early gain makes every later trial cheaper. In place of another
/// it promises what it gains beyond that one, and past the budget it has a turn where it is likely to repay its trial
/// in half of the run, of which trials have taken less than a tenth. What bound() leaves no gain has none. Of updates
/// that were timed by themselves only the fastest is tried, where that can be seen in the step, and the next where it
/// failed or was refused. Then rounds over what `interacts` ties together, wherever something accepted has changed the
/// ground since it was judged: a rejected strategy again, an accepted one off, a rejected one in place of an accepted
/// one, two rejected ones together. They end when nothing is left to ask or the budget is spent; no two combinations
/// meet twice. What has an expected cost is tried outside of that budget, as far as `cost_share` goes. What would have
/// such a cost taken anew is tried only where it promises to repay that soon. Of the planned run, a cost must be repaid
/// within a quarter by what is likely to be gained (expect()); of a group with such costs, one that gained little or
/// nothing speaks for the others. What is exact, free and often pays has its first turn even where refused strategies
/// have used up the budget. A strategy is kept only where its saving over `steps_planned` exceeds its cost; a number of
/// threads is not chosen while other programs use the processor.
///
/// ask() and tell() alternate; ask() again before tell() names the same trial. Deterministic.
class OXY_API Search {
 public:
  /// Error(InvalidArgument) for two strategies of one name, for names in requires_ that do not exist, for over 64.
  Search(std::vector<StrategyFacts> strategies, SearchOptions options);
  ~Search();
  Search(Search&&) noexcept;
  Search& operator=(Search&&) noexcept;

  [[nodiscard]] std::optional<Trial> ask();
  /// Of the trial that ask() named; Error(InvalidState) where there is none.
  void tell(const TrialOutcome& outcome);
  /// Notes a strategy that does not apply here; it is not asked for. Error(InvalidState) where it is active.
  void skip(const std::string& strategy, std::string reason);
  /// What a strategy is likely to make of the step as it is now, by a look at where its time goes: ask() again.
  void expect(const std::string& strategy, double speedup);
  /// What a strategy that is not active can make of the step as it is now at best: one that it leaves no gain has no
  /// trial. Until the next call.
  void bound(const std::string& strategy, double speedup);
  /// Seconds spent outside of trials (verifying), charged to the budget.
  void charge(double seconds);
  /// Takes out for good what turned out bad after it was accepted (a longer verification refused it), with what
  /// requires it. What was judged beside it is judged again, with the budget as it was before: ask() goes on.
  /// Error(InvalidState) where it is not active.
  void drop(const std::string& strategy, Status status, std::string reason);

  /// Of a step with what is kept so far, as its trial measured it.
  [[nodiscard]] double step_seconds() const;
  /// Of `total_seconds`, what is left; infinite without that bound.
  [[nodiscard]] double seconds_left() const;
  /// The same with what was kept back for concluding.
  [[nodiscard]] double seconds_to_conclude() const;
  /// Of everything against nothing at the end: PairedTestOptions::conclusion() in what is left of `total_seconds`.
  [[nodiscard]] PairedTestOptions conclusion() const;
  [[nodiscard]] std::vector<std::string> best() const;  ///< the active combination
  /// One entry a strategy: what became of it last, with reason and figures.
  [[nodiscard]] std::vector<CertificateEntry> entries() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace oxytorch::tune
