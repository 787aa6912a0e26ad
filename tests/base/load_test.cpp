#include "oxytorch/load.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <utility>
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

/// A machine's tree, in which processes use time while somebody waits.
class NeighboursTest : public testing::Test {
 protected:
  void SetUp() override {
    fs::remove_all(root_);
    write("proc/cpuinfo", "processor : 0\n\nprocessor : 1\n");
    write("proc/self/status", "Cpus_allowed_list:\t0-1\n");
    process(getpid(), "python3", 1, 0);
  }
  void TearDown() override { fs::remove_all(root_); }
  void write(const std::string& path, const std::string& text) {
    fs::create_directories((root_ / path).parent_path());
    std::ofstream(root_ / path, std::ios::binary) << text;
  }
  void process(int pid, const std::string& name, int parent, double seconds, const std::string& allowed = "0-1") {
    const std::string folder = "proc/" + std::to_string(pid) + "/";
    const auto ticks = static_cast<long>(seconds * static_cast<double>(sysconf(_SC_CLK_TCK)));
    write(folder + "comm", name + "\n");
    write(folder + "status", "Cpus_allowed_list:\t" + allowed + "\n");
    write(folder + "stat", std::to_string(pid) + " (" + name + " (x) S 9) R " + std::to_string(parent) +
                               " 1 1 0 -1 0 0 0 0 0 " + std::to_string(ticks) + " 0 0 0 20 0 4 0\n");
  }
  Neighbours after(const std::function<void()>& pause) {
    return read_neighbours(root_.string(), pause).value_or(Neighbours{});
  }

  const fs::path root_ = fs::temp_directory_path() / ("oxytorch-neighbours-" + std::to_string(getpid()));
};

TEST_F(NeighboursTest, ProgramsOnTheSameCoresAreNamedAndCounted) {
  process(800'001, "trains", 1, 5);
  process(800'002, "idle", 1, 7);
  process(800'003, "elsewhere", 1, 0, "6-7");
  const auto found = after([&] {
    process(getpid(), "python3", 1, 0.25);
    process(800'001, "trains", 1, 5.45);
    process(800'003, "elsewhere", 1, 0.25, "6-7");
    process(800'004, "a worker of ours", 800'005, 0.25);
    process(800'005, "its parent", getpid(), 0.25);
    process(800'006, "begins", 1, 0.05);
  });
  EXPECT_EQ(found.said(), "2.0 of 2 cores: trains (pid 800001, 4 threads) 1.8, begins (pid 800006, 4 threads) 0.2");
  EXPECT_TRUE(found.share_cores());
  EXPECT_FALSE(after([] {}).share_cores());
  EXPECT_EQ(after([] {}).said(), "0.0 of 2 cores");
}

TEST_F(NeighboursTest, WhatASystemDoesNotTellIsEmpty) {
  fs::remove_all(root_);
  EXPECT_FALSE(read_neighbours(root_.string(), [] {}));
  EXPECT_TRUE(read_neighbours()) << "this machine";
  set_neighbours(Neighbours{.cores = 1.5, .of = 2});
  EXPECT_EQ(read_neighbours()->said(), "1.5 of 2 cores");
  set_neighbours(std::nullopt);
}

TEST(SharedCoresTest, SettingsThatEndSpinningAreKnown) {
  using Set = std::vector<std::pair<std::string, std::string>>;
  const auto spins = [](const Set& set) {
    return waiting_threads_spin([&](const char* name) -> const char* {
      for (const auto& [key, value] : set) {
        if (key == name) return value.c_str();
      }
      return nullptr;
    });
  };
  EXPECT_TRUE(spins({}));
  EXPECT_TRUE(spins({{"OMP_WAIT_POLICY", "active"}, {"GOMP_SPINCOUNT", "1000"}, {"KMP_BLOCKTIME", "200"}}));
  EXPECT_FALSE(spins({{"OMP_WAIT_POLICY", "PASSIVE"}}));
  EXPECT_FALSE(spins({{"GOMP_SPINCOUNT", "0"}}));
  EXPECT_FALSE(spins({{"KMP_BLOCKTIME", " 0 "}}));
}

}  // namespace
}  // namespace oxytorch
