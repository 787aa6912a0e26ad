#include "ops/attention_call.h"

#include <cmath>

#include "ops/product.h"
#include "optim/dense.h"

namespace oxytorch::ops {

using at::Tensor;
using kernels::kTile;
using kernels::kTileStep;
using kernels::Rows;
using kernels::TileFormat;

namespace {

Rows rows_of_head(const Tensor& tensor, std::int64_t batch, std::int64_t head, std::int64_t first, std::int64_t count) {
  const auto* data =
      static_cast<const char*>(tensor.const_data_ptr()) +
      (batch * tensor.stride(0) + head * tensor.stride(1) + first * tensor.stride(2)) * tensor.element_size();
  return {optim::element_type(tensor).value(), data, tensor.stride(2), count, tensor.size(3)};
}

std::vector<AttentionDocument> documents_of(const Tensor& query, const Tensor& key, const AttentionRule& rule) {
  std::vector<AttentionDocument> documents;
  const auto& queries = rule.query_offsets;
  const auto& keys = rule.key_offsets;
  const auto count = queries.empty() ? query.size(0) : static_cast<std::int64_t>(queries.size()) - 1;
  documents.reserve(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i) {
    if (queries.empty()) {
      documents.push_back({i, i, 0, 0, Tiled(query.size(2)), Tiled(key.size(2))});
    } else {
      const auto at = static_cast<std::size_t>(i);
      documents.push_back(
          {i, 0, queries[at], keys[at], Tiled(queries[at + 1] - queries[at]), Tiled(keys[at + 1] - keys[at])});
    }
  }
  return documents;
}

// from[j * stride + i] to tile[i * kTile + j], of `columns` j and `rows` i.
void transpose_into(const float* from, std::int64_t stride, std::int64_t rows, std::int64_t columns, float* tile) {
  constexpr std::int64_t kStep = 8;  // of the kernel
  const std::int64_t whole_rows = rows / kStep * kStep, whole_columns = columns / kStep * kStep;
  kernels::transpose_words(from, stride, whole_columns, whole_rows, tile, kTile);
  for (std::int64_t j = 0; j < columns; ++j) {
    for (std::int64_t i = j < whole_columns ? whole_rows : 0; i < rows; ++i) tile[i * kTile + j] = from[j * stride + i];
  }
}

}  // namespace

Rows AttentionDocument::query_rows(const Tensor& tensor, std::int64_t head) const {
  return rows_of_head(tensor, sample, head, first_query, queries.count);
}

Rows AttentionDocument::key_rows(const Tensor& tensor, std::int64_t head) const {
  return rows_of_head(tensor, sample, head, first_key, keys.count);
}

AttentionCall::AttentionCall(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionRule& given)
    : query(dense(q)),
      key(dense(k)),
      value(dense(v)),
      rule(given),
      documents(documents_of(q, k, given)),
      heads(q.size(1)),
      key_heads(k.size(1)),
      group(heads / key_heads),
      width(round_up(q.size(3), kTileStep)),
      format(product_format(optim::element_type(q).value())),
      factor(static_cast<float>(rule.scale)),
      dropped(std::min(static_cast<std::uint32_t>(std::lround(rule.dropout * 65536)), 65535U)),
      kept_factor(rule.keep.defined() ? static_cast<float>(1 / (1 - rule.dropout))
                                      : 65536.0F / static_cast<float>(65536 - dropped)) {
  if (rule.mask.has_value() && rule.mask->defined()) {
    mask = rule.mask->to(at::kFloat).expand({q.size(0), heads, q.size(2), k.size(2)});
  }
  for (const auto& document : documents) {
    most_query_tiles = std::max(most_query_tiles, document.queries.tiles);
    most_key_tiles = std::max(most_key_tiles, document.keys.tiles);
  }
  key_run = std::clamp<std::int64_t>(most_key_tiles, 1, kMostOfRun);
  // Weights in fp32 are left operands as they lie, of one tile of queries.
  if (format == TileFormat::BFloat16) query_run = std::clamp<std::int64_t>(most_query_tiles, 1, kMostOfRun);
  if (mask.defined() && mask.numel() > 0) hidden = {mask, documents.front().queries, documents.front().keys};
}

float AttentionCall::finish_scores(const AttentionDocument& in, std::int64_t head, const TileRun& run,
                                   std::int64_t query_tile, float* mask_tiles, float* scores) const {
  const std::int64_t q = in.queries.begin(query_tile), columns = in.queries.padded(query_tile);
  const bool scales_later = !mask.defined() && rule.soft_cap == 0 && factor > 0;  // minus infinity stays so then
  for (std::int64_t i = 0; i < run.tiles; ++i, scores += kScores, mask_tiles += kScores) {
    const std::int64_t tile = run.first + i, k = in.keys.begin(tile), rows = in.keys.padded(tile);
    const bool whole =
        in.keys.used(tile) == rows && k + rows - 1 - q <= rule.ahead && q + columns - 1 - k <= rule.behind;
    if (scales_later && whole) continue;
    kernels::ScoreRule edit{scales_later ? 1.0F : factor,
                            in.keys.used(tile),
                            k - q,
                            rule.ahead,
                            rule.behind,
                            static_cast<float>(rule.soft_cap),
                            nullptr};
    if (mask.defined()) {
      read_mask(in, head, tile, query_tile, mask_tiles);
      edit.mask = mask_tiles;
    }
    kernels::apply_rule(edit, rows, columns, scores);
  }
  return scales_later ? factor : 1;
}

const std::uint32_t* AttentionCall::kept(const AttentionDocument& in, std::int64_t head, const TileRun& run,
                                         std::int64_t query_tile, std::uint32_t* keep) const {
  if (rule.keep.defined()) {
    for (std::int64_t i = 0; i < run.tiles; ++i) {
      read_keep(in, head, run.first + i, query_tile, keep + i * kScores);
    }
    return keep;
  }
  if (dropped == 0) return nullptr;
  kernels::dropout_tile({rule.seed, static_cast<std::uint32_t>(in.number * heads + head),
                         static_cast<std::uint32_t>(run.first), static_cast<std::uint32_t>(query_tile), dropped},
                        run.rows(in.keys), keep);
  return keep;
}

void AttentionCall::read_keep(const AttentionDocument& in, std::int64_t head, std::int64_t key_tile,
                              std::int64_t query_tile, std::uint32_t* tile) const {
  const std::int64_t rows = in.keys.used(key_tile), columns = in.queries.used(query_tile);
  const bool* from = rule.keep.const_data_ptr<bool>() + in.query_offset(rule.keep, head) +
                     in.queries.begin(query_tile) * rule.keep.stride(2) + in.keys.begin(key_tile);
  alignas(64) std::uint32_t words[kScores];
  for (std::int64_t j = 0; j < columns; ++j, from += rule.keep.stride(2)) {
    for (std::int64_t i = 0; i < rows; ++i) words[j * kTile + i] = 0U - static_cast<std::uint32_t>(from[i]);
  }
  if (rows < in.keys.padded(key_tile) || columns < kTile) std::fill(tile, tile + in.keys.padded(key_tile) * kTile, 0U);
  transpose_into(reinterpret_cast<const float*>(words), kTile, rows, columns, reinterpret_cast<float*>(tile));
}

void AttentionCall::read_mask(const AttentionDocument& in, std::int64_t head, std::int64_t key_tile,
                              std::int64_t query_tile, float* tile) const {
  const std::int64_t along_q = mask.stride(2), along_k = mask.stride(3);
  const float* from = mask.const_data_ptr<float>() + in.query_offset(mask, head) +
                      in.queries.begin(query_tile) * along_q + (in.first_key + in.keys.begin(key_tile)) * along_k;
  const std::int64_t rows = in.keys.used(key_tile), columns = in.queries.used(query_tile);
  if (along_k == 1 && along_q != 0) {
    transpose_into(from, along_q, rows, columns, tile);
  } else {
    for (std::int64_t i = 0; i < rows; ++i) {
      for (std::int64_t j = 0; j < columns; ++j) tile[i * kTile + j] = from[j * along_q + i * along_k];
    }
  }
  if (columns == kTile) return;
  for (std::int64_t i = 0; i < rows; ++i) std::fill(tile + i * kTile + columns, tile + (i + 1) * kTile, 0.0F);
}

}  // namespace oxytorch::ops
