/// Activation checkpointing: forward keeps the inputs of a function alone, and backward runs it again.
///
/// The graph that forward records is the one it would have been; only what its nodes save is left out, and made again
/// by a second forward when backward asks for the first of it. So gradients of parameters, of any input and by
/// torch::autograd::grad, second derivatives, hooks and several outputs work as without. The second forward sees what
/// the first saw: the state of torch's random generators, autocast, and every tensor that the function itself changes
/// in place (running statistics, counters), as it was before the first; afterwards they are what they were before the
/// second. Gradients, buffers and random state keep every bit.
///
/// Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "oxytorch/api.h"

namespace torch::nn {
class Sequential;
}

namespace oxytorch::memory {

/// A function that was run once and can be run again for what autograd did not keep. Of one checkpoint() call; lives as
/// long as the graph.
class OXY_API Recomputation {
 public:
  /// `again` runs the function on tensors that have the values and requires_grad of `inputs`, which are kept as
  /// autograd keeps tensors: inside another checkpoint they are not kept at all.
  Recomputation(const std::vector<at::Tensor>& inputs, std::function<void(const std::vector<at::Tensor>&)> again);
  ~Recomputation();
  Recomputation(const Recomputation&) = delete;
  Recomputation& operator=(const Recomputation&) = delete;

  /// Runs `first`, keeping nothing that its nodes save.
  void run(const std::function<void()>& first);

 private:
  struct Inside;
  std::shared_ptr<Inside> inside_;
};

/// Whether anything is recorded for backward on this thread; where not, a checkpoint only calls its function.
[[nodiscard]] OXY_API bool records_gradients();

namespace detail {

// Tensors among the arguments of a function, in order; the arguments with others in their place, and with none.
template <class Argument>
void collect(const Argument& argument, std::vector<at::Tensor>& into) {
  if constexpr (std::is_same_v<Argument, at::Tensor>) {
    into.push_back(argument);
  } else if constexpr (std::is_same_v<Argument, std::optional<at::Tensor>>) {
    if (argument) into.push_back(*argument);
  } else if constexpr (std::is_same_v<Argument, std::vector<at::Tensor>>) {
    into.insert(into.end(), argument.begin(), argument.end());
  }
}
template <class Argument>
Argument with(const Argument& old, std::vector<at::Tensor>::const_iterator& next) {
  if constexpr (std::is_same_v<Argument, at::Tensor>) {
    return *next++;
  } else if constexpr (std::is_same_v<Argument, std::optional<at::Tensor>>) {
    return old ? Argument(*next++) : std::nullopt;
  } else if constexpr (std::is_same_v<Argument, std::vector<at::Tensor>>) {
    const auto begin = std::exchange(next, next + static_cast<std::ptrdiff_t>(old.size()));
    return {begin, next};
  } else {
    return old;
  }
}
template <class Argument>
Argument without(const Argument& old) {
  if constexpr (std::is_same_v<Argument, at::Tensor>) {
    return {};
  } else if constexpr (std::is_same_v<Argument, std::optional<at::Tensor>>) {
    return old ? Argument(at::Tensor()) : std::nullopt;
  } else if constexpr (std::is_same_v<Argument, std::vector<at::Tensor>>) {
    return Argument(old.size());
  } else {
    return old;
  }
}

}  // namespace detail

/// function(args...), of which autograd keeps the arguments alone.
///
/// `function` is copied or moved in and must give the same results for the same inputs; it may call checkpoint()
/// itself. Arguments: at::Tensor, std::optional<at::Tensor>, std::vector<at::Tensor>, and anything that can be copied;
/// a module holder is a function too. Any return type. With no gradient recorded it only calls the function.
///
/// Errors, from backward: InvalidState where the second forward saved other tensors than the first (their number,
/// shape, dtype or device), and where an input or something that the function made was changed in place after it was
/// saved.
template <class Function, class... Args>
auto checkpoint(Function function, const Args&... args) {
  using Result = std::decay_t<decltype(function(args...))>;
  if (!records_gradients()) return Result(function(args...));
  std::vector<at::Tensor> inputs;
  (detail::collect<std::decay_t<Args>>(args, inputs), ...);
  auto shared = std::make_shared<Function>(std::move(function));
  Recomputation recomputation(
      inputs, [shared, others = std::tuple<std::decay_t<Args>...>(detail::without<std::decay_t<Args>>(args)...)](
                  const std::vector<at::Tensor>& tensors) {
        auto next = tensors.begin();
        const auto run = [&](const std::decay_t<Args>&... old) {
          // Braces: in the order of the arguments.
          std::apply(*shared, std::tuple<std::decay_t<Args>...>{detail::with<std::decay_t<Args>>(old, next)...});
        };
        std::apply(run, others);
      });
  std::optional<Result> result;
  recomputation.run([&] { result.emplace((*shared)(args...)); });
  return std::move(*result);
}

/// While it runs, autograd on this thread does not keep what cheap operators make of what it keeps anyway. See
/// selective_checkpoint().
class OXY_API SelectiveCheckpoint {
 public:
  SelectiveCheckpoint();
  ~SelectiveCheckpoint();
  SelectiveCheckpoint(const SelectiveCheckpoint&) = delete;
  SelectiveCheckpoint& operator=(const SelectiveCheckpoint&) = delete;

  /// Gives up what can be made again. Without it everything is kept.
  void end();

  struct Inside;
  struct Open;

 private:
  std::shared_ptr<Inside> inside_;
  std::unique_ptr<Open> open_;
};

/// function(args...), of which autograd does not keep what can be made again in little time from the rest that it
/// keeps: results of elementwise operators, normalisations, softmax, copies, pooling and lookups. Backward runs those
/// operators again, with the same arguments, when it comes to what needs them; the function itself is not run again.
/// Random masks are kept as bits. Gradients, buffers and random state keep every bit.
///
/// Tensors under 16 KiB are kept. Inside checkpoint() or another selective_checkpoint() it only calls the function, as
/// it does with no gradient recorded. Costs about two microseconds for each operator of the function.
///
/// Error(InvalidState), from backward: something that a tensor is made again from was changed in place meanwhile.
///
/// Which operators are worth their memory, and which are made again: Korthikanti et al., "Reducing Activation
/// Recomputation in Large Transformer Models", 2022.
template <class Function, class... Args>
auto selective_checkpoint(Function&& function, Args&&... args) {
  SelectiveCheckpoint selective;
  auto result = std::forward<Function>(function)(std::forward<Args>(args)...);
  selective.end();
  return result;
}

/// The modules of `sequential` one after another, in `segments` pieces of equal length, each of which keeps its input
/// alone; the last keeps everything, as backward begins with it. Each module takes a tensor and gives one.
/// Error(InvalidArgument) for fewer than 1 or more segments than modules.
OXY_API at::Tensor checkpoint_sequential(const torch::nn::Sequential& sequential, std::int64_t segments,
                                         const at::Tensor& input);

}  // namespace oxytorch::memory
