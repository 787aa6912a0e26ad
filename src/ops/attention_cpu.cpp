#include "ops/attention_cpu.h"

#include <ATen/ExpandUtils.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "ops/attention_call.h"
#include "ops/dispatch.h"
#include "ops/product.h"
#include "ops/shares.h"
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

// The plain tiles of one matrix.
void load(const AttentionCall& call, const Rows& rows, const Tiled& side, std::int64_t tile, std::byte* to) {
  kernels::load_tile(call.format, rows.part(side.begin(tile), side.used(tile)), side.padded(tile), call.width, to);
}

// Keys or values of a head as transposed left operands, each of a block of key_run.
struct TransposedKeys {
  TransposedKeys(const AttentionCall& call, Scratch& scratch)
      : call(call),
        stride(call.key_run * kTile),
        blocks(scratch, call.format, call.width, round_up(call.most_key_tiles, call.key_run)) {}
  [[nodiscard]] std::byte* operator[](std::int64_t tile) const {
    const std::int64_t within = tile % call.key_run;
    return blocks[tile - within] + within * kTile * (call.format == TileFormat::BFloat16 ? 2 : 4);
  }
  // From a plain tile; `work` has its size.
  void make(const AttentionDocument& in, std::int64_t tile, const std::byte* plain, std::byte* work) const {
    kernels::make_operand(call.format, Operand::LeftTransposed, plain, in.keys.padded(tile), call.width, work,
                          (*this)[tile], stride);
  }

  const AttentionCall& call;
  std::int64_t stride;
  Packed blocks;
};

struct ForwardWorker {
  ForwardWorker(const AttentionCall& call, Tensor& output, Tensor& log_sum)
      : call(call),
        output(output),
        log_sum(log_sum),
        key(scratch, call.format, call.width, call.most_key_tiles),
        value(call, scratch),
        plain(scratch, call.format, call.width, 2),
        query(scratch, call.format, call.width, 1),
        scores(scratch.floats(call.key_run * AttentionCall::kScores)),
        mask(scratch.floats(call.key_run * AttentionCall::kScores)),
        weights(scratch.floats(call.key_run * AttentionCall::kScores)),
        keep(reinterpret_cast<std::uint32_t*>(scratch.floats(call.key_run * AttentionCall::kScores))),
        sum(scratch.floats(kTile * call.width)),
        rows(scratch.floats(kTile * call.width)) {}

  void keys_of(const AttentionDocument& in, std::int64_t h) {
    if (loaded == in.number * call.key_heads + h || in.keys.count == 0) return;
    loaded = in.number * call.key_heads + h;
    const Rows k = in.key_rows(call.key, h), v = in.key_rows(call.value, h);
    for (std::int64_t tile = 0; tile < in.keys.tiles; ++tile) {
      load(call, k, in.keys, tile, key[tile]);
      load(call, v, in.keys, tile, plain[0]);
      value.make(in, tile, plain[0], plain[1]);
    }
  }

  void run(const AttentionDocument& in, std::int64_t h, std::int64_t query_tile) {
    keys_of(in, h / call.group);
    const std::int64_t columns = in.queries.padded(query_tile), used = in.queries.used(query_tile);
    load(call, in.query_rows(call.query, h), in.queries, query_tile, plain[0]);
    kernels::make_operand(call.format, Operand::RightTransposed, plain[0], columns, call.width, plain[1], query[0]);
    kernels::SoftmaxState state;
    state.reset();
    alignas(64) float correction[kTile];
    bool add = false;
    call.each_run(in, h, 0, in.keys.tiles, query_tile, [&](const TileRun& run) {
      const std::int64_t count = run.rows(in.keys);
      product(call.format, count, columns, call.width, key[run.first], call.width, query[0], kTile, scores, kTile,
              false);
      const float factor = call.finish_scores(in, h, run, query_tile, mask, scores);
      const bool corrects = kernels::softmax_tile(call.format, factor, count, columns, scores,
                                                  call.kept(in, h, run, query_tile, keep), state, correction, weights);
      if (add && corrects) kernels::scale_columns(call.width, correction, sum);
      product(call.format, call.width, columns, count, value[run.first], value.stride, weights, kTile, sum, kTile, add);
      add = true;
    });
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

  const AttentionCall& call;
  Tensor& output;
  Tensor& log_sum;
  Scratch scratch;
  Packed key;
  TransposedKeys value;
  Packed plain, query;
  float *scores, *mask, *weights;
  std::uint32_t* keep;
  float *sum, *rows;
  std::int64_t loaded = -1;
};

// The sum of a mask's gradient over the samples and heads that share it: keys x queries, as tiles of scores lie.
class MaskSum {
 public:
  MaskSum() = default;
  MaskSum(const AttentionCall& call, const Tensor& mask)
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
  Gradients(const AttentionCall& call, const Tensor& grad_output, const Tensor& output, const Tensor& log_sum,
            MaskSum mask)
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
  BackwardWorker(const AttentionCall& call, Gradients& grads)
      : call(call),
        grads(grads),
        key(scratch, call.format, call.width, call.most_key_tiles),
        key_transposed(call, scratch),
        value(scratch, call.format, call.width, call.most_key_tiles),
        query(scratch, call.format, call.width, call.most_query_tiles),
        query_transposed(scratch, call.format, call.width, call.most_query_tiles),
        grad(scratch, call.format, call.width, call.most_query_tiles),
        grad_transposed(scratch, call.format, call.width, call.most_query_tiles),
        plain(scratch, call.format, call.width, 2),
        log_sums(scratch.floats(kTile * call.most_query_tiles)),
        deltas(scratch.floats(kTile * call.most_query_tiles)),
        scores(scratch.floats(call.key_run * AttentionCall::kScores)),
        mask(scratch.floats(call.key_run * AttentionCall::kScores)),
        gradient(scratch.floats(call.key_run * AttentionCall::kScores)),
        keep(reinterpret_cast<std::uint32_t*>(scratch.floats(call.key_run * AttentionCall::kScores))),
        rows(scratch.floats(kTile * call.width)) {
    const std::int64_t of_runs = call.key_run * call.query_run * AttentionCall::kScores;
    for (auto& one : narrow) one = reinterpret_cast<std::uint16_t*>(scratch.bytes(of_runs * 2));
  }

  void keys_of(const AttentionDocument& in, std::int64_t h) {
    if (loaded_keys == in.number * call.key_heads + h || in.keys.count == 0) return;
    loaded_keys = in.number * call.key_heads + h;
    const Rows k = in.key_rows(call.key, h), v = in.key_rows(call.value, h);
    for (std::int64_t tile = 0; tile < in.keys.tiles; ++tile) {
      load(call, k, in.keys, tile, key[tile]);
      load(call, v, in.keys, tile, value[tile]);
      key_transposed.make(in, tile, key[tile], plain[1]);
    }
  }

  void queries_of(const AttentionDocument& in, std::int64_t h) {
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

  // Adds the share of a run of each to the gradients that are given; to that of the mask with the keys'.
  void multiply(const AttentionDocument& in, std::int64_t h, const TileRun& keys, const TileRun& queries,
                float* of_queries, float* of_keys, float* of_values) {
    const std::int64_t count = keys.rows(in.keys), width = call.width, stride = queries.tiles * kTile;
    const TileFormat format = call.format;
    const bool paired = format == TileFormat::BFloat16;
    for (std::int64_t i = 0; i < queries.tiles; ++i) {
      const std::int64_t at = queries.first + i, columns = in.queries.padded(at);
      product(format, count, columns, width, key[keys.first], width, query_transposed[at], kTile, scores, kTile, false);
      product(format, count, columns, width, value[keys.first], width, grad_transposed[at], kTile, gradient, kTile,
              false);
      kernels::SoftmaxGradient tile;
      tile.format = format;
      tile.factor = call.finish_scores(in, h, keys, at, mask, scores);
      tile.rows = count;
      tile.columns = columns;
      tile.log_sum = log_sums + in.queries.begin(at);
      tile.delta = deltas + in.queries.begin(at);
      tile.cap = static_cast<float>(call.rule.soft_cap);
      tile.mask = call.mask.defined() ? mask : nullptr;
      tile.keep = call.kept(in, h, keys, at, keep);
      tile.kept_factor = call.kept_factor;
      tile.scores = scores;
      tile.gradient = gradient;
      tile.weights = narrow[0] + i * kTile;
      tile.left_gradient = narrow[1] + i * kTile;
      tile.left_stride = stride;
      tile.right_gradient = narrow[2];
      if (of_values != nullptr && grads.mask.is_wanted()) {
        tile.mask_gradient = grads.mask.tile(in.sample, h, keys.first, at);
        tile.mask_stride = grads.mask.stride();
      }
      kernels::softmax_gradient(tile);
      if (of_queries == nullptr) continue;
      product(format, width, columns, count, key_transposed[keys.first], key_transposed.stride,
              paired ? static_cast<void*>(narrow[2]) : gradient, kTile, of_queries + i * kTile * width, kTile, true);
    }
    if (of_values == nullptr) return;
    const std::int64_t columns = queries.rows(in.queries);
    product(format, count, width, columns, paired ? static_cast<void*>(narrow[0]) : scores, stride, grad[queries.first],
            width, of_values, width, true);
    product(format, count, width, columns, paired ? static_cast<void*>(narrow[1]) : gradient, stride,
            query[queries.first], width, of_keys, width, true);
  }

  void store_keys(const AttentionDocument& in, std::int64_t h, std::int64_t tile, const float* of_key,
                  const float* of_value) {
    const std::int64_t at = in.keys.begin(tile), used = in.keys.used(tile);
    const Rows k = in.key_rows(grads.key, h).part(at, used), v = in.key_rows(grads.value, h).part(at, used);
    kernels::store_rows(of_key, call.width, used, k.columns, static_cast<float>(call.rule.scale), nullptr, k.element,
                        const_cast<void*>(k.data), k.stride);
    kernels::store_rows(of_value, call.width, used, v.columns, call.kept_factor, nullptr, v.element,
                        const_cast<void*>(v.data), v.stride);
  }

  void store_queries(const AttentionDocument& in, std::int64_t h, std::int64_t tile, const float* of_query) {
    const std::int64_t at = in.queries.begin(tile), used = in.queries.used(tile);
    const Rows q = in.query_rows(grads.query, h).part(at, used);
    kernels::transpose_words(of_query, kTile, call.width, in.queries.padded(tile), rows, call.width);
    kernels::store_rows(rows, call.width, used, q.columns, static_cast<float>(call.rule.scale), nullptr, q.element,
                        const_cast<void*>(q.data), q.stride);
  }

  // All of one head of keys.
  void head(const AttentionDocument& in, std::int64_t key_head) {
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
      for (std::int64_t k = 0; k < in.keys.tiles; k += call.key_run) {
        call.each_meeting(in, h, k, [&](const TileRun& keys, const TileRun& queries) {
          const std::int64_t at = keys.first * tile_size;
          multiply(in, h, keys, queries, of_queries + queries.first * tile_size, of_keys + at, of_values + at);
        });
      }
      for (std::int64_t q = 0; q < in.queries.tiles; ++q) store_queries(in, h, q, of_queries + q * tile_size);
    }
    for (std::int64_t k = 0; k < in.keys.tiles; ++k) {
      store_keys(in, key_head, k, of_keys + k * tile_size, of_values + k * tile_size);
    }
  }

  // One tile of keys, or one of queries: more work, which more threads can share. The sums are head()'s.
  void one_of_keys(const AttentionDocument& in, std::int64_t key_head, std::int64_t k) {
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
      call.each_meeting(in, h, k / call.key_run * call.key_run, [&](const TileRun& keys, const TileRun& queries) {
        if (keys.holds(k)) multiply(in, h, {k, 1}, queries, nullptr, of_keys, of_values);
      });
    }
    store_keys(in, key_head, k, of_keys, of_values);
  }
  void one_of_queries(const AttentionDocument& in, std::int64_t h, std::int64_t q) {
    const std::int64_t tile_size = kTile * call.width;
    if (of_queries == nullptr) of_queries = scratch.floats(tile_size);
    keys_of(in, h / call.group);
    queries_of(in, h);
    std::fill_n(of_queries, tile_size, 0.0F);
    call.each_run(in, h, 0, in.keys.tiles, q,
                  [&](const TileRun& run) { multiply(in, h, run, {q, 1}, of_queries, nullptr, nullptr); });
    store_queries(in, h, q, of_queries);
  }

  const AttentionCall& call;
  Gradients& grads;
  Scratch scratch;
  Packed key;
  TransposedKeys key_transposed;
  Packed value, query, query_transposed, grad, grad_transposed, plain;
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
  const AttentionDocument* document;
  std::int64_t head, tile;
  double cost;        // in scores
  std::int64_t unit;  // items of one are done by one thread, in their order
};

// By unit. What is added to one place of `sum` is of one unit.
std::vector<Item> items_of(const AttentionCall& call, Piece piece, const MaskSum& sum) {
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

// Units in a row, cut into a share for each thread. Documents differ in length, so shares are equal in cost.
class Schedule {
 public:
  Schedule(const AttentionCall& call, Piece piece, const MaskSum& sum = {})
      : call_(call), items_(items_of(call, piece, sum)) {
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
      first_.resize(std::max(first_.size(), share + 1), static_cast<std::int64_t>(units_.size()));
      units_.push_back(i);
      costs[share] += cost;
      before += cost;
      i = end;
    }
    first_.resize(threads + 1, static_cast<std::int64_t>(units_.size()));
    units_.push_back(items_.size());
    is_even_ = *std::max_element(costs.begin(), costs.end()) * static_cast<double>(threads) <= 1.25 * total;
  }

  // Whether no thread has much more to do than others.
  [[nodiscard]] bool is_even() const { return is_even_; }

  // Runs all items, each thread with a worker of its own.
  template <class Make, class Run>
  void run(const Make& make, const Run& run) const {
    share_out(first_, [&](const auto& take) {
      std::int64_t unit = take();
      if (unit < 0) return;
      const ProductScope products(call_.format);
      auto worker = make();
      for (; unit >= 0; unit = take()) {
        for (auto i = units_[static_cast<std::size_t>(unit)]; i < units_[static_cast<std::size_t>(unit) + 1]; ++i) {
          run(worker, items_[i]);
        }
      }
    });
  }

 private:
  const AttentionCall& call_;
  std::vector<Item> items_;
  std::vector<std::size_t> units_;   // the first item of each, and the end
  std::vector<std::int64_t> first_;  // the first unit of each share, and the end
  bool is_even_ = true;
};

void run_backward(const AttentionCall& call, Gradients& grads) {
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
  const AttentionCall call(query, key, value, rule);
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
  const AttentionCall call(query, key, value, rule);
  Gradients grads(call, grad_output, output, log_sum, {});
  run_backward(call, grads);
  return {grads.query, grads.key, grads.value};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_cpu_masked_backward(const Tensor& grad_output, const Tensor& query,
                                                                         const Tensor& key, const Tensor& value,
                                                                         const Tensor& output, const Tensor& log_sum,
                                                                         const AttentionRule& rule) {
  const AttentionCall call(query, key, value, rule);
  Gradients grads(call, grad_output, output, log_sum, MaskSum(call, *rule.mask));
  run_backward(call, grads);
  return {grads.query, grads.key, grads.value, grads.mask.gradient_of(*rule.mask)};
}

}  // namespace oxytorch::ops
