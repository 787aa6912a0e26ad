/// What lies around matrix products: operands in tiles, what becomes of sums; for attention softmax and its gradient.
///
/// Torch-free; `oxytorch::ops` puts matrix products between these. A tile of scores holds one key a row and
/// one query a column, kTile fp32 a row: maxima and sums over keys are then sums of rows, and a tile is the right
/// operand of the next product as it lies.
///
/// Threads. A function works on the memory it is given and keeps no state.
#pragma once

#include <cstdint>

#include "oxytorch/api.h"
#include "oxytorch/kernels/element_type.h"

namespace oxytorch::kernels {

/// Rows and columns of a tile. One at an end may have fewer: a multiple of kTileStep, padded with zeros.
inline constexpr std::int64_t kTile = 64;
inline constexpr std::int64_t kTileStep = 16;

/// What the matrix products multiply. BFloat16 right operands lie in pairs of rows: element (i, j) of a matrix with
/// `n` columns at (i / 2 * n + j) * 2 + i % 2.
enum class TileFormat : std::uint8_t { Float32, BFloat16 };

/// Rows of a strided matrix, contiguous along a row. Not of Int8.
struct Rows {
  ElementType element = ElementType::F32;
  const void* data = nullptr;
  std::int64_t stride = 0;  ///< elements from row to row
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  std::int64_t following = 0;  ///< rows of the matrix after these, which may be read next

  /// `count` rows from `first`.
  [[nodiscard]] OXY_API Rows part(std::int64_t first, std::int64_t count) const;
};

/// Copies `from`, at most kTile rows, into a tile of `rows` x `width` elements, both multiples of kTileStep; the rest
/// is zero.
OXY_API void load_tile(TileFormat format, const Rows& from, std::int64_t rows, std::int64_t width, void* tile);

/// The operands that are made of a tile that load_tile() filled.
enum class Operand : std::uint8_t {
  LeftTransposed,   ///< `width` rows of kTile, which may lie further apart
  Right,            ///< `rows` x `width`
  RightTransposed,  ///< `width` rows of kTile columns
};
/// Makes `operand`. `work` has the size of the tile. Rows of a LeftTransposed are `stride` elements apart.
OXY_API void make_operand(TileFormat format, Operand operand, const void* tile, std::int64_t rows, std::int64_t width,
                          void* work, void* to, std::int64_t stride = kTile);

/// load_tile() and make_operand() in one, of bfloat16, for a tile of at most kTile x kTile: `to` has `stride` elements
/// from row to row, or from pair to pair of rows half as many words.
OXY_API void pack_operand(Operand operand, const Rows& from, std::int64_t rows, std::int64_t width, void* to,
                          std::int64_t stride);

/// Packs a matrix of any element type and size as right operands of bfloat16: one of `terms` x kTile for each kTile
/// columns, `panel` elements apart. `terms` is a multiple of kTileStep, at least the rows of the matrix; the rest is 0.
OXY_API void pack_panels(const Rows& from, std::int64_t terms, void* to, std::int64_t panel);

/// How raw products become scores. Key i of a tile and query j are `offset` + i - j positions apart.
struct ScoreRule {
  float factor = 1;             ///< products are multiplied by it
  std::int64_t keys = 0;        ///< rows that are keys; scores of the others are -inf
  std::int64_t offset = 0;      ///< first key minus first query
  std::int64_t ahead = 0;       ///< keys more than this after their query are hidden
  std::int64_t behind = 0;      ///< keys more than this before their query are hidden
  float cap = 0;                ///< where not 0, scores s become cap * tanh(s / cap)
  const float* mask = nullptr;  ///< kTile a row, added; null: nothing
};
/// Applies `rule` to a tile of `rows` x `columns` raw products.
OXY_API void apply_rule(const ScoreRule& rule, std::int64_t rows, std::int64_t columns, float* scores);

/// The softmax of kTile queries over the keys that were seen: the largest score, the sum of exp(score - largest).
struct SoftmaxState {
  float largest[kTile];
  float sum[kTile];
  /// Nothing seen.
  OXY_API void reset();
};

/// Which weights of a tile dropout keeps.
struct TileDropout {
  std::uint64_t seed = 0;
  std::uint32_t head = 0;      ///< of the batch: sample * heads + head
  std::uint32_t key_tile = 0;  ///< at most 2^20 - 1
  std::uint32_t query_tile = 0;
  std::uint32_t dropped = 0;  ///< of 65,536 weights
};
/// Writes all ones where a weight is kept, else 0, kTile a row. Weight (i, j) is dropped where its 16 bits of
/// rounding_bits() (codec.h), as element key_tile * kTile^2 + i * kTile + j of stream `head` at step `query_tile`, are
/// below `dropped`: the same for any number of threads and instruction set.
OXY_API void dropout_tile(const TileDropout& rule, std::int64_t rows, std::uint32_t* keep);

/// Takes a tile of scores (times `factor`) into `state`; writes exp(score - largest) as the right operand of the
/// product with the values, 0 where `keep` (dropout_tile(), or null) has 0, and into `correction` by what earlier
/// results must be multiplied. `weights` may be `scores`, or null where they are not needed. Returns whether any
/// correction is not 1.
OXY_API bool softmax_tile(TileFormat format, float factor, std::int64_t rows, std::int64_t columns, const float* scores,
                          const std::uint32_t* keep, SoftmaxState& state, float* correction, void* weights);

/// Multiplies `rows` rows of a kTile wide tile, element by element, with `factors`.
OXY_API void scale_columns(std::int64_t rows, const float* factors, float* tile);

/// One tile of the gradient of softmax.
struct SoftmaxGradient {
  TileFormat format = TileFormat::Float32;
  float factor = 1;
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  const float* log_sum = nullptr;           ///< for each query, the logarithm of the sum of exp(score)
  const float* delta = nullptr;             ///< for each query, the product of its output and the output's gradient
  float cap = 0;                            ///< as in ScoreRule, which `scores` have been through
  const float* mask = nullptr;              ///< as in ScoreRule; needed with a cap alone
  const std::uint32_t* keep = nullptr;      ///< of dropout_tile(); null: all
  float kept_factor = 1;                    ///< of weights that are kept: 1 / (1 - probability)
  float* scores = nullptr;                  ///< in: scores, times `factor`. Float32: out: weights
  float* gradient = nullptr;                ///< in: gradient of the weights. Float32: out: of the scores
  std::uint16_t* weights = nullptr;         ///< BFloat16: the weights as a left operand
  std::uint16_t* left_gradient = nullptr;   ///< BFloat16: and the gradient of the scores
  std::int64_t left_stride = kTile;         ///< elements from row to row of these two
  std::uint16_t* right_gradient = nullptr;  ///< BFloat16: and as a right one
  float* mask_gradient = nullptr;           ///< what is added to scores: its gradient is added here; null: nowhere
  std::int64_t mask_stride = kTile;         ///< elements from key to key of it
};
/// weights = exp(score - log_sum); gradient of scores = weights * (gradient - delta). With `keep`, the gradient of a
/// weight is multiplied by `kept_factor` or 0, and weights that are written are 0 where they were dropped. The gradient
/// of what is added to scores is theirs without the derivative of the cap.
OXY_API void softmax_gradient(const SoftmaxGradient& tile);

/// Products of the rows of `a` with those of `b`, for at most kTile rows.
OXY_API void dot_rows(const Rows& a, const Rows& b, float* to);

/// Writes rows of fp32, times `factor`, and times factors[row] where that is given, plus added[column] where that is,
/// in `element`; with `relu`, the ReLU of that, as torch's of NaN.
OXY_API void store_rows(const float* from, std::int64_t stride, std::int64_t rows, std::int64_t columns, float factor,
                        const float* factors, ElementType element, void* to, std::int64_t to_stride,
                        const float* added = nullptr, bool relu = false);

/// Adds rows of fp32 to others.
OXY_API void add_rows(const float* from, std::int64_t stride, std::int64_t rows, std::int64_t columns, float* to,
                      std::int64_t to_stride);

/// Sums of the columns, in fp32.
OXY_API void sum_columns(const Rows& from, float* to);

/// Transposes a matrix of 32-bit words. rows and columns are multiples of 8.
OXY_API void transpose_words(const void* from, std::int64_t stride, std::int64_t rows, std::int64_t columns, void* to,
                             std::int64_t to_stride);

}  // namespace oxytorch::kernels
