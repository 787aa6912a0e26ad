/// The newest sample of every card, taken by one thread of its own: nothing of `libhlml.so` runs on a caller's thread,
/// so a card that hangs hangs no one.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "backends/hpu/hlml.h"

namespace oxytorch::backend::hpu {

/// What was known at one moment. Never changed once published.
struct Snapshot {
  std::string library;        ///< path of libhlml.so; empty where there is none
  std::string hlml, driver;   ///< versions
  std::string problem;        ///< one sentence; empty where cards can be read
  std::vector<bool> present;  ///< of meters(): whether this library has what each needs
  std::vector<Card> cards;    ///< by index; values empty before the first sample
  std::chrono::steady_clock::time_point taken;
};

class Sampler {
 public:
  /// The one sampler; its thread starts with the first question and ends with the process.
  static Sampler& instance();

  /// Library, cards and their names; waits up to 2 seconds for them the first time.
  std::shared_ptr<const Snapshot> facts();
  /// A sample at most 2 seconds old. One a second is taken from the first question until 10 seconds after the last, so
  /// who asks regularly never waits; the others wait for it up to 2 seconds.
  std::shared_ptr<const Snapshot> sample();

 private:
  struct State;
  Sampler();
  ~Sampler() = delete;
  std::shared_ptr<const Snapshot> wait(bool sampled);
  State* state_;
};

/// Whether this process was forked from one that had a sampler.
bool forked();

}  // namespace oxytorch::backend::hpu
