#include "oxytorch/data/order.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <set>
#include <vector>

#include "oxytorch/error.h"

namespace oxytorch::data {
namespace {

std::vector<std::int64_t> all_of(const Permutation& permutation) {
  std::vector<std::int64_t> found(static_cast<std::size_t>(permutation.size()));
  for (std::size_t i = 0; i < found.size(); ++i) found[i] = permutation(static_cast<std::int64_t>(i));
  return found;
}

/// How many standard deviations counts are above what chance alone would give, all being equally likely.
double chi_square_score(const std::vector<double>& counts) {
  const double degrees = static_cast<double>(counts.size()) - 1;
  const double mean = std::accumulate(counts.begin(), counts.end(), 0.0) / static_cast<double>(counts.size());
  double sum = 0;
  for (const double count : counts) sum += (count - mean) * (count - mean) / mean;
  return (sum - degrees) / std::sqrt(2 * degrees);
}

TEST(Permutation, HoldsEachElementOnceForEverySize) {
  for (std::int64_t size = 0; size <= 300; ++size) {
    for (const std::uint64_t key : {std::uint64_t{0}, std::uint64_t{1}, ~std::uint64_t{0}}) {
      auto found = all_of({size, key});
      std::sort(found.begin(), found.end());
      for (std::int64_t i = 0; i < size; ++i) ASSERT_EQ(found[static_cast<std::size_t>(i)], i) << size << " " << key;
    }
  }
  auto found = all_of({1'000'003, 9});
  std::sort(found.begin(), found.end());
  for (std::int64_t i = 0; i < 1'000'003; ++i) ASSERT_EQ(found[static_cast<std::size_t>(i)], i);
}

TEST(Permutation, PositionOfUndoesItForEverySize) {
  for (const std::int64_t size : {std::int64_t{1}, std::int64_t{2}, std::int64_t{3}, std::int64_t{9}, std::int64_t{10},
                                  std::int64_t{97}, std::int64_t{65'536}, std::int64_t{1'281'167},
                                  std::int64_t{1'000'000'000'000}, std::int64_t{9'223'372'036'854'775'807}}) {
    for (std::uint64_t key = 0; key < 20; ++key) {
      const Permutation permutation(size, key);
      for (std::int64_t i = 0; i < 50; ++i) {
        const std::int64_t position = i < 25 ? i % size : size - 1 - i % size;
        const std::int64_t element = permutation(position);
        ASSERT_TRUE(element >= 0 && element < size);
        ASSERT_EQ(permutation.position_of(element), position) << size << " " << key;
      }
    }
  }
}

TEST(Permutation, SaysThatAPositionIsOutside) {
  for (const std::int64_t size : {0, 1, 5, 1000}) {
    const Permutation permutation(size, 3);
    for (const std::int64_t outside : {std::int64_t{-1}, size, size + 1, std::int64_t{9'223'372'036'854'775'807}}) {
      EXPECT_EQ(permutation(outside), -1);
      EXPECT_EQ(permutation.position_of(outside), -1);
    }
  }
  EXPECT_THROW(Permutation(-1, 0), Error);
}

TEST(Permutation, EveryOrderOfAFewElementsIsEquallyLikely) {
  for (std::int64_t size = 2; size <= 6; ++size) {
    std::map<std::vector<std::int64_t>, double> orders;
    for (std::uint64_t key = 0; key < 100'000; ++key) ++orders[all_of({size, key})];
    double possible = 1;
    for (std::int64_t i = 2; i <= size; ++i) possible *= static_cast<double>(i);
    ASSERT_EQ(static_cast<double>(orders.size()), possible);
    std::vector<double> counts;
    for (const auto& [order, count] : orders) counts.push_back(count);
    EXPECT_LT(chi_square_score(counts), 4.5) << size;
  }
}

TEST(Permutation, APositionHoldsEveryElementAlikeOverKeys) {
  constexpr std::int64_t kBuckets = 16;
  for (const std::int64_t size : {16, 112, 1008, 65'536, 1'000'000}) {
    for (const std::int64_t position : {std::int64_t{0}, std::int64_t{1}, size / 2, size - 1}) {
      std::vector<double> counts(kBuckets);
      for (std::uint64_t key = 0; key < 50'000; ++key) {
        ++counts[static_cast<std::size_t>(Permutation(size, key)(position) * kBuckets / size)];
      }
      EXPECT_LT(chi_square_score(counts), 5) << size << " at " << position;
    }
  }
}

TEST(Permutation, NeighboursAndKeysAreNotCorrelated) {
  constexpr std::int64_t kSize = 100'000, kBuckets = 50;
  const Permutation one(kSize, 1), two(kSize, 2);
  std::vector<double> neighbours(kBuckets * kBuckets), keys(kBuckets * kBuckets), steps(kBuckets);
  const auto bucket = [](std::int64_t element) { return element / (kSize / kBuckets); };
  for (std::int64_t i = 0; i + 1 < kSize; ++i) {
    const std::int64_t here = one(i), after = one(i + 1);
    ++neighbours[static_cast<std::size_t>(bucket(here) * kBuckets + bucket(after))];
    ++keys[static_cast<std::size_t>(bucket(here) * kBuckets + bucket(two(i)))];
    ++steps[static_cast<std::size_t>(bucket((after - here + kSize) % kSize))];
  }
  EXPECT_LT(chi_square_score(neighbours), 5);
  EXPECT_LT(chi_square_score(keys), 5);
  EXPECT_LT(chi_square_score(steps), 5);
}

TEST(Permutation, NeighboursAreNextToEachOtherAsOftenAsByChance) {
  for (const std::int64_t size : {8, 100, 1024, 5000}) {
    const std::int64_t keys = 4'000'000 / size;
    std::vector<double> pairs(3);
    for (std::int64_t key = 0; key < keys; ++key) {
      const auto order = all_of({size, static_cast<std::uint64_t>(key)});
      for (std::size_t i = 1; i < order.size(); ++i) {
        for (std::int64_t step = 1; step <= 3; ++step) {
          pairs[static_cast<std::size_t>(step - 1)] += order[i] - order[i - 1] == step;
        }
      }
    }
    for (std::int64_t step = 1; step <= 3; ++step) {
      const double expected = static_cast<double>(keys * (size - step)) / static_cast<double>(size);
      EXPECT_NEAR(pairs[static_cast<std::size_t>(step - 1)], expected, 5 * std::sqrt(expected)) << size << " " << step;
    }
  }
}

TEST(Permutation, StaysWhatItIs) {  // runs that are resumed by a later version draw on in their order
  EXPECT_EQ(all_of({8, 42}), (std::vector<std::int64_t>{0, 7, 3, 2, 5, 4, 6, 1}));
  EXPECT_EQ(Permutation(1'000'000'000'000, 42)(123'456'789), 733'733'725'664);
}

}  // namespace
}  // namespace oxytorch::data
