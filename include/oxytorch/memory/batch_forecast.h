/// What a training step with a large batch will take, told from records of steps with small ones. Knows no torch:
/// Python and C++ run the steps.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "oxytorch/api.h"
#include "oxytorch/memory/timeline.h"

namespace oxytorch {

/// What a training step with a batch will take.
struct OXY_API BatchForecast {
  std::int64_t size = 0;       ///< samples of the batch that was asked about
  std::int64_t bytes = 0;      ///< the most that tensors of the step will take beyond those that are alive now
  std::int64_t available = 0;  ///< bytes that tensors may still take
  double headroom = 0;         ///< share of `available` that is to stay free
  std::pair<std::int64_t, std::int64_t> measured{};  ///< the sizes of batch that were run
  /// Steps of both sizes took and gave back memory in the same order: only then is `bytes` a replay of the step.
  bool is_regular = true;

  /// Whether the step leaves the headroom free.
  [[nodiscard]] bool fits() const noexcept;
  explicit operator bool() const noexcept { return fits(); }
  /// The answer in a sentence.
  [[nodiscard]] std::string text() const;
};

/// Each tensor that a step makes grows with the batch by a straight line. So a recorded step is replayed at another
/// size: what was live after each tensor was made or freed is continued by its line, and the highest counts. A line
/// through the two peaks would be too low wherever another part of the step is the highest at the larger size.
class OXY_API BatchReplay {
 public:
  /// `available`: bytes that tensors may still take, of which `headroom` is to stay free.
  /// Error(InvalidArgument) for a size under 1 and a headroom outside [0, 1).
  BatchReplay(std::int64_t size, std::int64_t available, double headroom = 0.1);

  /// The sizes of batch to record a step with: a 16th of the samples and twice that, of at most 32 and 64.
  [[nodiscard]] std::pair<std::int64_t, std::int64_t> sizes() const noexcept { return sizes_; }
  /// `kept`: bytes that the first step leaves, gradients and the optimizer's state; `smaller` and `larger`: the steps
  /// of sizes(), each from there.
  [[nodiscard]] BatchForecast forecast(std::int64_t kept, const memory::Timeline& smaller,
                                       const memory::Timeline& larger) const;

 private:
  std::int64_t size_, available_;
  double headroom_;
  std::pair<std::int64_t, std::int64_t> sizes_;
};

}  // namespace oxytorch
