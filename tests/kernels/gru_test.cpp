// One step of a GRU layer against its definition in fp64.
#include "oxytorch/kernels/gru.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "oxytorch/isa.h"

namespace oxytorch::kernels {
namespace {

double logistic(double x) { return 1 / (1 + std::exp(-x)); }

struct GruStepInputs {
  GruStepInputs(std::int64_t rows, std::int64_t width) : sizes{ElementType::F32, rows, width} {
    std::mt19937 engine(static_cast<unsigned>(width));
    std::normal_distribution<float> normal;
    const auto fill = [&](std::int64_t count) {
      std::vector<float> values(static_cast<std::size_t>(count));
      for (float& value : values) value = 2 * normal(engine);
      return values;
    };
    bias = fill(4 * width);
    input_sums = fill(rows * 3 * width);
    state_sums = fill(rows * 3 * width);
    before = fill(rows * width);
    grad_output = fill(rows * width);
    grad_state = fill(rows * width);
  }
  [[nodiscard]] std::size_t count(std::int64_t parts) const {
    return static_cast<std::size_t>(sizes.rows * parts * sizes.width);
  }

  GruSizes sizes;
  std::vector<float> bias, input_sums, state_sums, before, grad_output, grad_state;
};

class GruStep : public testing::TestWithParam<std::int64_t> {};

TEST_P(GruStep, IsThatOfItsDefinition) {
  const GruStepInputs step(5, GetParam());
  const auto& s = step.sizes;
  std::vector<float> state = step.before, kept(step.count(kGruKept));
  gru_forward({s, step.bias.data(), step.input_sums.data(), step.state_sums.data(), state.data(), kept.data()});
  std::vector<float> grad_state = step.grad_state, grad_sums(step.count(4));
  gru_backward({s, kept.data(), step.grad_output.data(), grad_state.data(), grad_sums.data()});
  for (std::int64_t i = 0; i < s.rows; ++i) {
    for (std::int64_t j = 0; j < s.width; ++j) {
      const auto at = [&](std::int64_t parts, std::int64_t part) {
        return static_cast<std::size_t>((i * parts + part) * s.width + j);
      };
      const auto bias = [&](std::int64_t part) {
        return double{step.bias[static_cast<std::size_t>(part * s.width + j)]};
      };
      const auto gate = [&](std::int64_t part) {
        return logistic(double{step.input_sums[at(3, part)]} + step.state_sums[at(3, part)] + bias(part));
      };
      const double reset = gate(0), update = gate(1), inner = step.state_sums[at(3, 2)] + bias(3);
      const double fresh = std::tanh(step.input_sums[at(3, 2)] + bias(2) + reset * inner);
      const double before = step.before[at(1, 0)];
      ASSERT_NEAR(state[at(1, 0)], (1 - update) * fresh + update * before, 3e-6) << i << " " << j;
      const double grad = double{step.grad_state[at(1, 0)]} + step.grad_output[at(1, 0)];
      const double of_fresh = grad * (1 - update) * (1 - fresh * fresh);
      EXPECT_NEAR(grad_sums[at(4, 0)], of_fresh, 1e-5);
      EXPECT_NEAR(grad_sums[at(4, 1)], of_fresh * inner * reset * (1 - reset), 2e-5);
      EXPECT_NEAR(grad_sums[at(4, 2)], grad * (before - fresh) * update * (1 - update), 1e-5);
      EXPECT_NEAR(grad_sums[at(4, 3)], of_fresh * reset, 1e-5);
      EXPECT_NEAR(grad_state[at(1, 0)], grad * update, 1e-5);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Width, GruStep, testing::Values(16, 32, 80));

TEST(GruStepTest, WithoutGradientsItKeepsNothing) {
  const GruStepInputs step(2, 32);
  std::vector<float> states[] = {step.before, step.before}, kept(step.count(kGruKept));
  for (int i = 0; i < 2; ++i) {
    gru_forward({step.sizes, step.bias.data(), step.input_sums.data(), step.state_sums.data(), states[i].data(),
                 i == 0 ? kept.data() : nullptr});
  }
  EXPECT_EQ(states[0], states[1]);
}

TEST(GruStepTest, WithoutAGradientOfTheOutputThatOfTheStateCounts) {
  const GruStepInputs step(2, 32);
  std::vector<float> kept(step.count(kGruKept), 0.25F), zeros(step.count(1));
  std::vector<float> sums[2], grads[] = {step.grad_state, step.grad_state};
  for (int i = 0; i < 2; ++i) {
    sums[i].resize(step.count(4));
    gru_backward({step.sizes, kept.data(), i == 0 ? nullptr : zeros.data(), grads[i].data(), sums[i].data()});
  }
  EXPECT_EQ(sums[0], sums[1]);
  EXPECT_EQ(grads[0], grads[1]);
}

TEST(GruStepTest, WhereTheStateHasNoColumnItStaysZero) {
  std::vector<float> bias(4 * 16), sums(3 * 16), state(16), kept(kGruKept * 16);
  gru_forward({{ElementType::F32, 1, 16}, bias.data(), sums.data(), sums.data(), state.data(), kept.data()});
  EXPECT_EQ(state, std::vector<float>(16));
}

}  // namespace
}  // namespace oxytorch::kernels
