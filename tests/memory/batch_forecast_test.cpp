// A recorded step, continued to another size.
#include "oxytorch/memory/batch_forecast.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <utility>
#include <vector>

#include "oxytorch/error.h"

namespace oxytorch {
namespace {

using testing::HasSubstr;
using testing::Pair;

/// A step that takes and gives back so many bytes in turn, of which `a sample` each: {fixed, of a sample}.
memory::Timeline step(std::int64_t samples, std::initializer_list<std::pair<std::int64_t, std::int64_t>> blocks) {
  memory::Timeline found;
  std::int64_t live = 0;
  for (const auto& [fixed, each] : blocks) {
    const auto bytes = fixed + each * samples;
    live += bytes;
    found.events.push_back({.bytes = bytes, .live_bytes = live});
  }
  return found;
}

TEST(BatchReplayTest, AnotherPartOfTheStepMayBeTheHighestAtAnotherSize) {
  for (const std::int64_t size : {1, 2, 3, 4, 100, 1'000'000}) {
    const BatchReplay replay(size, 1'000'000);
    const auto at = [](std::int64_t n) { return step(n, {{1000, 0}, {-1000, 0}, {0, 10}, {0, -10}}); };
    const auto found = replay.forecast(50, at(replay.sizes().first), at(replay.sizes().second));
    EXPECT_TRUE(found.is_regular);
    EXPECT_EQ(found.bytes, 50 + std::max<std::int64_t>(1000, 10 * size));
    EXPECT_EQ(found.fits(), size < 1'000'000);
    EXPECT_THAT(found.text(), HasSubstr(found ? ": it fits." : "it does not fit."));
  }
}

TEST(BatchReplayTest, SmallBatchesAreRun) {
  EXPECT_THAT(BatchReplay(1, 0).sizes(), Pair(1, 1));
  EXPECT_THAT(BatchReplay(2, 0).sizes(), Pair(2, 2));
  EXPECT_THAT(BatchReplay(3, 0).sizes(), Pair(2, 3));
  EXPECT_THAT(BatchReplay(4, 0).sizes(), Pair(2, 4));
  EXPECT_THAT(BatchReplay(160, 0).sizes(), Pair(10, 20));
  EXPECT_THAT(BatchReplay(1'000'000, 0).sizes(), Pair(32, 64));
}

TEST(BatchReplayTest, StepsOfOtherTensorsAreToldByTheirPeaks) {
  const BatchReplay replay(640, 1'000'000);
  const auto smaller = step(32, {{0, 10}, {0, -10}}), larger = step(64, {{0, 5}, {0, 5}, {0, -10}});
  const auto found = replay.forecast(0, smaller, larger);
  EXPECT_FALSE(found.is_regular);
  EXPECT_EQ(found.bytes, 6400);
  EXPECT_THAT(found.text(), HasSubstr("may be low"));
  // As many events, in another order.
  EXPECT_FALSE(replay.forecast(0, step(32, {{0, 10}, {0, -10}}), step(64, {{0, 5}, {0, 5}})).is_regular);
}

TEST(BatchReplayTest, NoSizeIsTooLargeToBeTold) {
  constexpr auto kMost = std::numeric_limits<std::int64_t>::max();
  const BatchReplay replay(kMost, kMost, 0);
  const auto found = replay.forecast(0, step(32, {{0, 1000}}), step(64, {{0, 1000}}));
  EXPECT_GT(found.bytes, kMost / 4);
}

TEST(BatchReplayTest, RefusesWhatCannotBeMeant) {
  EXPECT_THROW(BatchReplay(0, 1), Error);
  EXPECT_THROW(BatchReplay(-8, 1), Error);
  EXPECT_THROW(BatchReplay(1, 1, 1.0), Error);
  EXPECT_THROW(BatchReplay(1, 1, -0.1), Error);
  EXPECT_THROW(BatchReplay(1, 1, std::numeric_limits<double>::quiet_NaN()), Error);
}

}  // namespace
}  // namespace oxytorch
