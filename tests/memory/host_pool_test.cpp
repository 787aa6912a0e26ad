#include "oxytorch/memory/host_pool.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "oxytorch/error.h"
#include "oxytorch/host.h"

namespace oxytorch {
namespace {

constexpr size_t kMiB = 1 << 20;
constexpr size_t kPage = HostPool::kHugePage;

struct Held {
  unsigned char* memory;
  size_t size;
  unsigned char mark;
};

/// A block whose first, last and every 64th byte carry a mark of its own.
Held hold(HostPool& pool, size_t size, unsigned char mark) {
  auto* memory = static_cast<unsigned char*>(pool.allocate(size));
  for (size_t at = 0; memory && at < size; at += 64) memory[at] = mark;
  if (memory) memory[size - 1] = mark;
  return {memory, size, mark};
}

void expect_intact(const Held& held) {
  bool intact = held.memory[held.size - 1] == held.mark;
  for (size_t at = 0; at < held.size; at += 64) intact = intact && held.memory[at] == held.mark;
  EXPECT_TRUE(intact) << "a block of " << held.size << " bytes was written by another";
}

size_t random_size(std::mt19937_64& random) {
  const auto power = std::uniform_int_distribution<int>(0, 21)(random);
  return std::uniform_int_distribution<size_t>(1, size_t{1} << power)(random);
}

TEST(HostPoolTest, RandomBlocksAreAlignedApartAndKeepTheirBytes) {
  HostPool pool(512 * kMiB, 64 * kMiB);
  std::mt19937_64 random(1);
  std::map<uintptr_t, Held> live;
  for (int i = 0; i < 40000; ++i) {
    if (live.size() < 200 && random() % 100 < 55) {
      const auto held = hold(pool, random_size(random), static_cast<unsigned char>(i));
      ASSERT_NE(held.memory, nullptr);
      const auto begin = reinterpret_cast<uintptr_t>(held.memory);
      ASSERT_EQ(begin % HostPool::kAlignment, 0);
      ASSERT_TRUE(pool.owns(held.memory));
      const auto next = live.lower_bound(begin);
      ASSERT_TRUE(next == live.end() || begin + held.size <= next->first);
      ASSERT_TRUE(next == live.begin() || std::prev(next)->first + std::prev(next)->second.size <= begin);
      live.emplace(begin, held);
    } else if (!live.empty()) {
      auto chosen = std::next(live.begin(), static_cast<ptrdiff_t>(random() % live.size()));
      expect_intact(chosen->second);
      pool.release(chosen->second.memory);
      live.erase(chosen);
    }
  }
  for (const auto& [begin, held] : live) {
    expect_intact(held);
    pool.release(held.memory);
  }
  const auto stats = pool.stats();
  EXPECT_EQ(stats.live_bytes, 0);
  EXPECT_GT(stats.hits, stats.misses);
  EXPECT_LE(stats.peak_bytes, 512 * kMiB);
}

TEST(HostPoolTest, BlocksTravelBetweenThreads) {
  HostPool pool(1024 * kMiB, 128 * kMiB);
  std::mutex mutex;
  std::vector<Held> mailbox;
  std::vector<std::thread> threads;
  threads.reserve(4);
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&, thread] {
      std::mt19937_64 random(static_cast<uint64_t>(thread));
      for (int i = 0; i < 4000; ++i) {
        const auto mine = hold(pool, random_size(random), static_cast<unsigned char>(thread * 64 + i % 64));
        ASSERT_NE(mine.memory, nullptr);
        Held other{};
        {
          std::lock_guard lock(mutex);
          mailbox.push_back(mine);
          const auto at = random() % mailbox.size();
          std::swap(mailbox[at], mailbox.back());
          if (mailbox.size() > 64) {
            other = mailbox.back();
            mailbox.pop_back();
          }
        }
        if (!other.memory) continue;
        expect_intact(other);
        pool.release(other.memory);
      }
    });
  }
  for (auto& thread : threads) thread.join();
  for (const auto& held : mailbox) {
    expect_intact(held);
    pool.release(held.memory);
  }
  EXPECT_EQ(pool.stats().live_bytes, 0);
}

/// The blocks of one step, taken in order and freed in reverse, as forward and backward do.
void step(HostPool& pool, const std::vector<size_t>& sizes) {
  std::vector<void*> blocks;
  blocks.reserve(sizes.size());
  for (const auto size : sizes) {
    blocks.push_back(pool.allocate(size));
    std::memset(blocks.back(), 1, size);
  }
  while (!blocks.empty()) {
    pool.release(blocks.back());
    blocks.pop_back();
  }
}

TEST(HostPoolTest, TheNextStepFindsTheMemoryOfTheOneBefore) {
  HostPool pool(512 * kMiB, 256 * kMiB);
  std::mt19937_64 random(2);
  std::vector<size_t> sizes(60);
  for (auto& size : sizes) size = random_size(random) + HostPool::kSmallest;
  step(pool, sizes);
  const auto first = pool.stats();
  const auto faults = page_faults();
  for (int i = 0; i < 20; ++i) step(pool, sizes);
  EXPECT_EQ(pool.stats().misses, first.misses);
  EXPECT_EQ(pool.stats().peak_bytes, first.peak_bytes);
  EXPECT_LT(page_faults() - faults, 50);
}

TEST(HostPoolTest, FreePagesAboveTheLimitGoBack) {
  HostPool pool(1024 * kMiB, 16 * kMiB);
  std::vector<Held> blocks;
  for (int i = 0; i < 64; ++i) blocks.push_back(hold(pool, 5 * kMiB, static_cast<unsigned char>(i)));
  for (size_t i = 0; i < blocks.size(); i += 2) pool.release(blocks[i].memory);
  // Each hole of 5 MiB between blocks in use has one whole page at least, and parts of two that cannot go.
  EXPECT_GE(pool.stats().returned_bytes, 16 * kPage);
  EXPECT_LE(pool.stats().retained_bytes, 32 * 5 * kMiB - 16 * kPage);
  for (size_t i = 1; i < blocks.size(); i += 2) expect_intact(blocks[i]);
  for (size_t i = 1; i < blocks.size(); i += 2) pool.release(blocks[i].memory);
  EXPECT_LE(pool.stats().retained_bytes, 16 * kMiB);
  pool.set_retain_limit(0);
  EXPECT_LE(pool.stats().retained_bytes, kPage);
}

TEST(HostPoolTest, TheLimitHoldsAtEachRelease) {
  HostPool pool(1024 * kMiB, 32 * kMiB);
  for (int i = 0; i < 50; ++i) {
    const auto held = hold(pool, static_cast<size_t>(i + 1) * 5 * kMiB, 1);
    pool.release(held.memory);
    ASSERT_LE(pool.stats().retained_bytes, 32 * kMiB);
  }
}

TEST(HostPoolTest, WhatDoesNotFitIsNull) {
  HostPool pool(8 * kMiB, 0);
  EXPECT_EQ(pool.allocate(9 * kMiB), nullptr);
  EXPECT_EQ(pool.allocate(SIZE_MAX), nullptr);
  EXPECT_EQ(pool.allocate(SIZE_MAX / 2 + 1), nullptr);
  void* most = pool.allocate(7 * kMiB);
  ASSERT_NE(most, nullptr);
  EXPECT_EQ(pool.allocate(2 * kMiB), nullptr);
  pool.release(most);
  EXPECT_NE(pool.allocate(7 * kMiB), nullptr) << "what is free again serves again";
  int outside = 0;
  EXPECT_FALSE(pool.owns(&outside));
  EXPECT_FALSE(pool.owns(nullptr));
}

TEST(HostPoolTest, NeighboursThatAreFreeBecomeOneBlock) {
  HostPool pool(16 * kMiB, 16 * kMiB);
  std::vector<void*> blocks;
  while (void* block = pool.allocate(256 << 10)) blocks.push_back(block);
  ASSERT_GT(blocks.size(), 50U);
  std::mt19937_64 random(3);
  std::shuffle(blocks.begin(), blocks.end(), random);
  for (void* block : blocks) pool.release(block);
  EXPECT_NE(pool.allocate(15 * kMiB), nullptr);
}

TEST(HostPoolTest, AddressesThatTheKernelRefusesAreAnError) { EXPECT_THROW(HostPool(uint64_t{1} << 50, 0), Error); }

TEST(HostPoolTest, HugePagesAreCounted) {
  HostPool pool(256 * kMiB, 256 * kMiB);
  EXPECT_EQ(pool.huge_page_bytes(), 0U);
  const auto held = hold(pool, 64 * kMiB, 1);
  const auto bytes = pool.huge_page_bytes();
  EXPECT_LE(bytes, 68 * kMiB);
  if (bytes == 0) GTEST_SKIP() << "this kernel gives no huge pages";
  EXPECT_GE(bytes, kPage);
  pool.release(held.memory);
}

TEST(HostPoolTest, ParentAndChildGoOnAfterAFork) {
  HostPool pool(256 * kMiB, 256 * kMiB);
  const auto kept = hold(pool, 5 * kMiB, 7);
  pool.release(hold(pool, 50 * kMiB, 1).memory);
  std::atomic<bool> running{true};
  std::thread other([&] {
    while (running) pool.release(hold(pool, 100 << 10, 2).memory);
  });
  for (int i = 0; i < 20; ++i) {
    pool.before_fork();
    const pid_t child = fork();
    pool.after_fork();
    if (child == 0) {
      const auto mine = hold(pool, 8 * kMiB, 9);
      expect_intact(kept);
      expect_intact(mine);
      pool.release(kept.memory);
      pool.release(mine.memory);
      _exit(testing::Test::HasFailure() ? 1 : 0);
    }
    int status = -1;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    ASSERT_EQ(status, 0);
    ASSERT_LT(pool.stats().retained_bytes, 50 * kMiB) << "free memory is not shared with the child";
  }
  running = false;
  other.join();
  expect_intact(kept);
  pool.release(kept.memory);
}

}  // namespace
}  // namespace oxytorch
