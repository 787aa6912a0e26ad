#include "ops/attention_cpu.h"

#include <ATen/ExpandUtils.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "ops/dispatch.h"
#include "ops/hidden_tiles.h"
#include "ops/product.h"
#include "ops/tiles.h"
#include "optim/dense.h"
#include "oxytorch/kernels/attention.h"

namespace oxytorch::ops {
namespace {

using at::Tensor;
using kernels::ElementType;
using kernels::kTile;
using kernels::kTileStep;
using kernels::Operand;
using kernels::Rows;
using kernels::TileFormat;

Rows rows_of_head(const Tensor& tensor, std::int64_t batch, std::int64_t head, std::int64_t first, std::int64_t count) {
  const auto* data =
      static_cast<const char*>(tensor.const_data_ptr()) +
      (batch * tensor.stride(0) + head * tensor.stride(1) + first * tensor.stride(2)) * tensor.element_size();
  return {optim::element_type(tensor).value(), data, tensor.stride(2), count, tensor.size(3)};
}

// Queries and the keys they see: a sample of a batch, or a range of tokens of a batch of one.
struct Document {
  [[nodiscard]] Rows query_rows(const Tensor& tensor, std::int64_t head) const {
    return rows_of_head(tensor, sample, head, first_query, queries.count);
  }
  [[nodiscard]] Rows key_rows(const Tensor& tensor, std::int64_t head) const {
    return rows_of_head(tensor, sample, head, first_key, keys.count);
  }
  // Where one head's value of the first query lies in a tensor of batch x heads x queries.
  [[nodiscard]] std::int64_t query_offset(const Tensor& tensor, std::int64_t head) const {
    return sample * tensor.stride(0) + head * tensor.stride(1) + first_query * tensor.stride(2);
  }

  std::int64_t number, sample, first_query, first_key;
  Tiled queries, keys;
};

std::vector<Document> documents_of(const Tensor& query, const Tensor& key, const AttentionRule& rule) {
  std::vector<Document> documents;
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

// A call with its tensors, and what all threads share.
struct Call {
  Call(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionRule& rule)
      : query(dense(q)),
        key(dense(k)),
        value(dense(v)),
        rule(rule),
        documents(documents_of(q, k, rule)),
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
    if (mask.defined() && mask.numel() > 0) hidden = {mask, documents.front().queries, documents.front().keys};
  }

  // Whether a tile of keys and one of queries have a visible pair.
  [[nodiscard]] bool meet(const Document& in, std::int64_t h, std::int64_t key_tile, std::int64_t query_tile) const {
    const std::int64_t k = in.keys.begin(key_tile), q = in.queries.begin(query_tile);
    if (k - (q + in.queries.used(query_tile) - 1) > rule.ahead || q - (k + in.keys.used(key_tile) - 1) > rule.behind) {
      return false;
    }
    return !hidden.holds(in.sample, h, key_tile, query_tile);
  }

  // Turns raw products into scores, and returns the factor that they still lack.
  float finish_scores(const Document& in, std::int64_t h, std::int64_t key_tile, std::int64_t query_tile,
                      float* mask_tile, float* scores) const {
    const std::int64_t k = in.keys.begin(key_tile), q = in.queries.begin(query_tile);
    const std::int64_t rows = in.keys.padded(key_tile), columns = in.queries.padded(query_tile);
    const bool whole =
        in.keys.used(key_tile) == rows && k + rows - 1 - q <= rule.ahead && q + columns - 1 - k <= rule.behind;
    if (whole && !mask.defined() && rule.soft_cap == 0) return factor;
    kernels::ScoreRule edit{
        factor, in.keys.used(key_tile), k - q, rule.ahead, rule.behind, static_cast<float>(rule.soft_cap), nullptr};
    if (mask.defined()) {
      read_mask(in, h, key_tile, query_tile, mask_tile);
      edit.mask = mask_tile;
    }
    kernels::apply_rule(edit, rows, columns, scores);
    return 1;
  }

  // The weights that dropout keeps, or null where it keeps all.
  const std::uint32_t* kept(const Document& in, std::int64_t h, std::int64_t key_tile, std::int64_t query_tile,
                            std::uint32_t* keep) const {
    if (rule.keep.defined()) {
      read_keep(in, h, key_tile, query_tile, keep);
      return keep;
    }
    if (dropped == 0) return nullptr;
    kernels::dropout_tile({rule.seed, static_cast<std::uint32_t>(in.number * heads + h),
                           static_cast<std::uint32_t>(key_tile), static_cast<std::uint32_t>(query_tile), dropped},
                          in.keys.padded(key_tile), keep);
    return keep;
  }

  void read_keep(const Document& in, std::int64_t h, std::int64_t key_tile, std::int64_t query_tile,
                 std::uint32_t* tile) const {
    const std::int64_t rows = in.keys.used(key_tile), columns = in.queries.used(query_tile);
    const bool* from = rule.keep.const_data_ptr<bool>() + in.query_offset(rule.keep, h) +
                       in.queries.begin(query_tile) * rule.keep.stride(2) + in.keys.begin(key_tile);
    alignas(64) std::uint32_t words[kTile * kTile];
    for (std::int64_t j = 0; j < columns; ++j, from += rule.keep.stride(2)) {
      for (std::int64_t i = 0; i < rows; ++i) words[j * kTile + i] = 0U - static_cast<std::uint32_t>(from[i]);
    }
    if (rows < in.keys.padded(key_tile) || columns < kTile)
      std::fill(tile, tile + in.keys.padded(key_tile) * kTile, 0U);
    transpose_into(reinterpret_cast<const float*>(words), kTile, rows, columns, reinterpret_cast<float*>(tile));
  }

  void read_mask(const Document& in, std::int64_t h, std::int64_t key_tile, std::int64_t query_tile,
                 float* tile) const {
    const std::int64_t along_q = mask.stride(2), along_k = mask.stride(3);
    const float* from = mask.const_data_ptr<float>() + in.query_offset(mask, h) +
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

  Tensor query, key, value, mask;
  HiddenTiles hidden;
  const AttentionRule& rule;
  std::vector<Document> documents;
  std::int64_t most_query_tiles = 0, most_key_tiles = 0;  // of a document
  std::int64_t heads, key_heads, group, width;
  TileFormat format;
  float factor;
  std::uint32_t dropped;  // of 65,536 weights
  float kept_factor;
};

// The plain tiles of one matrix.
void load(const Call& call, const Rows& rows, const Tiled& side, std::int64_t tile, std::byte* to) {
  kernels::load_tile(call.format, rows.part(side.begin(tile), side.used(tile)), side.padded(tile), call.width, to);
}

struct ForwardWorker {
  ForwardWorker(const Call& call, Tensor& output, Tensor& log_sum)
      : call(call),
        output(output),
        log_sum(log_sum),
        key(scratch, call.format, call.width, call.most_key_tiles),
        value(scratch, call.format, call.width, call.most_key_tiles),
        plain(scratch, call.format, call.width, 2),
        query(scratch, call.format, call.width, 1),
        scores(scratch.floats(kTile * kTile)),
        mask(scratch.floats(kTile * kTile)),
        weights(scratch.floats(kTile * kTile)),
        keep(reinterpret_cast<std::uint32_t*>(scratch.floats(kTile * kTile))),
        sum(scratch.floats(kTile * call.width)),
        rows(scratch.floats(kTile * call.width)) {}

  void keys_of(const Document& in, std::int64_t h) {
    if (loaded == in.number * call.key_heads + h || in.keys.count == 0) return;
    loaded = in.number * call.key_heads + h;
    const Rows k = in.key_rows(call.key, h), v = in.key_rows(call.value, h);
    for (std::int64_t tile = 0; tile < in.keys.tiles; ++tile) {
      load(call, k, in.keys, tile, key[tile]);
      load(call, v, in.keys, tile, plain[0]);
      kernels::make_operand(call.format, Operand::LeftTransposed, plain[0], in.keys.padded(tile), call.width, plain[1],
                            value[tile]);
    }
  }

  void run(const Document& in, std::int64_t h, std::int64_t query_tile) {
    keys_of(in, h / call.group);
    const std::int64_t columns = in.queries.padded(query_tile), used = in.queries.used(query_tile);
    load(call, in.query_rows(call.query, h), in.queries, query_tile, plain[0]);
    kernels::make_operand(call.format, Operand::RightTransposed, plain[0], columns, call.width, plain[1], query[0]);
    kernels::SoftmaxState state;
    state.reset();
    alignas(64) float correction[kTile];
    bool add = false;
    for (std::int64_t tile = 0; tile < in.keys.tiles; ++tile) {
      if (!call.meet(in, h, tile, query_tile)) continue;
      const std::int64_t count = in.keys.padded(tile);
      product(call.format, count, columns, call.width, key[tile], call.width, query[0], kTile, scores, kTile, false);
      const float factor = call.finish_scores(in, h, tile, query_tile, mask, scores);
      const bool corrects = kernels::softmax_tile(call.format, factor, count, columns, scores,
                                                  call.kept(in, h, tile, query_tile, keep), state, correction, weights);
      if (add && corrects) kernels::scale_columns(call.width, correction, sum);
      product(call.format, call.width, columns, count, value[tile], kTile, weights, kTile, sum, kTile, add);
      add = true;
    }
    float inverse[kTile];
    auto* logs = log_sum.mutable_data_ptr<float>() + in.query_offset(log_sum, h) +
                 in.queries.begin(query_tile) * log_sum.stride(2);
    for (std::int64_t j = 0; j < used; ++j) {
      const bool none = state.sum[j] == 0;
      inverse[j] = none ? 0 : call.kept_factor / state.sum[j];
      logs[j * log_sum.stride(2)] = none ? 0 : state.largest[j] + std::log(state.sum[j]);
    }
    const std::int64_t at = in.queries.begin(query_tile);
    const Rows to = in.query_rows(output, h).part(at, used);
    if (!add) std::fill_n(sum, kTile * call.width, 0.0F);
    kernels::transpose_words(sum, kTile, call.width, columns, rows, call.width);
    kernels::store_rows(rows, call.width, used, to.columns, 1, inverse, to.element, const_cast<void*>(to.data),
                        to.stride);
  }

  const Call& call;
  Tensor& output;
  Tensor& log_sum;
  Scratch scratch;
  Packed key, value, plain, query;
  float *scores, *mask, *weights;
  std::uint32_t* keep;
  float *sum, *rows;
  std::int64_t loaded = -1;
};

// The sum of a mask's gradient over the samples and heads that share it: keys x queries, as tiles of scores lie.
class MaskSum {
 public:
  MaskSum() = default;
  MaskSum(const Call& call, const Tensor& mask)
      : samples_(size_of(mask, 0)),
        heads_(size_of(mask, 1)),
        keys_(call.key.size(2)),
        queries_(call.query.size(2)),
        sum_(at::zeros({samples_, heads_, call.most_key_tiles * kTile, call.most_query_tiles * kTile},
                       mask.options().dtype(at::kFloat))) {}

  [[nodiscard]] bool is_wanted() const { return sum_.defined(); }
  // The mask of a sample and a head, by number.
  [[nodiscard]] std::int64_t part(std::int64_t sample, std::int64_t head) const {
    return (samples_ > 1 ? sample : 0) * heads_ + (heads_ > 1 ? head : 0);
  }
  [[nodiscard]] std::int64_t stride() const { return sum_.size(3); }
  [[nodiscard]] float* tile(std::int64_t sample, std::int64_t head, std::int64_t key_tile,
                            std::int64_t query_tile) const {
    const std::int64_t row = part(sample, head) * sum_.size(2) + key_tile * kTile;
    return sum_.mutable_data_ptr<float>() + row * stride() + query_tile * kTile;
  }
  [[nodiscard]] Tensor gradient_of(const Tensor& mask) const {
    const Tensor sum = sum_.narrow(2, 0, keys_).narrow(3, 0, queries_).transpose(2, 3);
    return at::sum_to(sum, mask.sizes()).to(mask.scalar_type()).contiguous();
  }

 private:
  // Of the mask, as that of four dimensions.
  static std::int64_t size_of(const Tensor& mask, std::int64_t dim) {
    const auto at = mask.dim() - 4 + dim;
    return at < 0 ? 1 : mask.size(at);
  }

  std::int64_t samples_ = 1, heads_ = 1, keys_ = 0, queries_ = 0;
  Tensor sum_;
};

// What backward is given beside the call, and what it makes.
struct Gradients {
  Gradients(const Call& call, const Tensor& grad_output, const Tensor& output, const Tensor& log_sum, MaskSum mask)
      : grad_output(dense(grad_output)),
        output(dense(output)),
        log_sum(log_sum),
        query(empty_like(call.query)),
        key(empty_like(call.key)),
        value(empty_like(call.value)),
        mask(std::move(mask)) {}

  // In memory batch x tokens x heads x width.
  static Tensor empty_like(const Tensor& like) {
    return at::empty({like.size(0), like.size(2), like.size(1), like.size(3)}, like.options()).transpose(1, 2);
  }

  Tensor grad_output, output;
  const Tensor& log_sum;
  Tensor query, key, value;
  MaskSum mask;
};

struct BackwardWorker {
  BackwardWorker(const Call& call, Gradients& grads)
      : call(call),
        grads(grads),
        key(scratch, call.format, call.width, call.most_key_tiles),
        key_transposed(scratch, call.format, call.width, call.most_key_tiles),
        value(scratch, call.format, call.width, call.most_key_tiles),
        query(scratch, call.format, call.width, call.most_query_tiles),
        query_transposed(scratch, call.format, call.width, call.most_query_tiles),
        grad(scratch, call.format, call.width, call.most_query_tiles),
        grad_transposed(scratch, call.format, call.width, call.most_query_tiles),
        plain(scratch, call.format, call.width, 2),
        log_sums(scratch.floats(kTile * call.most_query_tiles)),
        deltas(scratch.floats(kTile * call.most_query_tiles)),
        scores(scratch.floats(kTile * kTile)),
        mask(scratch.floats(kTile * kTile)),
        gradient(scratch.floats(kTile * kTile)),
        keep(reinterpret_cast<std::uint32_t*>(scratch.floats(kTile * kTile))),
        rows(scratch.floats(kTile * call.width)) {
    for (auto& one : narrow) one = reinterpret_cast<std::uint16_t*>(scratch.bytes(kTile * kTile * 2));
  }

  void keys_of(const Document& in, std::int64_t h) {
    if (loaded_keys == in.number * call.key_heads + h || in.keys.count == 0) return;
    loaded_keys = in.number * call.key_heads + h;
    const Rows k = in.key_rows(call.key, h), v = in.key_rows(call.value, h);
    for (std::int64_t tile = 0; tile < in.keys.tiles; ++tile) {
      load(call, k, in.keys, tile, key[tile]);
      load(call, v, in.keys, tile, value[tile]);
      kernels::make_operand(call.format, Operand::LeftTransposed, key[tile], in.keys.padded(tile), call.width, plain[1],
                            key_transposed[tile]);
    }
  }

  void queries_of(const Document& in, std::int64_t h) {
    if (loaded_queries == in.number * call.heads + h || in.queries.count == 0) return;
    loaded_queries = in.number * call.heads + h;
    const Rows q = in.query_rows(call.query, h), o = in.query_rows(grads.output, h),
               g = in.query_rows(grads.grad_output, h);
    const auto make = [&](const Rows& rows, std::int64_t tile, Packed& right, Packed& transposed) {
      load(call, rows, in.queries, tile, plain[0]);
      const std::int64_t count = in.queries.padded(tile);
      kernels::make_operand(call.format, Operand::Right, plain[0], count, call.width, plain[1], right[tile]);
      kernels::make_operand(call.format, Operand::RightTransposed, plain[0], count, call.width, plain[1],
                            transposed[tile]);
    };
    const float* logs = grads.log_sum.const_data_ptr<float>() + in.query_offset(grads.log_sum, h);
    for (std::int64_t tile = 0; tile < in.queries.tiles; ++tile) {
      make(q, tile, query, query_transposed);
      make(g, tile, grad, grad_transposed);
      const std::int64_t at = in.queries.begin(tile), used = in.queries.used(tile);
      kernels::dot_rows(g.part(at, used), o.part(at, used), deltas + at);
      for (std::int64_t j = 0; j < kTile; ++j) {
        // Queries that are padding weigh nothing.
        log_sums[at + j] = j < used ? logs[(at + j) * grads.log_sum.stride(2)] : kInfinity;
        if (j >= used) deltas[at + j] = 0;
      }
    }
  }

  // Adds one tile's share to the gradients that are given; to that of the mask with the keys'.
  void pair(const Document& in, std::int64_t h, std::int64_t key_tile, std::int64_t query_tile, float* of_query,
            float* of_key, float* of_value) {
    const std::int64_t count = in.keys.padded(key_tile), columns = in.queries.padded(query_tile);
    const std::int64_t width = call.width;
    const TileFormat format = call.format;
    product(format, count, columns, width, key[key_tile], width, query_transposed[query_tile], kTile, scores, kTile,
            false);
    product(format, count, columns, width, value[key_tile], width, grad_transposed[query_tile], kTile, gradient, kTile,
            false);
    kernels::SoftmaxGradient tile;
    tile.format = format;
    tile.factor = call.finish_scores(in, h, key_tile, query_tile, mask, scores);
    tile.rows = count;
    tile.columns = columns;
    tile.log_sum = log_sums + in.queries.begin(query_tile);
    tile.delta = deltas + in.queries.begin(query_tile);
    tile.cap = static_cast<float>(call.rule.soft_cap);
    tile.mask = call.mask.defined() ? mask : nullptr;
    tile.keep = call.kept(in, h, key_tile, query_tile, keep);
    tile.kept_factor = call.kept_factor;
    tile.scores = scores;
    tile.gradient = gradient;
    tile.weights = narrow[0];
    tile.left_gradient = narrow[1];
    tile.right_gradient = narrow[2];
    if (of_value != nullptr && grads.mask.is_wanted()) {
      tile.mask_gradient = grads.mask.tile(in.sample, h, key_tile, query_tile);
      tile.mask_stride = grads.mask.stride();
    }
    kernels::softmax_gradient(tile);
    const bool paired = format == TileFormat::BFloat16;
    if (of_value != nullptr) {
      product(format, count, width, columns, paired ? static_cast<void*>(narrow[0]) : scores, kTile, grad[query_tile],
              width, of_value, width, true);
      product(format, count, width, columns, paired ? static_cast<void*>(narrow[1]) : gradient, kTile,
              query[query_tile], width, of_key, width, true);
    }
    if (of_query != nullptr) {
      product(format, width, columns, count, key_transposed[key_tile], kTile,
              paired ? static_cast<void*>(narrow[2]) : gradient, kTile, of_query, kTile, true);
    }
  }

  void store_keys(const Document& in, std::int64_t h, std::int64_t tile, const float* of_key, const float* of_value) {
    const std::int64_t at = in.keys.begin(tile), used = in.keys.used(tile);
    const Rows k = in.key_rows(grads.key, h).part(at, used), v = in.key_rows(grads.value, h).part(at, used);
    kernels::store_rows(of_key, call.width, used, k.columns, static_cast<float>(call.rule.scale), nullptr, k.element,
                        const_cast<void*>(k.data), k.stride);
    kernels::store_rows(of_value, call.width, used, v.columns, call.kept_factor, nullptr, v.element,
                        const_cast<void*>(v.data), v.stride);
  }

  void store_queries(const Document& in, std::int64_t h, std::int64_t tile, const float* of_query) {
    const std::int64_t at = in.queries.begin(tile), used = in.queries.used(tile);
    const Rows q = in.query_rows(grads.query, h).part(at, used);
    kernels::transpose_words(of_query, kTile, call.width, in.queries.padded(tile), rows, call.width);
    kernels::store_rows(rows, call.width, used, q.columns, static_cast<float>(call.rule.scale), nullptr, q.element,
                        const_cast<void*>(q.data), q.stride);
  }

  // All of one head of keys.
  void head(const Document& in, std::int64_t key_head) {
    const std::int64_t tile_size = kTile * call.width;
    if (of_keys == nullptr) {
      of_keys = scratch.floats(tile_size * call.most_key_tiles);
      of_values = scratch.floats(tile_size * call.most_key_tiles);
      of_queries = scratch.floats(tile_size * call.most_query_tiles);
    }
    keys_of(in, key_head);
    std::fill_n(of_keys, tile_size * in.keys.tiles, 0.0F);
    std::fill_n(of_values, tile_size * in.keys.tiles, 0.0F);
    for (std::int64_t h = key_head * call.group; h < (key_head + 1) * call.group; ++h) {
      queries_of(in, h);
      std::fill_n(of_queries, tile_size * in.queries.tiles, 0.0F);
      for (std::int64_t k = 0; k < in.keys.tiles; ++k) {
        for (std::int64_t q = 0; q < in.queries.tiles; ++q) {
          if (!call.meet(in, h, k, q)) continue;
          pair(in, h, k, q, of_queries + q * tile_size, of_keys + k * tile_size, of_values + k * tile_size);
        }
      }
      for (std::int64_t q = 0; q < in.queries.tiles; ++q) store_queries(in, h, q, of_queries + q * tile_size);
    }
    for (std::int64_t k = 0; k < in.keys.tiles; ++k) {
      store_keys(in, key_head, k, of_keys + k * tile_size, of_values + k * tile_size);
    }
  }

  // One tile of keys, or one of queries: more work, which more threads can share. The sums are head()'s.
  void one_of_keys(const Document& in, std::int64_t key_head, std::int64_t k) {
    const std::int64_t tile_size = kTile * call.width;
    if (of_keys == nullptr) {
      of_keys = scratch.floats(tile_size);
      of_values = scratch.floats(tile_size);
    }
    keys_of(in, key_head);
    std::fill_n(of_keys, tile_size, 0.0F);
    std::fill_n(of_values, tile_size, 0.0F);
    for (std::int64_t h = key_head * call.group; h < (key_head + 1) * call.group; ++h) {
      queries_of(in, h);
      for (std::int64_t q = 0; q < in.queries.tiles; ++q) {
        if (call.meet(in, h, k, q)) pair(in, h, k, q, nullptr, of_keys, of_values);
      }
    }
    store_keys(in, key_head, k, of_keys, of_values);
  }
  void one_of_queries(const Document& in, std::int64_t h, std::int64_t q) {
    const std::int64_t tile_size = kTile * call.width;
    if (of_queries == nullptr) of_queries = scratch.floats(tile_size);
    keys_of(in, h / call.group);
    queries_of(in, h);
    std::fill_n(of_queries, tile_size, 0.0F);
    for (std::int64_t k = 0; k < in.keys.tiles; ++k) {
      if (call.meet(in, h, k, q)) pair(in, h, k, q, of_queries, nullptr, nullptr);
    }
    store_queries(in, h, q, of_queries);
  }

  const Call& call;
  Gradients& grads;
  Scratch scratch;
  Packed key, key_transposed, value, query, query_transposed, grad, grad_transposed, plain;
  float *log_sums, *deltas, *scores, *mask, *gradient;
  std::uint32_t* keep;
  float* rows;
  float *of_keys = nullptr, *of_values = nullptr, *of_queries = nullptr;
  std::uint16_t* narrow[3];
  std::int64_t loaded_keys = -1, loaded_queries = -1;
};

// What a thread does on its own: one head of keys of a document, or one tile of a head.
enum class Piece : std::uint8_t { KeyHead, KeyTile, QueryTile };
struct Item {
  const Document* document;
  std::int64_t head, tile;
  double cost;        // in scores
  std::int64_t unit;  // items of one are done by one thread, in their order
};

// By unit. What is added to one place of `sum` is of one unit.
std::vector<Item> items_of(const Call& call, Piece piece, const MaskSum& sum) {
  const bool by_query = piece == Piece::QueryTile;
  const auto heads = by_query ? call.heads : call.key_heads;
  const auto passes = by_query ? 1 : call.group;
  const bool sums = sum.is_wanted() && !by_query;
  std::vector<Item> items;
  std::vector<double> costs;
  for (const auto& in : call.documents) {
    const Tiled& side = by_query ? in.queries : in.keys;
    costs.clear();
    for (std::int64_t tile = 0; tile < side.tiles; ++tile) {
      costs.push_back(static_cast<double>(kTile * side.padded(tile)));  // to load it
    }
    for (std::int64_t k = 0; k < in.keys.tiles; ++k) {
      for (std::int64_t q = 0; q < in.queries.tiles; ++q) {
        if (!call.meet(in, 0, k, q)) continue;
        costs[static_cast<std::size_t>(by_query ? q : k)] +=
            static_cast<double>(passes * in.keys.padded(k) * in.queries.padded(q));
      }
    }
    if (piece == Piece::KeyHead) {
      // Queries are loaded and stored for keys that they do not see, too.
      const auto loads = static_cast<double>(kTile * passes * round_up(in.queries.count, kTileStep));
      costs = {std::accumulate(costs.begin(), costs.end(), loads)};
    }
    for (std::int64_t h = 0; h < heads; ++h) {
      std::int64_t tile = 0;
      for (const double cost : costs) {
        const auto unit = sums ? sum.part(in.sample, h) * static_cast<std::int64_t>(costs.size()) + tile
                               : static_cast<std::int64_t>(items.size());
        items.push_back({&in, h, tile++, cost, unit});
      }
    }
  }
  if (sums) std::ranges::stable_sort(items, {}, &Item::unit);
  return items;
}

// Items in a row, cut into a share for each thread. Documents differ in length, so shares are equal in cost.
class Schedule {
 public:
  Schedule(const Call& call, Piece piece, const MaskSum& sum = {}) : call_(call), items_(items_of(call, piece, sum)) {
    const auto threads = static_cast<std::size_t>(at::get_num_threads());
    double total = 0, before = 0;
    for (const auto& item : items_) total += item.cost;
    std::vector<double> costs(threads);
    for (std::size_t i = 0; i < items_.size();) {
      double cost = 0;
      auto end = i;
      for (; end < items_.size() && items_[end].unit == items_[i].unit; ++end) cost += items_[end].cost;
      const double middle = (before + cost / 2) / std::max(total, 1.0);
      const auto share = std::min(static_cast<std::size_t>(middle * static_cast<double>(threads)), threads - 1);
      first_.resize(std::max(first_.size(), share + 1), i);
      costs[share] += cost;
      before += cost;
      i = end;
    }
    first_.resize(threads + 1, items_.size());
    is_even_ = *std::max_element(costs.begin(), costs.end()) * static_cast<double>(threads) <= 1.25 * total;
  }

  // Whether no thread has much more to do than others.
  [[nodiscard]] bool is_even() const { return is_even_; }

  // Runs all items, each thread with a worker of its own.
  template <class Make, class Run>
  void run(const Make& make, const Run& run) const {
    at::parallel_for(0, static_cast<std::int64_t>(first_.size()) - 1, 1, [&](std::int64_t begin, std::int64_t end) {
      const auto until = first_[static_cast<std::size_t>(end)];
      auto i = first_[static_cast<std::size_t>(begin)];
      if (i == until) return;
      const ProductScope products(call_.format);
      auto worker = make();
      for (; i < until; ++i) run(worker, items_[i]);
    });
  }

 private:
  const Call& call_;
  std::vector<Item> items_;
  std::vector<std::size_t> first_;  // of each share, and the end
  bool is_even_ = true;
};

void run_backward(const Call& call, Gradients& grads) {
  const auto make = [&] { return BackwardWorker(call, grads); };
  const Schedule heads(call, Piece::KeyHead, grads.mask);
  if (heads.is_even()) {
    heads.run(make, [](BackwardWorker& worker, const Item& item) { worker.head(*item.document, item.head); });
    return;
  }
  // The products of scores are then made twice, and no thread waits for one with a long document.
  Schedule(call, Piece::KeyTile, grads.mask).run(make, [](BackwardWorker& worker, const Item& item) {
    worker.one_of_keys(*item.document, item.head, item.tile);
  });
  Schedule(call, Piece::QueryTile).run(make, [](BackwardWorker& worker, const Item& item) {
    worker.one_of_queries(*item.document, item.head, item.tile);
  });
}

bool is_taken(const Tensor& tensor, at::ScalarType type) {
  return tensor.dim() == 4 && tensor.scalar_type() == type && tensor.device().is_cpu() &&
         tensor.layout() == at::kStrided && !tensor.is_neg();
}

}  // namespace

bool attention_cpu_takes(const Tensor& query, const Tensor& key, const Tensor& value,
                         const std::optional<Tensor>& mask) {
  const auto type = query.scalar_type();
  if (!has_kernel(query) || !is_taken(query, type) || !is_taken(key, type) || !is_taken(value, type)) return false;
  const bool fits = key.size(0) == query.size(0) && value.sizes() == key.sizes() && key.size(3) == query.size(3) &&
                    query.size(3) > 0 && key.size(1) > 0 && query.size(1) % key.size(1) == 0;
  if (!fits) return false;
  if (!mask.has_value() || !mask->defined()) return true;
  const bool known = mask->scalar_type() == at::kFloat || mask->scalar_type() == type;
  if (!known || !mask->device().is_cpu() || mask->layout() != at::kStrided || mask->dim() > 4) return false;
  const std::int64_t sizes[] = {query.size(0), query.size(1), query.size(2), key.size(2)};
  for (std::int64_t i = 0; i < mask->dim(); ++i) {
    const std::int64_t size = mask->size(mask->dim() - 1 - i);
    if (size != 1 && size != sizes[3 - i]) return false;
  }
  return true;
}

std::tuple<Tensor, Tensor> attention_cpu(const Tensor& query, const Tensor& key, const Tensor& value,
                                         const AttentionRule& rule) {
  const Call call(query, key, value, rule);
  Tensor output = empty_heads(query);
  Tensor log_sum = at::empty({query.size(0), query.size(2), query.size(1)}, query.options().dtype(at::kFloat));
  log_sum = log_sum.transpose(1, 2);
  Schedule(call, Piece::QueryTile)
      .run([&] { return ForwardWorker(call, output, log_sum); },
           [](ForwardWorker& worker, const Item& item) { worker.run(*item.document, item.head, item.tile); });
  return {output, log_sum};
}

std::tuple<Tensor, Tensor, Tensor> attention_cpu_backward(const Tensor& grad_output, const Tensor& query,
                                                          const Tensor& key, const Tensor& value, const Tensor& output,
                                                          const Tensor& log_sum, const AttentionRule& rule) {
  const Call call(query, key, value, rule);
  Gradients grads(call, grad_output, output, log_sum, {});
  run_backward(call, grads);
  return {grads.query, grads.key, grads.value};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_cpu_masked_backward(const Tensor& grad_output, const Tensor& query,
                                                                         const Tensor& key, const Tensor& value,
                                                                         const Tensor& output, const Tensor& log_sum,
                                                                         const AttentionRule& rule) {
  const Call call(query, key, value, rule);
  Gradients grads(call, grad_output, output, log_sum, MaskSum(call, *rule.mask));
  run_backward(call, grads);
  return {grads.query, grads.key, grads.value, grads.mask.gradient_of(*rule.mask)};
}

}  // namespace oxytorch::ops
