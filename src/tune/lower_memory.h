/// What makes a step smaller, as far as it may be slower: the search of Goal::Memory.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include "oxytorch/tune/certificate.h"
#include "oxytorch/tune/tuner.h"
#include "tune/combinations.h"

namespace oxytorch::tune {

/// Greedy: what saves most of what is left is tried first, and is kept where a step with all of it takes at most
/// `max_slowdown` times as long as given and a glance at its numbers holds. What a strategy saved beside less is taken
/// for the most that it saves beside more, so that few are measured anew after each one that is kept (M. Minoux,
/// "Accelerated greedy algorithms", 1978); where nothing seems to be left, all are.
///
/// What an allocator keeps is no tensor. Last, the one is kept that leaves least of the process in memory: freed blocks
/// of a large heap that glibc hands out in turn can be several times what a step needs.
class LowerMemory {
 public:
  /// `judged`: what must not be tried, with what became of it. `seconds_left`: for trials.
  LowerMemory(Combinations& all, const TunerOptions& options,
              std::map<std::string, std::pair<Status, std::string>> judged, std::function<double()> seconds_left);

  /// Adds to `kept` what makes the step smaller, and verifies all of it together. The comparison of that with nothing;
  /// empty where nothing was added, and `kept` is what it was.
  std::optional<PairedTestResult> add_to(Names& kept);

  /// What became of each strategy that was looked at or could have been, or was kept before and is not now.
  [[nodiscard]] const std::map<std::string, std::pair<Status, std::string>>& judged() const { return judged_; }

 private:
  struct Choice {
    std::string name;
    Names names;  ///< with those that it joins
    std::int64_t bytes = 0;
  };
  struct Saved {
    std::int64_t bytes = 0;
    std::int64_t of = 0;  ///< what a step took without it
  };
  void choose(Names& kept);
  void explain_the_rest(const Names& kept);
  void choose_allocator(Names& kept);
  std::vector<Names> allocators_for(const Names& kept) const;
  bool replace_allocator(const Names& names, const std::string& said, Names& kept);
  std::optional<Choice> most_saving(const Names& kept, std::int64_t now);
  Names joined_by(const Offer& offer, const Names& kept) const;
  void try_one(const Choice& choice, std::int64_t now, Names& kept);
  void keep(const Names& names, const PairedTestResult& joint, const std::string& saved, const std::string& instead,
            Names& kept);
  bool drop_refused(const Ruling& ruling, Names& kept);
  void take_out(const std::string& name, Status status, const std::string& reason, Names& kept);
  PairedTestResult at_most_slower(const Names& names, double least_seconds);
  PairedTestResult in_place_of(const Names& kept, const Names& names, double least_seconds);
  PairedTestResult compare(const Names& with, const Names& names, double slowdown, double least_seconds);

  Combinations& all_;
  const TunerOptions& options_;
  std::map<std::string, std::pair<Status, std::string>> judged_;
  std::function<double()> seconds_left_;
  std::map<std::string, Saved> saved_;        // by each when it was last measured
  Names added_;                               // in that order
  std::map<Names, PairedTestResult> within_;  // combinations that are not too slow
};

}  // namespace oxytorch::tune
