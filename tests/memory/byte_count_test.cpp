#include "memory/byte_count.h"

#include <gtest/gtest.h>

#include <random>
#include <thread>
#include <utility>
#include <vector>

namespace oxytorch::memory {
namespace {

const void* at(std::uintptr_t address) { return reinterpret_cast<const void*>(address * 64); }

TEST(ByteCountTest, CountsWhatIsHeldAndItsPeaks) {
  ByteCount count;
  const auto outer = count.begin_peak().value();
  ASSERT_TRUE(count.reserve(100));
  count.hold(at(1), 100);
  const auto inner = count.begin_peak().value();
  ASSERT_TRUE(count.reserve(50));
  count.hold(at(2), 50);
  count.release(at(1));
  EXPECT_EQ(count.live(), 50);
  EXPECT_EQ(count.peak(outer), 150);
  EXPECT_EQ(count.peak(inner), 150);
  count.reset_peak(inner);
  ASSERT_TRUE(count.reserve(7));
  count.cancel(7);
  EXPECT_EQ(count.peak(inner), 57);
  count.release(at(1));
  EXPECT_EQ(count.live(), 50) << "of a block that is not held nothing is taken off";
  count.release(at(2));
  EXPECT_EQ(count.live(), 0);
  EXPECT_FALSE(count.has_blocks());
}

TEST(ByteCountTest, ABlockFreedPastItIsNotCountedTwice) {
  ByteCount count;
  ASSERT_TRUE(count.reserve(100));
  count.hold(at(1), 100);
  ASSERT_TRUE(count.reserve(30));
  count.hold(at(1), 30);  // the address came back although nobody said that it was free
  EXPECT_EQ(count.live(), 30);
  count.release(at(1));
  EXPECT_EQ(count.live(), 0);
}

TEST(ByteCountTest, TheLimitIsMetToTheByte) {
  ByteCount count;
  count.set_limit(1000);
  EXPECT_TRUE(count.reserve(999));
  EXPECT_FALSE(count.reserve(2));
  EXPECT_TRUE(count.reserve(1));
  EXPECT_FALSE(count.reserve(1));
  EXPECT_FALSE(count.reserve(std::size_t{1} << 62));
  EXPECT_EQ(count.live(), 1000);
  count.set_limit(10);
  EXPECT_FALSE(count.reserve(1));
  count.set_limit(ByteCount::kNoLimit);
  EXPECT_TRUE(count.reserve(std::size_t{1} << 40));
}

TEST(ByteCountTest, ThirtyTwoPeaksAtOnceAndNoMore) {
  ByteCount count;
  std::vector<int> peaks;
  for (int i = 0; i < 32; ++i) peaks.push_back(count.begin_peak().value());
  EXPECT_FALSE(count.begin_peak());
  count.end_peak(peaks[7]);
  EXPECT_EQ(count.begin_peak(), peaks[7]);
}

TEST(ByteCountTest, ThreadsThatShareALimitNeverPassIt) {
  ByteCount count;
  count.set_limit(10'000);
  const auto peak = count.begin_peak().value();
  std::vector<std::thread> threads;
  for (std::uintptr_t t = 0; t < 4; ++t) {
    threads.emplace_back([&count, t] {
      std::mt19937 random(static_cast<unsigned>(t));
      std::vector<std::pair<const void*, std::size_t>> mine;
      for (std::uintptr_t i = 1; i < 20'000; ++i) {
        const std::size_t bytes = 1 + random() % 700;
        if (count.reserve(bytes)) {
          count.hold(at(t << 32 | i), bytes);
          mine.emplace_back(at(t << 32 | i), bytes);
        }
        if (mine.size() > random() % 16) {
          count.release(mine.back().first);
          mine.pop_back();
        }
      }
      for (const auto& [block, bytes] : mine) count.release(block);
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(count.live(), 0);
  EXPECT_FALSE(count.has_blocks());
  EXPECT_LE(count.peak(peak), 10'000);
  EXPECT_GT(count.peak(peak), 5'000);
}

struct Log final : BlockObserver {
  void taken(const void* block, std::size_t bytes) override { seen.emplace_back(block, static_cast<long>(bytes)); }
  void released(const void* block, std::size_t bytes) override { seen.emplace_back(block, -static_cast<long>(bytes)); }
  std::vector<std::pair<const void*, long>> seen;
};

TEST(ByteCountTest, OneObserverSeesEachBlock) {
  ByteCount count;
  Log log, other;
  ASSERT_TRUE(count.observe(&log));
  EXPECT_FALSE(count.observe(&other));
  ASSERT_TRUE(count.reserve(5));
  count.hold(at(3), 5);
  count.release(at(3));
  count.unobserve();
  ASSERT_TRUE(count.reserve(6));
  count.hold(at(4), 6);
  EXPECT_EQ(log.seen, (std::vector<std::pair<const void*, long>>{{at(3), 5}, {at(3), -5}}));
  EXPECT_TRUE(count.observe(&other));
}

}  // namespace
}  // namespace oxytorch::memory
