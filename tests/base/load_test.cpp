#include "oxytorch/load.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

namespace oxytorch {
namespace {

namespace fs = std::filesystem;

LoadSample quiet() {
  return {.wall = 100, .own = 10, .busy = 500, .stolen = 3, .waited = 1, .throttled = 2, .cores = 2};
}

/// After a second, in which this process used 0.9 s.
LoadSample later(double others, double waited, double stolen = 0, double throttled = 0) {
  LoadSample sample = quiet();
  sample.wall += 1;
  sample.own += 0.9;
  *sample.busy += 0.9 + others;
  *sample.waited += waited;
  *sample.stolen += stolen;
  *sample.throttled += throttled;
  return sample;
}

LoadWatch watch_of(const std::vector<LoadSample>& samples) {
  return LoadWatch([samples, next = std::size_t{0}]() mutable { return samples[next++ % samples.size()]; });
}

std::string evidence(const LoadSample& after) {
  LoadWatch watch = watch_of({quiet(), after});
  watch.begin();
  const bool disturbed = watch.end();
  EXPECT_EQ(disturbed, !watch.evidence().empty());
  EXPECT_EQ(disturbed, watch.disturbed());
  EXPECT_EQ(watch.share(), disturbed ? 1 : 0);
  return watch.evidence();
}

TEST(LoadTest, OthersAreSeenByWhatTheyTake) {
  EXPECT_EQ(evidence(later(0, 0)), "");
  EXPECT_EQ(evidence(later(1.0, 0.4)),
            "other programs used 1.0 of its 2 cores, and threads of this one waited 40 % of the time for one");
  EXPECT_EQ(evidence(later(1.0, 0.01)), "") << "there was a core left";
  EXPECT_EQ(evidence(later(0.02, 0.4)), "") << "its own threads were in each other's way";
  EXPECT_EQ(evidence(later(0, 0, 0.4)), "the machine's host gave 20 % of its cores to others");
  EXPECT_EQ(evidence(later(0, 0, 0, 0.3)), "the quota of its cgroup held it back 30 % of the time");
}

TEST(LoadTest, WithoutWaitingTimesABusyMachineIsSeenByItsCores) {
  LoadSample before = quiet();
  before.waited.reset();
  for (const auto& [others, seen] : {std::pair(1.0, true), std::pair(0.5, false), std::pair(0.0, false)}) {
    LoadSample after = later(others, 0);
    after.waited.reset();
    LoadWatch watch = watch_of({before, after});
    watch.begin();
    EXPECT_EQ(watch.end(), seen) << others;
  }
  LoadSample blind{.wall = 1}, after{.wall = 2, .own = 1};
  LoadWatch watch = watch_of({blind, after});
  watch.begin();
  EXPECT_FALSE(watch.end()) << "a system that tells nothing";
}

TEST(LoadTest, SharesAreOfTheTimeWatched) {
  LoadSample second = later(1, 0.5), third = second, fourth = second;
  third.wall += 10;  // not watched
  fourth.wall = third.wall + 3;
  LoadWatch watch = watch_of({quiet(), second, third, fourth});
  EXPECT_FALSE(watch.end()) << "before begin()";
  watch.begin();
  EXPECT_TRUE(watch.end());
  watch.begin();
  EXPECT_FALSE(watch.end());
  EXPECT_DOUBLE_EQ(watch.share(), 0.25);
  EXPECT_TRUE(watch.disturbed());
}

TEST(LoadTest, TheFirstStretchOrATenthOfAllCounts) {
  const auto disturbed = [](const std::vector<bool>& stretches) {
    std::vector<LoadSample> samples{quiet()};
    for (const bool busy : stretches) {
      const LoadSample& last = samples.back();
      LoadSample next = last;
      next.wall += 1;
      *next.busy += busy ? 1 : 0;
      *next.waited += busy ? 0.5 : 0;
      samples.push_back(next);
      samples.push_back(next);
    }
    LoadWatch watch = watch_of(samples);
    for (std::size_t i = 0; i < stretches.size(); ++i) {
      watch.begin();
      watch.end();
    }
    return watch.disturbed();
  };
  std::vector<bool> stretches(12, false);
  EXPECT_FALSE(disturbed(stretches));
  stretches[5] = true;
  EXPECT_FALSE(disturbed(stretches));
  stretches[7] = true;
  EXPECT_TRUE(disturbed(stretches));
  stretches.assign(12, false);
  stretches[0] = true;
  EXPECT_TRUE(disturbed(stretches));
}

TEST(LoadTest, AShortStretchGoesWithTheNextOne) {
  LoadSample soon = quiet();
  soon.wall += 0.05;
  LoadWatch watch = watch_of({quiet(), soon, later(1, 0.5)});
  watch.begin();
  EXPECT_FALSE(watch.end());
  watch.begin();
  EXPECT_TRUE(watch.end());
  EXPECT_DOUBLE_EQ(watch.share(), 1);
}

TEST(LoadTest, TheSourceCanBeGiven) {
  set_load_source([wall = 0.0]() mutable { return LoadSample{.wall = wall += 1, .stolen = wall}; });
  LoadWatch watch;
  watch.begin();
  EXPECT_TRUE(watch.end());
  set_load_source({});
}

TEST(LoadTest, ReadsWhatTheSystemTells) {
  const fs::path root = fs::temp_directory_path() / ("oxytorch-load-" + std::to_string(getpid()));
  const auto write = [&](const std::string& path, const std::string& text) {
    const fs::path file = root / path;
    fs::create_directories(file.parent_path());
    std::ofstream(file, std::ios::binary) << text;
  };
  const double tick = static_cast<double>(sysconf(_SC_CLK_TCK));
  EXPECT_FALSE(read_load(root.string()).busy);
  EXPECT_FALSE(read_load(root.string()).waited);
  const double own = read_load(root.string()).own;
  write("proc/stat", "cpu  100 20 30 4000 50 6 7 80 9 10\ncpu0 1 1\ncpu1 1 1\ncpu2 1 1\nintr 5\n");
  write("proc/self/task/12/schedstat", "1000 2000000000 5\n");
  write("proc/self/task/13/schedstat", "1000 500000000 5\n");
  write("proc/self/task/12/children", "77 \n");
  write("proc/77/stat", "77 (a (worker) S 9) S 1 1 1 0 -1 0 0 0 0 0 300 100 0 0 20 0\n");
  write("sys/fs/cgroup/cpu.stat", "usage_usec 10\nthrottled_usec 2500000\n");
  const LoadSample sample = read_load(root.string());
  EXPECT_DOUBLE_EQ(sample.busy.value_or(0), 163 / tick);
  EXPECT_DOUBLE_EQ(sample.stolen.value_or(0), 80 / tick);
  EXPECT_DOUBLE_EQ(sample.waited.value_or(0), 2.5);
  EXPECT_DOUBLE_EQ(sample.throttled.value_or(0), 2.5);
  EXPECT_NEAR(sample.own - own, 400 / tick, 0.5);
  EXPECT_EQ(sample.cores, 3);
  fs::remove_all(root);
  const LoadSample real = read_load();
  EXPECT_GT(real.wall, 0);
  EXPECT_GE(real.cores, 1);
}

}  // namespace
}  // namespace oxytorch
