#include "oxytorch/machine/host_report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "host_tree.h"
#include "oxytorch/random.h"

namespace oxytorch::machine {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;
using testing::IsEmpty;

std::vector<HostRow> report(const HostTree& tree, const std::string& data = "") {
  return host_report({tree.root(), data});
}

const HostRow* find(const std::vector<HostRow>& rows, const std::string& what) {
  const auto row = std::find_if(rows.begin(), rows.end(), [&](const HostRow& one) { return one.what == what; });
  return row == rows.end() ? nullptr : &*row;
}

std::vector<std::string> changes(const std::vector<HostRow>& rows) {
  std::vector<std::string> names;
  for (const HostRow& row : rows) {
    if (row.verdict == Verdict::Change) names.push_back(row.what);
  }
  return names;
}

/// What holds of every row, whatever the tree.
void expect_whole(const std::vector<HostRow>& rows) {
  for (const HostRow& row : rows) {
    EXPECT_FALSE(row.what.empty() || row.where.empty() || row.why.empty() || row.area.empty());
    EXPECT_EQ(row.verdict == Verdict::Change, !row.command.empty()) << row.what;
    EXPECT_EQ(row.verdict == Verdict::Change, !row.suggestion.empty()) << row.what;
    EXPECT_TRUE(row.why.ends_with('.')) << row.why;
    for (const std::string* text : {&row.what, &row.where, &row.value, &row.why, &row.command, &row.suggestion}) {
      EXPECT_TRUE(std::all_of(text->begin(), text->end(), [](char c) { return c >= ' ' && c <= '~'; })) << *text;
    }
  }
  EXPECT_EQ(nlohmann::json::parse(to_json(rows)).size(), rows.size());
  EXPECT_FALSE(to_text(rows).empty());
}

TEST(HostReport, AnEmptyTreeHasNoRows) {
  const HostTree tree;
  EXPECT_THAT(report(tree, "/data"), IsEmpty());
  EXPECT_EQ(to_text({}), "Nothing to change.\n");
  EXPECT_EQ(to_json({}), "[]");
  EXPECT_THAT(host_report({"/no/such/root", ""}), IsEmpty());
}

TEST(HostReport, Laptop) {
  HostTree tree;
  tree.processors(8);
  tree.memory(16, 8);
  tree.usual_sysctls();
  tree.numa(1, "0");
  tree.limits("1024", "2084925440");
  tree.disk("nvme0n1", "[none] mq-deadline", false);
  for (int i = 0; i < 8; ++i) {
    tree.write("/sys/devices/system/cpu/cpu" + std::to_string(i) + "/cpufreq/scaling_governor", "powersave\n");
  }
  tree.write({{"/sys/devices/system/cpu/intel_pstate/no_turbo", "1\n"},
              {"/sys/class/power_supply/BAT0/type", "Battery\n"},
              {"/sys/devices/system/cpu/smt/active", "1\n"},
              {"/sys/devices/system/clocksource/clocksource0/current_clocksource", "tsc\n"},
              {"/sys/class/net/wlan0/speed", "-1\n"},
              {"/sys/devices/system/cpu/vulnerabilities/meltdown", "Mitigation: PTI\n"},
              {"/sys/devices/system/cpu/vulnerabilities/mds", "Vulnerable\n"}});
  const auto rows = report(tree);
  expect_whole(rows);
  EXPECT_THAT(changes(rows), testing::ElementsAre("cpufreq governor", "turbo", "swappiness", "open files"));
  EXPECT_THAT(find(rows, "cpufreq governor")->why, HasSubstr("battery"));
  EXPECT_EQ(find(rows, "cpufreq governor")->value, "powersave on 8 processors");
  EXPECT_EQ(find(rows, "turbo")->command, "echo 0 | tee /sys/devices/system/cpu/intel_pstate/no_turbo");
  EXPECT_EQ(find(rows, "swappiness")->command, "sysctl -w vm.swappiness=10");
  EXPECT_TRUE(find(rows, "swappiness")->needs_root);
  EXPECT_EQ(find(rows, "open files")->command, "ulimit -n 65536");
  EXPECT_FALSE(find(rows, "open files")->needs_root);                      // the hard limit allows it
  EXPECT_EQ(find(rows, "net.core.rmem_max")->verdict, Verdict::Reported);  // one machine
  EXPECT_EQ(find(rows, "clocksource")->verdict, Verdict::Fine);
  EXPECT_EQ(find(rows, "kernel mitigations")->value, "1 active, 1 vulnerable");
  EXPECT_EQ(find(rows, "scheduler of nvme0n1")->verdict, Verdict::Fine);
  EXPECT_EQ(find(rows, "SMT")->value, "on");
}

TEST(HostReport, CloudMachine) {
  HostTree tree;
  tree.processors(16, "fpu avx512f hypervisor");
  tree.memory(64);
  tree.usual_sysctls();
  tree.limits("65536", "unlimited");
  tree.disk("vda", "[none] mq-deadline", true);  // the hypervisor says so of any disk
  tree.disk("loop0", "none [mq-deadline]", true);
  tree.write({{"/sys/devices/system/clocksource/clocksource0/current_clocksource", "xen\n"},
              {"/sys/devices/system/clocksource/clocksource0/available_clocksource", "xen tsc hpet\n"},
              {"/sys/class/net/ens5/speed", "25000\n"},
              {"/sys/class/net/ens5/mtu", "9001\n"},
              {"/proc/self/mountinfo",
               "27 1 259:1 / / rw,relatime - xfs /dev/vda rw\n"
               "40 27 0:40 / /data\\040sets rw - ext4 /dev/vdb rw\n"}});
  const auto rows = report(tree, "/data sets/imagenet");
  expect_whole(rows);
  EXPECT_THAT(changes(rows), testing::ElementsAre("clocksource", "net.core.rmem_max", "net.core.wmem_max",
                                                  "net.ipv4.tcp_rmem", "net.ipv4.tcp_wmem", "file system of the data"));
  EXPECT_EQ(find(rows, "net.ipv4.tcp_rmem")->command, "sysctl -w net.ipv4.tcp_rmem='4096 131072 67108864'");
  EXPECT_EQ(find(rows, "file system of the data")->command, "mount -o remount,noatime '/data sets'");
  EXPECT_EQ(find(rows, "scheduler of vda")->verdict, Verdict::Fine);
  EXPECT_EQ(find(rows, "scheduler of loop0"), nullptr);
  EXPECT_EQ(find(rows, "interface ens5")->value, "25 Gb/s, frames of 9001 bytes");
  EXPECT_EQ(find(report(tree, "/home"), "file system of the data")->verdict, Verdict::Fine);
}

TEST(HostReport, NodeWithNvswitchAndRoce) {
  HostTree tree;
  tree.processors(224);
  tree.memory(2048);
  tree.usual_sysctls();
  tree.numa(2, "1");
  tree.limits("1048576", "8388608");
  tree.disk("nvme0n1", "none [mq-deadline]", false);
  tree.disk("sda", "[none] mq-deadline", true);
  tree.adapter("mlx5_0", "mlx5_core", "4: ACTIVE", "400 Gb/sec (4X NDR)", "Ethernet");
  tree.adapter("mlx5_1", "mlx5_core", "4: ACTIVE", "400 Gb/sec (4X NDR)", "InfiniBand");
  tree.adapter("mlx5_2", "mlx5_core", "1: DOWN", "40 Gb/sec (4X QDR)", "InfiniBand");
  const std::string port = "/sys/class/infiniband/mlx5_0/ports/1";
  tree.write(
      {{port + "/gid_attrs/types/0", "IB/RoCE v1\n"},
       {port + "/gid_attrs/types/1", "RoCE v2\n"},
       {port + "/gid_attrs/types/3", "RoCE v2\n"},
       {port + "/gids/1", "fe80:0000:0000:0000:0ac0:ebff:fe4a:1c2e\n"},
       {port + "/gids/3", "0000:0000:0000:0000:0000:ffff:0a00:0001\n"},
       {port + "/hw_counters/out_of_sequence", "17\n"},
       {"/sys/class/net/eth2/speed", "400000\n"},
       {"/sys/class/net/eth2/mtu", "1500\n"},
       {"/sys/class/net/eth2/ecn/roce_np/enable/3", "1\n"},
       {"/sys/class/net/eth2/ecn/roce_np/enable/0", "0\n"},
       {"/proc/sys/net/core/somaxconn", "128\n"},
       {"/proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01\nGCC version: 12\n"},
       {"/proc/driver/nvidia/gpus/0000:1b:00.0/information", "Model: NVIDIA H100 80GB HBM3\n"},
       {"/proc/driver/nvidia-nvswitch/devices/0000:05:00.0/information", "x\n"}});
  auto rows = report(tree);
  expect_whole(rows);
  EXPECT_THAT(changes(rows), testing::UnorderedElementsAre(
                                 "NUMA balancing", "dirty pages", "locked memory", "net.core.rmem_max",
                                 "net.core.wmem_max", "net.ipv4.tcp_rmem", "net.ipv4.tcp_wmem", "net.core.somaxconn",
                                 "InfiniBand mlx5_2 port 1", "scheduler of nvme0n1", "scheduler of sda",
                                 "read-ahead of sda", "NVIDIA persistence", "GPUDirect RDMA", "NVIDIA Fabric Manager"));
  EXPECT_EQ(find(rows, "dirty pages")->value, "10% = 205 GiB; writers stop at 20%");
  EXPECT_EQ(find(rows, "RoCE mlx5_0 port 1")->value,
            "4: ACTIVE, 400 Gb/sec (4X NDR), Ethernet, firmware 28.39.1002, GID 3 is RoCE v2");
  EXPECT_EQ(find(rows, "RoCE mlx5_0 port 1 losses")->value, "17 since start");
  EXPECT_EQ(find(rows, "ECN of eth2")->value, "priorities 3");
  EXPECT_EQ(find(rows, "InfiniBand mlx5_2 port 1")->command, "export NCCL_IB_HCA=^mlx5_2");
  EXPECT_TRUE(find(rows, "locked memory")->needs_root);
  EXPECT_EQ(find(rows, "scheduler of nvme0n1")->command, "echo none | tee /sys/block/nvme0n1/queue/scheduler");
  // Put right, the same machine is fine.
  tree.write({{"/run/nvidia-persistenced/nvidia-persistenced.pid", "812\n"},
              {"/run/nvidia-fabricmanager/nv-fabricmanager.pid", "900\n"},
              {"/sys/module/nvidia_peermem/refcnt", "0\n"},
              {"/proc/sys/kernel/numa_balancing", "0\n"},
              {"/proc/sys/vm/dirty_background_bytes", "2147483648\n"},
              {"/proc/sys/net/core/somaxconn", "4096\n"},
              {"/proc/sys/net/core/rmem_max", "67108864\n"},
              {"/proc/sys/net/core/wmem_max", "67108864\n"},
              {"/proc/sys/net/ipv4/tcp_rmem", "4096 131072 67108864\n"},
              {"/proc/sys/net/ipv4/tcp_wmem", "4096 131072 67108864\n"},
              {"/sys/class/infiniband/mlx5_2/ports/1/state", "4: ACTIVE\n"},
              {"/sys/block/sda/queue/read_ahead_kb", "4096\n"}});
  tree.disk("nvme0n1", "[none] mq-deadline", false);
  tree.write("/sys/block/sda/queue/scheduler", "none [mq-deadline]\n");
  tree.limits("1048576", "unlimited");
  rows = report(tree);
  expect_whole(rows);
  EXPECT_THAT(changes(rows), IsEmpty());
  // RoCE without a v2 address; an open kernel module that needs no peer module.
  for (const char* index : {"1", "3"}) fs::remove(tree.at(port + "/gid_attrs/types/" + index));
  fs::remove_all(tree.at("/sys/module/nvidia_peermem"));
  tree.write("/proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  560.35.03\n");
  rows = report(tree);
  EXPECT_THAT(changes(rows), testing::ElementsAre("RoCE mlx5_0 port 1"));
  EXPECT_EQ(find(rows, "GPUDirect RDMA")->value, "open kernel module, dma-buf");
}

TEST(HostReport, NodeWithEfa) {
  HostTree tree;
  tree.processors(192, "fpu hypervisor");
  tree.memory(2048, 0, "5128");
  tree.limits("8192", "unlimited");
  for (const char* name : {"rdmap16s27", "rdmap32s27"}) {
    tree.adapter(name, "efa", "4: ACTIVE", "100 Gb/sec (4X EDR)", "Unspecified");
  }
  tree.write("/proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.90.07\n");
  tree.write("/run/nvidia-persistenced/nvidia-persistenced.pid", "1\n");
  const auto rows = report(tree);
  expect_whole(rows);
  EXPECT_THAT(changes(rows), testing::ElementsAre("open files"));
  EXPECT_EQ(find(rows, "EFA rdmap16s27 port 1")->verdict, Verdict::Fine);
  EXPECT_EQ(find(rows, "GPUDirect RDMA"), nullptr);  // EFA needs no peer module
  EXPECT_EQ(find(rows, "hugepages")->value, "5128 of 2.00 MiB, 5128 free");
  EXPECT_EQ(find(rows, "locked memory")->verdict, Verdict::Fine);
}

TEST(HostReport, LustreClient) {
  HostTree tree;
  tree.processors(96);
  tree.write("/proc/self/mountinfo", "50 1 0:50 / /fsx rw,relatime - lustre 10.0.1.5@tcp:/fsx rw,flock,lazystatfs\n");
  const std::string osc = "/sys/fs/lustre/osc/fsx-OST000";
  tree.write({{osc + "0-osc-ffff8881/max_rpcs_in_flight", "8\n"},
              {osc + "1-osc-ffff8881/max_rpcs_in_flight", "64\n"},
              {osc + "0-osc-ffff8881/checksums", "1\n"},
              {"/proc/fs/lustre/mdc/fsx-MDT0000-mdc-ffff8881/max_rpcs_in_flight", "64\n"},
              {"/proc/fs/lustre/mdc/fsx-MDT0000-mdc-ffff8881/max_mod_rpcs_in_flight", "7\n"},
              {"/proc/fs/lustre/lov/fsx-clilov-ffff8881/stripecount", "1\n"},
              {"/proc/fs/lustre/llite/fsx-ffff8881/max_read_ahead_mb", "64\n"}});
  auto rows = report(tree, "/fsx/train");
  expect_whole(rows);
  EXPECT_THAT(changes(rows),
              testing::ElementsAre("Lustre osc.max_rpcs_in_flight", "Lustre mdc.max_mod_rpcs_in_flight"));
  EXPECT_EQ(find(rows, "Lustre osc.max_rpcs_in_flight")->value, "8");  // the least of all targets
  EXPECT_EQ(find(rows, "Lustre osc.max_rpcs_in_flight")->command, "lctl set_param osc.*.max_rpcs_in_flight=32");
  EXPECT_EQ(find(rows, "Lustre /fsx")->value, "10.0.1.5@tcp:/fsx, flock, default stripes: 1");
  EXPECT_EQ(find(rows, "Lustre llite.max_read_ahead_mb")->value, "64");
  EXPECT_EQ(find(rows, "Lustre osc.checksums")->verdict, Verdict::Reported);
  tree.processors(8);  // a small client does not need them
  EXPECT_THAT(changes(report(tree)), IsEmpty());
}

TEST(HostReport, GaudiNode) {
  HostTree tree;
  tree.processors(160);
  for (int i = 0; i < 8; ++i) {
    const std::string card = "/sys/class/accel/accel" + std::to_string(i) + "/device/";
    tree.write({{card + "status", i == 5 ? "Malfunction\n" : "Operational\n"},
                {card + "device_type", "GAUDI2\n"},
                {card + "cpucp_ver", "1.21.0-555\nbuilt on a Monday\n"},
                {card + "hard_reset_cnt", i == 5 ? "3\n" : "0\n"}});
  }
  tree.write("/sys/class/accel/accel_controlD0/dev", "1:0\n");
  tree.write("/sys/module/habanalabs/version", "1.21.0-ca59b5a\n");
  const auto rows = report(tree);
  expect_whole(rows);
  EXPECT_THAT(changes(rows), testing::ElementsAre("Gaudi accel5"));
  EXPECT_EQ(find(rows, "Gaudi accel5")->value, "GAUDI2, Malfunction, firmware 1.21.0-555, 3 hard resets");
  EXPECT_EQ(find(rows, "Gaudi accel0")->value, "GAUDI2, Operational, firmware 1.21.0-555");
  EXPECT_EQ(find(rows, "Gaudi driver")->value, "1.21.0-ca59b5a");
  HostTree older;
  older.write({{"/sys/class/habanalabs/hl0/status", "Operational\n"},
               {"/sys/class/habanalabs/hl0/device_type", "GAUDI\n"},
               {"/sys/class/habanalabs/hl0/armcp_ver", "1.0\n"}});
  EXPECT_EQ(find(report(older), "Gaudi hl0")->value, "GAUDI, Operational, firmware 1.0");
}

TEST(HostReport, ContainerWithAlmostNothing) {
  HostTree tree;
  tree.processors(32);
  tree.memory(256);
  tree.write({{"/.dockerenv", ""},
              {"/proc/self/cgroup", "0::/\n"},
              {"/proc/self/mountinfo",
               "22 1 0:20 / / rw,relatime - overlay overlay rw\n"
               "30 22 0:26 / /sys/fs/cgroup ro - cgroup2 cgroup2 rw\n"
               "31 22 0:27 / /dev/shm rw - tmpfs shm rw,size=65536k\n"},
              {"/sys/fs/cgroup/cpu.max", "350000 100000\n"},
              {"/sys/fs/cgroup/memory.max", "8589934592\n"}});
  const auto rows = report(tree, "/workspace");
  expect_whole(rows);
  EXPECT_THAT(changes(rows), testing::ElementsAre("/dev/shm"));
  EXPECT_EQ(find(rows, "/dev/shm")->command, "docker run --shm-size=8g ...");
  EXPECT_EQ(find(rows, "cgroup CPU quota")->value, "3.5 processors of 32");
  EXPECT_EQ(find(rows, "cgroup memory limit")->value, "8.00 GiB of 256 GiB");
  EXPECT_THAT(find(rows, "file system of the data")->why, HasSubstr("volume"));
}

TEST(HostReport, SettingsThatHarm) {
  HostTree tree;
  tree.memory(32, 0, "8192");  // 16 of 32 GiB set aside
  tree.numa(4, "0");
  tree.write({{"/sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]"},
              {"/sys/kernel/mm/transparent_hugepage/defrag", "[always] defer madvise never"},
              {"/proc/sys/vm/overcommit_memory", "2"},
              {"/proc/sys/vm/zone_reclaim_mode", "1"},
              {"/proc/sys/net/ipv4/tcp_congestion_control", "reno"},
              {"/proc/sys/net/ipv4/tcp_available_congestion_control", "reno cubic"}});
  const auto rows = report(tree);
  expect_whole(rows);
  EXPECT_THAT(changes(rows),
              testing::UnorderedElementsAre("transparent hugepages", "hugepage defragmentation", "hugepages",
                                            "zone reclaim", "overcommit", "congestion control"));
  EXPECT_EQ(find(rows, "hugepages")->command, "sysctl -w vm.nr_hugepages=0");
}

TEST(HostReport, ThisMachineIsReadWithoutHarm) {
  const auto rows = host_report();
  expect_whole(rows);
  EXPECT_NE(find(rows, "cgroup memory limit"), nullptr);
  EXPECT_NE(find(rows, "open files"), nullptr);
}

/// Every file that the report reads, from a tree that has them all.
std::vector<std::string> files_of_a_full_tree(HostTree& tree) {
  tree.processors(64);
  tree.memory(512, 4, "100");
  tree.usual_sysctls();
  tree.numa(2, "1");
  tree.limits("1024", "65536");
  tree.disk("nvme0n1", "[none] mq-deadline", false);
  tree.adapter("mlx5_0", "mlx5_core", "4: ACTIVE", "400 Gb/sec (4X NDR)", "Ethernet");
  tree.write({{"/sys/class/infiniband/mlx5_0/ports/1/gid_attrs/types/0", "RoCE v2"},
              {"/sys/class/infiniband/mlx5_0/ports/1/gids/0", "0000:0000:0000:0000:0000:ffff:0a00:0001"},
              {"/sys/class/infiniband/mlx5_0/ports/1/hw_counters/out_of_sequence", "1"},
              {"/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "powersave"},
              {"/sys/devices/system/cpu/cpufreq/boost", "0"},
              {"/sys/devices/system/cpu/smt/active", "1"},
              {"/sys/devices/system/cpu/vulnerabilities/mds", "Vulnerable"},
              {"/sys/devices/system/clocksource/clocksource0/current_clocksource", "hpet"},
              {"/sys/devices/system/clocksource/clocksource0/available_clocksource", "tsc hpet"},
              {"/usr/lib/systemd/system/irqbalance.service", "x"},
              {"/proc/700/comm", "irqbalance"},
              {"/sys/class/net/eth0/speed", "100000"},
              {"/sys/class/net/eth0/mtu", "9000"},
              {"/sys/class/net/eth0/ecn/roce_np/enable/3", "1"},
              {"/proc/self/mountinfo",
               "27 1 259:1 / / rw - ext4 /dev/nvme0n1 rw\n50 1 0:50 / /fsx rw - lustre x rw\n"
               "31 22 0:27 / /dev/shm rw - tmpfs shm rw,size=65536k\n"},
              {"/proc/self/cgroup", "0::/\n"},
              {"/sys/fs/lustre/osc/a/max_rpcs_in_flight", "8"},
              {"/proc/fs/lustre/lov/a/stripecount", "1"},
              {"/proc/driver/nvidia/version", "NVRM version: 1"},
              {"/proc/driver/nvidia-nvswitch/devices/0/x", "1"},
              {"/sys/class/accel/accel0/device/status", "Operational"},
              {"/sys/class/accel/accel0/device/device_type", "GAUDI3"},
              {"/sys/class/accel/accel0/device/hard_reset_cnt", "1"},
              {"/sys/module/habanalabs/version", "1"}});
  std::vector<std::string> files;
  for (const auto& entry : fs::recursive_directory_iterator(tree.root())) {
    if (entry.is_regular_file()) files.push_back(entry.path().string().substr(tree.root().size()));
  }
  std::sort(files.begin(), files.end());
  return files;
}

TEST(HostReport, AnyBytesInAnyFileAreNoError) {
  HostTree tree;
  const auto files = files_of_a_full_tree(tree);
  const std::size_t whole = report(tree).size();
  EXPECT_GT(files.size(), 50U);
  EXPECT_GT(whole, 40U);
  const std::vector<std::string> garbage{"",
                                         "\n\n\n",
                                         std::string(4096, '\0'),
                                         std::string(300'000, '9'),
                                         "-1",
                                         "18446744073709551616",
                                         "nan",
                                         "1e400",
                                         "[",
                                         "]",
                                         "[]",
                                         "][",
                                         "$(reboot)",
                                         "'; rm -rf /",
                                         std::string("\xff\xfe\x80[\x01]", 6),
                                         ":::: - - -",
                                         "a b c d e f - ",
                                         "Max open files",
                                         "Max open files x y",
                                         "size=k",
                                         "27 1 259:1 / / rw - tmpfs /dev/shm size=99999999999999999999k"};
  PhiloxStream random(/*seed=*/5);
  for (const std::string& file : files) {
    const std::string path = tree.at(file);
    std::ifstream stream(path, std::ios::binary);
    const std::string before((std::istreambuf_iterator<char>(stream)), std::istreambuf_iterator<char>());
    for (const std::string& text : garbage) {
      tree.write(file, text);
      expect_whole(report(tree, "/data"));
    }
    for (int round = 0; round < 20; ++round) {  // the true text with some bytes changed
      std::string text = before;
      for (std::uint32_t i = random.below(4) + 1; i > 0 && !text.empty(); --i) {
        text[random.below(static_cast<std::uint32_t>(text.size()))] = static_cast<char>(random.below(256));
      }
      tree.write(file, text);
      expect_whole(report(tree, "/data"));
    }
    tree.write(file, before);
  }
  EXPECT_EQ(report(tree).size(), whole);
}

TEST(HostReport, FilesThatCannotBeReadAreLeftOut) {
  HostTree tree;
  const auto files = files_of_a_full_tree(tree);
  for (std::size_t i = 0; i < files.size(); ++i) {
    const fs::path path = tree.at(files[i]);
    fs::remove(path);
    switch (i % 5) {
      case 0: fs::create_directory(path); break;
      case 1: fs::create_symlink("nowhere", path); break;
      case 2: fs::create_symlink(path.filename(), path); break;  // a loop
      case 3: ASSERT_EQ(mkfifo(path.c_str(), 0600), 0); break;   // would wait for a writer
      default:
        tree.write(files[i], "1");
        fs::permissions(path, fs::perms::none);
        break;
    }
  }
  expect_whole(report(tree, "/data"));
}

TEST(HostReport, NamesOfFoldersNeverReachACommandUnquoted) {
  HostTree tree;
  for (const char* name : {"nvme0n1; reboot", "nvme0n1$(id)", "sda`id`", "nvme\n0"}) {
    tree.disk(name, "none [mq-deadline]", false);
  }
  tree.write("/proc/self/mountinfo", "27 1 259:1 / /it's\\040$(id) rw - ext4 /dev/sda rw\n");
  const auto rows = report(tree, "/it's $(id)/x");
  expect_whole(rows);
  ASSERT_EQ(rows.size(), 1U);
  EXPECT_EQ(rows[0].command, "mount -o remount,noatime '/it'\\''s $(id)'");
}

}  // namespace
}  // namespace oxytorch::machine
