/// File trees that stand for other machines, with the values such machines show.
#pragma once

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

namespace oxytorch::machine {

class HostTree {
 public:
  HostTree() {
    static int count = 0;
    root_ = std::filesystem::temp_directory_path() /
            ("oxytorch-host-" + std::to_string(getpid()) + "-" + std::to_string(count++));
    std::filesystem::remove_all(root_);
    std::filesystem::create_directories(root_);
  }
  ~HostTree() {
    std::error_code ignored;
    std::filesystem::remove_all(root_, ignored);
  }
  HostTree(const HostTree&) = delete;
  HostTree& operator=(const HostTree&) = delete;

  [[nodiscard]] std::string root() const { return root_.string(); }
  [[nodiscard]] std::filesystem::path at(const std::string& path) const {
    return root_ / std::filesystem::path(path).relative_path();
  }
  void write(const std::string& path, const std::string& text) {
    std::filesystem::create_directories(at(path).parent_path());
    std::ofstream(at(path), std::ios::binary) << text;
  }
  void write(const std::vector<std::pair<std::string, std::string>>& files) {
    for (const auto& [path, text] : files) write(path, text);
  }
  void link(const std::string& path, const std::string& to) {
    std::filesystem::create_directories(at(path).parent_path());
    std::filesystem::create_symlink(to, at(path));
  }
  void processors(int count, const std::string& flags = "fpu avx2") {
    std::string text;
    for (int i = 0; i < count; ++i) {
      text += "processor\t: " + std::to_string(i) + "\nmodel name\t: Fast Chip\nflags\t\t: " + flags +
              "\nphysical id\t: 0\ncore id\t\t: " + std::to_string(i) + "\n\n";
    }
    write("/proc/cpuinfo", text);
    write("/proc/self/status", "Name:\tpython\nCpus_allowed_list:\t0-" + std::to_string(count - 1) + "\n");
  }
  void memory(std::uint64_t gib, std::uint64_t swap_gib = 0, const std::string& hugepages = "0") {
    write("/proc/meminfo",
          "MemTotal:       " + std::to_string(gib << 20) + " kB\nMemAvailable:   " + std::to_string(gib << 19) +
              " kB\nSwapTotal:      " + std::to_string(swap_gib << 20) + " kB\nHugePages_Total:    " + hugepages +
              "\nHugePages_Free:     " + hugepages + "\nHugepagesize:       2048 kB\n");
  }
  void limits(const std::string& files, const std::string& locked) {
    write("/proc/self/limits",
          "Limit                     Soft Limit           Hard Limit           Units     \n"
          "Max processes             513906               513906               processes \n"
          "Max open files            " +
              files +
              "            1048576              files     \n"
              "Max locked memory         " +
              locked + "            " + locked + "            bytes\n");
  }
  void usual_sysctls() {
    write({{"/proc/sys/vm/swappiness", "60\n"},
           {"/proc/sys/vm/dirty_ratio", "20\n"},
           {"/proc/sys/vm/dirty_background_ratio", "10\n"},
           {"/proc/sys/vm/dirty_background_bytes", "0\n"},
           {"/proc/sys/vm/overcommit_memory", "0\n"},
           {"/proc/sys/vm/zone_reclaim_mode", "0\n"},
           {"/proc/sys/net/core/rmem_max", "212992\n"},
           {"/proc/sys/net/core/wmem_max", "212992\n"},
           {"/proc/sys/net/core/somaxconn", "4096\n"},
           {"/proc/sys/net/ipv4/tcp_rmem", "4096\t131072\t6291456\n"},
           {"/proc/sys/net/ipv4/tcp_wmem", "4096\t16384\t4194304\n"},
           {"/proc/sys/net/ipv4/tcp_congestion_control", "cubic\n"},
           {"/sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n"},
           {"/sys/kernel/mm/transparent_hugepage/defrag", "always defer defer+madvise [madvise] never\n"}});
  }
  void numa(int nodes, const std::string& balancing) {
    for (int i = 0; i < nodes; ++i) write("/sys/devices/system/node/node" + std::to_string(i) + "/cpulist", "0\n");
    write("/sys/devices/system/node/online", "0\n");
    write("/proc/sys/kernel/numa_balancing", balancing + "\n");
  }
  void disk(const std::string& name, const std::string& scheduler, bool spins) {
    const std::string queue = "/sys/block/" + name + "/queue/";
    write({{queue + "scheduler", scheduler + "\n"},
           {queue + "rotational", spins ? "1\n" : "0\n"},
           {queue + "read_ahead_kb", "128\n"},
           {queue + "nr_requests", "1023\n"}});
  }
  void adapter(const std::string& name, const std::string& driver, const std::string& state, const std::string& rate,
               const std::string& layer) {
    const std::string folder = "/sys/class/infiniband/" + name;
    write({{folder + "/fw_ver", "28.39.1002\n"},
           {folder + "/ports/1/state", state + "\n"},
           {folder + "/ports/1/rate", rate + "\n"},
           {folder + "/ports/1/link_layer", layer + "\n"}});
    link(folder + "/device/driver", "../../../../bus/pci/drivers/" + driver);
  }

 private:
  std::filesystem::path root_;
};

}  // namespace oxytorch::machine
