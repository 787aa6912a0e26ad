// The narrow formats: their stated errors over their whole range, odd values, and the same bytes on every
// instruction set.
#include "oxytorch/kernels/codec.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "oxytorch/isa.h"
#include "oxytorch/kernels/step_tail.h"
#include "oxytorch/random.h"
#include "step_tail_cases.h"

namespace oxytorch::kernels {
namespace {

struct Encoded {
  std::vector<std::uint8_t> codes;
  std::vector<std::uint16_t> scales;
  bool operator==(const Encoded&) const = default;
};

Encoded encode(StateCode code, const std::vector<float>& values) {
  Encoded e{
      std::vector<std::uint8_t>(values.size()),
      std::vector<std::uint16_t>(static_cast<std::size_t>(state_groups(static_cast<std::int64_t>(values.size()))))};
  encode_state(code, values, e.codes.data(), e.scales.data());
  return e;
}

std::vector<float> decode(StateCode code, const Encoded& e) {
  std::vector<float> values(e.codes.size());
  decode_state(code, e.codes.data(), e.scales.data(), values);
  return values;
}

// Groups over the whole range of scales, whose members fall over `binades` below the largest.
std::vector<float> sample(StateCode code, std::size_t groups, double binades, unsigned seed) {
  std::mt19937_64 random(seed);
  std::uniform_real_distribution<double> uniform(0, 1);
  std::vector<float> values;
  for (std::size_t i = 0; i < groups; ++i) {
    const double top = std::exp2(-80 + 200 * uniform(random));
    for (int k = 0; k < 32; ++k) {
      const double x = top * std::exp2(-binades * uniform(random));
      values.push_back(static_cast<float>(code == StateCode::Signed && uniform(random) < 0.5 ? -x : x));
    }
  }
  return values;
}

class StateCodeTest : public testing::TestWithParam<StateCode> {};

TEST_P(StateCodeTest, StaysWithinTheStatedErrors) {
  const bool is_signed = GetParam() == StateCode::Signed;
  for (Isa isa : supported_isas()) {
    const ScopedIsa scope(isa);
    const std::vector<float> values = sample(GetParam(), 20000, is_signed ? 20 : 40, 1);
    const Encoded e = encode(GetParam(), values);
    const std::vector<float> back = decode(GetParam(), e);
    for (std::size_t i = 0; i < values.size(); ++i) {
      const double scale = from_bf16(e.scales[i / 32]);
      const double error = std::abs(static_cast<double>(back[i]) - values[i]);
      ASSERT_LE(error, kStateError * scale) << values[i] << " in " << scale;
      if (std::abs(values[i]) >= (is_signed ? 0.25 : 0.0625) * scale) {
        ASSERT_LE(error, kStateRelativeError * std::abs(values[i])) << values[i] << " in " << scale;
      }
      if (!is_signed) {
        ASSERT_GT(back[i], 0) << values[i];
      }
    }
  }
}

TEST_P(StateCodeTest, ScaleIsTheLargestMagnitudeRoundedUp) {
  const std::vector<float> values = sample(GetParam(), 2000, 3, 2);
  const Encoded e = encode(GetParam(), values);
  for (std::size_t g = 0; g < e.scales.size(); ++g) {
    float largest = 0;
    for (std::size_t k = 0; k < 32; ++k) largest = std::max(largest, std::abs(values[32 * g + k]));
    EXPECT_GE(from_bf16(e.scales[g]), largest);
    EXPECT_LT(from_bf16(static_cast<std::uint16_t>(e.scales[g] - 1)), largest);
  }
}

TEST_P(StateCodeTest, ReencodingWhatWasDecodedGivesTheSameBytes) {
  for (std::size_t size : {6400U, 3U, 33U, 31U, 1000U}) {
    std::vector<float> values = sample(GetParam(), 200, 30, 3);
    values.resize(size);
    const Encoded once = encode(GetParam(), values);
    EXPECT_EQ(encode(GetParam(), decode(GetParam(), once)), once);
  }
}

TEST_P(StateCodeTest, GivesTheSameBytesOnEveryInstructionSet) {
  std::vector<float> values = sample(GetParam(), 500, 30, 4);
  values.resize(values.size() - 13);
  values[7] = 0;
  values[40] = kInf;
  values[80] = std::nanf("");
  values[81] = -std::nanf("");
  values[120] = -0.0F;
  values[130] = std::numeric_limits<float>::denorm_min();
  values[170] = std::numeric_limits<float>::max();
  std::vector<std::uint32_t> bits;
  Encoded first;
  for (Isa isa : supported_isas()) {
    const ScopedIsa scope(isa);
    const Encoded e = encode(GetParam(), values);
    std::vector<std::uint32_t> decoded;
    for (float x : decode(GetParam(), e)) decoded.push_back(std::bit_cast<std::uint32_t>(x));
    if (isa == supported_isas().front()) {
      first = e;
      bits = decoded;
    }
    EXPECT_TRUE(e == first) << name(isa);
    EXPECT_EQ(decoded, bits) << name(isa);
  }
}

TEST_P(StateCodeTest, DefinesOddValues) {
  const auto group = [](float x) {
    std::vector<float> values(32, 0.0F);
    values[5] = x;
    return values;
  };
  for (float tiny : {0.0F, 1e-40F, 0x1p-121F}) {
    const Encoded e = encode(GetParam(), group(tiny));
    EXPECT_EQ(e.scales[0], 0);
    EXPECT_THAT(decode(GetParam(), e), testing::Each(0.0F));
  }
  const Encoded least = encode(GetParam(), group(0x1p-120F));
  EXPECT_EQ(decode(GetParam(), least), group(0x1p-120F));
  for (float bad : {kInf, std::nan("")}) {
    const Encoded e = encode(GetParam(), group(bad));
    EXPECT_EQ(e.scales[0], 0x7FC0);
    for (float x : decode(GetParam(), e)) EXPECT_TRUE(std::isnan(x));
  }
  const float most = std::numeric_limits<float>::max();
  const std::vector<float> back = decode(GetParam(), encode(GetParam(), group(most)));
  EXPECT_NEAR(back[5] / most, 1, 1.0 / 128);
}

TEST_P(StateCodeTest, APartialGroupIsScaledByItsOwnElements) {
  const std::vector<float> three{0.5F, 0.25F, 0.125F};
  const Encoded e = encode(GetParam(), three);
  EXPECT_EQ(e.scales, std::vector<std::uint16_t>{0x3F00});
  const std::vector<float> back = decode(GetParam(), e);
  for (std::size_t i = 0; i < 3; ++i) EXPECT_NEAR(back[i], three[i], kStateError * 0.5);
  EXPECT_EQ(encode(GetParam(), {}).codes.size(), 0U);
}

INSTANTIATE_TEST_SUITE_P(Codes, StateCodeTest, testing::Values(StateCode::Signed, StateCode::Unsigned),
                         [](const auto& info) { return info.param == StateCode::Signed ? "Signed" : "Unsigned"; });

std::vector<float> floats_over_the_range() {
  std::vector<float> values;
  // Every exponent and sign; mantissas around each boundary of the cut and at random.
  std::mt19937 random(5);
  for (std::uint32_t high = 0; high < 0x200; ++high) {
    for (std::uint32_t low : {0x0U, 0x1U, 0x7FU, 0x80U, 0x81U, 0x7F80U, 0x7FFFU, 0x8000U, 0x8001U, 0xFF80U, 0x7F7FFFU,
                              0x7FFFFFU, 0x400000U, 0x3FFF80U}) {
      values.push_back(std::bit_cast<float>(high << 23 | low));
    }
    for (int i = 0; i < 100; ++i)
      values.push_back(std::bit_cast<float>(high << 23 | static_cast<std::uint32_t>(random() & 0x7FFFFF)));
  }
  return values;
}

TEST(SplitWeights, AreWithinTheirBoundAndBf16IsNearest) {
  for (Isa isa : supported_isas()) {
    const ScopedIsa scope(isa);
    const std::vector<float> values = floats_over_the_range();
    std::vector<std::uint16_t> bf16(values.size());
    std::vector<std::int8_t> low_bits(values.size());
    split_weights(values, bf16.data(), low_bits.data());
    std::vector<float> joined(values.size());
    join_weights(bf16.data(), low_bits.data(), joined);
    for (std::size_t i = 0; i < values.size(); ++i) {
      const float x = values[i];
      if (std::isnan(x)) {
        ASSERT_TRUE(std::isnan(joined[i]) && std::isnan(from_bf16(bf16[i])));
        continue;
      }
      ASSERT_EQ(std::signbit(joined[i]), std::signbit(x));
      if (std::isinf(x) || std::isinf(joined[i])) {
        ASSERT_GE(std::abs(x), std::bit_cast<float>(0x7F7FFF80U));
        continue;
      }
      const double least = std::max<double>(std::abs(x), std::numeric_limits<float>::min());
      ASSERT_LE(std::abs(static_cast<double>(joined[i]) - x), std::ldexp(least, -16)) << x;
      // No neighbour of the bf16 is nearer to the weight.
      const double distance = std::abs(static_cast<double>(from_bf16(bf16[i])) - joined[i]);
      for (int step : {-1, 1}) {
        const float other = from_bf16(static_cast<std::uint16_t>(bf16[i] + step));
        if (std::isfinite(other) && std::signbit(other) == std::signbit(x) && std::isfinite(distance)) {
          ASSERT_LE(distance, std::abs(static_cast<double>(other) - joined[i])) << x;
        }
      }
    }
    // What was joined splits into the same bytes.
    std::vector<std::uint16_t> again(values.size());
    std::vector<std::int8_t> low_bits_again(values.size());
    split_weights(joined, again.data(), low_bits_again.data());
    EXPECT_EQ(again, bf16);
    EXPECT_EQ(low_bits_again, low_bits);
  }
}

// A step of zero length: the parameter is loaded, and stored or copied to another type.
void store_through_step(ElementType type, void* param, ElementType copy_type, void* copy, std::size_t count) {
  std::vector<float> grad(count);
  TailTensor t;
  t.param = param;
  t.grad = grad.data();
  t.copy = copy;
  t.copy_type = copy_type;
  t.numel = static_cast<std::int64_t>(count);
  t.type = type;
  TailGroup g;
  g.rule = Rule::Sgd;
  g.lr = 0;
  StepTailPlan plan({&t, 1});
  plan.apply({&g, 1}, {}, {});
}

TEST(HalfTypes, EveryValueRoundTrips) {
  for (Isa isa : supported_isas()) {
    const ScopedIsa scope(isa);
    for (ElementType type : {ElementType::BF16, ElementType::F16}) {
      const std::uint16_t infinity = type == ElementType::BF16 ? 0x7F80 : 0x7C00;
      std::vector<std::uint16_t> all(65536);
      for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::uint16_t>(i);
      std::vector<std::uint16_t> stored = all;
      std::vector<float> wide(all.size());
      store_through_step(type, stored.data(), ElementType::F32, wide.data(), all.size());
      for (std::size_t i = 0; i < all.size(); ++i) {
        if ((all[i] & 0x7FFF) > infinity) {
          ASSERT_TRUE(std::isnan(wide[i])) << i;
          ASSERT_GT(stored[i] & 0x7FFF, infinity) << i;
        } else {
          // 0 + -0 is 0: the step of nothing loses the sign of zero alone.
          ASSERT_EQ(stored[i] & ((i & 0x7FFF) == 0 ? 0x7FFF : 0xFFFF), all[i] & ((i & 0x7FFF) == 0 ? 0x7FFF : 0xFFFF));
          if (type == ElementType::F16) {
            ASSERT_EQ(wide[i], static_cast<float>(std::bit_cast<_Float16>(all[i])));
          }
        }
      }
    }
  }
}

TEST(HalfTypes, AreRoundedToNearestEven) {
  const std::vector<float> values = floats_over_the_range();
  for (Isa isa : supported_isas()) {
    const ScopedIsa scope(isa);
    std::vector<float> param = values;
    std::vector<std::uint16_t> copy(values.size());
    store_through_step(ElementType::F32, param.data(), ElementType::F16, copy.data(), values.size());
    for (std::size_t i = 0; i < values.size(); ++i) {
      if (std::isnan(param[i])) {
        ASSERT_GT(copy[i] & 0x7FFF, 0x7C00);
      } else {
        ASSERT_EQ(copy[i], std::bit_cast<std::uint16_t>(static_cast<_Float16>(param[i]))) << param[i];
      }
    }
  }
}

TEST(RoundingBits, ArePiecesOfThePhiloxBlock) {
  const PhiloxBlock block = philox4x32(2 * 16 + 5, 1, 77, 9, 0xDDCCBBAA, 0x44332211);
  for (unsigned k = 0; k < 8; ++k) {
    const auto half = static_cast<std::uint16_t>(block.word[k / 2] >> (k % 2 == 0 ? 0 : 16));
    EXPECT_EQ(rounding_bits(0x44332211DDCCBBAA, 77, RoundingOperand::State0, 9, 2 * 128 + 5 + 16 * k), half);
  }
}

}  // namespace
}  // namespace oxytorch::kernels
