/// Strategy: one change to a training run that may make its step faster, with its way back; and the register of them.
///
/// ```cpp
/// struct OneThread : oxytorch::tune::Strategy {
///   int before = 0;
///   void apply(oxytorch::tune::Run&) override {
///     before = at::get_num_threads();
///     at::set_num_threads(1);
///   }
///   void revert(oxytorch::tune::Run&) override { at::set_num_threads(before); }
/// };
/// oxytorch::tune::register_strategy<OneThread>("one_thread", oxytorch::tune::Kind::Tolerance, {.group = "threads"});
/// ```
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "oxytorch/api.h"
#include "oxytorch/tune/kind.h"
#include "oxytorch/tune/workload.h"

namespace oxytorch::tune {

class Run;

/// An object is made for each run, so what apply() needs to remember for revert() is a member. Both are called many
/// times in turn while the step is measured, between steps, never inside one.
class OXY_API Strategy {
 public:
  Strategy() = default;
  virtual ~Strategy();
  Strategy(const Strategy&) = delete;
  Strategy& operator=(const Strategy&) = delete;

  /// Must change nothing.
  [[nodiscard]] virtual Applicability applies(Run& run);
  /// Makes it active, whole or not at all: what it throws makes it a failed strategy, reported once.
  virtual void apply(Run& run) = 0;
  /// Takes it back: all that apply() touched is as before; trained values stay. Must not throw.
  virtual void revert(Run& run) = 0;
  /// Lets go of what is kept for trials alone: they are over, and this stays active.
  virtual void settle_in(Run& run);
  /// Seconds that turning it on takes once, as far as one can tell beforehand.
  [[nodiscard]] virtual double expected_cost(Run& run);
};

struct RegisteredStrategy {
  std::string name;
  Kind kind;
  StrategyTraits traits;
  std::function<std::unique_ptr<Strategy>()> make;
};

/// Error(InvalidArgument) for a name that is taken or empty. From any thread.
OXY_API void register_strategy(RegisteredStrategy strategy);

/// `T` is a Strategy that needs no arguments. `kind` is a claim that the verifier checks.
template <class T>
void register_strategy(std::string name, Kind kind, StrategyTraits traits = {}) {
  register_strategy({std::move(name), kind, std::move(traits), [] { return std::make_unique<T>(); }});
}

/// In the order in which they are tried: those of the library, then the user's.
[[nodiscard]] OXY_API std::vector<RegisteredStrategy> strategies();

/// Error(InvalidArgument) with the nearest name where there is none of this one.
[[nodiscard]] OXY_API RegisteredStrategy find_strategy(const std::string& name);

}  // namespace oxytorch::tune
