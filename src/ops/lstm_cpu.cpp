#include "ops/lstm_cpu.h"

#include <ATen/Parallel.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "ops/product.h"
#include "ops/tiles.h"
#include "optim/dense.h"
#include "oxytorch/kernels/attention.h"
#include "oxytorch/kernels/lstm.h"

namespace oxytorch::ops {
namespace {

using at::Tensor;
using kernels::ElementType;
using kernels::kTile;
using kernels::kTileStep;
using kernels::Operand;
using kernels::Rows;
using kernels::TileFormat;

constexpr std::int64_t kGates = 4;
// Products with the input are summed for several steps at a time, as many as a cache near the core holds.
constexpr std::int64_t kSums = 65536;
// A workspace begins with these, which oneDNN's does not.
constexpr std::array<std::uint64_t, 8> kMark{
    0x6f78'7974'6f72'6368, 0x9e37'79b9'7f4a'7c15, 0xc2b2'ae3d'27d4'eb4f, 0x1656'67b1'9e37'79f9, 1, 0, 0, 0};

// Rows of a batch that a thread takes through all steps: few, so that there is work for many threads, and more where
// they share weights that no cache near a core holds. Of sizes alone, so that no sum depends on the number of threads.
std::int64_t rows_of_tile(std::int64_t batch, std::int64_t weight_bytes) {
  constexpr std::int64_t kNear = std::int64_t{4} << 20;
  const std::int64_t many = weight_bytes > kNear ? 64 : 128;
  return batch < many ? 16 : batch < 512 ? 32 : 64;
}

Rows rows_at(const Tensor& tensor, std::int64_t step, std::int64_t first, std::int64_t count) {
  const auto* data = static_cast<const char*>(tensor.const_data_ptr()) +
                     (step * tensor.stride(0) + first * tensor.stride(1)) * tensor.element_size();
  return {optim::element_type(tensor).value(), data, tensor.stride(1), count, tensor.size(2)};
}

// A batch's state as one step of a sequence.
Tensor as_step(const Tensor& state) { return dense(state).unsqueeze(0); }

struct Sizes {
  explicit Sizes(const LstmLayer& layer)
      : steps(layer.input.size(0)),
        batch(layer.input.size(1)),
        features(layer.input.size(2)),
        hidden(layer.hidden.size(1)),
        width(round_up(hidden, kTileStep)),
        sums(kGates * width),
        reverse(layer.reverse),
        element(optim::element_type(layer.input).value()),
        element_size(layer.input.element_size()),
        format(product_format(element)),
        format_size(format == TileFormat::BFloat16 ? 2 : 4),
        rows(rows_of_tile(batch, sums * width * format_size)),
        tiles(round_up(batch, rows) / rows) {}

  [[nodiscard]] std::int64_t time(std::int64_t step) const { return reverse ? steps - 1 - step : step; }
  [[nodiscard]] std::int64_t used(std::int64_t tile) const { return std::min(rows, batch - tile * rows); }
  [[nodiscard]] kernels::LstmSizes of(std::int64_t tile) const { return {element, rows, used(tile), hidden, width}; }

  // The workspace: the mark, gates of every step and tile, cells of the same.
  [[nodiscard]] std::int64_t gates_at(std::int64_t step, std::int64_t tile) const {
    return static_cast<std::int64_t>(sizeof kMark) + (step * tiles + tile) * rows * sums * element_size;
  }
  [[nodiscard]] std::int64_t cells_at(std::int64_t step, std::int64_t tile) const {
    return gates_at(steps, 0) + (step * tiles + tile) * rows * width * 4;
  }

  std::int64_t steps, batch, features, hidden, width, sums;
  bool reverse;
  ElementType element;
  std::int64_t element_size;
  TileFormat format;
  std::int64_t format_size, rows, tiles;
};

// Weights, which have four gates of `hidden` rows, as right operands of products in blocks of kTile x kTile.
class Weights {
 public:
  // Transposed, so that rows times them are sums of gates; or as they are, for sums of gates times them.
  Weights(const Sizes& sizes, const Tensor& weight, bool transposed)
      : columns_(round_up(weight.size(1), kTileStep)),
        across_(Tiled(columns_).tiles),
        down_(sizes.sums / kTile),
        transposed_(transposed),
        blocks_(scratch_, sizes.format, kTile, across_ * down_) {
    const Tensor from = weight.contiguous();
    const auto* data = static_cast<const char*>(from.const_data_ptr());
    at::parallel_for(0, down_, 1, [&](std::int64_t begin, std::int64_t end) {
      Scratch scratch;
      const Packed plain(scratch, sizes.format, kTile, 2);
      for (std::int64_t i = begin * across_; i < end * across_; ++i) {
        const std::int64_t down = i / across_, column = i % across_ * kTile;
        for (std::int64_t at = 0; at < kTile; at += kTileStep) {
          const std::int64_t row = down * kTile + at, gate = row / sizes.width, unit = row % sizes.width;
          const std::int64_t count = std::clamp<std::int64_t>(sizes.hidden - unit, 0, kTileStep);
          const std::int64_t first = gate * sizes.hidden + std::min(unit, sizes.hidden);
          const Rows rows{sizes.element, data + (first * from.size(1) + column) * sizes.element_size, from.size(1),
                          count, std::min(kTile, from.size(1) - column)};
          kernels::load_tile(sizes.format, rows, kTileStep, kTile, plain[0] + at * kTile * sizes.format_size);
        }
        kernels::make_operand(sizes.format, transposed ? Operand::RightTransposed : Operand::Right, plain[0], kTile,
                              kTile, plain[1], blocks_[transposed ? i : i % across_ * down_ + down]);
      }
    });
  }
  [[nodiscard]] std::int64_t columns() const { return columns_; }

  // Sums of the products of `count` rows of the other operand, `stride` elements apart, with what is given here.
  void multiply(const Sizes& sizes, const std::byte* rows, std::int64_t count, std::int64_t stride, float* to,
                bool add) const {
    const std::int64_t length = transposed_ ? columns_ : sizes.sums, wide = transposed_ ? sizes.sums : columns_;
    const std::int64_t along = transposed_ ? across_ : down_;
    for (std::int64_t panel = 0; panel < Tiled(wide).tiles; ++panel) {
      product(sizes.format, count, std::min(kTile, wide - panel * kTile), length, rows, stride, blocks_[panel * along],
              kTile, to + panel * kTile, wide, add);
    }
  }

 private:
  std::int64_t columns_, across_, down_;
  bool transposed_;
  Scratch scratch_;
  Packed blocks_;
};

void load_state(const Sizes& sizes, const Tensor& state, std::int64_t tile, float* to) {
  kernels::load_tile(TileFormat::Float32, rows_at(state, 0, tile * sizes.rows, sizes.used(tile)), sizes.rows,
                     sizes.width, to);
}

void store_state(const Sizes& sizes, const float* from, std::int64_t tile, Tensor& to) {
  kernels::store_rows(from, sizes.width, sizes.used(tile), sizes.hidden, 1, nullptr, optim::element_type(to).value(),
                      static_cast<char*>(to.mutable_data_ptr()) + tile * sizes.rows * sizes.hidden * to.element_size(),
                      sizes.hidden);
}

std::vector<float> summed_biases(const Sizes& sizes, const LstmLayer& layer) {
  std::vector<float> sums(static_cast<std::size_t>(sizes.sums));
  if (!layer.has_biases) return sums;
  const Tensor both = layer.bias_input.to(at::kFloat) + layer.bias_hidden.to(at::kFloat);
  for (std::int64_t gate = 0; gate < kGates; ++gate) {
    std::copy_n(both.const_data_ptr<float>() + gate * sizes.hidden, sizes.hidden, sums.data() + gate * sizes.width);
  }
  return sums;
}

struct ForwardPass {
  ForwardPass(const Sizes& sizes, const LstmLayer& layer, std::byte* workspace)
      : sizes(sizes),
        input(dense(layer.input)),
        first(as_step(layer.hidden)),
        first_cell(as_step(layer.cell)),
        of_input(sizes, layer.weight_input, /*transposed=*/true),
        of_hidden(sizes, layer.weight_hidden, /*transposed=*/true),
        bias(summed_biases(sizes, layer)),
        output(at::empty({sizes.steps, sizes.batch, sizes.hidden}, layer.input.options())),
        last(at::empty({sizes.batch, sizes.hidden}, layer.hidden.options())),
        last_cell(at::empty({sizes.batch, sizes.hidden}, layer.cell.options())),
        workspace(workspace),
        together(std::clamp<std::int64_t>(std::min(kTile / sizes.rows, kSums / (sizes.rows * sizes.sums)), 1,
                                          sizes.steps)) {}

  void run(std::int64_t tile) {
    Scratch scratch;
    const std::int64_t begin = tile * sizes.rows, used = sizes.used(tile);
    std::byte* of_steps = scratch.bytes(together * sizes.rows * of_input.columns() * sizes.format_size);
    std::byte* state = scratch.bytes(sizes.rows * sizes.width * sizes.format_size);
    float* sums = scratch.floats(together * sizes.rows * sizes.sums);
    float* cell = scratch.floats(sizes.rows * sizes.width);
    load_state(sizes, first_cell, tile, cell);
    kernels::load_tile(sizes.format, rows_at(first, 0, begin, used), sizes.rows, sizes.width, state);
    for (std::int64_t from = 0; from < sizes.steps; from += together) {
      const std::int64_t count = std::min(together, sizes.steps - from);
      for (std::int64_t i = 0; i < count; ++i) {
        kernels::load_tile(sizes.format, rows_at(input, sizes.time(from + i), begin, used), sizes.rows,
                           of_input.columns(), of_steps + i * sizes.rows * of_input.columns() * sizes.format_size);
      }
      of_input.multiply(sizes, of_steps, count * sizes.rows, of_input.columns(), sums, false);
      for (std::int64_t i = 0; i < count; ++i) {
        const std::int64_t step = from + i;
        float* here = sums + i * sizes.rows * sizes.sums;
        of_hidden.multiply(sizes, state, sizes.rows, of_hidden.columns(), here, true);
        const Rows to = rows_at(output, sizes.time(step), begin, used);
        kernels::lstm_forward(
            {.sizes = sizes.of(tile),
             .bias = bias.data(),
             .sums = here,
             .cell = cell,
             .gates = workspace == nullptr ? nullptr : workspace + sizes.gates_at(step, tile),
             .cells = workspace == nullptr ? nullptr : reinterpret_cast<float*>(workspace + sizes.cells_at(step, tile)),
             .output = const_cast<void*>(to.data),
             .output_stride = to.stride});
        kernels::load_tile(sizes.format, to, sizes.rows, sizes.width, state);
      }
    }
    store_state(sizes, cell, tile, last_cell);
  }

  const Sizes& sizes;
  Tensor input, first, first_cell;
  Weights of_input, of_hidden;
  std::vector<float> bias;
  Tensor output, last, last_cell;
  std::byte* workspace;
  std::int64_t together;
};

struct BackwardPass {
  BackwardPass(const Sizes& sizes, const LstmLayer& layer, const Tensor& of_output, const Tensor& of_hidden,
               const Tensor& of_cell, const std::byte* workspace)
      : sizes(sizes),
        first_cell(as_step(layer.cell)),
        to_hidden(sizes, layer.weight_hidden, /*transposed=*/false),
        to_input(sizes, layer.weight_input, /*transposed=*/false),
        workspace(workspace),
        sums(at::empty({sizes.steps, sizes.tiles * sizes.rows, kGates, sizes.width}, layer.input.options())),
        input(at::empty(layer.input.sizes(), layer.input.options())),
        hidden(at::empty({sizes.batch, sizes.hidden}, layer.hidden.options())),
        cell(at::empty({sizes.batch, sizes.hidden}, layer.cell.options())) {
    if (of_output.defined()) grad_output = dense(of_output.to(layer.input.scalar_type()));
    if (of_hidden.defined()) grad_hidden = as_step(of_hidden);
    if (of_cell.defined()) grad_cell = as_step(of_cell);
  }

  void run(std::int64_t tile) {
    Scratch scratch;
    const std::int64_t size = sizes.rows * sizes.width;
    float* of_hidden = scratch.floats(size);
    float* of_cell = scratch.floats(size);
    float* before = scratch.floats(size);
    float* of_input = scratch.floats(sizes.rows * to_input.columns());
    const bool is_direct = sizes.format_size == sizes.element_size;
    std::byte* wide = is_direct ? nullptr : scratch.bytes(sizes.rows * sizes.sums * sizes.format_size);
    const auto load = [&](const Tensor& state, float* to) {
      if (state.defined()) {
        load_state(sizes, state, tile, to);
      } else {
        std::fill_n(to, size, 0.0F);
      }
    };
    load(grad_hidden, of_hidden);
    load(grad_cell, of_cell);
    load(first_cell, before);
    const auto cells = [&](std::int64_t step) {
      return reinterpret_cast<const float*>(workspace + sizes.cells_at(step, tile));
    };
    for (std::int64_t step = sizes.steps - 1; step >= 0; --step) {
      const std::int64_t time = sizes.time(step);
      auto* of_sums = static_cast<std::byte*>(sums.mutable_data_ptr()) +
                      (time * sizes.tiles + tile) * sizes.rows * sizes.sums * sizes.element_size;
      kernels::LstmBackward one{.sizes = sizes.of(tile),
                                .gates = workspace + sizes.gates_at(step, tile),
                                .cells = cells(step),
                                .before = step > 0 ? cells(step - 1) : before,
                                .grad_hidden = of_hidden,
                                .grad_cell = of_cell,
                                .grad_sums = of_sums};
      if (grad_output.defined()) {
        const Rows rows = rows_at(grad_output, time, tile * sizes.rows, sizes.used(tile));
        one.grad_output = rows.data;
        one.grad_output_stride = rows.stride;
      }
      kernels::lstm_backward(one);
      const std::byte* left = of_sums;
      if (!is_direct) {
        kernels::load_tile(sizes.format, {sizes.element, of_sums, sizes.sums, sizes.rows, sizes.sums}, sizes.rows,
                           sizes.sums, wide);
        left = wide;
      }
      to_hidden.multiply(sizes, left, sizes.rows, sizes.sums, of_hidden, false);
      to_input.multiply(sizes, left, sizes.rows, sizes.sums, of_input, false);
      const Rows to = rows_at(input, time, tile * sizes.rows, sizes.used(tile));
      kernels::store_rows(of_input, to_input.columns(), to.rows, to.columns, 1, nullptr, to.element,
                          const_cast<void*>(to.data), to.stride);
    }
    store_state(sizes, of_hidden, tile, hidden);
    store_state(sizes, of_cell, tile, cell);
  }

  const Sizes& sizes;
  Tensor first_cell;
  Weights to_hidden, to_input;
  const std::byte* workspace;
  Tensor grad_output, grad_hidden, grad_cell;
  Tensor sums;  ///< gradients of the sums before the gates
  Tensor input, hidden, cell;
};

// Rows of a matrix as the right operand of products, in blocks of kTile x kTile.
struct RightRows {
  RightRows(const Sizes& sizes, const Tensor& from)
      : rows(from),
        along(from.size(0)),
        across(from.size(1)),
        blocks(scratch, sizes.format, kTile, along.tiles * across.tiles) {
    at::parallel_for(0, along.tiles, 4, [&](std::int64_t begin, std::int64_t end) {
      Scratch own;
      const Packed plain(own, sizes.format, kTile, 2);
      for (std::int64_t tile = begin; tile < end; ++tile) {
        for (std::int64_t column = 0; column < across.tiles; ++column) {
          const auto* data =
              static_cast<const char*>(rows.const_data_ptr()) + across.begin(column) * sizes.element_size;
          const Rows whole{sizes.element, data, rows.stride(0), along.count, across.used(column)};
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

// Gradients of the weights that the rows of `factors` were multiplied with: the transposed `of_sums` times them.
template <std::size_t N>
std::array<Tensor, N> of_weights(const Sizes& sizes, const Tensor& of_sums, const std::array<Tensor, N>& factors) {
  const Tiled along(of_sums.size(0)), units(of_sums.size(1));
  std::vector<RightRows> right;
  right.reserve(N);
  std::array<Tensor, N> results;
  for (std::size_t i = 0; i < N; ++i) {
    right.emplace_back(sizes, factors[i]);
    results[i] = at::empty({units.count, factors[i].size(1)}, factors[i].options());
  }
  at::parallel_for(0, units.tiles, 1, [&](std::int64_t begin, std::int64_t end) {
    const ProductScope scope(sizes.format);
    Scratch scratch;
    const Packed plain(scratch, sizes.format, kTile, 2), left(scratch, sizes.format, kTile, along.tiles);
    float* sums = scratch.floats(kTile * kTile);
    for (std::int64_t unit = begin; unit < end; ++unit) {
      const auto* of_units =
          static_cast<const char*>(of_sums.const_data_ptr()) + units.begin(unit) * sizes.element_size;
      const Rows rows{sizes.element, of_units, of_sums.stride(0), along.count, units.used(unit)};
      for (std::int64_t tile = 0; tile < along.tiles; ++tile) {
        kernels::load_tile(sizes.format, rows.part(along.begin(tile), along.used(tile)), along.padded(tile), kTile,
                           plain[0]);
        kernels::make_operand(sizes.format, Operand::LeftTransposed, plain[0], along.padded(tile), kTile, plain[1],
                              left[tile]);
      }
      for (std::size_t i = 0; i < N; ++i) {
        const Tiled& across = right[i].across;
        auto* to =
            static_cast<char*>(results[i].mutable_data_ptr()) + units.begin(unit) * across.count * sizes.element_size;
        for (std::int64_t column = 0; column < across.tiles; ++column) {
          for (std::int64_t tile = 0; tile < along.tiles; ++tile) {
            product(sizes.format, kTile, across.padded(column), along.padded(tile), left[tile], kTile,
                    right[i].blocks[column * along.tiles + tile], kTile, sums, kTile, tile > 0);
          }
          kernels::store_rows(sums, kTile, units.used(unit), across.used(column), 1, nullptr, sizes.element,
                              to + across.begin(column) * sizes.element_size, across.count);
        }
      }
    }
  });
  return results;
}

template <class Work>
void run_all(const Sizes& sizes, Work& work) {
  at::parallel_for(0, sizes.tiles, 1, [&](std::int64_t begin, std::int64_t end) {
    const ProductScope scope(sizes.format);
    for (std::int64_t tile = begin; tile < end; ++tile) work.run(tile);
  });
}

}  // namespace

bool lstm_cpu_takes(const LstmLayer& layer) {
  const Tensor& input = layer.input;
  const auto type = input.scalar_type();
  if (type != at::kFloat && type != at::kBFloat16) return false;
  const auto fits = [&](const Tensor& tensor, std::initializer_list<std::int64_t> sizes) {
    return tensor.device().is_cpu() && tensor.layout() == at::kStrided && tensor.scalar_type() == type &&
           tensor.sizes() == at::IntArrayRef(sizes) && tensor.numel() > 0;
  };
  if (input.dim() != 3 || !fits(input, {input.size(0), input.size(1), input.size(2)})) return false;
  if (layer.hidden.dim() != 2) return false;
  const std::int64_t batch = input.size(1), hidden = layer.hidden.size(1), sums = kGates * hidden;
  return fits(layer.hidden, {batch, hidden}) && fits(layer.cell, {batch, hidden}) &&
         fits(layer.weight_input, {sums, input.size(2)}) && fits(layer.weight_hidden, {sums, hidden}) &&
         (!layer.has_biases || (fits(layer.bias_input, {sums}) && fits(layer.bias_hidden, {sums})));
}

std::tuple<Tensor, Tensor, Tensor, Tensor> lstm_cpu(const LstmLayer& layer, bool train) {
  const Sizes sizes(layer);
  Tensor workspace = at::empty({train ? sizes.cells_at(sizes.steps, 0) : 0}, at::kByte);
  auto* bytes = train ? static_cast<std::byte*>(workspace.mutable_data_ptr()) : nullptr;
  if (train) std::memcpy(bytes, kMark.data(), sizeof kMark);
  ForwardPass work(sizes, layer, bytes);
  run_all(sizes, work);
  work.last.copy_(work.output[sizes.time(sizes.steps - 1)]);
  return {work.output, work.last, work.last_cell, workspace};
}

bool is_lstm_cpu_workspace(const Tensor& workspace) {
  return workspace.scalar_type() == at::kByte && workspace.is_contiguous() &&
         workspace.numel() >= static_cast<std::int64_t>(sizeof kMark) &&
         std::memcmp(workspace.const_data_ptr(), kMark.data(), sizeof kMark) == 0;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> lstm_cpu_backward(
    const LstmLayer& layer, const Tensor& output, const Tensor& grad_output, const Tensor& grad_hidden,
    const Tensor& grad_cell, const Tensor& workspace) {
  const Sizes sizes(layer);
  // torch's own error: this runs below its dispatcher.
  TORCH_CHECK_VALUE(workspace.numel() == sizes.cells_at(sizes.steps, 0), "the LSTM's backward was given ",
                    workspace.numel(), " bytes of its forward, which leaves ", sizes.cells_at(sizes.steps, 0),
                    " for these sizes; pass what forward returned.");
  BackwardPass work(sizes, layer, grad_output, grad_hidden, grad_cell,
                    static_cast<const std::byte*>(workspace.const_data_ptr()));
  run_all(sizes, work);
  const std::int64_t rows = sizes.steps * sizes.batch;
  const Tensor sums =
      dense(work.sums.narrow(1, 0, sizes.batch).narrow(3, 0, sizes.hidden).reshape({rows, kGates * sizes.hidden}));
  const Tensor first = as_step(layer.hidden);
  const auto rest = output.narrow(0, sizes.reverse ? 1 : 0, sizes.steps - 1);
  const Tensor before = (sizes.reverse ? at::cat({rest, first}) : at::cat({first, rest})).flatten(0, 1);
  const auto [of_weight_input, of_weight_hidden] =
      of_weights<2>(sizes, sums, {dense(layer.input.reshape({rows, sizes.features})), before});
  Tensor of_bias = layer.has_biases ? sums.sum(0, /*keepdim=*/false, at::kFloat)
                                    : at::zeros({kGates * sizes.hidden}, sums.options().dtype(at::kFloat));
  of_bias = of_bias.to(layer.input.scalar_type());
  return {work.input, of_weight_input, of_weight_hidden, of_bias, of_bias.clone(), work.hidden, work.cell};
}

}  // namespace oxytorch::ops
