/// A training step as it was recorded, block by block: what a choice of blocks to recompute saves and costs. Knows no
/// torch.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "oxytorch/api.h"
#include "oxytorch/memory/timeline.h"

namespace oxytorch::memory {

/// What backward makes again of a block.
enum class Recompute : std::uint8_t {
  Nothing,    ///< everything that its nodes save is kept
  Selective,  ///< results of cheap operators: selective_checkpoint()
  Full,       ///< the whole block is run again: checkpoint()
};
constexpr std::size_t kRecomputes = 3;

/// Blocks by name, those of which something is made again.
struct RecomputeChoice {
  std::vector<std::string> selective, full;

  [[nodiscard]] bool empty() const noexcept { return selective.empty() && full.empty(); }
  bool operator==(const RecomputeChoice&) const = default;
};

/// One call of a block in a recorded step. Moments are indices of events.
struct BlockCall {
  /// An input that the step gives back before backward of the block, for which a second forward would have to hold it.
  struct Held {
    std::size_t input = 0;
    std::int64_t from = 0;  ///< the moment at which the step gives it back
    std::int64_t bytes = 0;
  };
  /// Under selective_checkpoint().
  struct Selective {
    std::int64_t saved_bytes = 0;    ///< that are still kept
    std::int64_t backward_peak = 0;  ///< the most that backward had live beyond what was live when it began
    double seconds = 0;              ///< to leave out in forward and to make again
    std::vector<Held> held{};
  };
  std::size_t block = 0;  ///< index into StepTape::names
  std::int64_t forward_begin = 0;
  std::int64_t forward_end = 0;
  std::int64_t backward_begin = 0;  ///< the first that backward of it takes
  std::int64_t backward_end = 0;    ///< the first that backward of another block takes, or the end
  double seconds = 0;               ///< of its forward
  double selective_seconds = 0;     ///< that selective_checkpoint() worked, where the step was recorded under it
  std::int64_t saved_bytes = 0;     ///< made in forward, kept for its backward alone
  std::int64_t forward_peak = 0;    ///< the most that forward had live beyond what was live before it
  std::int64_t backward_peak = 0;   ///< likewise
  std::vector<Held> held{};
  std::optional<Selective> selective{};  ///< where it is known
};

/// What `live` becomes between two moments at which a choice may change it: the peak in between, and by how much each
/// block lowers it (below 0: raises it), by what is made again of it.
struct Span {
  using Bytes = std::array<std::int64_t, kRecomputes>;
  /// It counts where this block is recomputed in one of these ways.
  struct Condition {
    std::size_t block = 0;
    std::array<bool, kRecomputes> counts{};
  };
  std::int64_t live = 0;
  std::vector<std::pair<std::size_t, Bytes>> lowered;
  std::optional<Condition> only_with;
};

struct OXY_API StepTape {
  std::vector<std::int64_t> live;  ///< bytes after each event
  std::vector<std::string> names;  ///< of blocks
  std::vector<BlockCall> calls;    ///< in the order of forward

  /// From a meter's timeline of one step: calls of the regions `blocks`, which do not nest, that backward comes by.
  static StepTape of(const Timeline& timeline, const std::vector<std::string>& blocks);
  /// The last of some recordings of one step, at least one; each call takes the median of its seconds in those that
  /// have the same calls. One recording alone mistakes a page fault for a slow block.
  static StepTape steady(std::vector<StepTape> recordings);
  /// Takes over what each call takes under selective_checkpoint(), from a recording with every block under it. One with
  /// other calls changes nothing.
  void add_selective(const StepTape& recording);

  /// The most that is live with a choice, one for each block.
  [[nodiscard]] std::int64_t peak(const std::vector<Recompute>& choice) const;
  /// Seconds that it adds to a step.
  [[nodiscard]] double seconds(const std::vector<Recompute>& choice) const;
  /// What any choice comes to, the highest first.
  [[nodiscard]] std::vector<Span> spans() const;
  /// Seconds that each block adds, by Recompute; infinite where it is not known.
  [[nodiscard]] std::vector<std::array<double, kRecomputes>> seconds() const;
};

}  // namespace oxytorch::memory
