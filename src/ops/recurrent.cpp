#include "ops/recurrent.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "optim/dense.h"

namespace oxytorch::ops {
namespace {

using at::Tensor;
using kernels::kTile;
using kernels::kTileStep;
using kernels::Operand;
using kernels::Rows;
using kernels::TileFormat;

// Few, so that there is work for many threads, and more where they share weights that no cache near a core holds. Of
// sizes alone, so that no sum depends on the number of threads.
std::int64_t rows_of_tile(std::int64_t batch, std::int64_t weight_bytes) {
  constexpr std::int64_t kNear = std::int64_t{4} << 20;
  const std::int64_t many = weight_bytes > kNear ? 64 : 128;
  return batch < many ? 16 : batch < 512 ? 32 : 64;
}

// Terms of a product of gradients, and tiles of units in it: both operands are near the core, and sums are read and
// written once for that many. In float32 fewer, since sums of short sums lose fewer digits.
constexpr std::int64_t kTerms = 512, kTermsOfFloat32 = kTile, kUnitTiles = 2;

// Rows of a matrix as the right operand of products, in blocks of kTile x kTile.
struct RightRows {
  RightRows(const RecurrentSizes& sizes, const Tensor& from)
      : rows(from),
        along(from.size(0)),
        across(from.size(1)),
        blocks(scratch, sizes.format, kTile, along.tiles * across.tiles) {
    at::parallel_for(0, along.tiles, 4, [&](std::int64_t begin, std::int64_t end) {
      Scratch own;
      const Packed plain(own, sizes.format, kTile, 2);
      for (std::int64_t tile = begin; tile < end; ++tile) {
        if (sizes.format == TileFormat::BFloat16) {
          kernels::pack_panels(rows_of(rows).part(along.begin(tile), along.used(tile)), along.padded(tile),
                               blocks[tile], along.tiles * kTile * kTile);
          continue;
        }
        for (std::int64_t column = 0; column < across.tiles; ++column) {
          Rows whole = rows_of(rows);
          whole.data = static_cast<const char*>(whole.data) + across.begin(column) * rows.element_size();
          whole.columns = across.used(column);
          kernels::load_tile(sizes.format, whole.part(along.begin(tile), along.used(tile)), along.padded(tile), kTile,
                             plain[0]);
          kernels::make_operand(sizes.format, Operand::Right, plain[0], along.padded(tile), kTile, plain[1],
                                blocks[column * along.tiles + tile]);
        }
      }
    });
  }

  Tensor rows;
  Tiled along, across;
  Scratch scratch;
  Packed blocks;
};

}  // namespace

RecurrentSizes::RecurrentSizes(const Tensor& input, std::int64_t hidden, std::int64_t gates, bool reverse,
                               kernels::ElementType element)
    : steps(input.size(0)),
      batch(input.size(1)),
      features(input.size(2)),
      hidden(hidden),
      gates(gates),
      width(round_up(hidden, kTileStep)),
      sums(gates * width),
      reverse(reverse),
      element(element),
      element_size(element == kernels::ElementType::F32 ? 4 : 2),
      format(product_format(element)),
      format_size(format == TileFormat::BFloat16 ? 2 : 4),
      rows(rows_of_tile(batch, sums * width * format_size)),
      tiles(round_up(batch, rows) / rows) {}

std::int64_t RecurrentSizes::steps_together() const {
  constexpr std::int64_t kSums = 65536;
  return std::clamp<std::int64_t>(std::min(kTile / rows, kSums / (rows * sums)), 1, steps);
}

Rows rows_at(const Tensor& tensor, std::int64_t step, std::int64_t first, std::int64_t count) {
  const auto* data = static_cast<const char*>(tensor.const_data_ptr()) +
                     (step * tensor.stride(0) + first * tensor.stride(1)) * tensor.element_size();
  return {optim::element_type(tensor).value(), data, tensor.stride(1), count, tensor.size(2)};
}

void load_step(const RecurrentSizes& sizes, const Tensor& states, std::int64_t step, std::int64_t tile, float* to) {
  kernels::load_tile(TileFormat::Float32, rows_at(states, step, sizes.begin(tile), sizes.used(tile)), sizes.rows,
                     sizes.width, to);
}

void store_step(const RecurrentSizes& sizes, const float* from, std::int64_t stride, const Tensor& states,
                std::int64_t step, std::int64_t tile) {
  const Rows to = rows_at(states, step, sizes.begin(tile), sizes.used(tile));
  kernels::store_rows(from, stride, to.rows, to.columns, 1, nullptr, to.element, const_cast<void*>(to.data), to.stride);
}

void spread_bias(const RecurrentSizes& sizes, const float* bias, std::int64_t gates, float* to) {
  for (std::int64_t gate = 0; gate < gates; ++gate) {
    std::copy_n(bias + gate * sizes.hidden, sizes.hidden, to + gate * sizes.width);
  }
}

RecurrentWeights::RecurrentWeights(const RecurrentSizes& sizes, const Tensor& weight, bool transposed,
                                   std::int64_t first)
    : columns_(round_up(weight.size(1), kTileStep)),
      across_(Tiled(columns_).tiles),
      down_(round_up(sizes.sums, kTile) / kTile),
      transposed_(transposed),
      blocks_(scratch_, sizes.format, kTile, across_ * down_) {
  const Tensor from = weight.contiguous();
  const auto element = optim::element_type(from).value();
  const auto* data = static_cast<const char*>(from.const_data_ptr());
  at::parallel_for(0, down_, 1, [&](std::int64_t begin, std::int64_t end) {
    Scratch scratch;
    const Packed plain(scratch, sizes.format, kTile, 2);
    for (std::int64_t i = begin * across_; i < end * across_; ++i) {
      const std::int64_t down = i / across_, column = i % across_ * kTile;
      for (std::int64_t at = 0; at < kTile; at += kTileStep) {
        const std::int64_t row = down * kTile + at, unit = row % sizes.width;
        const std::int64_t gate = (row / sizes.width + first) % sizes.gates;
        // Rows beyond the last gate fill the last block.
        const std::int64_t count = row < sizes.sums ? std::clamp<std::int64_t>(sizes.hidden - unit, 0, kTileStep) : 0;
        const std::int64_t begins = gate * sizes.hidden + std::min(unit, sizes.hidden);
        const Rows rows{element, data + (begins * from.size(1) + column) * from.element_size(), from.size(1), count,
                        std::min(kTile, from.size(1) - column)};
        kernels::load_tile(sizes.format, rows, kTileStep, kTile, plain[0] + at * kTile * sizes.format_size);
      }
      kernels::make_operand(sizes.format, transposed ? Operand::RightTransposed : Operand::Right, plain[0], kTile,
                            kTile, plain[1], blocks_[transposed ? i : i % across_ * down_ + down]);
    }
  });
}

void RecurrentWeights::multiply(const RecurrentSizes& sizes, const std::byte* rows, std::int64_t count,
                                std::int64_t stride, float* to, bool add) const {
  const std::int64_t length = transposed_ ? columns_ : sizes.sums, wide = transposed_ ? sizes.sums : columns_;
  const std::int64_t along = transposed_ ? across_ : down_;
  for (std::int64_t panel = 0; panel < Tiled(wide).tiles; ++panel) {
    product(sizes.format, count, std::min(kTile, wide - panel * kTile), length, rows, stride, blocks_[panel * along],
            kTile, to + panel * kTile, wide, add);
  }
}

InputProducts::InputProducts(const RecurrentSizes& sizes, const Tensor& input, const RecurrentWeights& weights,
                             std::int64_t tile)
    : sizes_(sizes),
      input_(input),
      weights_(weights),
      tile_(tile),
      together_(sizes.steps_together()),
      rows_(scratch_.bytes(together_ * sizes.rows * weights.columns() * sizes.format_size)),
      products_(scratch_.floats(together_ * sizes.rows * sizes.sums)) {}

float* InputProducts::of(std::int64_t step) {
  const std::int64_t here = step % together_, columns = weights_.columns();
  if (here == 0) {
    const std::int64_t count = std::min(together_, sizes_.steps - step);
    for (std::int64_t i = 0; i < count; ++i) {
      kernels::load_tile(sizes_.format, rows_at(input_, sizes_.time(step + i), sizes_.begin(tile_), sizes_.used(tile_)),
                         sizes_.rows, columns, rows_ + i * sizes_.rows * columns * sizes_.format_size);
    }
    weights_.multiply(sizes_, rows_, count * sizes_.rows, columns, products_, false);
  }
  return products_ + here * sizes_.rows * sizes_.sums;
}

LeftRows::LeftRows(const RecurrentSizes& sizes, kernels::ElementType element, std::int64_t columns)
    : sizes_(sizes), element_(element), columns_(columns) {
  const bool is_wide = element == kernels::ElementType::F32, is_wanted_wide = sizes.format == TileFormat::Float32;
  if (is_wide != is_wanted_wide) converted_ = scratch_.bytes(sizes.rows * columns * sizes.format_size);
}

const std::byte* LeftRows::of(const void* rows) {
  if (converted_ == nullptr) return static_cast<const std::byte*>(rows);
  kernels::load_tile(sizes_.format, {element_, rows, columns_, sizes_.rows, columns_}, sizes_.rows, columns_,
                     converted_);
  return converted_;
}

std::vector<Tensor> weight_gradients(const RecurrentSizes& sizes, const Tensor& of_sums,
                                     const std::vector<Tensor>& factors, at::ScalarType type) {
  const Tiled along(of_sums.size(0)), units(of_sums.size(1));
  std::vector<RightRows> right;
  right.reserve(factors.size());
  std::vector<Tensor> results;
  for (const Tensor& factor : factors) {
    right.emplace_back(sizes, factor);
    results.push_back(at::empty({units.count, factor.size(1)}, factor.options().dtype(type)));
  }
  // Rows of a left operand lie a little further apart: at powers of two, few sets of a cache would hold them.
  const std::int64_t length = along.begin(along.tiles - 1) + along.padded(along.tiles - 1), stride = length + kTile / 2;
  const std::int64_t terms = sizes.format == TileFormat::BFloat16 ? kTerms : kTermsOfFloat32;
  const std::int64_t groups = (units.tiles - 1) / kUnitTiles + 1;
  at::parallel_for(0, groups, 1, [&](std::int64_t begin, std::int64_t end) {
    const ProductScope scope(sizes.format);
    Scratch scratch;
    const Packed plain(scratch, sizes.format, kTile, 1);
    std::byte* left = scratch.bytes(kUnitTiles * kTile * stride * sizes.format_size);
    float* sums = scratch.floats(kUnitTiles * kTile * kTile);
    for (std::int64_t group = begin; group < end; ++group) {
      const std::int64_t first = group * kUnitTiles, last = std::min(units.tiles, first + kUnitTiles);
      for (std::int64_t unit = first; unit < last; ++unit) {
        Rows rows = rows_of(of_sums);
        rows.data = static_cast<const char*>(rows.data) + units.begin(unit) * of_sums.element_size();
        rows.columns = units.used(unit);
        for (std::int64_t tile = 0; tile < along.tiles; ++tile) {
          std::byte* to = left + ((unit - first) * kTile * stride + along.begin(tile)) * sizes.format_size;
          const Rows part = rows.part(along.begin(tile), along.used(tile));
          if (sizes.format == TileFormat::BFloat16) {
            kernels::pack_operand(Operand::LeftTransposed, part, along.padded(tile), kTile, to, stride);
          } else {
            kernels::load_tile(sizes.format, part, along.padded(tile), kTile, plain[0]);
            kernels::transpose_words(plain[0], kTile, along.padded(tile), kTile, to, stride);
          }
        }
      }
      const std::int64_t used = std::min(units.count - units.begin(first), (last - first) * kTile);
      for (std::size_t i = 0; i < factors.size(); ++i) {
        const Tiled& across = right[i].across;
        const auto element = optim::element_type(results[i]).value();
        const auto size = static_cast<std::int64_t>(results[i].element_size());
        auto* to = static_cast<char*>(results[i].mutable_data_ptr()) + units.begin(first) * across.count * size;
        for (std::int64_t column = 0; column < across.tiles; ++column) {
          for (std::int64_t term = 0; term < length; term += terms) {
            product(sizes.format, (last - first) * kTile, across.padded(column), std::min(terms, length - term),
                    left + term * sizes.format_size, stride,
                    right[i].blocks[column * along.tiles] + term * kTile * sizes.format_size, kTile, sums, kTile,
                    term > 0);
          }
          kernels::store_rows(sums, kTile, used, across.used(column), 1, nullptr, element,
                              to + across.begin(column) * size, across.count);
        }
      }
    }
  });
  return results;
}

Tensor sums_of_columns(const Tensor& matrix) {
  Tensor sums = at::zeros({matrix.size(1)}, matrix.options().dtype(at::kFloat));
  auto* to = sums.mutable_data_ptr<float>();
  const Tiled columns(matrix.size(1)), along(matrix.size(0));
  at::parallel_for(0, columns.tiles, 4, [&](std::int64_t begin, std::int64_t end) {
    Rows here = rows_of(matrix);
    here.data = static_cast<const char*>(here.data) + columns.begin(begin) * matrix.element_size();
    here.columns = std::min(columns.count, columns.begin(end)) - columns.begin(begin);
    std::vector<float> of_tile(static_cast<std::size_t>(here.columns));
    for (std::int64_t tile = 0; tile < along.tiles; ++tile) {  // sums of sums lose fewer digits
      kernels::sum_columns(here.part(along.begin(tile), along.used(tile)), of_tile.data());
      kernels::add_rows(of_tile.data(), 0, 1, here.columns, to + columns.begin(begin), 0);
    }
  });
  return sums;
}

}  // namespace oxytorch::ops
