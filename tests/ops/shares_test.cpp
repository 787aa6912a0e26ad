#include "ops/shares.h"

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <vector>

namespace oxytorch::ops {
namespace {

TEST(Shares, ThreadsTakeTheirOwnFromTheFrontAndThenThoseOfOthersFromTheEnd) {
  Shares shares({0, 3, 3, 7});
  EXPECT_EQ(shares.take(0), 0);
  EXPECT_EQ(shares.take(2), 3);
  EXPECT_EQ(shares.take(1), 6);  // it has none itself
  EXPECT_EQ(shares.take(2), 4);
  EXPECT_EQ(shares.take(2), 5);
  EXPECT_EQ(shares.take(2), 2);
  EXPECT_EQ(shares.take(1), 1);
  for (std::int64_t own = 0; own < 3; ++own) EXPECT_EQ(shares.take(own), -1) << own;
}

TEST(Shares, EveryTaskIsDoneOnceByAnyNumberOfThreads) {
  const int before = at::get_num_threads();
  for (const int threads : {1, 2, 5}) {
    at::set_num_threads(threads);
    for (const std::int64_t tasks : {0, 1, 4, 5, 1000}) {
      for (const std::int64_t grain : {0, 1, 300}) {
        std::vector<std::atomic<int>> times(static_cast<std::size_t>(tasks));
        share_out(tasks, grain, [&](const auto& take) {
          for (std::int64_t task; (task = take()) >= 0;) ++times[static_cast<std::size_t>(task)];
        });
        for (const auto& one : times) EXPECT_EQ(one, 1) << tasks << " tasks by " << grain << ", " << threads;
      }
    }
  }
  at::set_num_threads(before);
}

TEST(Shares, WithinAParallelRegionOneThreadDoesAll) {
  std::atomic<int> done = 0;
  at::parallel_for(0, 3, 1, [&](std::int64_t begin, std::int64_t end) {
    for (; begin < end; ++begin) {
      share_out(7, 1, [&](const auto& take) {
        while (take() >= 0) ++done;
      });
    }
  });
  EXPECT_EQ(done, 21);
}

TEST(Shares, WhatATaskThrowsReachesTheCaller) {
  const auto fails = [](const auto& take) {
    if (take() >= 0) throw std::runtime_error("this task");
  };
  EXPECT_THROW(share_out(4, 1, fails), std::runtime_error);
}

}  // namespace
}  // namespace oxytorch::ops
