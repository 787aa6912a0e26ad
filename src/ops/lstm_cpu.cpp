#include "ops/lstm_cpu.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "ops/recurrent.h"
#include "optim/dense.h"
#include "oxytorch/kernels/lstm.h"

namespace oxytorch::ops {
namespace {

using at::Tensor;
using kernels::Rows;

constexpr std::int64_t kGates = 4;
// A workspace begins with these, which oneDNN's does not.
constexpr std::array<std::uint64_t, 8> kMark{
    0x6f78'7974'6f72'6368, 0x9e37'79b9'7f4a'7c15, 0xc2b2'ae3d'27d4'eb4f, 0x1656'67b1'9e37'79f9, 1, 0, 0, 0};

struct LstmLayout : RecurrentSizes {
  explicit LstmLayout(const LstmLayer& layer)
      : RecurrentSizes(layer.input, layer.hidden.size(1), kGates, layer.reverse,
                       optim::element_type(layer.input).value()) {}

  [[nodiscard]] kernels::LstmSizes of(std::int64_t tile) const { return {element, rows, used(tile), hidden, width}; }

  // The workspace: the mark, gates of every step and tile, cells of the same.
  [[nodiscard]] std::int64_t gates_at(std::int64_t step, std::int64_t tile) const {
    return static_cast<std::int64_t>(sizeof kMark) + (step * tiles + tile) * rows * sums * element_size;
  }
  [[nodiscard]] std::int64_t cells_at(std::int64_t step, std::int64_t tile) const {
    return gates_at(steps, 0) + (step * tiles + tile) * rows * width * 4;
  }
};

std::vector<float> summed_biases(const RecurrentSizes& sizes, const LstmLayer& layer) {
  std::vector<float> sums(static_cast<std::size_t>(sizes.sums));
  if (!layer.has_biases) return sums;
  const Tensor both = layer.bias_input.to(at::kFloat) + layer.bias_hidden.to(at::kFloat);
  spread_bias(sizes, both.const_data_ptr<float>(), kGates, sums.data());
  return sums;
}

struct LstmForwardPass {
  LstmForwardPass(const LstmLayout& sizes, const LstmLayer& layer, std::byte* workspace)
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
        workspace(workspace) {}

  void run(std::int64_t tile) {
    Scratch scratch;
    const std::int64_t begin = sizes.begin(tile), used = sizes.used(tile);
    InputProducts products(sizes, input, of_input, tile);
    std::byte* state = scratch.bytes(sizes.rows * sizes.width * sizes.format_size);
    float* cell = scratch.floats(sizes.rows * sizes.width);
    load_step(sizes, first_cell, 0, tile, cell);
    kernels::load_tile(sizes.format, rows_at(first, 0, begin, used), sizes.rows, sizes.width, state);
    for (std::int64_t step = 0; step < sizes.steps; ++step) {
      float* here = products.of(step);
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
    store_step(sizes, cell, sizes.width, last_cell.unsqueeze(0), 0, tile);
  }

  const LstmLayout& sizes;
  Tensor input, first, first_cell;
  RecurrentWeights of_input, of_hidden;
  std::vector<float> bias;
  Tensor output, last, last_cell;
  std::byte* workspace;
};

struct LstmBackwardPass {
  LstmBackwardPass(const LstmLayout& sizes, const LstmLayer& layer, const Tensor& of_output, const Tensor& of_hidden,
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
    LeftRows operand(sizes, sizes.element, sizes.sums);
    const auto load = [&](const Tensor& state, float* to) {
      if (state.defined()) {
        load_step(sizes, state, 0, tile, to);
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
        const Rows rows = rows_at(grad_output, time, sizes.begin(tile), sizes.used(tile));
        one.grad_output = rows.data;
        one.grad_output_stride = rows.stride;
      }
      kernels::lstm_backward(one);
      const std::byte* left = operand.of(of_sums);
      to_hidden.multiply(sizes, left, sizes.rows, sizes.sums, of_hidden, false);
      to_input.multiply(sizes, left, sizes.rows, sizes.sums, of_input, false);
      store_step(sizes, of_input, to_input.columns(), input, time, tile);
    }
    store_step(sizes, of_hidden, sizes.width, hidden.unsqueeze(0), 0, tile);
    store_step(sizes, of_cell, sizes.width, cell.unsqueeze(0), 0, tile);
  }

  const LstmLayout& sizes;
  Tensor first_cell;
  RecurrentWeights to_hidden, to_input;
  const std::byte* workspace;
  Tensor grad_output, grad_hidden, grad_cell;
  Tensor sums;  ///< gradients of the sums before the gates
  Tensor input, hidden, cell;
};

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
  const LstmLayout sizes(layer);
  Tensor workspace = at::empty({train ? sizes.cells_at(sizes.steps, 0) : 0}, at::kByte);
  auto* bytes = train ? static_cast<std::byte*>(workspace.mutable_data_ptr()) : nullptr;
  if (train) std::memcpy(bytes, kMark.data(), sizeof kMark);
  LstmForwardPass work(sizes, layer, bytes);
  run_tiles(sizes, work);
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
  const LstmLayout sizes(layer);
  // torch's own error: this runs below its dispatcher.
  TORCH_CHECK_VALUE(workspace.numel() == sizes.cells_at(sizes.steps, 0), "the LSTM's backward was given ",
                    workspace.numel(), " bytes of its forward, which leaves ", sizes.cells_at(sizes.steps, 0),
                    " for these sizes; pass what forward returned.");
  LstmBackwardPass work(sizes, layer, grad_output, grad_hidden, grad_cell,
                        static_cast<const std::byte*>(workspace.const_data_ptr()));
  run_tiles(sizes, work);
  const std::int64_t rows = sizes.steps * sizes.batch;
  const Tensor sums =
      dense(work.sums.narrow(1, 0, sizes.batch).narrow(3, 0, sizes.hidden).reshape({rows, kGates * sizes.hidden}));
  const Tensor first = as_step(layer.hidden);
  const auto rest = output.narrow(0, sizes.reverse ? 1 : 0, sizes.steps - 1);
  const Tensor before = (sizes.reverse ? at::cat({rest, first}) : at::cat({first, rest})).flatten(0, 1);
  const auto of_weights = weight_gradients(sizes, sums, {dense(layer.input.reshape({rows, sizes.features})), before},
                                           layer.input.scalar_type());
  const Tensor of_bias =
      (layer.has_biases ? sums_of_columns(sums) : at::zeros({kGates * sizes.hidden}, sums.options().dtype(at::kFloat)))
          .to(layer.input.scalar_type());
  return {work.input, of_weights[0], of_weights[1], of_bias, of_bias.clone(), work.hidden, work.cell};
}

}  // namespace oxytorch::ops
