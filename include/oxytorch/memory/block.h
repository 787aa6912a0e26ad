/// Blocks of a model: parts that fit() may have run again in backward.
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

namespace oxytorch::memory {

/// Whether a plan that is active has this block run again.
[[nodiscard]] OXY_API bool is_run_again(std::string_view name);

/// Has blocks of these names run again until it ends. Any number may be active, of any thread.
class OXY_API RunAgain {
 public:
  explicit RunAgain(std::vector<std::string> names);
  ~RunAgain();
  RunAgain(const RunAgain&) = delete;
  RunAgain& operator=(const RunAgain&) = delete;

 private:
  std::vector<std::string> names_;
};

/// function(args...), a block called `name`: a region of timelines, and under checkpoint() where a plan says so. What
/// checkpoint() says of function and arguments holds: `function` may be kept beyond the call, so that what it captures
/// by reference has to live until backward. Names are those of the whole process; a name that is called several times
/// in a step is one block.
template <class Function, class... Args>
auto block(std::string_view name, Function function, const Args&... args) {
  std::vector<at::Tensor> tensors;
  (detail::collect<std::decay_t<Args>>(args, tensors), ...);
  Region region(name, tensors);
  tensors.clear();
  auto result = is_run_again(name) ? checkpoint(std::move(function), args...) : function(args...);
  detail::collect<std::decay_t<decltype(result)>>(result, tensors);
  region.outputs(tensors);
  return result;
}

}  // namespace oxytorch::memory
