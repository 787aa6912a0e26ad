#include "monitor/statistics.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <thread>

#include "monitor/ring.h"

namespace oxytorch::monitor {
namespace {

TEST(Histogram, BucketsCoverTheLineWithoutGapsOrOverlap) {
  for (int bucket = 0; bucket + 1 < Histogram::kBuckets; ++bucket) {
    const auto low = static_cast<std::int64_t>(Histogram::lower_edge(bucket));
    const auto next = static_cast<std::int64_t>(Histogram::lower_edge(bucket + 1));
    ASSERT_LT(low, next);
    ASSERT_EQ(Histogram::bucket(low), bucket);
    ASSERT_EQ(Histogram::bucket(next - 1), bucket);
  }
  EXPECT_EQ(Histogram::bucket(-5), 0);
  EXPECT_EQ(Histogram::bucket(INT64_MAX), Histogram::kBuckets - 1);
}

TEST(DurationTrack, QuantilesAreWithinTheStatedError) {
  std::mt19937_64 random(7);
  std::lognormal_distribution<double> durations(13, 1.5);
  DurationTrack track;
  std::vector<std::int64_t> values;
  for (int i = 0; i < 20'000; ++i) {
    values.push_back(static_cast<std::int64_t>(durations(random)));
    track.add(values.back());
  }
  std::sort(values.begin(), values.end());
  std::vector<std::uint64_t> scratch;
  const Distribution found = track.read(scratch);
  const auto exact = [&](double q) {
    return static_cast<double>(values[static_cast<std::size_t>(q * static_cast<double>(values.size() - 1))]) * 1e-9;
  };
  EXPECT_NEAR(found.p10 / exact(0.1), 1, 0.016);
  EXPECT_NEAR(found.median / exact(0.5), 1, 0.016);
  EXPECT_NEAR(found.p90 / exact(0.9), 1, 0.016);
  EXPECT_DOUBLE_EQ(found.min, exact(0));
  EXPECT_DOUBLE_EQ(found.max, exact(1));
}

TEST(Curve, KeepsTheWholeRunInItsPoints) {
  Curve curve(16);
  double sum = 0;
  for (int i = 1; i <= 1000; ++i) {
    curve.add(i, i == 777 ? 5000 : i);
    sum += i == 777 ? 5000 : i;
  }
  std::vector<CurvePoint> points;
  curve.read(points);
  ASSERT_LE(points.size(), 16u);
  ASSERT_GE(points.size(), 8u);
  EXPECT_DOUBLE_EQ(points.front().min, 1);
  EXPECT_DOUBLE_EQ(points.back().max, 1000);
  const auto spike = std::max_element(points.begin(), points.end(), [](auto& a, auto& b) { return a.max < b.max; });
  EXPECT_DOUBLE_EQ(spike->max, 5000);
  EXPECT_NEAR(spike->x, 777, 64);
  // All points but the last stand for equally many values, so their means give the sum back.
  const double each = 64;
  double back = 0;
  for (std::size_t i = 0; i + 1 < points.size(); ++i) back += points[i].mean * each;
  back += points.back().mean * (1000 - each * static_cast<double>(points.size() - 1));
  EXPECT_NEAR(back, sum, 1e-6);
}

TEST(Ring, ReadersSeeWholeRecordsOrNone) {
  Ring ring(8, 16);
  constexpr std::uint64_t kRecords = 200'000;
  std::thread writer([&] {
    std::vector<std::uint64_t> record;
    for (std::uint64_t n = 0; n < kRecords; ++n) {
      record.assign(1 + n % 16, n);
      ring.push(record);
    }
  });
  std::uint64_t seen = 0, next = 0;
  std::vector<std::uint64_t> record;
  while (next < kRecords) {
    const std::uint64_t end = ring.pushed();
    if (end - next > ring.records()) next = end - ring.records();
    for (; next < end; ++next) {
      if (!ring.read(next, record)) continue;
      ++seen;
      ASSERT_EQ(record.size(), 1 + next % 16);
      for (std::uint64_t word : record) ASSERT_EQ(word, next);
    }
  }
  writer.join();
  EXPECT_GE(seen, ring.records());
}

}  // namespace
}  // namespace oxytorch::monitor
