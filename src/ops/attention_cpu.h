/// Attention on the CPU, tile by tile: memory grows with the tokens, not with their square.
#pragma once

#include <ATen/core/Tensor.h>

#include <cmath>
#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

namespace oxytorch::ops {

/// What one call computes. Key k is visible to query q where -behind <= k - q <= ahead.
struct AttentionRule {
  double scale = 1;
  std::int64_t ahead = 0;
  std::int64_t behind = 0;
  double soft_cap = 0;             ///< 0: none
  std::optional<at::Tensor> mask;  ///< added to scores; broadcasts to batch x heads x queries x keys
  double dropout = 0;              ///< probability that a weight is dropped; of 2^-16
  std::uint64_t seed = 0;          ///< of dropout
  /// Which weights dropout keeps, in the place of the seed and with the exact probability: bool, contiguous, batch x
  /// heads x queries x keys. Undefined: by the seed.
  at::Tensor keep = {};
  /// Where each document begins in the tokens of a batch of one, and their end; positions and dropout are of a document
  /// as of a sample. Empty: each sample of the batch is one.
  std::vector<std::int64_t> query_offsets = {};
  std::vector<std::int64_t> key_offsets = {};
};

/// 1 / sqrt(width) where not given.
[[nodiscard]] inline double scale_or_default(std::optional<double> scale, std::int64_t width) {
  return scale.value_or(1 / std::sqrt(static_cast<double>(width)));
}

/// With `before` and `after` as oxytorch/ops/attention.h has them: below 0, no limit.
[[nodiscard]] inline AttentionRule attention_rule(const std::optional<at::Tensor>& mask, double scale,
                                                  std::int64_t before, std::int64_t after, double soft_cap) {
  constexpr std::int64_t kNoLimit = std::int64_t{1} << 40;
  return {.scale = scale,
          .ahead = after < 0 ? kNoLimit : after,
          .behind = before < 0 ? kNoLimit : before,
          .soft_cap = soft_cap,
          .mask = mask};
}

/// Whether attention_cpu() takes these.
[[nodiscard]] bool attention_cpu_takes(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                       const std::optional<at::Tensor>& mask);

/// Output and the logarithm of each query's sum of exponentials, fp32, batch x heads x queries
/// (0 where nothing is visible, as torch's).
std::tuple<at::Tensor, at::Tensor> attention_cpu(const at::Tensor& query, const at::Tensor& key,
                                                 const at::Tensor& value, const AttentionRule& rule);

/// Gradients of query, key and value, in memory batch x tokens x heads x width.
std::tuple<at::Tensor, at::Tensor, at::Tensor> attention_cpu_backward(const at::Tensor& grad_output,
                                                                      const at::Tensor& query, const at::Tensor& key,
                                                                      const at::Tensor& value, const at::Tensor& output,
                                                                      const at::Tensor& log_sum,
                                                                      const AttentionRule& rule);

/// And of rule.mask, in its sizes and dtype; of no packed documents. Batch and heads that share a mask are summed in
/// their order, in memory of its size.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> attention_cpu_masked_backward(
    const at::Tensor& grad_output, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const at::Tensor& output, const at::Tensor& log_sum, const AttentionRule& rule);

}  // namespace oxytorch::ops
