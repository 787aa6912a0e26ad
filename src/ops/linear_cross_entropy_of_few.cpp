// A few classes: logits of many tokens lie in memory at a time, a token a row, and products are those of linear layers.
#include <ATen/ops/empty.h>

#include <algorithm>
#include <numeric>
#include <vector>

#include "ops/linear_cpu.h"
#include "ops/linear_cross_entropy_kernels.h"
#include "ops/shares.h"
#include "ops/tiles.h"
#include "oxytorch/kernels/cross_entropy.h"

namespace oxytorch::ops {
namespace {

using at::Tensor;

// Above, rows of gradients would take more memory than what a model keeps of a token.
constexpr std::int64_t kMostClasses = 1024;
// Logits in fp32 that are held at a time, 4 MiB: softmax finds them in the last cache.
constexpr std::int64_t kLogits = std::int64_t{1} << 20;
// Logits of a thread: fewer are not worth a second one.
constexpr std::int64_t kLogitsOfThread = std::int64_t{1} << 13;

}  // namespace

bool has_few_classes(const LinearCrossEntropy& call) {
  return call.weight.size(0) <= kMostClasses && linear_cpu_takes(call.input, call.weight, call.bias);
}

LossAndGradients linear_cross_entropy_of_few(const LinearCrossEntropy& call, std::array<bool, 3> wanted,
                                             std::int64_t counted) {
  const std::int64_t tokens = call.input.size(0), classes = call.weight.size(0);
  const bool gradients = wanted[0] || wanted[1] || wanted[2];
  const Tensor gradient = gradients ? at::empty({tokens, classes}, call.input.options()) : Tensor();
  const auto* targets = call.target.const_data_ptr<std::int64_t>();
  const std::int64_t held = round_up(kLogits / classes, kernels::kTile);
  double loss = 0;
  for (std::int64_t first = 0; first < tokens; first += held) {
    const std::int64_t count = std::min(held, tokens - first);
    const Tensor logits = linear_cpu(call.input.narrow(0, first, count), call.weight, call.bias, false, at::kFloat);
    const Tiled rows(count);
    std::vector<double> losses(static_cast<std::size_t>(rows.tiles));
    share_out(rows.tiles, kLogitsOfThread / (kernels::kTile * classes), [&](const auto& take) {
      kernels::CrossEntropyRows of;
      of.stride = of.gradient_stride = of.classes = classes;
      of.ignore_index = call.ignore_index;
      of.smoothing = call.label_smoothing;
      of.weight = call.mean ? 1.0F / static_cast<float>(counted) : 1.0F;
      for (std::int64_t tile; (tile = take()) >= 0;) {
        const std::int64_t row = rows.begin(tile);
        of.rows = rows.used(tile);
        of.logits = logits.mutable_data_ptr<float>() + row * classes;
        of.targets = targets + first + row;
        if (gradients) {
          of.gradient =
              reinterpret_cast<std::uint16_t*>(gradient.mutable_data_ptr<at::BFloat16>()) + (first + row) * classes;
        }
        losses[static_cast<std::size_t>(tile)] = kernels::cross_entropy_rows(of);
      }
    });
    loss = std::accumulate(losses.begin(), losses.end(), loss);
  }
  LinearGradients made;
  if (gradients) made = linear_cpu_backward(gradient, call.input, call.weight, wanted);
  return {reduced_loss(call, loss, counted), made.input, made.weight, made.bias};
}

}  // namespace oxytorch::ops
