/// Verifier: whether a combination of strategies leaves the numbers of a training step as its kind promises.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "oxytorch/api.h"
#include "oxytorch/tune/kind.h"
#include "oxytorch/tune/run.h"
#include "oxytorch/tune/snapshot.h"
#include "oxytorch/tune/workload.h"

namespace oxytorch::tune {

struct VerifierOptions {
  int steps = 12;          ///< compared, one after the other; 1 is a check of one step, without those of `span`
  int span = 12;           ///< steps after them, of which draw_steps() has four compared
  int trajectory = 8;      ///< steps whose losses are held to the band of seeds
  int seeds = 3;           ///< runs as given with another seed and order of batches; they span the band
  std::uint64_t seed = 0;  ///< mixed into what is drawn
  std::optional<std::uint64_t> drawn_by = {};  ///< evidence["drawn_by"] of an earlier ruling, to compare the same steps
};

/// Exact: after all steps the digest of everything (gradients, state, generators included) and every loss are the same
/// bits. Otherwise, for each compared step of the candidate, from the state that it had then:
///  - loss, every gradient and every buffer against the same step as given, and where that shows more than rounding,
///    and at two steps that are drawn, against the step computed in float64; of gradients that are further off, what
///    lies along the jumps that float64 itself makes across kinks within rounding is taken away first
///    (oxytorch/tune/kinks.h); and
///  - every parameter after the update against the float64 update from the candidate's own gradients,
/// each accepted where the root mean square error is at most three times that of stock torch at the same precision
/// (under torch's own bf16 autocast for Precision), plus a floor relative to the value (the rule of
/// torch._dynamo.utils.same). A common factor on all gradients is looked for apart, as it hides in bf16's rounding.
/// Then the mean loss at the end of a trajectory must lie inside the band that seeds span.
/// An optimizer class that torch does not know is verified by itself from the same gradients.
class OXY_API Verifier {
 public:
  /// Error(InvalidArgument) for options out of range, and for a run without batches.
  Verifier(Run& run, Snapshot& snapshot, VerifierOptions options = {});
  ~Verifier();

  /// Checks what is active; leaves it active and the state as in the snapshot. An exception of the candidate passes
  /// through, with everything taken back.
  [[nodiscard]] Ruling check(Kind kind);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace oxytorch::tune
