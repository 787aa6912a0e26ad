/// A call of attention on the CPU, in tiles of queries and keys.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "ops/attention_cpu.h"
#include "ops/hidden_tiles.h"
#include "ops/tiles.h"
#include "oxytorch/kernels/attention.h"

namespace oxytorch::ops {

/// Queries and the keys they see: a sample of a batch, or a range of tokens of a batch of one.
struct AttentionDocument {
  [[nodiscard]] kernels::Rows query_rows(const at::Tensor& tensor, std::int64_t head) const;
  [[nodiscard]] kernels::Rows key_rows(const at::Tensor& tensor, std::int64_t head) const;
  /// Where one head's value of the first query lies in a tensor of batch x heads x queries.
  [[nodiscard]] std::int64_t query_offset(const at::Tensor& tensor, std::int64_t head) const {
    return sample * tensor.stride(0) + head * tensor.stride(1) + first_query * tensor.stride(2);
  }

  std::int64_t number, sample, first_query, first_key;
  Tiled queries, keys;
};

/// Tiles of keys or of queries in a row, which are multiplied at once.
struct TileRun {
  std::int64_t first = 0, tiles = 0;
  bool operator==(const TileRun&) const = default;
  [[nodiscard]] bool holds(std::int64_t tile) const { return tile >= first && tile < first + tiles; }
  /// Of the side that they are tiles of, padded.
  [[nodiscard]] std::int64_t rows(const Tiled& side) const {
    return (tiles - 1) * kernels::kTile + side.padded(first + tiles - 1);
  }
};

/// Its tensors, and what all threads share.
struct AttentionCall {
  /// Elements of a tile of scores.
  static constexpr std::int64_t kScores = kernels::kTile * kernels::kTile;
  /// Tiles of a run: what is computed of one of keys and one of queries stays near the core.
  static constexpr std::int64_t kMostOfRun = 4;

  /// `given` must live as long.
  AttentionCall(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const AttentionRule& given);

  /// Whether a tile of keys and one of queries have a visible pair.
  [[nodiscard]] bool meet(const AttentionDocument& in, std::int64_t head, std::int64_t key_tile,
                          std::int64_t query_tile) const {
    const std::int64_t k = in.keys.begin(key_tile), q = in.queries.begin(query_tile);
    if (k - (q + in.queries.used(query_tile) - 1) > rule.ahead || q - (k + in.keys.used(key_tile) - 1) > rule.behind) {
      return false;
    }
    return !hidden.holds(in.sample, head, key_tile, query_tile);
  }

  /// `act(run)` for the tiles of keys from `first` to `end` that meet one of queries; a run ends with its block of
  /// key_run.
  template <class Act>
  void each_run(const AttentionDocument& in, std::int64_t head, std::int64_t first, std::int64_t end,
                std::int64_t query_tile, const Act& act) const {
    for (TileRun run{first, 0}; run.first < end; run.first += std::max<std::int64_t>(run.tiles, 1)) {
      const std::int64_t block_end = std::min(end, (run.first / key_run + 1) * key_run);
      run.tiles = 0;
      while (run.first + run.tiles < block_end && meet(in, head, run.first + run.tiles, query_tile)) ++run.tiles;
      if (run.tiles > 0) act(run);
    }
  }

  /// `act(keys, queries)` for what meets of the block of keys that begins at tile `first`: runs of queries that see the
  /// same keys of it.
  template <class Act>
  void each_meeting(const AttentionDocument& in, std::int64_t head, std::int64_t first, const Act& act) const {
    const std::int64_t end = std::min(in.keys.tiles, first + key_run);
    TileRun keys, queries;
    for (std::int64_t q = 0; q < in.queries.tiles; ++q) {
      each_run(in, head, first, end, q, [&](const TileRun& run) {
        if (run == keys && queries.tiles < query_run && queries.first + queries.tiles == q) {
          ++queries.tiles;
          return;
        }
        if (queries.tiles > 0) act(keys, queries);
        keys = run;
        queries = {q, 1};
      });
    }
    if (queries.tiles > 0) act(keys, queries);
  }

  /// Turns raw products into scores, and returns the factor that they still lack. `mask_tiles` is written where there
  /// is a mask.
  float finish_scores(const AttentionDocument& in, std::int64_t head, const TileRun& run, std::int64_t query_tile,
                      float* mask_tiles, float* scores) const;
  /// The weights that dropout keeps, written to `keep`; or null where it keeps all.
  const std::uint32_t* kept(const AttentionDocument& in, std::int64_t head, const TileRun& run, std::int64_t query_tile,
                            std::uint32_t* keep) const;

  at::Tensor query, key, value, mask;
  HiddenTiles hidden;
  const AttentionRule& rule;
  std::vector<AttentionDocument> documents;
  std::int64_t most_query_tiles = 0, most_key_tiles = 0;  ///< of a document
  std::int64_t key_run = 1, query_run = 1;                ///< tiles of a run at most
  std::int64_t heads, key_heads, group, width;
  kernels::TileFormat format;
  float factor;
  std::uint32_t dropped;  ///< of 65,536 weights
  float kept_factor;

 private:
  void read_keep(const AttentionDocument& in, std::int64_t head, std::int64_t key_tile, std::int64_t query_tile,
                 std::uint32_t* tile) const;
  void read_mask(const AttentionDocument& in, std::int64_t head, std::int64_t key_tile, std::int64_t query_tile,
                 float* tile) const;
};

}  // namespace oxytorch::ops
