#include "ops/attention_cpu.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "ops/dispatch.h"
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

Rows rows_of_head(const Tensor& tensor, std::int64_t batch, std::int64_t head) {
  const auto* data = static_cast<const char*>(tensor.const_data_ptr()) +
                     (batch * tensor.stride(0) + head * tensor.stride(1)) * tensor.element_size();
  return {optim::element_type(tensor).value(), data, tensor.stride(2), tensor.size(2), tensor.size(3)};
}

// A call with its tensors, and what all threads share.
struct Call {
  Call(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionRule& rule)
      : query(dense(q)),
        key(dense(k)),
        value(dense(v)),
        rule(rule),
        queries(q.size(2)),
        keys(k.size(2)),
        batch(q.size(0)),
        heads(q.size(1)),
        key_heads(k.size(1)),
        group(heads / key_heads),
        width(round_up(q.size(3), kTileStep)),
        format(product_format(optim::element_type(q).value())),
        factor(static_cast<float>(rule.scale)),
        dropped(std::min(static_cast<std::uint32_t>(std::lround(rule.dropout * 65536)), 65535U)),
        kept_factor(65536.0F / static_cast<float>(65536 - dropped)) {
    if (rule.mask.has_value() && rule.mask->defined()) {
      mask = rule.mask->to(at::kFloat).expand({batch, heads, queries.count, keys.count});
    }
  }

  // Whether a tile of keys and one of queries have a visible pair.
  [[nodiscard]] bool meet(std::int64_t key_tile, std::int64_t query_tile) const {
    const std::int64_t k = keys.begin(key_tile), q = queries.begin(query_tile);
    return k - (q + queries.used(query_tile) - 1) <= rule.ahead && q - (k + keys.used(key_tile) - 1) <= rule.behind;
  }

  // Turns raw products into scores, and returns the factor that they still lack.
  float finish_scores(std::int64_t b, std::int64_t h, std::int64_t key_tile, std::int64_t query_tile, float* mask_tile,
                      float* scores) const {
    const std::int64_t k = keys.begin(key_tile), q = queries.begin(query_tile);
    const std::int64_t rows = keys.padded(key_tile), columns = queries.padded(query_tile);
    const bool whole =
        keys.used(key_tile) == rows && k + rows - 1 - q <= rule.ahead && q + columns - 1 - k <= rule.behind;
    if (whole && !mask.defined() && rule.soft_cap == 0) return factor;
    kernels::ScoreRule edit{
        factor, keys.used(key_tile), k - q, rule.ahead, rule.behind, static_cast<float>(rule.soft_cap), nullptr};
    if (mask.defined()) {
      read_mask(b, h, key_tile, query_tile, mask_tile);
      edit.mask = mask_tile;
    }
    kernels::apply_rule(edit, rows, columns, scores);
    return 1;
  }

  // The weights that dropout keeps, or null where it keeps all.
  const std::uint32_t* kept(std::int64_t b, std::int64_t h, std::int64_t key_tile, std::int64_t query_tile,
                            std::uint32_t* keep) const {
    if (dropped == 0) return nullptr;
    kernels::dropout_tile({rule.seed, static_cast<std::uint32_t>(b * heads + h), static_cast<std::uint32_t>(key_tile),
                           static_cast<std::uint32_t>(query_tile), dropped},
                          keys.padded(key_tile), keep);
    return keep;
  }

  void read_mask(std::int64_t b, std::int64_t h, std::int64_t key_tile, std::int64_t query_tile, float* tile) const {
    const std::int64_t along_q = mask.stride(2), along_k = mask.stride(3);
    const float* from = mask.const_data_ptr<float>() + b * mask.stride(0) + h * mask.stride(1) +
                        queries.begin(query_tile) * along_q + keys.begin(key_tile) * along_k;
    const std::int64_t columns = queries.used(query_tile);
    for (std::int64_t i = 0; i < keys.used(key_tile); ++i, tile += kTile) {
      for (std::int64_t j = 0; j < columns; ++j) tile[j] = from[j * along_q + i * along_k];
      std::fill(tile + columns, tile + kTile, 0.0F);
    }
  }

  Tensor query, key, value, mask;
  const AttentionRule& rule;
  Tiled queries, keys;
  std::int64_t batch, heads, key_heads, group, width;
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
        key(scratch, call.format, call.width, call.keys.tiles),
        value(scratch, call.format, call.width, call.keys.tiles),
        plain(scratch, call.format, call.width, 2),
        query(scratch, call.format, call.width, 1),
        scores(scratch.floats(kTile * kTile)),
        mask(scratch.floats(kTile * kTile)),
        weights(scratch.floats(kTile * kTile)),
        keep(reinterpret_cast<std::uint32_t*>(scratch.floats(kTile * kTile))),
        sum(scratch.floats(kTile * call.width)),
        rows(scratch.floats(kTile * call.width)) {}

  void keys_of(std::int64_t b, std::int64_t h) {
    if (loaded == b * call.key_heads + h) return;
    loaded = b * call.key_heads + h;
    const Rows k = rows_of_head(call.key, b, h), v = rows_of_head(call.value, b, h);
    for (std::int64_t tile = 0; tile < call.keys.tiles; ++tile) {
      load(call, k, call.keys, tile, key[tile]);
      load(call, v, call.keys, tile, plain[0]);
      kernels::make_operand(call.format, Operand::LeftTransposed, plain[0], call.keys.padded(tile), call.width,
                            plain[1], value[tile]);
    }
  }

  void run(std::int64_t b, std::int64_t h, std::int64_t query_tile) {
    keys_of(b, h / call.group);
    const std::int64_t columns = call.queries.padded(query_tile), used = call.queries.used(query_tile);
    load(call, rows_of_head(call.query, b, h), call.queries, query_tile, plain[0]);
    kernels::make_operand(call.format, Operand::RightTransposed, plain[0], columns, call.width, plain[1], query[0]);
    kernels::SoftmaxState state;
    state.reset();
    alignas(64) float correction[kTile];
    bool add = false;
    for (std::int64_t tile = 0; tile < call.keys.tiles; ++tile) {
      if (!call.meet(tile, query_tile)) continue;
      const std::int64_t count = call.keys.padded(tile);
      product(call.format, count, columns, call.width, key[tile], call.width, query[0], kTile, scores, kTile, false);
      const float factor = call.finish_scores(b, h, tile, query_tile, mask, scores);
      const bool corrects = kernels::softmax_tile(call.format, factor, count, columns, scores,
                                                  call.kept(b, h, tile, query_tile, keep), state, correction, weights);
      if (add && corrects) kernels::scale_columns(call.width, correction, sum);
      product(call.format, call.width, columns, count, value[tile], kTile, weights, kTile, sum, kTile, add);
      add = true;
    }
    float inverse[kTile];
    auto* logs = log_sum.mutable_data_ptr<float>() + b * log_sum.stride(0) + h * log_sum.stride(1) +
                 call.queries.begin(query_tile) * log_sum.stride(2);
    for (std::int64_t j = 0; j < used; ++j) {
      const bool none = state.sum[j] == 0;
      inverse[j] = none ? 0 : call.kept_factor / state.sum[j];
      logs[j * log_sum.stride(2)] = none ? 0 : state.largest[j] + std::log(state.sum[j]);
    }
    const std::int64_t at = call.queries.begin(query_tile);
    const Rows to = rows_of_head(output, b, h).part(at, used);
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

struct Gradients {
  const Tensor& grad_output;
  const Tensor& output;
  const Tensor& log_sum;
  Tensor query, key, value;
};

struct BackwardWorker {
  BackwardWorker(const Call& call, Gradients& grads)
      : call(call),
        grads(grads),
        key(scratch, call.format, call.width, call.keys.tiles),
        key_transposed(scratch, call.format, call.width, call.keys.tiles),
        value(scratch, call.format, call.width, call.keys.tiles),
        query(scratch, call.format, call.width, call.queries.tiles),
        query_transposed(scratch, call.format, call.width, call.queries.tiles),
        grad(scratch, call.format, call.width, call.queries.tiles),
        grad_transposed(scratch, call.format, call.width, call.queries.tiles),
        plain(scratch, call.format, call.width, 2),
        log_sums(scratch.floats(kTile * call.queries.tiles)),
        deltas(scratch.floats(kTile * call.queries.tiles)),
        scores(scratch.floats(kTile * kTile)),
        mask(scratch.floats(kTile * kTile)),
        gradient(scratch.floats(kTile * kTile)),
        keep(reinterpret_cast<std::uint32_t*>(scratch.floats(kTile * kTile))),
        rows(scratch.floats(kTile * call.width)) {
    for (auto& one : narrow) one = reinterpret_cast<std::uint16_t*>(scratch.bytes(kTile * kTile * 2));
  }

  void keys_of(std::int64_t b, std::int64_t h) {
    if (loaded_keys == b * call.key_heads + h) return;
    loaded_keys = b * call.key_heads + h;
    const Rows k = rows_of_head(call.key, b, h), v = rows_of_head(call.value, b, h);
    for (std::int64_t tile = 0; tile < call.keys.tiles; ++tile) {
      load(call, k, call.keys, tile, key[tile]);
      load(call, v, call.keys, tile, value[tile]);
      kernels::make_operand(call.format, Operand::LeftTransposed, key[tile], call.keys.padded(tile), call.width,
                            plain[1], key_transposed[tile]);
    }
  }

  void queries_of(std::int64_t b, std::int64_t h) {
    if (loaded_queries == b * call.heads + h) return;
    loaded_queries = b * call.heads + h;
    const Rows q = rows_of_head(call.query, b, h), o = rows_of_head(grads.output, b, h),
               g = rows_of_head(grads.grad_output, b, h);
    const auto make = [&](const Rows& rows, std::int64_t tile, Packed& right, Packed& transposed) {
      load(call, rows, call.queries, tile, plain[0]);
      const std::int64_t count = call.queries.padded(tile);
      kernels::make_operand(call.format, Operand::Right, plain[0], count, call.width, plain[1], right[tile]);
      kernels::make_operand(call.format, Operand::RightTransposed, plain[0], count, call.width, plain[1],
                            transposed[tile]);
    };
    const float* logs =
        grads.log_sum.const_data_ptr<float>() + b * grads.log_sum.stride(0) + h * grads.log_sum.stride(1);
    for (std::int64_t tile = 0; tile < call.queries.tiles; ++tile) {
      make(q, tile, query, query_transposed);
      make(g, tile, grad, grad_transposed);
      const std::int64_t at = call.queries.begin(tile), used = call.queries.used(tile);
      kernels::dot_rows(g.part(at, used), o.part(at, used), deltas + at);
      for (std::int64_t j = 0; j < kTile; ++j) {
        // Queries that are padding weigh nothing.
        log_sums[at + j] = j < used ? logs[(at + j) * grads.log_sum.stride(2)] : kInfinity;
        if (j >= used) deltas[at + j] = 0;
      }
    }
  }

  // Adds one tile's share to the gradients that are given.
  void pair(std::int64_t b, std::int64_t h, std::int64_t key_tile, std::int64_t query_tile, float* of_query,
            float* of_key, float* of_value) {
    const std::int64_t count = call.keys.padded(key_tile), columns = call.queries.padded(query_tile);
    const std::int64_t width = call.width;
    const TileFormat format = call.format;
    product(format, count, columns, width, key[key_tile], width, query_transposed[query_tile], kTile, scores, kTile,
            false);
    product(format, count, columns, width, value[key_tile], width, grad_transposed[query_tile], kTile, gradient, kTile,
            false);
    kernels::SoftmaxGradient tile;
    tile.format = format;
    tile.factor = call.finish_scores(b, h, key_tile, query_tile, mask, scores);
    tile.rows = count;
    tile.columns = columns;
    tile.log_sum = log_sums + call.queries.begin(query_tile);
    tile.delta = deltas + call.queries.begin(query_tile);
    tile.cap = static_cast<float>(call.rule.soft_cap);
    tile.mask = call.mask.defined() ? mask : nullptr;
    tile.keep = call.kept(b, h, key_tile, query_tile, keep);
    tile.kept_factor = call.kept_factor;
    tile.scores = scores;
    tile.gradient = gradient;
    tile.weights = narrow[0];
    tile.left_gradient = narrow[1];
    tile.right_gradient = narrow[2];
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

  void store_keys(std::int64_t b, std::int64_t h, std::int64_t tile, const float* of_key, const float* of_value) {
    const std::int64_t at = call.keys.begin(tile), used = call.keys.used(tile);
    const Rows k = rows_of_head(grads.key, b, h).part(at, used), v = rows_of_head(grads.value, b, h).part(at, used);
    kernels::store_rows(of_key, call.width, used, k.columns, static_cast<float>(call.rule.scale), nullptr, k.element,
                        const_cast<void*>(k.data), k.stride);
    kernels::store_rows(of_value, call.width, used, v.columns, call.kept_factor, nullptr, v.element,
                        const_cast<void*>(v.data), v.stride);
  }

  void store_queries(std::int64_t b, std::int64_t h, std::int64_t tile, const float* of_query) {
    const std::int64_t at = call.queries.begin(tile), used = call.queries.used(tile);
    const Rows q = rows_of_head(grads.query, b, h).part(at, used);
    kernels::transpose_words(of_query, kTile, call.width, call.queries.padded(tile), rows, call.width);
    kernels::store_rows(rows, call.width, used, q.columns, static_cast<float>(call.rule.scale), nullptr, q.element,
                        const_cast<void*>(q.data), q.stride);
  }

  // All of one head of keys.
  void head(std::int64_t b, std::int64_t key_head) {
    const std::int64_t tile_size = kTile * call.width;
    if (of_keys == nullptr) {
      of_keys = scratch.floats(tile_size * call.keys.tiles);
      of_values = scratch.floats(tile_size * call.keys.tiles);
      of_queries = scratch.floats(tile_size * call.queries.tiles);
    }
    keys_of(b, key_head);
    std::fill_n(of_keys, tile_size * call.keys.tiles, 0.0F);
    std::fill_n(of_values, tile_size * call.keys.tiles, 0.0F);
    for (std::int64_t h = key_head * call.group; h < (key_head + 1) * call.group; ++h) {
      queries_of(b, h);
      std::fill_n(of_queries, tile_size * call.queries.tiles, 0.0F);
      for (std::int64_t k = 0; k < call.keys.tiles; ++k) {
        for (std::int64_t q = 0; q < call.queries.tiles; ++q) {
          if (!call.meet(k, q)) continue;
          pair(b, h, k, q, of_queries + q * tile_size, of_keys + k * tile_size, of_values + k * tile_size);
        }
      }
      for (std::int64_t q = 0; q < call.queries.tiles; ++q) store_queries(b, h, q, of_queries + q * tile_size);
    }
    for (std::int64_t k = 0; k < call.keys.tiles; ++k) {
      store_keys(b, key_head, k, of_keys + k * tile_size, of_values + k * tile_size);
    }
  }

  // One tile of keys, or one of queries: more work, which more threads can share. The sums are head()'s.
  void one_of_keys(std::int64_t b, std::int64_t key_head, std::int64_t k) {
    const std::int64_t tile_size = kTile * call.width;
    if (of_keys == nullptr) {
      of_keys = scratch.floats(tile_size);
      of_values = scratch.floats(tile_size);
    }
    keys_of(b, key_head);
    std::fill_n(of_keys, tile_size, 0.0F);
    std::fill_n(of_values, tile_size, 0.0F);
    for (std::int64_t h = key_head * call.group; h < (key_head + 1) * call.group; ++h) {
      queries_of(b, h);
      for (std::int64_t q = 0; q < call.queries.tiles; ++q) {
        if (call.meet(k, q)) pair(b, h, k, q, nullptr, of_keys, of_values);
      }
    }
    store_keys(b, key_head, k, of_keys, of_values);
  }
  void one_of_queries(std::int64_t b, std::int64_t h, std::int64_t q) {
    const std::int64_t tile_size = kTile * call.width;
    if (of_queries == nullptr) of_queries = scratch.floats(tile_size);
    keys_of(b, h / call.group);
    queries_of(b, h);
    std::fill_n(of_queries, tile_size, 0.0F);
    for (std::int64_t k = 0; k < call.keys.tiles; ++k) {
      if (call.meet(k, q)) pair(b, h, k, q, of_queries, nullptr, nullptr);
    }
    store_queries(b, h, q, of_queries);
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

// Items [0, count), each thread with a worker of its own.
template <class Make, class Run>
void in_parallel(const Call& call, std::int64_t count, const Make& make, const Run& run) {
  at::parallel_for(0, count, 1, [&](std::int64_t begin, std::int64_t end) {
    const ProductScope products(call.format);
    auto worker = make();
    for (std::int64_t item = begin; item < end; ++item) run(worker, item);
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
                    query.numel() > 0 && key.numel() > 0 && query.size(1) % key.size(1) == 0;
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
  Tensor output = at::empty_like(query);
  if (output.stride(3) != 1) output = at::empty(query.sizes(), query.options());
  Tensor log_sum =
      at::empty({call.batch, call.queries.count, call.heads}, query.options().dtype(at::kFloat)).transpose(1, 2);
  const std::int64_t tiles = call.queries.tiles;
  in_parallel(
      call, call.batch * call.heads * tiles, [&] { return ForwardWorker(call, output, log_sum); },
      [&](ForwardWorker& worker, std::int64_t item) {
        const std::int64_t head = item / tiles;
        worker.run(head / call.heads, head % call.heads, item % tiles);
      });
  return {output, log_sum};
}

std::tuple<Tensor, Tensor, Tensor> attention_cpu_backward(const Tensor& grad_output, const Tensor& query,
                                                          const Tensor& key, const Tensor& value, const Tensor& output,
                                                          const Tensor& log_sum, const AttentionRule& rule) {
  const Call call(query, key, value, rule);
  const auto empty = [](const Tensor& like) {
    return at::empty({like.size(0), like.size(2), like.size(1), like.size(3)}, like.options()).transpose(1, 2);
  };
  const Tensor from = dense(grad_output), out = dense(output);
  Gradients grads{from, out, log_sum, empty(query), empty(key), empty(value)};
  const auto make = [&] { return BackwardWorker(call, grads); };
  const std::int64_t heads = call.batch * call.key_heads;
  if (heads % at::get_num_threads() == 0 || heads >= 4 * at::get_num_threads()) {
    in_parallel(call, heads, make, [&](BackwardWorker& worker, std::int64_t item) {
      worker.head(item / call.key_heads, item % call.key_heads);
    });
    return {grads.query, grads.key, grads.value};
  }
  in_parallel(call, heads * call.keys.tiles, make, [&](BackwardWorker& worker, std::int64_t item) {
    const std::int64_t head = item / call.keys.tiles;
    worker.one_of_keys(head / call.key_heads, head % call.key_heads, item % call.keys.tiles);
  });
  in_parallel(call, call.batch * call.heads * call.queries.tiles, make, [&](BackwardWorker& worker, std::int64_t item) {
    const std::int64_t head = item / call.queries.tiles;
    worker.one_of_queries(head / call.heads, head % call.heads, item % call.queries.tiles);
  });
  return {grads.query, grads.key, grads.value};
}

}  // namespace oxytorch::ops
