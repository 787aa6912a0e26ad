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
#include "ops/shares.h"
#include "ops/tiles.h"
#include "optim/dense.h"
#include "oxytorch/kernels/activation.h"
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
constexpr std::int64_t kRows = 256, kTerms = 256;
// Terms of a product of rows as they lie. Those of long rows are pages apart and come slowly: each is read in one go.
constexpr std::int64_t kTermsOfRow = 1024;
// Panels whose sums are stored together, in rows of several lines.
constexpr std::int64_t kStrip = 2;
// Rows of a batch that are few: a panel is multiplied with all of them as soon as it is made.
constexpr std::int64_t kFew = 128;
// Rows of a batch whose operands backward holds at a time.
constexpr std::int64_t kChunk = 2048;
// Panels of kTerms rows of a batch that a core holds with their products: the cache of a core has 1 or 2 MiB.
constexpr std::int64_t kHeldPanels = 8;
// Tasks of a thread, where there are as many panels: a slower one leaves some to others.
constexpr std::int64_t kTasksOfThread = 4;
// Multiplications and additions below which a second thread costs more than it brings, and as how many an element
// counts that is packed or stored.
constexpr std::int64_t kWorkOfThread = std::int64_t{1} << 21, kWorkOfElement = 64;

Rows columns_of(const Rows& rows, std::int64_t first, std::int64_t count) {
  const std::int64_t size = rows.element == ElementType::F32 ? 4 : 2;
  return {rows.element, static_cast<const char*>(rows.data) + first * size, rows.stride, rows.rows, count};
}

/// Terms of a sum in equal parts of about kTermsOfRow.
struct Parts {
  explicit Parts(std::int64_t terms) : terms(terms) {
    const std::int64_t parts = std::max<std::int64_t>(1, (terms + kTermsOfRow / 2) / kTermsOfRow);
    size = round_up((terms - 1) / parts + 1, kTileStep);
  }
  template <class Run>
  void each(const Run& run) const {
    for (std::int64_t at = 0; at < terms; at += size) run(at, std::min(size, terms - at));
  }
  std::int64_t terms, size = 0;
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

/// A tile of rows of a matrix as terms of all panels.
void pack_tile(const Panels& panels, const Rows& from, std::int64_t tile) {
  const Tiled terms(from.rows);
  kernels::pack_panels(from.part(terms.begin(tile), terms.used(tile)), terms.padded(tile),
                       panels[0] + terms.begin(tile) * kTile * kBytes, panels.terms * kTile);
}

/// Rows of the left operand times the panel at `right`, into `sums`, whose rows are `stride` apart.
void multiply(const Left& left, std::int64_t row, std::int64_t count, const std::byte* right, std::int64_t columns,
              float* sums, std::int64_t stride) {
  Parts(left.terms).each([&](std::int64_t term, std::int64_t terms) {
    product(kFormat, count, columns, terms, left.data + (row * left.stride + term) * kBytes, left.stride,
            right + term * kTile * kBytes, kTile, sums, stride, term > 0);
  });
}

std::int64_t grain(std::int64_t work_of_task) { return std::max<std::int64_t>(1, kWorkOfThread / work_of_task); }

/// Where sums go: rows from `first`, what is added to each, and whether ReLU follows.
struct Output {
  const Tensor& to;
  std::int64_t first = 0;
  const float* added = nullptr;
  bool relu = false;

  void store(const float* sums, std::int64_t stride, std::int64_t row, std::int64_t count, std::int64_t column,
             std::int64_t columns) const {
    auto* data = static_cast<std::byte*>(to.mutable_data_ptr());
    const std::int64_t offset = ((first + row) * to.stride(0) + column) * static_cast<std::int64_t>(to.itemsize());
    kernels::store_rows(sums, stride, count, columns, 1, nullptr, optim::element_type(to).value(), data + offset,
                        to.stride(0), added == nullptr ? nullptr : added + column, relu);
  }
};

/// All rows of `left` times `right`.
void multiply_all(const Left& left, std::int64_t rows, const Panels& right, const Output& output) {
  const std::int64_t blocks = round_up(rows, kRows) / kRows, panels = right.columns.tiles,
                     strips = round_up(panels, kStrip) / kStrip;
  share_out(blocks * strips, grain(std::min(rows, kRows) * kStrip * kTile * left.terms), [&](const auto& take) {
    const ProductScope scope(kFormat);
    Scratch scratch;
    constexpr std::int64_t kStride = kStrip * kTile;
    float* sums = scratch.floats(kRows * kStride);
    for (std::int64_t task; (task = take()) >= 0;) {
      const std::int64_t row = task / strips * kRows, count = std::min(kRows, rows - row);
      const std::int64_t first = task % strips * kStrip, last = std::min(panels, first + kStrip);
      for (std::int64_t panel = first; panel < last; ++panel) {
        multiply(left, row, count, right[panel], right.columns.padded(panel), sums + (panel - first) * kTile, kStride);
      }
      const std::int64_t column = right.columns.begin(first);
      output.store(sums, kStride, row, count, column, std::min(kStride, right.columns.count - column));
    }
  });
}

class LinearBackwardPass {
 public:
  LinearBackwardPass(const Tensor& grad_output, const Tensor& input, const Tensor& weight, std::array<bool, 3> wanted,
                     const Tensor& sum, const Tensor& output)
      : given_grad_(dense(grad_output)),
        output_(output.defined() ? dense(output) : output),
        grad_(output.defined() ? at::empty(grad_output.sizes(), grad_output.options()) : given_grad_),
        input_(input.defined() ? dense(input) : input),
        given_weight_(weight),
        weight_(dense(weight)),
        wanted_(wanted),
        adds_(sum.defined() && sum.scalar_type() == at::kFloat && grad_.size(0) <= kChunk),
        of_weight_(sum),
        swaps_(!is_small() && weight.size(0) > weight.size(1)),
        outputs_(round_up(weight.size(0), kTileStep)),
        left_rows_(swaps_ ? round_up(weight.size(1), kTileStep) : outputs_) {}

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
    if (wanted_[1]) {
      const std::int64_t blocks = round_up(std::min(rows, kChunk), kTerms) / kTerms;
      left_ = scratch_.bytes(blocks * left_rows_ * kTerms * kBytes);
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
  [[nodiscard]] bool is_small() const { return grad_.size(0) <= kFew; }

  void chunk(std::int64_t first, std::int64_t count, LinearGradients& made) {
    const Rows grad = rows_of(grad_).part(first, count);
    const Rows input = wanted_[1] ? rows_of(input_).part(first, count) : Rows();
    const bool is_new = first == 0 && !kept_.defined();
    lay_out(first, grad, input, is_new);
    if (keeps_ && is_new) keep_panels(given_weight_, PackedFor::Backward, weight_panels_->memory());
    Scratch scratch;
    const Left left = wanted_[0] ? left_of(scratch, grad) : Left();
    if (is_small()) return multiply_few(left, input, made.input);
    if (wanted_[0]) multiply_all(left, count, *weight_panels_, {made.input, first});
    if (wanted_[1]) add_to_weight(swaps_ ? grad : input, adds_ || first > 0);
  }

  void multiply_few(const Left& left, const Rows& input, Tensor& of_input) {
    if (!wanted_[0] && !wanted_[1]) return;
    const std::int64_t rows = grad_.size(0), outputs = weight_.size(0);
    const Tiled columns(weight_.size(1));
    const std::int64_t work = kTile * (outputs * rows + kWorkOfElement * 2 * (outputs + rows));
    share_out(columns.tiles, grain(work), [&](const auto& take) {
      const ProductScope scope(kFormat);
      Scratch scratch;
      float* sums = scratch.floats(kRows * kTile);
      const std::int64_t terms = round_up(std::max(outputs, rows), kTileStep);
      std::byte* panel = scratch.bytes(terms * kTile * kBytes);
      for (std::int64_t i; (i = take()) >= 0;) {
        const std::int64_t column = columns.begin(i), used = columns.used(i);
        const auto pack = [&](const Rows& from) {
          kernels::pack_panels(columns_of(from, column, used), round_up(from.rows, kTileStep), panel, 0);
        };
        if (wanted_[0]) {
          if (!weight_panels_) pack(rows_of(weight_));
          multiply(left, 0, rows, weight_panels_ ? (*weight_panels_)[i] : panel, columns.padded(i), sums, kTile);
          Output{of_input}.store(sums, kTile, 0, rows, column, used);
        }
        if (!wanted_[1]) continue;
        pack(input);
        for (std::int64_t row = 0; row < outputs; row += kRows) {
          const std::int64_t count = std::min(kRows, outputs - row);
          const bool in_place = !adds_ && used == columns.padded(i);
          float* to = in_place ? place_of(row, column) : sums;
          product(kFormat, count, columns.padded(i), round_up(rows, kTileStep), left_ + row * kTerms * kBytes, kTerms,
                  panel, kTile, to, in_place ? sums_.stride(0) : kTile, false);
          if (!in_place) put(sums, count, used, row, column, adds_);
        }
      }
    });
  }

  [[nodiscard]] float* place_of(std::int64_t row, std::int64_t column) const {
    return sums_.mutable_data_ptr<float>() + row * sums_.stride(0) + column;
  }

  /// Sums of `count` outputs from `row` and `used` inputs from `column` into the gradient.
  void put(const float* sums, std::int64_t count, std::int64_t used, std::int64_t row, std::int64_t column, bool add) {
    const std::int64_t stride = sums_.stride(0);
    float* there = place_of(row, column);
    if (!add) {
      kernels::store_rows(sums, kTile, count, used, 1, nullptr, ElementType::F32, there, stride);
      return;
    }
    for (std::int64_t r = 0; r < count; ++r) {  // its rows lie apart
      for (std::int64_t c = 0; c < used; c += 16) __builtin_prefetch(there + r * stride + c, 1, 2);
    }
    kernels::add_rows(sums, kTile, count, used, there, stride);
  }

  // The weight (where it `is_new`), the gradient behind ReLU, the left operand of the gradient of the weight, and with
  // it that of the bias.
  void lay_out(std::int64_t first, const Rows& grad, const Rows& input, bool is_new) {
    const Tiled rows(grad.rows);
    const std::int64_t of_weight = weight_panels_ && is_new ? Tiled(weight_.size(0)).tiles : 0;
    const bool sums_bias = wanted_[2] && !(wanted_[1] && swaps_);
    const Rows& across = swaps_ ? input : grad;
    const std::int64_t of_left = wanted_[1] || sums_bias || output_.defined() ? rows.tiles : 0;
    std::vector<float> sums(sums_bias ? static_cast<std::size_t>(rows.tiles * grad.columns) : 0);
    const std::int64_t work = kTile * kWorkOfElement * std::max(outputs_, weight_.size(1));
    share_out(of_weight + of_left, grain(work), [&](const auto& take) {
      for (std::int64_t task; (task = take()) >= 0;) {
        if (task < of_weight) {
          pack_tile(*weight_panels_, rows_of(weight_), task);
          continue;
        }
        const std::int64_t tile = task - of_weight, row = rows.begin(tile);
        if (output_.defined()) pass_relu(first + row, rows.used(tile));
        if (sums_bias) kernels::sum_columns(grad.part(row, rows.used(tile)), sums.data() + tile * grad.columns);
        if (wanted_[1]) pack_left(across.part(row, rows.used(tile)), row);
      }
    });
    for (std::size_t tile = 0; tile * bias_.size() < sums.size(); ++tile) {
      for (std::size_t i = 0; i < bias_.size(); ++i) bias_[i] += sums[tile * bias_.size() + i];
    }
  }

  void pass_relu(std::int64_t row, std::int64_t count) {
    kernels::relu_backward(rows_of(output_).part(row, count), rows_of(given_grad_).part(row, count),
                           {grad_.mutable_data_ptr<at::BFloat16>() + row * grad_.stride(0), grad_.stride(0)});
  }

  void pack_left(const Rows& from, std::int64_t row) {
    std::byte* to = left_block(row / kTerms) + row % kTerms * kBytes;
    for (std::int64_t column = 0; column < left_rows_; column += kTile) {
      const Rows here = columns_of(from, column, std::min(kTile, from.columns - column));
      for (std::int64_t i = 0; i < here.rows; ++i) {  // those of the next tile lie apart
        const auto* next = static_cast<const std::byte*>(here.data) + (i * here.stride + kTile) * kBytes;
        __builtin_prefetch(next);
        __builtin_prefetch(next + 64);
      }
      kernels::pack_operand(Operand::LeftTransposed, here, round_up(from.rows, kTileStep),
                            std::min(kTile, left_rows_ - column), to + column * kTerms * kBytes, kTerms);
    }
  }

  // The transposed left operand: its rows of kTerms rows of the batch.
  [[nodiscard]] std::byte* left_block(std::int64_t block) const { return left_ + block * left_rows_ * kTerms * kBytes; }

  // Each task makes the panels of `right` that it multiplies itself, kTerms rows at a time: they stay near its core.
  void add_to_weight(const Rows& right, bool add) {
    const Tiled across(right.columns);
    const std::int64_t blocks = (left_rows_ - 1) / kRows + 1, block = round_up((left_rows_ - 1) / blocks + 1, kTile);
    const std::int64_t work = right.rows * block * kTile;
    const std::int64_t threads =
        std::clamp<std::int64_t>(blocks * across.tiles / grain(work), 1, at::get_num_threads());
    const std::int64_t held =
        std::clamp<std::int64_t>(blocks * across.tiles / (kTasksOfThread * threads), 1, kHeldPanels);
    const std::int64_t groups = (across.tiles - 1) / held + 1;
    share_out(blocks * groups, grain(work * held), [&](const auto& take) {
      const ProductScope scope(kFormat);
      Scratch scratch;
      std::byte* panels = scratch.bytes(held * kTerms * kTile * kBytes);
      float* sums = scratch.floats(held * block * kTile);
      for (std::int64_t task; (task = take()) >= 0;) {
        const std::int64_t row = task / groups * block;
        add_to_weight(right, across, row, std::min(block, left_rows_ - row), task % groups * held, held, panels, sums,
                      add);
      }
    });
  }

  void add_to_weight(const Rows& right, const Tiled& across, std::int64_t row, std::int64_t count, std::int64_t panel,
                     std::int64_t held, std::byte* panels, float* sums, bool add) {
    const std::int64_t size = round_up(count, kTile) * kTile;
    const std::int64_t last = std::min(across.tiles, panel + held), column = across.begin(panel);
    const Rows strip = columns_of(right, column, std::min(right.columns - column, held * kTile));
    for (std::int64_t term = 0; term < right.rows; term += kTerms) {
      const Rows from = strip.part(term, std::min(kTerms, right.rows - term));
      const std::int64_t terms = round_up(from.rows, kTileStep);
      kernels::pack_panels(from, terms, panels, kTerms * kTile);
      if (swaps_ && wanted_[2] && row == 0) add_to_bias(from, column);
      for (std::int64_t i = panel; i < last; ++i) {
        product(kFormat, count, across.padded(i), terms, left_block(term / kTerms) + row * kTerms * kBytes, kTerms,
                panels + (i - panel) * kTerms * kTile * kBytes, kTile, sums + (i - panel) * size, kTile, term > 0);
      }
    }
    const std::int64_t used_rows = std::min(count, (swaps_ ? weight_.size(1) : weight_.size(0)) - row);
    for (std::int64_t i = panel; i < last; ++i, sums += size) {
      if (!swaps_) {
        put(sums, used_rows, across.used(i), row, across.begin(i), add);
        continue;
      }
      for (std::int64_t at = 0; at < used_rows; at += kTile) {
        alignas(64) float turned[kTile * kTile];
        kernels::transpose_words(sums + at * kTile, kTile, kTile, kTile, turned, kTile);
        put(turned, across.used(i), std::min(kTile, used_rows - at), across.begin(i), row + at, add);
      }
    }
  }

  // In the order of tiles of the batch, of columns that nobody else adds to.
  void add_to_bias(const Rows& grad, std::int64_t column) {
    std::vector<float> sums(static_cast<std::size_t>(grad.columns));
    const Tiled rows(grad.rows);
    for (std::int64_t tile = 0; tile < rows.tiles; ++tile) {
      kernels::sum_columns(grad.part(rows.begin(tile), rows.used(tile)), sums.data());
      for (std::size_t i = 0; i < sums.size(); ++i) bias_[static_cast<std::size_t>(column) + i] += sums[i];
    }
  }

  Tensor given_grad_, output_;  // what ReLU gave, where one follows
  Tensor grad_, input_, given_weight_, weight_;
  std::array<bool, 3> wanted_;
  bool adds_;                // each sum, once it is whole, to what the gradient holds already
  Tensor of_weight_, sums_;  // the gradient and its fp32 sums: often one tensor
  /// Whether the gradient of the weight is computed transposed: the rows of the batch that are narrower are the left
  /// operand, which takes longer to make and is made once for all.
  bool swaps_;
  std::int64_t outputs_;
  std::int64_t left_rows_;  // of the operand on the left, padded
  bool keeps_ = false;
  Tensor kept_;
  Scratch scratch_;
  std::optional<Panels> weight_panels_;
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

Tensor linear_cpu(const Tensor& input, const Tensor& weight, const Tensor& bias, bool relu, at::ScalarType type) {
  const Tensor rows = dense(input), from = dense(weight);
  Tensor output = at::empty({rows.size(0), from.size(0)}, rows.options().dtype(type));
  const Tensor added = bias.defined() ? bias.to(at::kFloat).contiguous() : bias;
  const Output to{output, 0, added.defined() ? added.const_data_ptr<float>() : nullptr, relu};
  Scratch scratch;
  const Left left = left_of(scratch, rows_of(rows));
  const Rows of_weight = rows_of(from);
  const Tiled columns(from.size(0));
  const bool keeps = keeps_panels(weight);
  // Few rows are multiplied with a panel as soon as it is made: to make it takes about as long.
  if (rows.size(0) <= kFew && !keeps) {
    share_out(columns.tiles, grain(kTile * left.terms * rows.size(0)), [&](const auto& take) {
      const ProductScope scope(kFormat);
      Scratch own;
      float* sums = own.floats(kFew * kTile);
      std::byte* panel = own.bytes(left.terms * kTile * kBytes);
      for (std::int64_t i; (i = take()) >= 0;) {
        pack_transposed(of_weight, columns, i, panel);
        multiply(left, 0, rows.size(0), panel, columns.padded(i), sums, kTile);
        to.store(sums, kTile, 0, rows.size(0), columns.begin(i), columns.used(i));
      }
    });
    return output;
  }
  const Tensor kept = keeps ? kept_panels(weight, PackedFor::Forward) : Tensor();
  const Panels panels(from.size(1), from.size(0), kept);
  if (!kept.defined()) {
    share_out(columns.tiles, grain(kTile * kWorkOfElement * panels.terms), [&](const auto& take) {
      for (std::int64_t i; (i = take()) >= 0;) pack_transposed(of_weight, columns, i, panels[i]);
    });
    if (keeps) keep_panels(weight, PackedFor::Forward, panels.memory());
  }
  multiply_all(left, rows.size(0), panels, to);
  return output;
}

LinearGradients linear_cpu_backward(const Tensor& grad_output, const Tensor& input, const Tensor& weight,
                                    std::array<bool, 3> wanted, const Tensor& sum, const Tensor& output) {
  return LinearBackwardPass(grad_output, input, weight, wanted, sum, output).run();
}

}  // namespace oxytorch::ops
