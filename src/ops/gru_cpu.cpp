#include "ops/gru_cpu.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <optional>

#include "ops/recurrent.h"
#include "optim/dense.h"
#include "oxytorch/kernels/gru.h"

namespace oxytorch::ops {
namespace {

using at::Tensor;
using kernels::ElementType;
using kernels::kGruKept;

constexpr std::int64_t kGruGates = 3;
// Gradients of sums: n of the input, r, z, n of the state. The first three are the input's, the last three the state's.
constexpr std::int64_t kGruSums = 4;

struct GruLayout : RecurrentSizes {
  GruLayout(const Tensor& input, const Tensor& weight_hidden, bool reverse, bool narrow)
      : RecurrentSizes(input, weight_hidden.size(1), kGruGates, reverse,
                       narrow ? ElementType::BF16 : ElementType::F32) {}

  [[nodiscard]] kernels::GruSizes of_step() const { return {element, rows, width}; }
  [[nodiscard]] at::ScalarType type() const { return element == ElementType::BF16 ? at::kBFloat16 : at::kFloat; }

  // For each row of every step, `parts` of `width` columns; of all tiles, whole.
  [[nodiscard]] Tensor for_each_row(std::int64_t parts) const {
    return at::empty({steps, tiles * rows, parts, width}, type());
  }
  [[nodiscard]] std::int64_t offset(std::int64_t time, std::int64_t tile, std::int64_t parts) const {
    return (time * tiles + tile) * rows * parts * width * element_size;
  }
  // Of such a tensor the rows and columns that count, as a matrix of rows.
  [[nodiscard]] Tensor matrix(const Tensor& all, std::int64_t first, std::int64_t count) const {
    const Tensor parts = all.narrow(1, 0, batch).narrow(2, first, count).narrow(3, 0, hidden);
    return dense(parts.reshape({steps * batch, count * hidden}));
  }
};

// r and z of both together, n of the input, n of the state.
std::vector<float> gru_biases(const GruLayout& sizes, const GruLayer& layer) {
  std::vector<float> spread(static_cast<std::size_t>(4 * sizes.width));
  if (!layer.bias_input.defined()) return spread;
  const Tensor of_input = layer.bias_input.to(at::kFloat), of_state = layer.bias_hidden.to(at::kFloat);
  const std::int64_t n = 2 * sizes.hidden;
  const Tensor all = at::cat({of_input.narrow(0, 0, n).add(of_state.narrow(0, 0, n)),
                              of_input.narrow(0, n, sizes.hidden), of_state.narrow(0, n, sizes.hidden)});
  spread_bias(sizes, all.const_data_ptr<float>(), 4, spread.data());
  return spread;
}

struct GruForwardPass {
  GruForwardPass(const GruLayout& sizes, const GruLayer& layer, bool train)
      : sizes(sizes),
        input(dense(layer.input)),
        first(as_step(layer.hidden)),
        of_input(sizes, layer.weight_input, /*transposed=*/true),
        of_state(sizes, layer.weight_hidden, /*transposed=*/true),
        bias(gru_biases(sizes, layer)),
        output(at::empty({sizes.steps, sizes.batch, sizes.hidden}, layer.hidden.options())) {
    if (!train) return;
    kept = sizes.for_each_row(kGruKept);
    kept_bytes = static_cast<std::byte*>(kept.mutable_data_ptr());
  }

  void run(std::int64_t tile) {
    Scratch scratch;
    InputProducts products(sizes, input, of_input, tile);
    LeftRows operand(sizes, ElementType::F32, sizes.width);
    float* state = scratch.floats(sizes.rows * sizes.width);
    float* state_sums = scratch.floats(sizes.rows * sizes.sums);
    load_step(sizes, first, 0, tile, state);
    for (std::int64_t step = 0; step < sizes.steps; ++step) {
      const std::int64_t time = sizes.time(step);
      of_state.multiply(sizes, operand.of(state), sizes.rows, sizes.width, state_sums, false);
      kernels::gru_forward({.sizes = sizes.of_step(),
                            .bias = bias.data(),
                            .input_sums = products.of(step),
                            .state_sums = state_sums,
                            .state = state,
                            .kept = kept_bytes == nullptr ? nullptr : kept_bytes + sizes.offset(time, tile, kGruKept)});
      store_step(sizes, state, sizes.width, output, time, tile);
    }
  }

  const GruLayout& sizes;
  Tensor input, first;
  RecurrentWeights of_input, of_state;
  std::vector<float> bias;
  Tensor output, kept;
  std::byte* kept_bytes = nullptr;
};

struct GruBackwardPass {
  GruBackwardPass(const GruLayout& sizes, const GruKept& layer, const Tensor& of_output, const Tensor& of_last,
                  bool wants_input)
      : sizes(sizes),
        to_state(sizes, layer.weight_hidden, /*transposed=*/false),
        kept(static_cast<const std::byte*>(layer.kept.const_data_ptr())),
        sums(sizes.for_each_row(kGruSums)),
        sums_bytes(static_cast<std::byte*>(sums.mutable_data_ptr())),
        sums_of_rows(static_cast<std::size_t>(sizes.tiles * kGruSums * sizes.width)),
        state(at::empty({sizes.batch, sizes.hidden}, at::kFloat)) {
    if (of_output.defined()) grad_output = dense(of_output);
    if (of_last.defined()) grad_last = as_step(of_last);
    if (!wants_input) return;
    constexpr std::int64_t kNew = 2;  // comes first in the gradients of sums
    to_input.emplace(sizes, layer.weight_input, /*transposed=*/false, kNew);
    input = at::empty(layer.input.sizes(), layer.input.options());
  }

  void run(std::int64_t tile) {
    Scratch scratch;
    const std::int64_t size = sizes.rows * sizes.width, stride = kGruSums * sizes.width;
    LeftRows operand(sizes, sizes.element, stride);
    float* of_state = scratch.floats(size);
    float* of_output = grad_output.defined() ? scratch.floats(size) : nullptr;
    float* of_rows = scratch.floats(stride);
    float* of_input = to_input ? scratch.floats(sizes.rows * to_input->columns()) : nullptr;
    if (grad_last.defined()) {
      load_step(sizes, grad_last, 0, tile, of_state);
    } else {
      std::fill_n(of_state, size, 0.0F);
    }
    for (std::int64_t step = sizes.steps - 1; step >= 0; --step) {
      const std::int64_t time = sizes.time(step);
      std::byte* of_sums = sums_bytes + sizes.offset(time, tile, kGruSums);
      if (of_output != nullptr) load_step(sizes, grad_output, time, tile, of_output);
      kernels::gru_backward({.sizes = sizes.of_step(),
                             .kept = kept + sizes.offset(time, tile, kGruKept),
                             .grad_output = of_output,
                             .grad_state = of_state,
                             .grad_sums = of_sums});
      // Those of rows beyond the batch are zero.
      kernels::sum_columns({sizes.element, of_sums, stride, sizes.rows, stride}, of_rows);
      kernels::add_rows(of_rows, stride, 1, stride, sums_of_rows.data() + tile * stride, stride);
      const std::byte* left = operand.of(of_sums);
      to_state.multiply(sizes, left + sizes.width * sizes.format_size, sizes.rows, stride, of_state, true);
      if (!to_input) continue;
      to_input->multiply(sizes, left, sizes.rows, stride, of_input, false);
      store_step(sizes, of_input, to_input->columns(), input, time, tile);
    }
    store_step(sizes, of_state, sizes.width, state.unsqueeze(0), 0, tile);
  }

  // The gradient of a bias, whose gates have these places in the gradients of sums.
  [[nodiscard]] Tensor of_bias(std::array<std::int64_t, 3> places) const {
    Tensor made = at::zeros({kGruGates * sizes.hidden}, at::kFloat);
    for (std::int64_t tile = 0; tile < sizes.tiles; ++tile) {
      auto* to = made.mutable_data_ptr<float>();
      for (const std::int64_t place : places) {
        const float* from = sums_of_rows.data() + (tile * kGruSums + place) * sizes.width;
        kernels::add_rows(from, sizes.width, 1, sizes.hidden, to, sizes.hidden);
        to += sizes.hidden;
      }
    }
    return made;
  }

  const GruLayout& sizes;
  RecurrentWeights to_state;
  std::optional<RecurrentWeights> to_input;
  const std::byte* kept;
  Tensor grad_output, grad_last;
  Tensor sums;  ///< gradients of the sums before the gates
  std::byte* sums_bytes;
  std::vector<float> sums_of_rows;  ///< of each tile, the sum of its gradients of sums
  Tensor input, state;
};

}  // namespace

GruResults gru_cpu(const GruLayer& layer, bool train) {
  const GruLayout sizes(layer.input, layer.weight_hidden, layer.reverse, layer.narrow);
  GruForwardPass work(sizes, layer, train);
  run_tiles(sizes, work);
  return {work.output, work.output[sizes.time(sizes.steps - 1)].clone(), work.kept};
}

std::array<Tensor, 6> gru_cpu_backward(const GruKept& layer, const Tensor& grad_output, const Tensor& grad_last,
                                       std::array<bool, 6> wanted) {
  const GruLayout sizes(layer.input, layer.weight_hidden, layer.reverse, layer.kept.scalar_type() == at::kBFloat16);
  GruBackwardPass work(sizes, layer, grad_output, grad_last, wanted[0]);
  run_tiles(sizes, work);
  std::array<Tensor, 6> made;
  made[0] = work.input;
  if (wanted[1]) made[1] = work.state;
  if (wanted[2]) {
    const Tensor rows = dense(layer.input.reshape({sizes.steps * sizes.batch, sizes.features}));
    const Tensor turned =
        weight_gradients(sizes, sizes.matrix(work.sums, 0, 3), {rows}, layer.weight_input.scalar_type())[0];
    made[2] = turned.roll(-sizes.hidden, 0);
  }
  if (wanted[3]) {
    const Tensor before = sizes.matrix(layer.kept, kGruKept - 1, 1);
    made[3] = weight_gradients(sizes, sizes.matrix(work.sums, 1, 3), {before}, layer.weight_hidden.scalar_type())[0];
  }
  if (wanted[4]) made[4] = work.of_bias({1, 2, 0});
  if (wanted[5]) made[5] = work.of_bias({1, 2, 3});
  return made;
}

}  // namespace oxytorch::ops
