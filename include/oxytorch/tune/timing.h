/// Timing: whole steps of a workload timed under two combinations of strategies, in the order that a paired test asks
/// for.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "oxytorch/api.h"
#include "oxytorch/load.h"
#include "oxytorch/tune/paired_test.h"
#include "oxytorch/tune/workload.h"

namespace oxytorch::tune {

using Names = std::vector<std::string>;

/// A combination threw while it was made active or stepped; what() is one line. Nothing is active then, and the state
/// is restored.
class OXY_API SideFailed : public std::runtime_error {
  using runtime_error::runtime_error;
};

/// A block is a few steps in a row: some unmeasured where the combination has just been changed, then as many as last
/// long enough for the clock. What changing takes is no part of it.
class OXY_API Timing {
 public:
  Timing(Workload& workload, const std::vector<Offer>& offers);

  /// Reverts everything and restores the state; what could not be reverted passes through after that.
  void rewind();
  /// As rewind(), after something threw: another failure is no news.
  void recover();
  /// Times a step as given; what it throws passes through. To be called before anything is tried: trials leave memory
  /// laid out otherwise than in a process that was not tuned. `is_short(seconds)`, where given, is asked of the last
  /// step of the warm-up; where it says no, that is all that is timed, and the answer is false.
  bool baseline(const std::function<bool(double)>& is_short = {});
  /// Seconds and page faults of a step with nothing active now.
  std::pair<double, double> untouched();
  /// How many times as fast as given the update by each of these is, and which is shown to be faster. Timed without
  /// the rest of a step they are known after a few calls, where whole steps would need dozens of pairs; the fastest
  /// then meets the one given in a paired test of updates; empty where it does not win. Left out is what throws: its
  /// trial will say so.
  std::pair<std::map<std::string, double>, std::string> updates(const Names& names, std::uint64_t seed);
  /// The result, and the seconds that turning the challenger on took once. SideFailed where a side threw. Where one
  /// side alone keeps memory of the heap, the other counts with the page faults of the step as given that it happens
  /// not to have: trials leave more of the heap with the process than it keeps where their certificate is reused.
  std::pair<PairedTestResult, double> compare(const Names& incumbent, const Names& challenger,
                                              PairedTestOptions options);
  /// What a combination threw, where the step as given does not throw too; else that passes through.
  std::string blame(const SideFailed& failure);

  /// Calls `work` with exactly these active. SideFailed where it throws; with nothing active, before either, the
  /// exception itself passes through.
  template <class Work>
  auto guarded(const Names& names, const Work& work) -> decltype(work()) {
    Names suspects = workload_.active();  // reverting one may throw as well
    suspects.insert(suspects.end(), names.begin(), names.end());
    std::string failure;
    try {
      switch_to(names);
      suspects = names;
      return work();
    } catch (const std::exception& error) {
      if (suspects.empty()) throw;  // the user's own step: theirs to see as it is
      const auto told = workload_.told(error);
      if (!told) throw;
      failure = *told;
    }
    // The exception is gone by now, and with it what it held.
    recover();
    throw SideFailed(failure);
  }

  [[nodiscard]] double step_seconds() const noexcept { return step_seconds_; }
  [[nodiscard]] double spread() const noexcept { return spread_; }  ///< of its blocks, as a share
  [[nodiscard]] double faults() const noexcept { return faults_; }  ///< page faults of that step
  /// Of a step of the challenger in the last comparison.
  [[nodiscard]] double challenger_faults() const noexcept { return challenger_faults_; }
  [[nodiscard]] double fastest() const noexcept { return fastest_; }  ///< least seconds of one, by the best clock
  [[nodiscard]] double optimizer_share() const noexcept { return optimizer_share_; }  ///< of that step
  [[nodiscard]] double fetch_share() const noexcept { return fetch_share_; }          ///< of the loop, drawing a batch
  [[nodiscard]] const LoadWatch& load() const noexcept { return load_; }
  [[nodiscard]] bool disturbed() const noexcept { return disturbed_; }  ///< the baseline or the last comparison

 private:
  void switch_to(const Names& names);
  /// Most steps that the strategies in which two combinations differ need to settle.
  [[nodiscard]] int settle(const Names& one, const Names& other) const;
  [[nodiscard]] bool keeps_heap(const Names& names) const;
  int warm_up();
  double block(double& faults);
  double timed(int steps, std::vector<double>* updates = nullptr);
  /// Seconds of each of kBaselineBlocks blocks; sets faults_.
  std::vector<double> blocks(int steps, std::vector<double>* updates = nullptr);
  double update_seconds(int count);
  bool wins(const std::string& name, std::uint64_t seed);

  Workload& workload_;
  std::map<std::string, StrategyTraits> traits_;
  double step_seconds_ = 0, optimizer_share_ = 0, spread_ = 0, faults_ = 0, fastest_ = 0, fetch_share_ = 0;
  double challenger_faults_ = 0;
  LoadWatch load_;
  bool disturbed_ = false;
  bool drawing_ = false;  // drawing a batch takes long enough to be a part of every step
  bool drawn_ = false;    // steps draw theirs now
  int steps_ = 1, fresh_ = 0;
  double last_ = 0;  // seconds of a step in the last block
  std::size_t next_ = 0;
};

}  // namespace oxytorch::tune
