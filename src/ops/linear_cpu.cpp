#include "ops/linear_cpu.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "ops/kept_panels.h"
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

constexpr auto kFormat = TileFormat::BFloat16;
constexpr std::int64_t kBytes = 2;
// Rows of the left operand of one product, and terms of its sums: both operands are then near the core, and sums are
// read and written once for that many terms.
constexpr std::int64_t kRows = 128, kTerms = 256;
// Rows of a batch whose operands backward holds at a time.
constexpr std::int64_t kChunk = 1024;
// Multiplications and additions below which a second thread costs more than it brings.
constexpr std::int64_t kWorkOfThread = std::int64_t{1} << 21;

Rows columns_of(const Rows& rows, std::int64_t first, std::int64_t count) {
  const std::int64_t size = rows.element == ElementType::F32 ? 4 : 2;
  return {rows.element, static_cast<const char*>(rows.data) + first * size, rows.stride, rows.rows, count};
}

/// Terms of a sum in equal parts of about kTerms.
struct Parts {
  explicit Parts(std::int64_t terms)
      : terms(terms),
        size(round_up((terms - 1) / std::max<std::int64_t>(1, (terms + kTerms / 2) / kTerms) + 1, kTileStep)) {}
  template <class Run>
  void each(const Run& run) const {
    for (std::int64_t at = 0; at < terms; at += size) run(at, std::min(size, terms - at));
  }
  std::int64_t terms, size;
};

/// A right operand: panels of kTile columns, each of all terms, which are padded with zeros.
class Panels {
 public:
  /// In `memory`, which another one has had, where that is defined.
  Panels(std::int64_t terms, std::int64_t columns, Tensor memory = {})
      : terms(round_up(terms, kTileStep)),
        columns(columns),
        memory_(memory.defined() ? std::move(memory)
                                 : at::empty({this->terms * this->columns.tiles * kTile * kBytes}, at::kByte)),
        data_(static_cast<std::byte*>(memory_.mutable_data_ptr())) {}
  [[nodiscard]] std::byte* operator[](std::int64_t panel) const { return data_ + panel * terms * kTile * kBytes; }
  [[nodiscard]] const Tensor& memory() const { return memory_; }

  std::int64_t terms;
  Tiled columns;

 private:
  Tensor memory_;
  std::byte* data_;
};

/// A left operand: rows of bfloat16, padded to `terms`, which do not overlap.
struct Left {
  const std::byte* data = nullptr;
  std::int64_t terms = 0;
  std::int64_t stride = 0;
};
Left left_of(Scratch& scratch, const Rows& rows) {
  const std::int64_t terms = round_up(rows.columns, kTileStep);
  if (terms == rows.columns && (rows.stride >= terms || rows.rows == 1)) {
    return {static_cast<const std::byte*>(rows.data), terms, std::max(rows.stride, terms)};
  }
  std::byte* padded = scratch.bytes(round_up(rows.rows, kTileStep) * terms * kBytes);
  const Tiled tiles(rows.rows);
  at::parallel_for(0, tiles.tiles, 16, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t tile = begin; tile < end; ++tile) {
      kernels::load_tile(kFormat, rows.part(tiles.begin(tile), tiles.used(tile)), tiles.padded(tile), terms,
                         padded + tiles.begin(tile) * terms * kBytes);
    }
  });
  return {padded, terms, terms};
}

/// Rows of the weight as a panel, which the rows of forward are multiplied with.
void pack_transposed(const Rows& weight, const Tiled& columns, std::int64_t panel, std::byte* to) {
  const Rows rows = weight.part(columns.begin(panel), columns.used(panel));
  const std::int64_t padded = round_up(rows.columns, kTileStep);
  for (std::int64_t term = 0; term < padded; term += kTile) {
    kernels::pack_operand(Operand::RightTransposed, columns_of(rows, term, std::min(kTile, rows.columns - term)), kTile,
                          std::min(kTile, padded - term), to + term * kTile * kBytes, kTile);
  }
}

/// kTile rows of a matrix, from the tile `tile`, as terms of the panel that begins at `to`.
void pack_right(const Rows& from, const Tiled& columns, std::int64_t panel, std::int64_t tile, std::byte* to) {
  const Tiled terms(from.rows);
  const Rows rows = from.part(terms.begin(tile), terms.used(tile));
  kernels::pack_operand(Operand::Right, columns_of(rows, columns.begin(panel), columns.used(panel)), terms.padded(tile),
                        kTile, to + terms.begin(tile) * kTile * kBytes, kTile);
}
void pack_right(const Rows& from, const Tiled& columns, std::int64_t panel, std::byte* to) {
  for (std::int64_t tile = 0; tile < Tiled(from.rows).tiles; ++tile) pack_right(from, columns, panel, tile, to);
}
void pack_tile(const Panels& panels, const Rows& from, std::int64_t tile) {
  for (std::int64_t panel = 0; panel < panels.columns.tiles; ++panel) {
    pack_right(from, panels.columns, panel, tile, panels[panel]);
  }
}

/// Rows of the left operand times the panel at `right`, into `sums` of kTile columns.
void multiply(const Left& left, std::int64_t row, std::int64_t count, const std::byte* right, std::int64_t columns,
              float* sums) {
  Parts(left.terms).each([&](std::int64_t term, std::int64_t terms) {
    product(kFormat, count, columns, terms, left.data + (row * left.stride + term) * kBytes, left.stride,
            right + term * kTile * kBytes, kTile, sums, kTile, term > 0);
  });
}

std::int64_t grain(std::int64_t work_of_task) { return std::max<std::int64_t>(1, kWorkOfThread / work_of_task); }

/// Where sums go that are rounded: rows from `first`, and what is added to each.
struct Output {
  Tensor& to;
  std::int64_t first = 0;
  const float* added = nullptr;

  void store(const float* sums, std::int64_t row, std::int64_t count, const Tiled& columns, std::int64_t panel) const {
    const std::int64_t column = columns.begin(panel);
    auto* data = static_cast<std::byte*>(to.mutable_data_ptr());
    kernels::store_rows(sums, kTile, count, columns.used(panel), 1, nullptr, ElementType::BF16,
                        data + ((first + row) * to.stride(0) + column) * kBytes, to.stride(0),
                        added == nullptr ? nullptr : added + column);
  }
};

/// All rows of `left` times `right`.
void multiply_all(const Left& left, std::int64_t rows, const Panels& right, const Output& output) {
  const std::int64_t blocks = round_up(rows, kRows) / kRows, panels = right.columns.tiles;
  at::parallel_for(0, blocks * panels, grain(std::min(rows, kRows) * kTile * left.terms),
                   [&](std::int64_t begin, std::int64_t end) {
                     const ProductScope scope(kFormat);
                     Scratch scratch;
                     float* sums = scratch.floats(kRows * kTile);
                     for (std::int64_t task = begin; task < end; ++task) {
                       const std::int64_t row = task / panels * kRows, panel = task % panels;
                       const std::int64_t count = std::min(kRows, rows - row);
                       multiply(left, row, count, right[panel], right.columns.padded(panel), sums);
                       output.store(sums, row, count, right.columns, panel);
                     }
                   });
}

class LinearBackwardPass {
 public:
  LinearBackwardPass(const Tensor& grad_output, const Tensor& input, const Tensor& weight, std::array<bool, 3> wanted,
                     const Tensor& sum)
      : grad_(dense(grad_output)),
        input_(input.defined() ? dense(input) : input),
        given_weight_(weight),
        weight_(dense(weight)),
        wanted_(wanted),
        adds_(sum.defined() && sum.scalar_type() == at::kFloat && grad_.size(0) <= kChunk),
        of_weight_(sum),
        outputs_(round_up(weight.size(0), kTileStep)) {}

  LinearGradients run() {
    const std::int64_t rows = grad_.size(0);
    LinearGradients made;
    if (wanted_[0]) {
      made.input = at::empty({rows, weight_.size(1)}, grad_.options());
      keeps_ = keeps_panels(given_weight_);
      if (keeps_) kept_ = kept_panels(given_weight_, PackedFor::Backward);
      if (!is_small() || keeps_) weight_panels_.emplace(weight_.size(0), weight_.size(1), kept_);
    }
    if (wanted_[1]) {
      if (!of_weight_.defined()) of_weight_ = made.weight = at::empty(weight_.sizes(), weight_.options());
      const bool there = adds_ || (made.weight.defined() && made.weight.scalar_type() == at::kFloat);
      sums_ = there ? of_weight_ : at::empty_like(of_weight_, at::kFloat);
    }
    if (wanted_[2]) bias_.assign(static_cast<std::size_t>(weight_.size(0)), 0.0F);
    const std::int64_t held = std::min(rows, kChunk);
    if (wanted_[1]) {
      const std::int64_t blocks = round_up(held, kTerms) / kTerms;
      left_ = scratch_.bytes(blocks * outputs_ * kTerms * kBytes);
      if (!is_small()) input_panels_.emplace(held, weight_.size(1));
    }
    for (std::int64_t first = 0; first < rows; first += kChunk) chunk(first, std::min(kChunk, rows - first), made);
    if (wanted_[1] && !sums_.is_same(of_weight_)) {
      if (made.weight.defined()) {
        made.weight.copy_(sums_);
      } else {
        of_weight_.add_(sums_);
      }
    }
    if (wanted_[2]) {
      made.bias = at::empty({weight_.size(0)}, weight_.options());
      kernels::store_rows(bias_.data(), 0, 1, weight_.size(0), 1, nullptr, optim::element_type(made.bias).value(),
                          made.bias.mutable_data_ptr(), 0);
    }
    return made;
  }

 private:
  [[nodiscard]] bool is_small() const { return grad_.size(0) <= kRows; }

  void chunk(std::int64_t first, std::int64_t count, LinearGradients& made) {
    const Rows grad = rows_of(grad_).part(first, count);
    const Rows input = wanted_[1] ? rows_of(input_).part(first, count) : Rows();
    const bool is_new = first == 0 && !kept_.defined();
    lay_out(grad, input, is_new);
    if (keeps_ && is_new) keep_panels(given_weight_, PackedFor::Backward, weight_panels_->memory());
    Scratch scratch;
    const Left left = wanted_[0] ? left_of(scratch, grad) : Left();
    if (is_small()) return multiply_few(left, input, made.input);
    if (wanted_[0]) multiply_all(left, count, *weight_panels_, {made.input, first});
    if (wanted_[1]) add_to_weight(count, adds_ || first > 0);
  }

  void multiply_few(const Left& left, const Rows& input, Tensor& of_input) {
    if (!wanted_[0] && !wanted_[1]) return;
    const std::int64_t rows = grad_.size(0), outputs = weight_.size(0);
    const Tiled columns(weight_.size(1));
    at::parallel_for(0, columns.tiles, grain(kTile * outputs * rows), [&](std::int64_t begin, std::int64_t end) {
      const ProductScope scope(kFormat);
      Scratch scratch;
      float* sums = scratch.floats(kRows * kTile);
      std::byte* panel = scratch.bytes(std::max(outputs_, kRows) * kTile * kBytes);
      for (std::int64_t i = begin; i < end; ++i) {
        if (wanted_[0]) {
          if (!weight_panels_) pack_right(rows_of(weight_), columns, i, panel);
          multiply(left, 0, rows, weight_panels_ ? (*weight_panels_)[i] : panel, columns.padded(i), sums);
          Output{of_input}.store(sums, 0, rows, columns, i);
        }
        if (!wanted_[1]) continue;
        pack_right(input, columns, i, panel);
        for (std::int64_t row = 0; row < outputs; row += kRows) add_product(row, rows, panel, columns, i, sums, adds_);
      }
    });
  }

  // To the gradient of kRows outputs from `row`, of a panel of the input. Sums of several products are made where they
  // lie together: rows of the gradient are often a power of two apart, of which caches hold few.
  void add_product(std::int64_t row, std::int64_t rows, const std::byte* panel, const Tiled& columns, std::int64_t i,
                   float* sums, bool add) {
    const std::int64_t stride = sums_.stride(0), padded = columns.padded(i), terms = round_up(rows, kTileStep);
    const std::int64_t count = std::min(kRows, weight_.size(0) - row);
    float* there = sums_.mutable_data_ptr<float>() + row * stride + columns.begin(i);
    const bool at_once = terms <= kTerms && !add && columns.used(i) == padded;
    if (add) {  // its rows lie apart, and come while the products are made
      for (std::int64_t r = 0; r < count; ++r) {
        for (std::int64_t c = 0; c < columns.used(i); c += 16) __builtin_prefetch(there + r * stride + c, 1, 2);
      }
    }
    for (std::int64_t term = 0; term < terms; term += kTerms) {
      product(kFormat, count, padded, std::min(kTerms, terms - term), left_block(term / kTerms) + row * kTerms * kBytes,
              kTerms, panel + term * kTile * kBytes, kTile, at_once ? there : sums, at_once ? stride : kTile, term > 0);
    }
    if (at_once) return;
    if (add) {
      kernels::add_rows(sums, kTile, count, columns.used(i), there, stride);
    } else {
      kernels::store_rows(sums, kTile, count, columns.used(i), 1, nullptr, ElementType::F32, there, stride);
    }
  }

  // The weight (where it `is_new`), the chunk's input and its gradient as operands, and the gradient's sums.
  void lay_out(const Rows& grad, const Rows& input, bool is_new) {
    const Tiled rows(grad.rows);
    const std::int64_t of_weight = weight_panels_ && is_new ? Tiled(weight_.size(0)).tiles : 0;
    const std::int64_t of_input = input_panels_ ? rows.tiles : 0, of_grad = wanted_[1] || wanted_[2] ? rows.tiles : 0;
    std::vector<float> sums(wanted_[2] ? static_cast<std::size_t>(rows.tiles * grad.columns) : 0);
    // Tiles of the three differ in size: each thread has its part of each.
    const std::int64_t least = grain(kTile * 16 * std::max(outputs_, weight_.size(1)));
    const std::int64_t parts =
        std::clamp<std::int64_t>((of_weight + of_input + of_grad) / least, 1, at::get_num_threads());
    at::parallel_for(0, parts, 1, [&](std::int64_t begin, std::int64_t end) {
      const auto each = [&](std::int64_t tiles, const auto& run) {
        for (std::int64_t tile = tiles * begin / parts; tile < tiles * end / parts; ++tile) run(tile);
      };
      each(of_weight, [&](std::int64_t tile) { pack_tile(*weight_panels_, rows_of(weight_), tile); });
      each(of_input, [&](std::int64_t tile) { pack_tile(*input_panels_, input, tile); });
      each(of_grad, [&](std::int64_t tile) {
        const Rows here = grad.part(rows.begin(tile), rows.used(tile));
        if (wanted_[2]) kernels::sum_columns(here, sums.data() + tile * grad.columns);
        if (!wanted_[1]) return;
        std::byte* to = left_block(rows.begin(tile) / kTerms) + rows.begin(tile) % kTerms * kBytes;
        for (std::int64_t column = 0; column < outputs_; column += kTile) {
          kernels::pack_operand(Operand::LeftTransposed,
                                columns_of(here, column, std::min(kTile, here.columns - column)), rows.padded(tile),
                                std::min(kTile, outputs_ - column), to + column * kTerms * kBytes, kTerms);
        }
      });
    });
    for (std::size_t tile = 0; tile * bias_.size() < sums.size(); ++tile) {
      for (std::size_t i = 0; i < bias_.size(); ++i) bias_[i] += sums[tile * bias_.size() + i];
    }
  }

  // The transposed gradient: outputs of kTerms rows of the batch.
  [[nodiscard]] std::byte* left_block(std::int64_t block) const { return left_ + block * outputs_ * kTerms * kBytes; }

  void add_to_weight(std::int64_t rows, bool add) {
    const Panels& right = *input_panels_;
    const std::int64_t outputs = weight_.size(0), panels = right.columns.tiles,
                       blocks = round_up(outputs, kRows) / kRows;
    at::parallel_for(0, blocks * panels, grain(std::min(outputs, kRows) * kTile * rows),
                     [&](std::int64_t begin, std::int64_t end) {
                       const ProductScope scope(kFormat);
                       Scratch scratch;
                       float* sums = scratch.floats(kRows * kTile);
                       for (std::int64_t task = begin; task < end; ++task) {
                         const std::int64_t panel = task % panels;
                         add_product(task / panels * kRows, rows, right[panel], right.columns, panel, sums, add);
                       }
                     });
  }

  Tensor grad_, input_, given_weight_, weight_;
  std::array<bool, 3> wanted_;
  bool adds_;                // each sum, once it is whole, to what the gradient holds already
  Tensor of_weight_, sums_;  // the gradient and its fp32 sums: often one tensor
  std::int64_t outputs_;
  bool keeps_ = false;
  Tensor kept_;
  Scratch scratch_;
  std::optional<Panels> weight_panels_, input_panels_;
  std::byte* left_ = nullptr;
  std::vector<float> bias_;
};

}  // namespace

bool linear_cpu_takes(const Tensor& input, const Tensor& weight, const Tensor& bias) {
  const auto type = weight.scalar_type();
  const auto is_here = [](const Tensor& tensor) {
    return tensor.device().is_cpu() && tensor.layout() == at::kStrided && tensor.numel() > 0;
  };
  return input.scalar_type() == at::kBFloat16 && (type == at::kFloat || type == at::kBFloat16) && is_here(input) &&
         is_here(weight) && weight.dim() == 2 && input.dim() > 0 && input.size(-1) == weight.size(1) &&
         (!bias.defined() ||
          (bias.scalar_type() == type && is_here(bias) && bias.dim() == 1 && bias.size(0) == weight.size(0))) &&
         product_format(ElementType::BF16) == kFormat;
}

Tensor linear_cpu(const Tensor& input, const Tensor& weight, const Tensor& bias) {
  const Tensor rows = dense(input), from = dense(weight);
  Tensor output = at::empty({rows.size(0), from.size(0)}, rows.options());
  const Tensor added = bias.defined() ? bias.to(at::kFloat).contiguous() : bias;
  const Output to{output, 0, added.defined() ? added.const_data_ptr<float>() : nullptr};
  Scratch scratch;
  const Left left = left_of(scratch, rows_of(rows));
  const Rows of_weight = rows_of(from);
  const Tiled columns(from.size(0));
  const bool keeps = keeps_panels(weight);
  // Few rows are multiplied with a panel as soon as it is made: to make it takes about as long.
  if (rows.size(0) <= kRows && !keeps) {
    at::parallel_for(0, columns.tiles, grain(kTile * left.terms * rows.size(0)),
                     [&](std::int64_t begin, std::int64_t end) {
                       const ProductScope scope(kFormat);
                       Scratch own;
                       float* sums = own.floats(kRows * kTile);
                       std::byte* panel = own.bytes(left.terms * kTile * kBytes);
                       for (std::int64_t i = begin; i < end; ++i) {
                         pack_transposed(of_weight, columns, i, panel);
                         multiply(left, 0, rows.size(0), panel, columns.padded(i), sums);
                         to.store(sums, 0, rows.size(0), columns, i);
                       }
                     });
    return output;
  }
  const Tensor kept = keeps ? kept_panels(weight, PackedFor::Forward) : Tensor();
  const Panels panels(from.size(1), from.size(0), kept);
  if (!kept.defined()) {
    at::parallel_for(0, columns.tiles, grain(kTile * 16 * panels.terms), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) pack_transposed(of_weight, columns, i, panels[i]);
    });
    if (keeps) keep_panels(weight, PackedFor::Forward, panels.memory());
  }
  multiply_all(left, rows.size(0), panels, to);
  return output;
}

LinearGradients linear_cpu_backward(const Tensor& grad_output, const Tensor& input, const Tensor& weight,
                                    std::array<bool, 3> wanted, const Tensor& sum) {
  return LinearBackwardPass(grad_output, input, weight, wanted, sum).run();
}

}  // namespace oxytorch::ops
