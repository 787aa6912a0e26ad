#include "oxytorch/system.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "oxytorch/isa.h"
#include "oxytorch/random.h"

namespace oxytorch {
namespace {

namespace fs = std::filesystem;

/// A file tree that stands for another machine.
class Machine : public testing::Test {
 protected:
  void SetUp() override {
    root_ = fs::temp_directory_path() / ("oxytorch-machine-" + std::to_string(getpid()));
    fs::remove_all(root_);
    fs::create_directories(root_);
  }
  void TearDown() override { fs::remove_all(root_); }

  void write(const std::string& path, const std::string& text) {
    const fs::path file = root_ / fs::path(path).relative_path();
    fs::create_directories(file.parent_path());
    std::ofstream(file, std::ios::binary) << text;
  }

  /// `count` threads, two to a core where `paired`, as Linux numbers them: siblings are half the count apart.
  void write_processors(int count, bool paired) {
    std::string text;
    for (int i = 0; i < count; ++i) {
      const int cores = paired ? count / 2 : count;
      text += "processor\t: " + std::to_string(i) +
              "\nmodel name\t: Fast Chip 9000\nphysical id\t: 0\ncore id\t\t: " + std::to_string(i % cores) + "\n\n";
    }
    write("/proc/cpuinfo", text);
  }
  void write_affinity(const std::string& list) {
    write("/proc/self/status",
          "Name:\tpython\nVmHWM:\t  2048 kB\nVmRSS:\t  1024 kB\nCpus_allowed:\tff\nCpus_allowed_list:\t" + list + "\n");
  }
  void mount_v2(const std::string& own, const std::string& mount_root = "/") {
    write("/proc/self/cgroup", "0::" + own + "\n");
    write("/proc/self/mountinfo", "22 1 0:20 / / rw - ext4 /dev/sda rw\n30 22 0:26 " + mount_root +
                                      " /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n");
  }
  void mount_v1(const std::string& own, const std::string& mount_root = "/") {
    write("/proc/self/cgroup", "5:memory:" + own + "\n4:cpu,cpuacct:" + own + "\n1:name=systemd:/\n");
    write("/proc/self/mountinfo", "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n32 31 0:29 " + mount_root +
                                      " /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n33 31 0:30 " +
                                      mount_root + " /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n");
  }
  CoreInfo cores() { return read_cores(root_); }
  MemoryInfo memory() { return read_memory(root_); }

  fs::path root_;
};

constexpr std::uint64_t kMiB = 1 << 20;

TEST_F(Machine, ToldApartByCoresAndLastLevelCaches) {
  write_processors(8, true);  // 0 and 4 are one core
  write_affinity("0-5");
  EXPECT_EQ(cores().one_a_core, (std::vector<int>{0, 1, 2, 3}));
  EXPECT_EQ(cores().last_level_caches, 1) << "not known";
  const auto write_cache = [&](int number, const std::string& sharing) {
    const std::string folder = "/sys/devices/system/cpu/cpu" + std::to_string(number) + "/cache/index";
    write(folder + "0/level", "1\n");
    write(folder + "0/shared_cpu_list", std::to_string(number) + "\n");
    write(folder + "1/level", "3\n");
    write(folder + "1/shared_cpu_list", sharing + "\n");
  };
  for (int i = 0; i < 4; ++i) write_cache(i, i < 2 ? "0-1,4-5" : "2-3,6-7");
  EXPECT_EQ(cores().last_level_caches, 2);
  write_affinity("0-1");
  EXPECT_EQ(cores().last_level_caches, 1);
}

TEST_F(Machine, NothingThereIsUnknownNotAFailure) {
  EXPECT_EQ(processor_name(root_), "");
  const CoreInfo info = cores();
  EXPECT_FALSE(info.logical || info.physical || info.affinity || info.quota);
  EXPECT_EQ(info.usable, 1);
  EXPECT_EQ(info.usable_physical, 1);
  const MemoryInfo bytes = memory();
  EXPECT_FALSE(bytes.physical || bytes.cgroup_limit || bytes.limit || bytes.available || bytes.resident ||
               bytes.peak_resident);
}

TEST_F(Machine, CountsThreadsAndCores) {
  write_processors(8, true);
  write_affinity("0-7");
  const CoreInfo info = cores();
  EXPECT_EQ(processor_name(root_), "Fast Chip 9000");
  EXPECT_EQ(info.logical, 8);
  EXPECT_EQ(info.physical, 4);
  EXPECT_EQ(info.affinity, 8);
  EXPECT_FALSE(info.quota);
  EXPECT_EQ(info.usable, 8);
  EXPECT_EQ(info.usable_physical, 4);
}

TEST_F(Machine, AffinityPicksThreadsAndTheirCores) {
  write_processors(8, true);
  write_affinity("0,4,6");  // 0 and 4 are siblings
  EXPECT_EQ(cores().usable, 3);
  EXPECT_EQ(cores().usable_physical, 2);
  write_affinity("2-3,9-63");  // a mask wider than the machine
  EXPECT_EQ(cores().affinity, 2);
}

TEST_F(Machine, CpuinfoWithoutCoresLeavesThemUnknown) {
  write("/proc/cpuinfo", "processor\t: 0\nBogoMIPS\t: 50\n\nprocessor\t: 1\nBogoMIPS\t: 50\n");
  write_affinity("0-1");
  EXPECT_EQ(cores().logical, 2);
  EXPECT_FALSE(cores().physical);
  EXPECT_EQ(cores().usable, 2);
  EXPECT_EQ(cores().usable_physical, 2);
}

TEST_F(Machine, QuotaV2IsTheLeastOnTheWayUp) {
  write_processors(16, false);
  write_affinity("0-15");
  mount_v2("/jobs/run");
  write("/sys/fs/cgroup/jobs/cpu.max", "250000 100000\n");
  write("/sys/fs/cgroup/jobs/run/cpu.max", "max 100000\n");
  EXPECT_DOUBLE_EQ(cores().quota.value(), 2.5);
  EXPECT_EQ(cores().usable, 2);
  write("/sys/fs/cgroup/jobs/run/cpu.max", "50000 100000\n");
  EXPECT_DOUBLE_EQ(cores().quota.value(), 0.5);
  EXPECT_EQ(cores().usable, 1);
  write("/sys/fs/cgroup/jobs/cpu.max", "max 100000\n");
  write("/sys/fs/cgroup/jobs/run/cpu.max", "max 100000\n");
  EXPECT_FALSE(cores().quota);
  EXPECT_EQ(cores().usable, 16);
}

TEST_F(Machine, AffinityAndQuotaIntersect) {
  write_processors(16, false);
  mount_v2("/");
  write("/sys/fs/cgroup/cpu.max", "600000 100000\n");
  write_affinity("0-3");
  EXPECT_EQ(cores().usable, 4);
  write_affinity("0-11");
  EXPECT_EQ(cores().usable, 6);
}

TEST_F(Machine, QuotaV1) {
  write_processors(8, false);
  write_affinity("0-7");
  mount_v1("/docker/abc");
  write("/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "-1\n");
  write("/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000\n");
  write("/sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_quota_us", "300000\n");
  write("/sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(cores().quota, 3.0);
  EXPECT_EQ(cores().usable, 3);
}

// In a container the mount shows the tree from the container's own group on.
TEST_F(Machine, ContainerSeesItsGroupAtTheMountPoint) {
  write_processors(8, false);
  write_affinity("0-7");
  mount_v1("/docker/abc", "/docker/abc");
  write("/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "200000\n");
  write("/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000\n");
  write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "1048576\n");
  EXPECT_EQ(cores().quota, 2.0);
  EXPECT_EQ(memory().cgroup_limit, kMiB);
  mount_v1("/docker/abcdef", "/docker/abc");  // another group whose name starts the same
  EXPECT_EQ(cores().quota, 2.0);
  mount_v2("/../../elsewhere");  // a namespace that looks out of itself
  write("/sys/fs/cgroup/cpu.max", "400000 100000");
  EXPECT_EQ(cores().quota, 4.0);
}

TEST_F(Machine, MemoryLimitV2IsTheLeastOfMachineAndGroups) {
  write("/proc/meminfo", "MemTotal:       16384 kB\nMemFree: 1 kB\nMemAvailable:    8192 kB\n");
  write_affinity("0");
  mount_v2("/jobs/run");
  EXPECT_EQ(memory().limit, 16 * kMiB);
  EXPECT_EQ(memory().available, 8 * kMiB);
  EXPECT_EQ(memory().resident, kMiB);
  EXPECT_EQ(memory().peak_resident, 2 * kMiB);
  write("/sys/fs/cgroup/jobs/memory.max", "4194304\n");
  write("/sys/fs/cgroup/jobs/memory.current", "3145728\n");
  write("/sys/fs/cgroup/jobs/memory.stat", "anon 1048576\ninactive_file 1048576\nactive_file 0\n");
  write("/sys/fs/cgroup/jobs/run/memory.max", "max\n");
  EXPECT_EQ(memory().physical, 16 * kMiB);
  EXPECT_EQ(memory().cgroup_limit, 4 * kMiB);
  EXPECT_EQ(memory().limit, 4 * kMiB);
  EXPECT_EQ(memory().available, 2 * kMiB);  // 4 less 3, of which 1 is cache that can go
  write("/sys/fs/cgroup/jobs/memory.max", "1073741824\n");
  EXPECT_EQ(memory().limit, 16 * kMiB);  // a group wider than the machine
  EXPECT_EQ(memory().available, 8 * kMiB);
}

TEST_F(Machine, MemoryOverItsLimitLeavesNothing) {
  mount_v2("/");
  write("/sys/fs/cgroup/memory.max", "1048576\n");
  write("/sys/fs/cgroup/memory.current", "2097152\n");
  EXPECT_EQ(memory().available, 0u);
}

TEST_F(Machine, MemoryV1WithoutALimitIsNoLimit) {
  write("/proc/meminfo", "MemTotal: 16384 kB\n");
  mount_v1("/a");
  write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  EXPECT_FALSE(memory().cgroup_limit);
  EXPECT_EQ(memory().limit, 16 * kMiB);
  write("/sys/fs/cgroup/memory/a/memory.limit_in_bytes", "2097152\n");
  write("/sys/fs/cgroup/memory/a/memory.usage_in_bytes", "1048576\n");
  write("/sys/fs/cgroup/memory/a/memory.stat", "total_inactive_file 524288\n");
  EXPECT_EQ(memory().limit, 2 * kMiB);
  EXPECT_EQ(memory().available, kMiB + kMiB / 2);
}

TEST_F(Machine, MountPointWithASpace) {
  write("/proc/self/cgroup", "0::/\n");
  write("/proc/self/mountinfo", "30 22 0:26 / /my\\040groups rw - cgroup2 cgroup2 rw\n");
  write("/my groups/memory.max", "1048576\n");
  EXPECT_EQ(memory().cgroup_limit, kMiB);
}

TEST_F(Machine, MalformedFilesNeverFail) {
  const std::vector<std::pair<std::string, std::string>> files{
      {"/proc/cpuinfo",
       "processor\t: 0\nphysical id\t: 0\ncore id\t: 0\n\nprocessor\t: 1\nphysical id\t: 0\ncore id: 1\n"},
      {"/proc/meminfo", "MemTotal: 16384 kB\nMemAvailable: 8192 kB\n"},
      {"/proc/self/status", "VmHWM: 2048 kB\nVmRSS: 1024 kB\nCpus_allowed_list:\t0-1,5\n"},
      {"/proc/self/cgroup", "4:cpu,cpuacct:/a\n5:memory:/a\n0::/a/b\n"},
      {"/proc/self/mountinfo",
       "30 22 0:26 / /cg rw - cgroup2 cgroup2 rw\n32 31 0:29 /a /v1\\040c rw - cgroup cgroup rw,cpu,memory\n"},
      {"/cg/a/b/cpu.max", "250000 100000\n"},
      {"/cg/a/b/memory.max", "4194304\n"},
      {"/cg/a/memory.current", "3145728\n"},
      {"/cg/a/memory.stat", "anon 1\ninactive_file 1048576\n"},
      {"/v1 c/cpu.cfs_quota_us", "-1\n"},
      {"/v1 c/memory.limit_in_bytes", "9223372036854771712\n"}};
  constexpr char kAlphabet[] = "0123456789-,: \n\t/.kBmax\\";
  PhiloxStream random(21);
  for (int round = 0; round < 150; ++round) {
    for (const auto& [path, good] : files) {
      std::string text = good;
      for (std::uint64_t edits = random.below(6); edits > 0; --edits) {
        const char c = random.below(4) == 0 ? static_cast<char>(random.below(256)) : kAlphabet[random.below(24)];
        const std::size_t place = random.below(text.size() + 1);
        switch (random.below(4)) {
          case 0: text.resize(place); break;
          case 1: text.erase(place, random.below(8)); break;
          case 2: text.insert(place, random.below(12) + 1, c); break;
          default: text.insert(place, 1, c);
        }
      }
      write(path, text);
    }
    const CoreInfo info = cores();
    ASSERT_GE(info.usable, 1);
    ASSERT_GE(info.usable_physical, 1);
    ASSERT_FALSE(info.quota && !(*info.quota > 0));
    const MemoryInfo bytes = memory();
    ASSERT_FALSE(bytes.limit && bytes.physical && *bytes.limit > *bytes.physical);
    processor_name(root_);
  }
}

TEST(ThisMachine, AgreesWithTheSystem) {
  const CoreInfo info = read_cores();
  EXPECT_EQ(info.logical, sysconf(_SC_NPROCESSORS_ONLN));
  cpu_set_t mask;
  ASSERT_EQ(sched_getaffinity(getpid(), sizeof mask, &mask), 0);
  EXPECT_EQ(info.affinity, CPU_COUNT(&mask));
  EXPECT_LE(info.usable, *info.affinity);
  EXPECT_LE(info.usable_physical, info.usable);
  EXPECT_FALSE(processor_name().empty());
}

TEST(ThisMachine, MemoryIsConsistent) {
  const MemoryInfo before = read_memory();
  const auto pages = static_cast<std::uint64_t>(sysconf(_SC_PHYS_PAGES));
  EXPECT_EQ(before.physical, pages * static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE)));
  EXPECT_LE(*before.limit, *before.physical);
  EXPECT_LE(*before.available, *before.limit);
  EXPECT_LE(*before.resident, *before.peak_resident);
  std::vector<char> touched(64 << 20);
  for (std::size_t i = 0; i < touched.size(); i += 512) static_cast<volatile char*>(touched.data())[i] = 1;
  EXPECT_GE(*read_memory().peak_resident, *before.resident + (48 << 20));
}

TEST(ThisMachine, FeaturesAgreeWithTheKernelsList) {
  std::ifstream file("/proc/cpuinfo");
  std::string flags;
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("flags", 0) == 0) {
      flags = line + ' ';
      break;
    }
  }
  if (flags.empty()) GTEST_SKIP() << "/proc/cpuinfo lists no flags here";
  const auto has = [&](const std::string& flag) { return flags.find(' ' + flag + ' ') != std::string::npos; };
  const CpuFeatures& features = cpu_features();
  EXPECT_EQ(features.f16c, has("f16c"));
  EXPECT_EQ(features.fma, has("fma"));
  EXPECT_EQ(features.avx2, has("avx2"));
  EXPECT_EQ(features.avx512f, has("avx512f"));
  EXPECT_EQ(features.avx512bw, has("avx512bw"));
  EXPECT_EQ(features.avx512dq, has("avx512dq"));
  EXPECT_EQ(features.avx512vl, has("avx512vl"));
  EXPECT_EQ(features.avx512_vnni, has("avx512_vnni"));
  EXPECT_EQ(features.avx512_bf16, has("avx512_bf16"));
  EXPECT_EQ(features.avx512_fp16, has("avx512_fp16"));
  EXPECT_LE(features.amx_bf16, has("amx_bf16"));
  EXPECT_LE(features.amx_fp16, has("amx_fp16"));
  EXPECT_EQ(features.has_native_bf16(), features.avx512_bf16 || features.amx_bf16);
}

TEST(ThisMachine, FeaturesAgreeWithTheInstructionSets) {
  for (const Isa isa : supported_isas()) {
    EXPECT_TRUE(isa != Isa::Avx2 || cpu_features().avx2);
    EXPECT_TRUE(isa != Isa::Avx512 || (cpu_features().avx512f && cpu_features().avx512vl));
  }
}

TEST(CpuFeatures, EitherInstructionIsNativeFp16) {
  CpuFeatures features;
  features.f16c = features.avx512f = features.amx_bf16 = true;
  EXPECT_FALSE(features.has_native_fp16());
  features.avx512_fp16 = true;
  EXPECT_TRUE(features.has_native_fp16());
  features.avx512_fp16 = false;
  features.amx_fp16 = true;
  EXPECT_TRUE(features.has_native_fp16());
}

TEST(CpuFeatures, EitherInstructionIsNativeBf16) {
  CpuFeatures features;
  EXPECT_FALSE(features.has_native_bf16());
  features.avx512f = true;
  EXPECT_FALSE(features.has_native_bf16());
  features.avx512_bf16 = true;
  EXPECT_TRUE(features.has_native_bf16());
  features.avx512_bf16 = false;
  features.amx_bf16 = true;
  EXPECT_TRUE(features.has_native_bf16());
}

}  // namespace
}  // namespace oxytorch
