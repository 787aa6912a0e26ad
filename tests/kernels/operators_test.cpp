// The operators on raw memory against their definitions, with the same bits on every instruction set and split.
#include "oxytorch/kernels/operators.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "oxytorch/isa.h"

namespace oxytorch::kernels {
namespace {

std::vector<float> values(std::size_t count, unsigned seed, bool special = false) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> normal;
  const float rare[] = {-0.0F, std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
                        std::numeric_limits<float>::quiet_NaN()};
  std::vector<float> made(count);
  for (auto& value : made) {
    value = special ? std::round(2 * normal(engine)) : 3 * normal(engine) + 1;
    if (special && engine() % 12 == 0) value = rare[engine() % 4];
  }
  return made;
}

std::vector<std::uint32_t> bits(const std::vector<float>& values) {
  std::vector<std::uint32_t> all;
  for (const float value : values) all.push_back(std::isnan(value) ? 0x7FC00000U : std::bit_cast<std::uint32_t>(value));
  return all;
}

float plus_product(bool fused, float value, float factor, float other) {
  return fused ? std::fma(factor, other, value) : value + factor * other;
}

void on_each_isa(const std::function<void()>& check) {
  for (const Isa isa : supported_isas()) {
    SCOPED_TRACE(name(isa));
    const ScopedIsa scope(isa);
    check();
  }
}

const PoolShape kPools[] = {
    {{8, 66}, {4, 33}, {2, 2}, {2, 2}, {0, 0}, {1, 1}},  {{9, 67}, {4, 33}, {2, 2}, {2, 2}, {0, 0}, {1, 1}},
    {{17, 35}, {9, 18}, {3, 3}, {2, 2}, {1, 1}, {1, 1}}, {{9, 50}, {9, 50}, {3, 3}, {1, 1}, {1, 1}, {1, 1}},
    {{9, 70}, {2, 34}, {3, 2}, {3, 2}, {0, 1}, {2, 3}},  {{31, 70}, {31, 17}, {3, 2}, {1, 4}, {1, 0}, {1, 2}},
    {{2, 2}, {1, 1}, {2, 2}, {1, 1}, {1, 1}, {3, 3}},    {{1, 1}, {1, 1}, {1, 1}, {1, 1}, {0, 0}, {1, 1}},
};

// Every place of the kernel that is on the input, in order.
void pool(const PoolShape& s, const float* plane, std::vector<float>& output, std::vector<std::int64_t>& indices) {
  for (std::int64_t y = 0; y < s.output[0]; ++y) {
    for (std::int64_t x = 0; x < s.output[1]; ++x) {
      float best = -std::numeric_limits<float>::infinity();
      std::int64_t at = -1;
      for (std::int64_t i = 0; i < s.kernel[0]; ++i) {
        for (std::int64_t j = 0; j < s.kernel[1]; ++j) {
          const std::int64_t row = y * s.stride[0] - s.padding[0] + i * s.dilation[0];
          const std::int64_t column = x * s.stride[1] - s.padding[1] + j * s.dilation[1];
          if (row < 0 || column < 0 || row >= s.input[0] || column >= s.input[1]) continue;
          const float value = plane[row * s.input[1] + column];
          if (at < 0 || value > best || std::isnan(value)) {
            best = value;
            at = row * s.input[1] + column;
          }
        }
      }
      output.push_back(best);
      indices.push_back(at);
    }
  }
}

TEST(MaxPool, TakesTheFirstMaximumOfEachWindow) {
  constexpr std::int64_t kPlanes = 3;
  for (const PoolShape& shape : kPools) {
    const auto size = static_cast<std::size_t>(shape.input[0] * shape.input[1]);
    const auto outputs = static_cast<std::size_t>(shape.output[0] * shape.output[1]);
    const auto input = values(size * kPlanes, 1, true);
    const auto grad = values(outputs * kPlanes, 2, true);
    std::vector<float> expected;
    std::vector<std::int64_t> expected_at;
    std::vector<float> expected_grad(input.size());
    for (std::size_t p = 0; p < kPlanes; ++p) pool(shape, input.data() + p * size, expected, expected_at);
    const bool empty = expected_at[0] < 0;  // the index of an empty window is no place
    for (std::size_t i = 0; i < grad.size() && !empty; ++i) {
      expected_grad[i / outputs * size + static_cast<std::size_t>(expected_at[i])] += grad[i];
    }
    on_each_isa([&] {
      std::vector<float> output(expected.size()), grad_input(input.size(), 7);
      std::vector<std::int64_t> indices(expected.size());
      max_pool2d(shape, kPlanes, input.data(), output.data(), indices.data());
      EXPECT_EQ(bits(output), bits(expected));
      const bool good = max_pool2d_backward(shape, kPlanes, grad.data(), indices.data(), grad_input.data());
      EXPECT_EQ(good, !empty);
      if (empty) return;
      EXPECT_EQ(indices, expected_at);
      EXPECT_EQ(bits(grad_input), bits(expected_grad));
    });
  }
}

TEST(MaxPool, SaysThatAnIndexIsOutsideItsPlane) {
  const PoolShape& shape = kPools[0];
  const std::vector<float> grad(4 * 33, 1);
  for (const std::int64_t wrong : {std::int64_t{-1}, std::int64_t{8 * 66}, std::int64_t{1} << 32}) {
    on_each_isa([&] {
      std::vector<float> grad_input(8 * 66);
      std::vector<std::int64_t> indices(4 * 33);
      for (std::int64_t i = 0; i < 4 * 33; ++i) indices[static_cast<std::size_t>(i)] = i / 33 * 132 + i % 33 * 2;
      EXPECT_TRUE(max_pool2d_backward(shape, 1, grad.data(), indices.data(), grad_input.data()));
      indices[0] = wrong;
      EXPECT_FALSE(max_pool2d_backward(shape, 1, grad.data(), indices.data(), grad_input.data()));
    });
  }
}

struct NormShape {
  std::int64_t batch, channels, plane;
};

struct Forward {
  std::vector<float> output, mean, invstd, running_mean, running_var;
};
struct Backward {
  std::vector<float> input, weight, bias;
};

struct NormData {
  NormShape shape;
  std::size_t numel = static_cast<std::size_t>(shape.batch * shape.channels * shape.plane);
  std::size_t channels = static_cast<std::size_t>(shape.channels);
  std::vector<float> input = values(numel, 3), grad = values(numel, 4), weight = values(channels, 5),
                     bias = values(channels, 6);

  // In `parts` calls over the channels.
  [[nodiscard]] Forward forward(BatchNormFusion fusion, std::int64_t parts) const {
    Forward made{std::vector<float>(numel), std::vector<float>(channels), std::vector<float>(channels),
                 std::vector<float>(channels, 0.5F), std::vector<float>(channels, 2)};
    BatchNormForward args;
    describe(args, fusion);
    args.bias = bias.data();
    args.running_mean = made.running_mean.data();
    args.running_var = made.running_var.data();
    args.save_mean = made.mean.data();
    args.save_invstd = made.invstd.data();
    args.output = made.output.data();
    for (std::int64_t p = 0; p < parts; ++p) {
      batch_norm_forward(args, shape.channels * p / parts, shape.channels * (p + 1) / parts);
    }
    return made;
  }
  [[nodiscard]] Backward backward(const Forward& saved, BatchNormFusion fusion, std::int64_t parts) const {
    Backward made{std::vector<float>(numel), std::vector<float>(channels), std::vector<float>(channels)};
    BatchNormBackward args;
    describe(args, fusion);
    args.grad_output = grad.data();
    args.save_mean = saved.mean.data();
    args.save_invstd = saved.invstd.data();
    args.grad_input = made.input.data();
    args.grad_weight = made.weight.data();
    args.grad_bias = made.bias.data();
    for (std::int64_t p = 0; p < parts; ++p) {
      batch_norm_backward(args, shape.channels * p / parts, shape.channels * (p + 1) / parts);
    }
    return made;
  }

 private:
  void describe(BatchNorm& args, BatchNormFusion fusion) const {
    args.batch = shape.batch;
    args.channels = shape.channels;
    args.plane = shape.plane;
    args.input = input.data();
    args.weight = weight.data();
    args.fusion = fusion;
  }
};

const NormShape kNorms[] = {{3, 13, 35}, {6, 8, 64}, {5, 3, 7}, {9, 21, 1}, {1, 1, 2}};
const BatchNormFusion kFusions[] = {{true, false, true, true}, {false, true, false, false}};

TEST(BatchNorm, IsThatOfItsDefinition) {
  for (const NormShape& shape : kNorms) {
    const NormData data{shape};
    const Forward forward = data.forward({}, 1);
    const Backward backward = data.backward(forward, {}, 1);
    const auto count = static_cast<double>(shape.batch * shape.plane);
    for (std::int64_t c = 0; c < shape.channels; ++c) {
      const auto each = [&](const auto& visit) {
        for (std::int64_t n = 0; n < shape.batch; ++n) {
          for (std::int64_t i = 0; i < shape.plane; ++i) {
            visit(static_cast<std::size_t>((n * shape.channels + c) * shape.plane + i));
          }
        }
      };
      const auto at = static_cast<std::size_t>(c);
      double mean = 0, var = 0, sum = 0, dot = 0;
      each([&](std::size_t i) { mean += data.input[i] / count; });
      each([&](std::size_t i) { var += (data.input[i] - mean) * (data.input[i] - mean) / count; });
      const double invstd = 1 / std::sqrt(var + 1e-5);
      each([&](std::size_t i) {
        const double normal = (data.input[i] - mean) * invstd;
        EXPECT_NEAR(forward.output[i], normal * data.weight[at] + data.bias[at], 1e-5);
        sum += data.grad[i];
        dot += data.grad[i] * normal;
      });
      EXPECT_NEAR(forward.running_mean[at], 0.9 * 0.5 + 0.1 * mean, 1e-6);
      EXPECT_NEAR(forward.running_var[at], 0.9 * 2 + 0.1 * var * count / (count - 1), 1e-6);
      EXPECT_NEAR(backward.bias[at], sum, 5e-5);
      EXPECT_NEAR(backward.weight[at], dot, 5e-5);
      each([&](std::size_t i) {
        const double normal = (data.input[i] - mean) * invstd;
        const double grad = (data.grad[i] - sum / count - normal * dot / count) * invstd * data.weight[at];
        EXPECT_NEAR(backward.input[i], grad, 1e-5);
      });
    }
  }
}

TEST(BatchNorm, GivesTheSameBitsOnEveryInstructionSetAndSplit) {
  for (const NormShape& shape : kNorms) {
    const NormData data{shape};
    for (const BatchNormFusion& fusion : kFusions) {
      Forward forward;
      Backward backward;
      {
        const ScopedIsa scope(Isa::Scalar);
        forward = data.forward(fusion, 1);
        backward = data.backward(forward, fusion, 1);
      }
      on_each_isa([&] {
        for (const std::int64_t parts : {1, 3}) {
          const Forward other = data.forward(fusion, parts);
          EXPECT_EQ(bits(other.output), bits(forward.output));
          EXPECT_EQ(bits(other.mean), bits(forward.mean));
          EXPECT_EQ(bits(other.invstd), bits(forward.invstd));
          EXPECT_EQ(bits(other.running_mean), bits(forward.running_mean));
          EXPECT_EQ(bits(other.running_var), bits(forward.running_var));
          const Backward back = data.backward(forward, fusion, parts);
          EXPECT_EQ(bits(back.input), bits(backward.input));
          EXPECT_EQ(bits(back.weight), bits(backward.weight));
          EXPECT_EQ(bits(back.bias), bits(backward.bias));
        }
      });
    }
  }
}

TEST(BatchNorm, WithoutEpsilonDividesByZeroNowhere) {
  const float input[] = {2, 2, 2, 2, 1, 3, 1, 3};  // a channel without variance, and one of variance 1
  float output[8], mean[2], invstd[2];
  BatchNormForward args;
  args.batch = 1;
  args.channels = 2;
  args.plane = 4;
  args.input = input;
  args.save_mean = mean;
  args.save_invstd = invstd;
  args.output = output;
  for (const double eps : {0.0, 0.25}) {
    args.eps = eps;
    on_each_isa([&] {
      batch_norm_forward(args, 0, 2);
      EXPECT_EQ(invstd[0], eps == 0 ? 0 : 2);
      EXPECT_FLOAT_EQ(invstd[1], static_cast<float>(1 / std::sqrt(1 + eps)));
      EXPECT_EQ(output[0], 0);
    });
  }
}

TEST(BatchNorm, FusesItsGradientWhereAsked) {
  constexpr float kMean = 0.3F, kInvstd = 1;
  NormData data{{2, 1, 37}};
  for (float& g : data.grad) g = std::round(g);  // their sum is exact
  Forward saved;
  saved.mean = {kMean};
  saved.invstd = {kInvstd};
  const auto count = static_cast<float>(data.numel);
  const auto grad_mean =
      static_cast<float>(std::accumulate(data.grad.begin(), data.grad.end(), 0.0) / static_cast<double>(count));
  for (const bool fused : {false, true}) {
    on_each_isa([&] {
      const Backward made = data.backward(saved, {.gradient = fused}, 1);
      const float k = made.weight[0] / count;  // of the sum that was taken
      std::vector<float> expected;
      for (std::size_t i = 0; i < data.numel; ++i) {
        expected.push_back(plus_product(fused, data.grad[i] - grad_mean, data.input[i] - kMean, -k) * data.weight[0]);
      }
      EXPECT_EQ(bits(made.input), bits(expected)) << fused;
    });
  }
}

MersenneTwister seeded(unsigned seed) {
  MersenneTwister generator;
  generator.word[0] = seed;
  for (unsigned i = 1; i < MersenneTwister::kWords; ++i) {
    const std::uint32_t last = generator.word[i - 1];
    generator.word[i] = 1812433253U * (last ^ last >> 30) + i;
  }
  return generator;
}

// A draw of 53 bits, as torch makes it of two words.
std::uint64_t draw_from(std::mt19937& engine) {
  const std::uint64_t high = engine();
  return (high << 32 | engine()) & ((std::uint64_t{1} << 53) - 1);
}

TEST(Bernoulli, DrawsFromTheMersenneTwister) {
  constexpr unsigned kSeed = 5489;
  for (const double p : {0.0, 0.1, 0.5, 1 - 0x1p-53, 1.0}) {
    on_each_isa([&] {
      std::mt19937 engine(kSeed);
      MersenneTwister generator = seeded(kSeed);
      for (const std::int64_t count : {2, 400, 1, 311, 2, 0, 1000, 5}) {
        std::vector<float> expected, draws(static_cast<std::size_t>(count));
        for (std::int64_t i = 0; i < count; ++i) {
          expected.push_back(static_cast<double>(draw_from(engine)) * 0x1p-53 < p ? 1.0F : 0.0F);
        }
        bernoulli(generator, p, count, ElementType::F32, draws.data());
        EXPECT_EQ(draws, expected);
        if (count != 1) continue;
        // Someone else took one word: from here on a pair lies across two fillings.
        engine();
        ++generator.next;
      }
    });
  }
}

TEST(Bernoulli, DrawsTheSameInEveryFormat) {
  on_each_isa([&] {
    for (const auto& [element, one] : {std::pair(ElementType::BF16, 0x3F80), std::pair(ElementType::F16, 0x3C00)}) {
      MersenneTwister generators[] = {seeded(11), seeded(11)};
      for (const std::size_t count : {1U, 17U, 700U, 5U}) {
        std::vector<float> wide(count);
        std::vector<std::uint16_t> narrow(count + 1, 77);
        bernoulli(generators[0], 0.4, static_cast<std::int64_t>(count), ElementType::F32, wide.data());
        bernoulli(generators[1], 0.4, static_cast<std::int64_t>(count), element, narrow.data());
        for (std::size_t i = 0; i < count; ++i) ASSERT_EQ(narrow[i], wide[i] == 1 ? one : 0) << i;
        ASSERT_EQ(narrow[count], 77) << "beyond its end";
        ASSERT_EQ(generators[0].next, generators[1].next);
      }
    }
  });
}

TEST(Bernoulli, DrawsBytes) {
  on_each_isa([&] {
    MersenneTwister generators[] = {seeded(11), seeded(11)};
    for (const std::size_t count : {1U, 17U, 700U, 5U}) {
      std::vector<float> wide(count);
      std::vector<std::uint8_t> bytes(count + 1, 77);
      bernoulli(generators[0], 0.4, static_cast<std::int64_t>(count), ElementType::F32, wide.data());
      bernoulli(generators[1], 0.4, static_cast<std::int64_t>(count), ElementType::Int8, bytes.data());
      for (std::size_t i = 0; i < count; ++i) ASSERT_EQ(bytes[i], wide[i] == 1 ? 1 : 0) << i;
      ASSERT_EQ(bytes[count], 77) << "beyond its end";
      ASSERT_EQ(generators[0].next, generators[1].next);
    }
  });
}

TEST(Bernoulli, DrawsEveryBit) {
  on_each_isa([&] {
    std::mt19937 engine(7);
    MersenneTwister generator = seeded(7);
    for (int i = 0; i < 700; ++i) {  // over more than two fillings; from 300 on a pair may lie across two
      if (i == 300) {
        engine();
        ++generator.next;
      }
      const auto draw = static_cast<double>(draw_from(engine));
      MersenneTwister same = generator;
      float drawn = 2;
      bernoulli(same, draw * 0x1p-53, 1, ElementType::F32, &drawn);
      EXPECT_EQ(drawn, 0) << i;
      bernoulli(generator, (draw + 1) * 0x1p-53, 1, ElementType::F32, &drawn);
      EXPECT_EQ(drawn, 1) << i;
    }
  });
}

// -- steps of optimizers ----------------------------------------------------------------------------------------------

std::vector<float> normal(std::size_t count, float scale, unsigned seed) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> draw(0, scale);
  std::vector<float> values(count);
  for (float& value : values) value = draw(engine);
  return values;
}

TEST(AdamLoop, RoundsEachTermAndGivesTheSameBitsOnEveryInstructionSet) {
  constexpr std::size_t kCount = 83;
  AdamLoop loop{.decay = 0.99F,
                .beta1 = 0.9F,
                .beta1_rest = 0.1F,
                .beta2 = 0.999F,
                .beta2_rest = 0.001F,
                .correction = 0.0447F,
                .eps = 1e-8F,
                .rate = -0.01F};
  const auto grad = normal(kCount, 0.1F, 1);
  for (const bool fused : {true, false}) {
    for (const bool lerp : {true, false}) {
      loop.fused = fused;
      loop.lerp = lerp;
      auto param = normal(kCount, 1, 2), average = normal(kCount, 0.1F, 3), square = normal(kCount, 0.1F, 4);
      for (float& value : square) value *= value;
      square[5] = std::numeric_limits<float>::infinity();
      square[6] = 0;
      const auto first_param = param, first_average = average, first_square = square;
      for (std::size_t i = 0; i < kCount; ++i) {
        average[i] = lerp ? plus_product(fused, average[i], loop.beta1_rest, grad[i] - average[i])
                          : plus_product(fused, average[i] * loop.beta1, loop.beta1_rest, grad[i]);
        square[i] = plus_product(fused, square[i] * loop.beta2, loop.beta2_rest * grad[i], grad[i]);
        const float denominator = std::sqrt(square[i]) / loop.correction + loop.eps;
        param[i] = param[i] * loop.decay + loop.rate * average[i] / denominator;
      }
      on_each_isa([&] {
        auto p = first_param, m = first_average, v = first_square;
        adam_averages(loop, kCount, p.data(), grad.data(), m.data(), v.data(), nullptr);
        EXPECT_EQ(bits(m), bits(average));
        EXPECT_EQ(bits(v), bits(square));
        std::vector<float> root(kCount);
        std::transform(v.begin(), v.end(), root.begin(), [](float value) { return std::sqrt(value); });
        adam_parameters(loop, kCount, m.data(), root.data(), p.data());
        EXPECT_EQ(bits(p), bits(param));
      });
    }
  }
}

// The denominator is the quotient itself where eps is 0, and the parameter its reciprocal where all else is 1.
TEST(AdamLoop, RoundsQuotientsCorrectly) {
  constexpr std::size_t kCount = 4096;
  std::mt19937 engine(5);
  std::vector<float> root(kCount);
  const std::vector<float> average(kCount, 1);
  for (const float correction : {1.0F, 0x1.fffffep-1F, 0x1.fffffcp-1F, 0.03162F, 0.7F, 1e-4F, 0x1.000002p-3F, 1e-30F}) {
    for (float& value : root) {
      value = std::sqrt(std::bit_cast<float>(static_cast<std::uint32_t>(engine()) % 0x7F800000U));
    }
    root[0] = 0;
    root[1] = std::numeric_limits<float>::infinity();
    on_each_isa([&] {
      std::vector<float> param(kCount, 0);
      adam_parameters({.correction = correction, .rate = 1}, kCount, average.data(), root.data(), param.data());
      for (std::size_t i = 0; i < kCount; ++i) {
        ASSERT_EQ(param[i], 1 / (root[i] / correction)) << root[i] << " / " << correction;
      }
    });
  }
}

TEST(SgdLoop, RoundsEachTermAndGivesTheSameBitsOnEveryInstructionSet) {
  constexpr std::size_t kCount = 83;
  const auto grad = normal(kCount, 0.1F, 1), start = normal(kCount, 1, 2), held = normal(kCount, 0.1F, 3);
  for (const bool fused : {true, false}) {
    for (const bool nesterov : {true, false}) {
      const SgdLoop loop{.fused = fused,
                         .maximize = true,
                         .nesterov = nesterov,
                         .weight_decay = 0.1F,
                         .momentum = 0.9F,
                         .dampening_rest = 0.7F,
                         .rate = -0.05F};
      auto param = start, buffer = held;
      for (std::size_t i = 0; i < kCount; ++i) {
        const float g = plus_product(fused, -grad[i], loop.weight_decay, param[i]);
        buffer[i] = plus_product(fused, buffer[i] * loop.momentum, loop.dampening_rest, g);
        const float change = nesterov ? plus_product(fused, g, loop.momentum, buffer[i]) : buffer[i];
        param[i] = plus_product(fused, param[i], loop.rate, change);
      }
      on_each_isa([&] {
        auto p = start, b = held;
        sgd_step(loop, kCount, grad.data(), b.data(), p.data());
        EXPECT_EQ(bits(b), bits(buffer));
        EXPECT_EQ(bits(p), bits(param));
      });
    }
  }
}

}  // namespace
}  // namespace oxytorch::kernels
