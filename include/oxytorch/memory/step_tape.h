/// A training step as it was recorded, block by block: what a choice of actions for its blocks saves and costs. Knows
/// no torch.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "oxytorch/api.h"
#include "oxytorch/memory/saved_format.h"
#include "oxytorch/memory/timeline.h"

namespace oxytorch::memory {

/// What is done with what backward needs of a block.
enum class BlockAction : std::uint8_t {
  Keep,       ///< everything that its nodes save is kept as it is
  Selective,  ///< results of cheap operators are made again: selective_checkpoint()
  Full,       ///< the whole block is run again: checkpoint()
  Lossless,   ///< what is saved is packed, as SavedFormat::Lossless
  BFloat16,   ///< SavedFormat::BFloat16
  Int8,       ///< SavedFormat::Int8
  File,       ///< SavedFormat::File
};
constexpr std::size_t kBlockActions = 7;
/// Those whose cost is known by a recording under them alone: all but Keep and Full.
inline constexpr std::array kRecordedActions{BlockAction::Selective, BlockAction::Lossless, BlockAction::BFloat16,
                                             BlockAction::Int8, BlockAction::File};
/// Of one that packs what is saved.
[[nodiscard]] OXY_API std::optional<SavedFormat> format_of(BlockAction action) noexcept;
/// "keep", "selective", "full", or that of its format.
[[nodiscard]] OXY_API std::string_view name(BlockAction action) noexcept;
/// Error(InvalidArgument) for another word.
[[nodiscard]] OXY_API BlockAction parse_block_action(std::string_view word);

/// Names of blocks by what is done with them; those that are kept are left out.
class OXY_API BlockChoice {
 public:
  BlockChoice() = default;
  BlockChoice(BlockAction action, std::vector<std::string> names);

  [[nodiscard]] const std::vector<std::string>& operator[](BlockAction action) const {
    return names_[static_cast<std::size_t>(action)];
  }
  BlockChoice& add(BlockAction action, std::string name);
  [[nodiscard]] BlockAction action_of(std::string_view name) const;
  [[nodiscard]] bool empty() const noexcept;
  bool operator==(const BlockChoice&) const = default;

 private:
  std::array<std::vector<std::string>, kBlockActions> names_;
};

/// One call of a block in a recorded step. Moments are indices of events.
struct BlockCall {
  /// An input that the step gives back before backward of the block, for which a second forward would have to hold it.
  struct Held {
    std::size_t input = 0;
    std::int64_t from = 0;  ///< the moment at which the step gives it back
    std::int64_t bytes = 0;
  };
  /// An output that is kept for backward of the block itself, too, as that of a ReLU.
  struct KeptOutput {
    std::size_t output = 0;
    std::int64_t from = 0;  ///< the moment from which no other block keeps it
    std::int64_t bytes = 0;
  };
  /// Under an action that was recorded.
  struct Under {
    std::int64_t saved_bytes = 0;        ///< that are still kept
    std::int64_t backward_peak = 0;      ///< the most that backward had live beyond what was live when it began
    double seconds = 0;                  ///< that it adds to forward and backward
    std::vector<Held> held{};            ///< of BlockCall::held, those that it holds
    std::int64_t released_bytes = 0;     ///< of inputs that the step would keep for this block, and it does not
    std::vector<KeptOutput> released{};  ///< of BlockCall::kept_outputs, those that it does not keep
  };
  std::size_t block = 0;  ///< index into StepTape::names
  std::int64_t forward_begin = 0;
  std::int64_t forward_end = 0;
  std::int64_t backward_begin = 0;  ///< the first that backward of it takes
  std::int64_t backward_end = 0;    ///< the first that backward of another block takes, or the end
  double seconds = 0;               ///< of its forward
  double overhead_seconds = 0;      ///< that the action worked under which the step was recorded
  std::int64_t saved_bytes = 0;     ///< made in forward, kept for its backward alone
  std::int64_t forward_peak = 0;    ///< the most that forward had live beyond what was live before it
  std::int64_t backward_peak = 0;   ///< likewise
  std::vector<Held> held{};
  std::vector<KeptOutput> kept_outputs{};
  std::array<std::optional<Under>, kBlockActions> under{};  ///< by action, those that are known
};

/// What `live` becomes between two moments at which a choice may change it: the peak in between, and by how much each
/// block lowers it (below 0: raises it), by what is done with it.
struct Span {
  using Bytes = std::array<std::int64_t, kBlockActions>;
  /// It counts where one of these actions is taken for this block.
  struct Condition {
    std::size_t block = 0;
    std::array<bool, kBlockActions> counts{};
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
  /// Takes over what each call takes under an action, from a recording with every block under it. One with other calls
  /// changes nothing.
  void add(BlockAction action, const StepTape& recording);
  /// Whether it is known of every call.
  [[nodiscard]] bool has(BlockAction action) const;

  /// The most that is live with a choice, one for each block.
  [[nodiscard]] std::int64_t peak(const std::vector<BlockAction>& choice) const;
  /// Seconds that it adds to a step.
  [[nodiscard]] double seconds(const std::vector<BlockAction>& choice) const;
  /// What any choice comes to, the highest first.
  [[nodiscard]] std::vector<Span> spans() const;
  /// Seconds that each block adds, by action; infinite where that is not known, or saves nothing.
  [[nodiscard]] std::vector<std::array<double, kBlockActions>> seconds() const;
};

}  // namespace oxytorch::memory
