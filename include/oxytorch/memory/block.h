/// Blocks of a model: parts of which fit() may have something made again in backward, or packed until then.
///
/// ```cpp
/// at::Tensor forward(at::Tensor x) {
///   for (std::size_t i = 0; i < layers.size(); ++i) {
///     x = oxytorch::memory::block("layer" + std::to_string(i), [&](const at::Tensor& in) {
///       return layers[i]->forward(in); }, x);
///   }
///   return head->forward(x);
/// }
/// ```
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "oxytorch/api.h"
#include "oxytorch/memory/checkpoint.h"
#include "oxytorch/memory/meter.h"
#include "oxytorch/memory/pack_saved_tensors.h"
#include "oxytorch/memory/step_tape.h"

namespace oxytorch::memory {

/// What plans that are active do with this block.
[[nodiscard]] OXY_API BlockAction action_of(std::string_view name);

/// Takes a choice of actions for blocks until it ends. Any number may be active, of any thread: the one that keeps the
/// least in memory counts.
class OXY_API PlannedBlocks {
 public:
  /// Error(Io) where a file is needed and none can be made.
  explicit PlannedBlocks(BlockChoice choice);
  ~PlannedBlocks();
  PlannedBlocks(const PlannedBlocks&) = delete;
  PlannedBlocks& operator=(const PlannedBlocks&) = delete;

  /// The largest of PackedReport::relative_error.
  [[nodiscard]] double relative_error() const;

 private:
  BlockChoice choice_;
  std::vector<std::shared_ptr<PackSavedTensors>> packed_;
};

namespace detail {

struct Planned {
  BlockAction action = BlockAction::Keep;
  std::shared_ptr<PackSavedTensors> packed;  ///< null where the action packs nothing
};
[[nodiscard]] OXY_API Planned planned(std::string_view name);

}  // namespace detail

/// function(args...), a block called `name`: a region of timelines, and under checkpoint(), selective_checkpoint() or a
/// PackSavedTensors::Scope where a plan says so. What checkpoint() says of function and arguments holds: `function` may
/// be kept beyond the call, so that what it captures by reference has to live until backward. Names are those of the
/// whole process; a name that is called several times in a step is one block.
template <class Function, class... Args>
auto block(std::string_view name, Function function, const Args&... args) {
  std::vector<at::Tensor> tensors;
  (detail::collect<std::decay_t<Args>>(args, tensors), ...);
  Region region(name, tensors);
  tensors.clear();
  const auto [action, packed] = detail::planned(name);
  std::optional<PackSavedTensors::Scope> scope;
  if (packed) scope.emplace(*packed);
  auto result = action == BlockAction::Full        ? checkpoint(std::move(function), args...)
                : action == BlockAction::Selective ? selective_checkpoint(function, args...)
                                                   : function(args...);
  scope.reset();
  detail::collect<std::decay_t<decltype(result)>>(result, tensors);
  region.outputs(tensors);
  return result;
}

}  // namespace oxytorch::memory
