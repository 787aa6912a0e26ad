/// The largest batch that fits, and how fast each batch size is: found by running real steps, leaving no trace.
///
/// ```cpp
/// const auto plan = oxytorch::largest_batch(*model, optimizer, loss, [](std::int64_t n) {
///   return oxytorch::Batch(torch::randn({n, 3, 64, 64}), torch::randint(10, {n}));
/// }, oxytorch::BatchSizeOptions().limit("2GB"));
/// std::cout << plan.table();
/// ```
#pragma once

#include <torch/arg.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "oxytorch/api.h"
#include "oxytorch/memory/batch_forecast.h"
#include "oxytorch/memory/batch_search.h"
#include "oxytorch/tune/batch.h"
#include "oxytorch/tune/models.h"

namespace oxytorch {

struct BatchSizeOptions {
  /// For the resident memory of the process, or for what torch's allocator takes from another device than the CPU:
  /// "8GB", "50%"; empty: all that it can get now.
  TORCH_ARG(std::string, limit);
  TORCH_ARG(std::int64_t, start) = 1;               ///< the first size
  TORCH_ARG(std::int64_t, most) = 1 << 20;          ///< the largest to try
  TORCH_ARG(std::int64_t, multiple) = 1;            ///< of which sizes are multiples; not of batch_curve()
  TORCH_ARG(double, headroom) = 0.1;                ///< share of the limit that the peak must leave free
  TORCH_ARG(double, resolution) = 0.02;             ///< as BatchSearchOptions; not of batch_curve()
  TORCH_ARG(int, steps) = 2;                        ///< timed of each size, after one that is not
  TORCH_ARG(double, clip_norm) = 0;                 ///< of the step; 0: no clipping
  TORCH_ARG(std::optional<std::int64_t>, samples);  ///< in an epoch, for the table
  TORCH_ARG(std::optional<std::int64_t>, current);  ///< the batch size of today, for the table
};

/// Finds the largest batch whose training step (zero_grad, loss, backward, clip, optimizer step) runs within a memory
/// limit, by running it. After every size, and after an error, model, optimizer and random generators are what they
/// were, bit for bit; what only `loss` captures is not covered.
///
/// Errors: OutOfMemory where the first size does not fit, InvalidArgument for options that cannot be meant,
/// NotSupported on a device whose allocator does not tell what it takes. What a step throws for another reason than
/// memory passes through.
[[nodiscard]] OXY_API BatchPlan largest_batch(torch::nn::Module& model, torch::optim::Optimizer& optimizer,
                                              LossFunction loss, const std::function<Batch(std::int64_t)>& make_batch,
                                              const BatchSizeOptions& options = {});

struct BatchForecastOptions {
  /// For the whole process, or for its tensors on another device than the CPU: "8GB", "50%"; empty: what
  /// memory::available_bytes() says.
  TORCH_ARG(std::string, limit);
  TORCH_ARG(double, headroom) = 0.1;  ///< share of what is available that is to stay free
  TORCH_ARG(double, clip_norm) = 0;   ///< of the step; 0: no clipping
};

/// Whether a training step with a batch of `size` samples will fit, told as BatchReplay does, from steps with at most
/// 32 and 64. Model, optimizer and random generators are as before then, bit for bit; also after an error.
///
/// Errors: InvalidArgument for a size, a headroom or a limit that cannot be meant; NotSupported where the
/// device's tensors cannot be recorded (memory::timeline_refusal()) and where nobody says what is available; what a
/// step throws.
[[nodiscard]] OXY_API BatchForecast will_it_fit(torch::nn::Module& model, torch::optim::Optimizer& optimizer,
                                                LossFunction loss, const std::function<Batch(std::int64_t)>& make_batch,
                                                std::int64_t size, const BatchForecastOptions& options = {});

/// Measures samples a second against batch size, doubling until it no longer pays or fits. The rest as
/// largest_batch(); `largest` is then the largest size that was run, not the largest that would fit.
[[nodiscard]] OXY_API BatchPlan batch_curve(torch::nn::Module& model, torch::optim::Optimizer& optimizer,
                                            LossFunction loss, const std::function<Batch(std::int64_t)>& make_batch,
                                            const BatchSizeOptions& options = {});

}  // namespace oxytorch
