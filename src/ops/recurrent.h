/// What layers that take a batch through a sequence step by step have in common: a tile of the batch's rows as the work
/// of a thread, packed weights, products with the input for several steps at a time, gradients of the weights.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "ops/product.h"
#include "ops/tiles.h"
#include "oxytorch/kernels/attention.h"

namespace oxytorch::ops {

/// A layer in one direction: `gates` sums for each unit of its state, which lie side by side, `width` columns each.
struct RecurrentSizes {
  /// `input` is steps x batch x features; products are computed in the format of `element`, F32 or BF16.
  RecurrentSizes(const at::Tensor& input, std::int64_t hidden, std::int64_t gates, bool reverse,
                 kernels::ElementType element);

  [[nodiscard]] std::int64_t time(std::int64_t step) const { return reverse ? steps - 1 - step : step; }
  [[nodiscard]] std::int64_t begin(std::int64_t tile) const { return tile * rows; }
  [[nodiscard]] std::int64_t used(std::int64_t tile) const { return std::min(rows, batch - begin(tile)); }
  /// Steps whose products with the input are made together: as many as a cache near the core holds.
  [[nodiscard]] std::int64_t steps_together() const;

  std::int64_t steps, batch, features, hidden, gates;
  std::int64_t width, sums;  ///< of one gate, and of all
  bool reverse;
  kernels::ElementType element;  ///< of what is kept for backward, and of gradients of sums
  std::int64_t element_size;
  kernels::TileFormat format;
  std::int64_t format_size;
  std::int64_t rows, tiles;  ///< of the batch that a thread takes through all steps; of sizes alone
};

/// `count` rows from `first` of a step of a dense() tensor of steps x batch x columns.
[[nodiscard]] kernels::Rows rows_at(const at::Tensor& tensor, std::int64_t step, std::int64_t first,
                                    std::int64_t count);

/// A batch's state as one step of a sequence.
[[nodiscard]] inline at::Tensor as_step(const at::Tensor& state) { return dense(state).unsqueeze(0); }

/// The rows of a tile at a step of a tensor of steps x batch x hidden, as `rows` x `width` with zeros for the rest.
void load_step(const RecurrentSizes& sizes, const at::Tensor& states, std::int64_t step, std::int64_t tile, float* to);

/// And from rows that are `stride` apart into a step of a dense() tensor.
void store_step(const RecurrentSizes& sizes, const float* from, std::int64_t stride, const at::Tensor& states,
                std::int64_t step, std::int64_t tile);

/// The biases of torch, which lie next to each other, `width` columns apart; `to` has zeros.
void spread_bias(const RecurrentSizes& sizes, const float* bias, std::int64_t gates, float* to);

/// Weights of gates x hidden rows as right operands of products in blocks of kTile x kTile.
class RecurrentWeights {
 public:
  /// Transposed, so that rows times them are sums of gates; or as they are, for sums of gates times them. `first` is
  /// the gate that comes first, and those before it come last.
  RecurrentWeights(const RecurrentSizes& sizes, const at::Tensor& weight, bool transposed, std::int64_t first = 0);

  /// Columns of an operand whose rows have those of the weight.
  [[nodiscard]] std::int64_t columns() const { return columns_; }

  /// Sums of the products of `count` rows of the other operand, `stride` elements apart, with what is given here.
  void multiply(const RecurrentSizes& sizes, const std::byte* rows, std::int64_t count, std::int64_t stride, float* to,
                bool add) const;

 private:
  std::int64_t columns_, across_, down_;
  bool transposed_;
  Scratch scratch_;
  Packed blocks_;
};

/// Products of a tile's rows of the input with the weights.
class InputProducts {
 public:
  InputProducts(const RecurrentSizes& sizes, const at::Tensor& input, const RecurrentWeights& weights,
                std::int64_t tile);

  /// Those of a step, `rows` x `sums`, to be written to. Steps are asked for in their order.
  float* of(std::int64_t step);

 private:
  const RecurrentSizes& sizes_;
  const at::Tensor& input_;
  const RecurrentWeights& weights_;
  std::int64_t tile_, together_;
  Scratch scratch_;
  std::byte* rows_;
  float* products_;
};

/// Rows of a tile as the left operand of products: as they are, or converted.
class LeftRows {
 public:
  LeftRows(const RecurrentSizes& sizes, kernels::ElementType element, std::int64_t columns);

  /// `rows` x `columns`, until the next call.
  const std::byte* of(const void* rows);

 private:
  const RecurrentSizes& sizes_;
  kernels::ElementType element_;
  std::int64_t columns_;
  Scratch scratch_;
  std::byte* converted_ = nullptr;
};

/// For each of `factors`, the gradient of the weights that its rows were multiplied with: the transposed `of_sums`
/// times them, in `type`.
std::vector<at::Tensor> weight_gradients(const RecurrentSizes& sizes, const at::Tensor& of_sums,
                                         const std::vector<at::Tensor>& factors, at::ScalarType type);

/// Sums of the columns of a dense() matrix, in float32. The same bits for any number of threads.
at::Tensor sums_of_columns(const at::Tensor& matrix);

/// Takes each tile through all steps on one thread, by `pass.run(tile)`.
template <class Pass>
void run_tiles(const RecurrentSizes& sizes, Pass& pass) {
  at::parallel_for(0, sizes.tiles, 1, [&](std::int64_t begin, std::int64_t end) {
    const ProductScope scope(sizes.format);
    for (std::int64_t tile = begin; tile < end; ++tile) pass.run(tile);
  });
}

}  // namespace oxytorch::ops
