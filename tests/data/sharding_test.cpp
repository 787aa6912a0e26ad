#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <vector>

#include "oxytorch/data/order.h"

namespace oxytorch::data {
namespace {

/// Positions of a batch, those of all ranks one after another; checks that all ranks have as many and some.
std::vector<std::int64_t> positions_of(std::int64_t samples, std::int64_t global, std::int64_t world, bool drop_last,
                                       std::int64_t index) {
  std::vector<std::int64_t> found;
  std::int64_t each = 0;
  for (std::int64_t rank = 0; rank < world; ++rank) {
    std::int64_t first = -1, last = -1;
    Sharding{global / world, rank, world, drop_last}.range(samples, index, first, last);
    EXPECT_LT(first, last);
    if (rank == 0) each = last - first;
    EXPECT_EQ(last - first, each) << "rank " << rank << " of " << world << ", " << samples << " samples";
    for (; first < last; ++first) found.push_back(first);
  }
  return found;
}

TEST(Sharding, AnyNumberOfProcessesDrawsTheSameStream) {
  for (const std::int64_t global : {6, 12, 30}) {
    for (std::int64_t samples = 0; samples <= 3 * global + 1; ++samples) {
      for (const std::int64_t world : {1, 2, 3, 6}) {
        for (const bool drop_last : {false, true}) {
          const std::int64_t batches = Sharding{global / world, 0, world, drop_last}.batches(samples);
          ASSERT_EQ(batches, drop_last ? samples / global : (samples + global - 1) / global);
          std::int64_t expected = 0;
          for (std::int64_t index = 0; index < batches; ++index) {
            for (const std::int64_t position : positions_of(samples, global, world, drop_last, index)) {
              ASSERT_EQ(position, expected++);  // in order, so each once
              ASSERT_LT(position, (index + 1) * global);
            }
          }
          if (drop_last) {
            ASSERT_EQ(expected, batches * global);
          } else {
            ASSERT_GE(expected, samples);
            ASSERT_LT(expected - samples, world);  // repeats
          }
        }
      }
    }
  }
}

TEST(Sharding, HasNothingOutsideOfTheEpoch) {
  std::int64_t first = 5, last = 9;
  for (const std::int64_t index : {std::int64_t{-1}, std::int64_t{3}, std::numeric_limits<std::int64_t>::max()}) {
    Sharding{4, 0, 1, false}.range(10, index, first, last);
    EXPECT_EQ(first, last);
  }
  EXPECT_EQ((Sharding{4, 0, 1, false}.batches(0)), 0);
  EXPECT_EQ((Sharding{4, 0, 1, false}.batches(-3)), 0);
}

TEST(Sharding, NumbersThatMakeNoBatchMakeNone) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
  EXPECT_EQ((Sharding{0, 0, 1, false}.batches(10)), 0);
  EXPECT_EQ((Sharding{4, 0, 0, false}.batches(10)), 0);
  EXPECT_EQ((Sharding{kMost, 0, 2, false}.batches(10)), 0);
  EXPECT_EQ((Sharding{kMost, 0, 1, false}.batches(10)), 1);
  EXPECT_EQ((Sharding{1, 0, 1, false}.batches(kMost)), kMost);
}

TEST(Sharding, FewerSamplesThanProcessesAreRepeated) {
  std::vector<std::int64_t> found;
  for (std::int64_t rank = 0; rank < 6; ++rank) {
    std::int64_t first = 0, last = 0;
    Sharding{3, rank, 6, false}.range(2, 0, first, last);
    ASSERT_EQ(last - first, 1);
    found.push_back(first % 2);
  }
  EXPECT_EQ(found, (std::vector<std::int64_t>{0, 1, 0, 1, 0, 1}));
}

}  // namespace
}  // namespace oxytorch::data
