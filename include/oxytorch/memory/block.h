/// Blocks of a model: parts of which fit() may have something made again in backward.
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

#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "oxytorch/api.h"
#include "oxytorch/memory/checkpoint.h"
#include "oxytorch/memory/meter.h"
#include "oxytorch/memory/step_tape.h"

namespace oxytorch::memory {

/// What plans that are active have made again of this block.
[[nodiscard]] OXY_API Recompute recompute_of(std::string_view name);

/// Has a choice of blocks made again until it ends. Any number may be active, of any thread: the one that keeps the
/// least counts.
class OXY_API RecomputeBlocks {
 public:
  explicit RecomputeBlocks(RecomputeChoice choice);
  ~RecomputeBlocks();
  RecomputeBlocks(const RecomputeBlocks&) = delete;
  RecomputeBlocks& operator=(const RecomputeBlocks&) = delete;

 private:
  RecomputeChoice choice_;
};

/// function(args...), a block called `name`: a region of timelines, and under checkpoint() or selective_checkpoint()
/// where a plan says so. What checkpoint() says of function and arguments holds: `function` may be kept beyond the
/// call, so that what it captures by reference has to live until backward. Names are those of the whole process; a name
/// that is called several times in a step is one block.
template <class Function, class... Args>
auto block(std::string_view name, Function function, const Args&... args) {
  std::vector<at::Tensor> tensors;
  (detail::collect<std::decay_t<Args>>(args, tensors), ...);
  Region region(name, tensors);
  tensors.clear();
  const auto recompute = recompute_of(name);
  auto result = recompute == Recompute::Full        ? checkpoint(std::move(function), args...)
                : recompute == Recompute::Selective ? selective_checkpoint(function, args...)
                                                    : function(args...);
  detail::collect<std::decay_t<decltype(result)>>(result, tensors);
  region.outputs(tensors);
  return result;
}

}  // namespace oxytorch::memory
