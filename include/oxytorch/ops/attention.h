/// Scaled dot-product attention with a native kernel for CPUs.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "oxytorch/api.h"

namespace oxytorch::ops {

struct AttentionOptions {
  /// Added to the scores, or true where a pair is visible; broadcasts to batch x heads x queries x keys. One that is
  /// added and requires a gradient gets it, for two more matrix products of the scores' size.
  std::optional<at::Tensor> mask = {};
  bool causal = false;               ///< a query sees keys up to its own position, counted from the first of both
  std::optional<double> scale = {};  ///< of the products; 1 / sqrt(width) where not given
  /// Keys a query sees before and after its own position; a negative number is no limit. `causal` is window_after = 0.
  std::int64_t window_before = -1;
  std::int64_t window_after = -1;
  double soft_cap = 0;  ///< where above 0, scores s become soft_cap * tanh(s / soft_cap)
  /// Probability, below 1, that a weight is dropped; the others are divided by one less it. Pass 0 in evaluation.
  double dropout = 0;
};

/// softmax(query key^T scale + mask) value, differentiable once.
///
/// `query`: batch x heads x queries x width; `key` and `value`: batch x key heads x keys x width, where heads are a
/// multiple of key heads and consecutive heads share one. One dtype, one device. The output has the shape, dtype and
/// layout of `query`. A query that sees nothing gives zeros.
///
/// On a CPU, float32, bfloat16 and float16 take the kernel of this library: memory grows with the tokens, and results
/// have the same bits for any number of threads. Scores and sums are fp32; matrix products multiply bfloat16 where the
/// processor does, else float32. Dropout takes one number of torch's generator for a call and makes the rest by
/// Philox, to 2^-16 of the probability; it keeps no mask for backward. float64 and other devices take torch's own
/// operators. Under autocast, the three are cast as for torch's attention.
///
/// Throws InvalidArgument for shapes that do not fit or a dropout outside of [0, 1), InvalidType for dtypes that
/// differ.
OXY_API at::Tensor attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                             const AttentionOptions& options = {});

struct PackedAttentionOptions {
  std::optional<at::Tensor> key_offsets = {};  ///< as query_offsets; where not given, documents attend to themselves
  bool causal = false;                         ///< this and what follows: as in AttentionOptions, within a document
  std::optional<double> scale = {};
  std::int64_t window_before = -1;
  std::int64_t window_after = -1;
  double soft_cap = 0;
  double dropout = 0;
};

/// attention() of documents whose tokens lie one after the other, without padding: each query sees keys of its own
/// document. Memory grows with the tokens.
///
/// `query`: tokens x heads x width; `key` and `value`: tokens x key heads x width. `query_offsets`: int64 or int32, on
/// the CPU or on the device of `query`: where each document begins, and the number of tokens, as cumulative sequence
/// lengths are elsewhere. Documents may be empty. Positions are counted from the first query and the first key of a
/// document. The output has the shape, dtype and layout of `query`.
///
/// What is said of attention() holds, and a document has the bits that attention() has of it alone, with dropout those
/// of a sample of that number. float64 and other devices take torch's operators, document by document, and read the
/// offsets on the host.
///
/// Throws InvalidArgument for shapes that do not fit, for offsets that do not begin with 0, fall, do not end with the
/// number of tokens or lie on another device, and for a dropout outside of [0, 1); InvalidType for dtypes that differ
/// and offsets that are no int64 or int32.
OXY_API at::Tensor packed_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                    const at::Tensor& query_offsets, const PackedAttentionOptions& options = {});

}  // namespace oxytorch::ops
