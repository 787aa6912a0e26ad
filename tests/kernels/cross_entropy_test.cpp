// Cross entropy of rows against its definition in fp64.
#include "oxytorch/kernels/cross_entropy.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

namespace oxytorch::kernels {
namespace {

constexpr std::int64_t kRows = 7, kIgnored = -3;

float wide(std::uint16_t narrow) {
  const std::uint32_t bits = static_cast<std::uint32_t>(narrow) << 16;
  float value = 0;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

struct Given {
  explicit Given(std::int64_t classes) : classes(classes), stride(classes + 5) {
    std::mt19937 engine(static_cast<unsigned>(classes));
    std::normal_distribution<float> normal(0, 4);
    logits.resize(static_cast<std::size_t>(kRows * stride));
    for (float& logit : logits) logit = normal(engine);
    for (std::int64_t i = 0; i < kRows; ++i) targets.push_back(i == 2 ? kIgnored : (i * 31) % classes);
    gradient.assign(static_cast<std::size_t>(kRows * (classes + 2)), kUntouched);
  }
  [[nodiscard]] CrossEntropyRows rows(double smoothing) {
    return {logits.data(), stride,    kRows, classes,         targets.data(),
            kIgnored,      smoothing, 0.25F, gradient.data(), classes + 2};
  }

  static constexpr std::uint16_t kUntouched = 0x1234;
  std::int64_t classes, stride;
  std::vector<float> logits;
  std::vector<std::int64_t> targets;
  std::vector<std::uint16_t> gradient;
};

class RowsOfClasses : public testing::TestWithParam<std::int64_t> {};

TEST_P(RowsOfClasses, HaveTheLossAndTheGradientOfTheirDefinition) {
  for (const double smoothing : {0.0, 0.1, 1.0}) {
    Given given(GetParam());
    const auto classes = static_cast<std::size_t>(given.classes), stride = static_cast<std::size_t>(given.stride);
    const std::vector<float> logits = given.logits;
    const double loss = cross_entropy_rows(given.rows(smoothing));
    double expected = 0;
    for (std::size_t i = 0; i < kRows; ++i) {
      const float* row = logits.data() + i * stride;
      const std::uint16_t* gradient = given.gradient.data() + i * (classes + 2);
      double sum = 0, mean = 0;
      for (std::size_t c = 0; c < classes; ++c) {
        sum += std::exp(static_cast<double>(row[c]));
        mean += row[c] / static_cast<double>(classes);
      }
      const bool counts = given.targets[i] != kIgnored;
      if (counts) {
        expected += std::log(sum) - (1 - smoothing) * row[given.targets[i]] - smoothing * mean;
      }
      for (std::size_t c = 0; c < classes; ++c) {
        const double own = static_cast<std::int64_t>(c) == given.targets[i] ? 1 - smoothing : 0;
        const double right =
            counts ? 0.25 * (std::exp(row[c]) / sum - own - smoothing / static_cast<double>(classes)) : 0;
        ASSERT_NEAR(wide(gradient[c]), right, std::abs(right) / 256 + 1e-7) << i << ' ' << c;
      }
      EXPECT_EQ(gradient[classes], Given::kUntouched);
    }
    EXPECT_NEAR(loss, expected, 1e-5 * (1 + std::abs(expected)));
    given.logits = logits;
    CrossEntropyRows alone = given.rows(smoothing);
    alone.gradient = nullptr;
    EXPECT_EQ(cross_entropy_rows(alone), loss);
  }
}
INSTANTIATE_TEST_SUITE_P(Classes, RowsOfClasses, testing::Values(1, 2, 10, 16, 17, 63, 64, 65, 100, 256, 1000));

TEST(CrossEntropyRows, HaveTorchsLossOfLogitsThatAreNotFinite) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const auto loss_of = [](std::vector<float> logits, std::int64_t target) {
    CrossEntropyRows rows;
    rows.logits = logits.data();
    rows.stride = rows.classes = static_cast<std::int64_t>(logits.size());
    rows.rows = 1;
    rows.targets = &target;
    return cross_entropy_rows(rows);
  };
  EXPECT_NEAR(loss_of({1, -kInfinity, 1}, 0), std::log(2), 1e-6);
  EXPECT_EQ(loss_of({1, -kInfinity, 1}, 1), kInfinity);
  EXPECT_TRUE(std::isnan(loss_of({1, kInfinity, 1}, 0)));
  EXPECT_TRUE(std::isnan(loss_of({-kInfinity, -kInfinity}, 0)));
  EXPECT_TRUE(std::isnan(loss_of({1, std::numeric_limits<float>::quiet_NaN(), 3, 4}, 3)));
}

}  // namespace
}  // namespace oxytorch::kernels
