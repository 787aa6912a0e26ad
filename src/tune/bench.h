/// Bench: whole training steps timed under two combinations of strategies, in the order that a duel asks for.
#pragma once

#include <map>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "oxytorch/load.h"
#include "oxytorch/tune/duel.h"
#include "oxytorch/tune/escrow.h"
#include "oxytorch/tune/run.h"

namespace oxytorch::tune {

/// A combination threw while it was put in force or stepped; what() is its message. Nothing is in force then, and the
/// state is restored.
class SideFailed : public std::runtime_error {
  using runtime_error::runtime_error;
};

class Bench {
 public:
  using Names = std::vector<std::string>;
  Bench(Run& run, Escrow& escrow) : run_(run), escrow_(escrow) {}

  /// Takes everything back and restores the state.
  void rewind();
  /// Median seconds of a step as given; what the step throws passes through. To be called before anything is tried:
  /// trials leave memory laid out otherwise than in a process that was not tuned.
  double baseline();
  /// A step with nothing active now: seconds and page faults.
  std::pair<double, double> untouched();
  /// How many times as fast as given the update by each of these is, and which is shown to be faster. Timed without the
  /// rest of a step they are known after a few calls, where whole steps would need dozens of pairs; the fastest then
  /// meets the one given in a duel of updates; empty where it does not win. Left out is what throws: its trial will say
  /// so.
  std::pair<std::map<std::string, double>, std::string> updates(const Names& names, std::uint64_t seed);
  /// The result, and the seconds that turning the challenger on took once. SideFailed where a side threw.
  std::pair<DuelResult, double> duel(const Names& incumbent, const Names& challenger, const DuelOptions& options);
  /// A step with nothing in force, undone; what it throws passes through.
  void plain_step();
  /// Calls `work` with exactly these in force. SideFailed where that throws an exception of the standard library's, if
  /// anything is or was to be in force; other exceptions pass through, after a rewind().
  template <class Work>
  auto guarded(const Names& names, const Work& work) {
    Names suspects = run_.in_force();
    suspects.insert(suspects.end(), names.begin(), names.end());
    try {
      bring(names);
      suspects = names;
      return work();
    } catch (const std::exception& error) {
      const std::string message = first_line(error);
      rewind();
      if (suspects.empty()) throw;
      throw SideFailed(message);
    } catch (...) {
      rewind();
      throw;
    }
  }
  [[nodiscard]] double loss() const noexcept { return loss_; }  ///< of the last warm-up
  [[nodiscard]] double step_seconds() const noexcept { return step_seconds_; }
  [[nodiscard]] double spread() const noexcept { return spread_; }    ///< of its blocks, as a share
  [[nodiscard]] double faults() const noexcept { return faults_; }    ///< page faults of that step
  [[nodiscard]] double fastest() const noexcept { return fastest_; }  ///< least seconds of one, by the best clock
  [[nodiscard]] LoadWatch& load() noexcept { return load_; }
  [[nodiscard]] bool disturbed() const noexcept { return disturbed_; }                ///< the baseline or the last duel
  [[nodiscard]] double optimizer_share() const noexcept { return optimizer_share_; }  ///< of that step

 private:
  void bring(const Names& names);
  /// Most steps that the strategies in which two combinations differ need to settle.
  [[nodiscard]] int settle(const Names& one, const Names& other) const;
  int warm_up();
  double block();
  double timed(int steps);
  /// Seconds of each of kBaselineBlocks blocks, and page faults a step.
  std::pair<std::vector<double>, double> blocks(int steps);
  void step();
  /// Seconds that clipping and the optimizer take, with the gradients that there are.
  double update_seconds();
  /// Whether a duel of updates shows this one to be faster than the one given.
  bool wins(const std::string& name, std::uint64_t seed);
  static std::string first_line(const std::exception& error);

  Run& run_;
  Escrow& escrow_;
  double loss_ = 0, step_seconds_ = 0, optimizer_share_ = 0, spread_ = 0, faults_ = 0, fastest_ = 0;
  LoadWatch load_;
  bool disturbed_ = false;
  std::vector<double> updates_;  // seconds of each step's update, while those of the baseline are timed
  bool timing_updates_ = false;
  int steps_ = 1, fresh_ = 0;
  std::size_t next_ = 0;
};

/// Waits for a device; nothing on a CPU.
void synchronize(at::Device device);

}  // namespace oxytorch::tune
