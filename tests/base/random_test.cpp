#include "oxytorch/random.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <vector>

namespace oxytorch {
namespace {

// Known answers of the Random123 distribution (tests/kat_vectors, philox4x32 10).
static_assert(philox4x32(0, 0, 0, 0, 0, 0) == PhiloxBlock{{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}});
static_assert(philox4x32(~0u, ~0u, ~0u, ~0u, ~0u, ~0u) ==
              PhiloxBlock{{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}});
static_assert(philox4x32(0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344, 0xa4093822, 0x299f31d0) ==
              PhiloxBlock{{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}});

TEST(Philox, KnownAnswersAtRunTime) {
  volatile std::uint32_t ones = ~0u;  // keeps the compiler from folding the call
  EXPECT_EQ(philox4x32(ones, ones, ones, ones, ones, ones),
            (PhiloxBlock{{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}}));
}

TEST(Philox, SeedStreamAndIndexFillKeyAndCounter) {
  EXPECT_EQ(philox(0x299f31d0a4093822, 0x0370734413198a2e, 0x85a308d3243f6a88),
            (PhiloxBlock{{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}}));
}

TEST(PhiloxStream, IsTheBlocksInOrder) {
  PhiloxStream stream(42, 7);
  for (std::uint64_t index = 0; index < 5; ++index) {
    const PhiloxBlock block = philox(42, 7, index);
    for (const std::uint32_t word : block.word) EXPECT_EQ(stream.next(), word);
  }
  EXPECT_EQ(stream.position(), 20u);
}

TEST(PhiloxStream, SeeksAnywhere) {
  std::vector<std::uint32_t> words;
  PhiloxStream stream(3);
  for (int i = 0; i < 64; ++i) words.push_back(stream.next());
  for (const std::uint64_t place : {0u, 1u, 4u, 7u, 31u, 62u}) {
    stream.seek(place);
    EXPECT_EQ(stream.next(), words[place]);
    EXPECT_EQ(stream.next(), words[place + 1]);
  }
}

TEST(PhiloxStream, SeedsAndStreamsDiffer) {
  EXPECT_NE(PhiloxStream(1).next64(), PhiloxStream(2).next64());
  EXPECT_NE(PhiloxStream(1, 0).next64(), PhiloxStream(1, 1).next64());
  EXPECT_EQ(PhiloxStream(1, 5).next64(), PhiloxStream(1, 5).next64());
}

TEST(Uniform, EndsOfTheRange) {
  EXPECT_EQ(uniform_float(0), 0.0f);
  EXPECT_EQ(uniform_float(~0u), 1.0f - 0x1p-24f);
  EXPECT_EQ(uniform_double(0, 0), 0.0);
  EXPECT_EQ(uniform_double(~0u, ~0u), 1.0 - 0x1p-53);
}

TEST(Uniform, MeanAndVarianceAreThoseOfTheUnitInterval) {
  constexpr int kCount = 200'000;
  PhiloxStream stream(11);
  double sum = 0;
  double squares = 0;
  for (int i = 0; i < kCount; ++i) {
    const double value = i % 2 == 0 ? stream.uniform_double() : static_cast<double>(stream.uniform_float());
    ASSERT_GE(value, 0.0);
    ASSERT_LT(value, 1.0);
    sum += value;
    squares += value * value;
  }
  const double mean = sum / kCount;
  EXPECT_NEAR(mean, 0.5, 5 * std::sqrt(1.0 / 12 / kCount));
  EXPECT_NEAR(squares / kCount - mean * mean, 1.0 / 12, 0.001);
}

TEST(Below, CoversItsRangeEvenly) {
  PhiloxStream stream(5);
  std::array<int, 7> counts{};
  constexpr int kCount = 70'000;
  for (int i = 0; i < kCount; ++i) {
    const std::uint64_t value = stream.below(counts.size());
    ASSERT_LT(value, counts.size());
    ++counts[value];
  }
  double chi = 0;
  for (const int count : counts) chi += (count - 10'000.0) * (count - 10'000.0) / 10'000.0;
  EXPECT_LT(chi, 22.46);  // 99.9% of chi squared with 6 degrees of freedom
}

TEST(Below, EdgeBounds) {
  PhiloxStream stream(5);
  EXPECT_EQ(stream.below(0), 0u);
  EXPECT_EQ(stream.below(1), 0u);
  EXPECT_EQ(stream.position(), 0u);
  bool high = false;
  for (int i = 0; i < 100; ++i) {
    EXPECT_LT(stream.below(0xFFFFFFFFu), 0xFFFFFFFFu);
    EXPECT_LE(stream.below(0x100000000u), 0xFFFFFFFFu);
    const std::uint64_t wide = stream.below(~std::uint64_t{0});
    EXPECT_LT(wide, ~std::uint64_t{0});
    high |= wide >> 63 != 0;
  }
  EXPECT_TRUE(high);
}

// A bound just over a power of two shows a biased reduction: x % bound would favour the low half 2 to 1.
TEST(Below, HasNoModuloBias) {
  const std::uint64_t bound = 3'000'000'000u;
  PhiloxStream stream(8);
  int low = 0;
  constexpr int kCount = 100'000;
  for (int i = 0; i < kCount; ++i) low += stream.below(bound) < bound / 2 ? 1 : 0;
  EXPECT_NEAR(low, kCount / 2, 5 * std::sqrt(kCount / 4.0));
}

}  // namespace
}  // namespace oxytorch
