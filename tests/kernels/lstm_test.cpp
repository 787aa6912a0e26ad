// One step of an LSTM layer against its definition in fp64.
#include "oxytorch/kernels/lstm.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "oxytorch/isa.h"

namespace oxytorch::kernels {
namespace {

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

struct Step {
  Step(std::int64_t rows, std::int64_t used, std::int64_t hidden)
      : sizes{ElementType::F32, rows, used, hidden, (hidden + kStep - 1) / kStep * kStep} {
    std::mt19937 engine(static_cast<unsigned>(hidden));
    std::normal_distribution<float> normal;
    const auto fill = [&](std::int64_t count) {
      std::vector<float> values(static_cast<std::size_t>(count));
      for (float& value : values) value = 2 * normal(engine);
      return values;
    };
    bias = fill(4 * sizes.width);
    sums = fill(rows * 4 * sizes.width);
    before = fill(rows * sizes.width);
    grad_output = fill(used * stride());
    grad_hidden = fill(rows * sizes.width);
    grad_cell = fill(rows * sizes.width);
  }
  [[nodiscard]] std::int64_t stride() const { return sizes.hidden + 3; }

  static constexpr std::int64_t kStep = 16;
  LstmSizes sizes;
  std::vector<float> bias, sums, before, grad_output, grad_hidden, grad_cell;
};

class LstmStep : public testing::TestWithParam<std::int64_t> {};

TEST_P(LstmStep, IsThatOfItsDefinition) {
  const Step step(5, 3, GetParam());
  const auto& s = step.sizes;
  const auto size = static_cast<std::size_t>(s.rows * s.width);
  std::vector<float> cell = step.before, gates(4 * size), cells(size);
  constexpr float kUntouched = -77;
  std::vector<float> output(static_cast<std::size_t>(s.rows * step.stride()), kUntouched);
  lstm_forward(
      {s, step.bias.data(), step.sums.data(), cell.data(), gates.data(), cells.data(), output.data(), step.stride()});
  EXPECT_EQ(cell, cells);
  std::vector<float> grad_cell = step.grad_cell, grad_sums(4 * size);
  lstm_backward({s, gates.data(), cells.data(), step.before.data(), step.grad_output.data(), step.stride(),
                 step.grad_hidden.data(), grad_cell.data(), grad_sums.data()});
  for (std::int64_t i = 0; i < s.rows; ++i) {
    for (std::int64_t j = 0; j < s.hidden; ++j) {
      const auto at = [&](std::int64_t gate) { return static_cast<std::size_t>((i * 4 + gate) * s.width + j); };
      const auto sum = [&](std::int64_t gate) {
        return double{step.sums[at(gate)]} + step.bias[static_cast<std::size_t>(gate * s.width + j)];
      };
      const auto here = static_cast<std::size_t>(i * s.width + j);
      const double in = sigmoid(sum(0)), forget = sigmoid(sum(1)), fresh = std::tanh(sum(2)), out = sigmoid(sum(3));
      const double now = forget * step.before[here] + in * fresh;
      ASSERT_NEAR(cell[here], now, 2e-6) << i << " " << j;
      const auto shown = static_cast<std::size_t>(i * step.stride() + j);
      const bool is_shown = i < s.used;
      EXPECT_NEAR(is_shown ? output[shown] : out * std::tanh(now), out * std::tanh(now), 1e-6);
      const double grad = step.grad_hidden[here] + (i < s.used ? double{step.grad_output[shown]} : 0);
      const double tanh = std::tanh(now);
      const double of_cell = step.grad_cell[here] + grad * out * (1 - tanh * tanh);
      EXPECT_NEAR(grad_sums[at(0)], of_cell * fresh * in * (1 - in), 1e-5);
      EXPECT_NEAR(grad_sums[at(1)], of_cell * step.before[here] * forget * (1 - forget), 1e-5);
      EXPECT_NEAR(grad_sums[at(2)], of_cell * in * (1 - fresh * fresh), 1e-5);
      EXPECT_NEAR(grad_sums[at(3)], grad * tanh * out * (1 - out), 1e-5);
      EXPECT_NEAR(grad_cell[here], of_cell * forget, 1e-5);
    }
    for (std::int64_t j = i < s.used ? s.hidden : 0; j < step.stride(); ++j) {
      ASSERT_EQ(output[static_cast<std::size_t>(i * step.stride() + j)], kUntouched) << "beyond its rows and columns";
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Hidden, LstmStep, testing::Values(1, 7, 16, 33, 64));

TEST(LstmStepTest, WithoutGradientsItKeepsNothing) {
  const Step step(2, 2, 20);
  std::vector<float> cells[] = {step.before, step.before}, gates(8 * 32), kept(2 * 32), outputs[2];
  for (int i = 0; i < 2; ++i) {
    outputs[i].resize(2 * 23);
    lstm_forward({step.sizes, step.bias.data(), step.sums.data(), cells[i].data(), i == 0 ? gates.data() : nullptr,
                  i == 0 ? kept.data() : nullptr, outputs[i].data(), step.stride()});
  }
  EXPECT_EQ(cells[0], cells[1]);
  EXPECT_EQ(outputs[0], outputs[1]);
}

TEST(LstmStepTest, WithoutAGradientOfTheOutputThatOfTheStateCounts) {
  const Step step(2, 2, 20);
  std::vector<float> gates(8 * 32, 0.25F), cells(2 * 32, 0.5F), zeros(step.grad_output.size());
  std::vector<float> results[2], grads[2] = {step.grad_cell, step.grad_cell};
  for (int i = 0; i < 2; ++i) {
    results[i].resize(8 * 32);
    lstm_backward({step.sizes, gates.data(), cells.data(), step.before.data(), i == 0 ? nullptr : zeros.data(),
                   step.stride(), step.grad_hidden.data(), grads[i].data(), results[i].data()});
  }
  EXPECT_EQ(results[0], results[1]);
  EXPECT_EQ(grads[0], grads[1]);
}

}  // namespace
}  // namespace oxytorch::kernels
