#include "oxytorch/system.h"

#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <set>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "base/file_tree.h"

namespace oxytorch {
namespace {

namespace fs = std::filesystem;
using namespace detail;

/// The folders of a controller, from this process's own up to the mount point. `v2` says which kind they are.
struct CgroupChain {
  std::vector<fs::path> folders;
  bool v2 = false;
};

std::vector<CgroupChain> cgroup_chains(const std::string& root, const std::string& controller) {
  std::vector<CgroupChain> chains;
  const std::vector<std::string> own = read_lines(under(root, "/proc/self/cgroup"));
  for (const Mount& mount : read_mounts(root)) {
    const bool v2 = mount.type == "cgroup2";
    if (!v2 && (mount.type != "cgroup" || !contains(mount.super_options, controller))) continue;
    std::string path;  // "hierarchy:controllers:path"; v2 is hierarchy 0 without controllers
    for (const std::string& line : own) {
      const std::size_t first = line.find(':');
      const std::size_t second = first == std::string::npos ? first : line.find(':', first + 1);
      if (second == std::string::npos) continue;
      const std::string controllers = line.substr(first + 1, second - first - 1);
      if (v2 ? line.starts_with("0::") : contains(split(controllers, ','), controller)) {
        path = line.substr(second + 1);
        break;
      }
    }
    // The mount shows the tree from mount.root on: what lies above it is out of sight.
    std::string_view inside = path;
    if (mount.root != "/") {
      const bool below =
          path.starts_with(mount.root) && (path.size() == mount.root.size() || path[mount.root.size()] == '/');
      inside = below ? inside.substr(mount.root.size()) : std::string_view{};
    }
    CgroupChain chain;
    chain.v2 = v2;
    const fs::path top = under(root, mount.point);
    fs::path folder = top;
    chain.folders.push_back(folder);
    for (const fs::path& part : fs::path(inside).relative_path()) {
      // A path with ".." leads outside of what this namespace shows.
      if (part == ".." || part == "." || part.empty()) continue;
      std::error_code missing;
      if (!fs::is_directory(folder / part, missing)) break;
      folder /= part;
      chain.folders.push_back(folder);
    }
    chains.push_back(std::move(chain));
  }
  return chains;
}

void lower(std::optional<double>& least, double value) { least = least ? std::min(*least, value) : value; }
void lower(std::optional<std::uint64_t>& least, std::uint64_t value) {
  least = least ? std::min(*least, value) : value;
}

std::optional<double> cpu_quota(const std::string& root) {
  std::optional<double> least;
  for (const CgroupChain& chain : cgroup_chains(root, "cpu")) {
    for (const fs::path& folder : chain.folders) {
      std::optional<std::int64_t> quota;
      std::optional<std::int64_t> period;
      if (chain.v2) {
        const auto words = split(std::string(trim(read_text(folder / "cpu.max"))), ' ');  // "max 100000"
        if (!words.empty()) quota = parse<std::int64_t>(words[0]);
        period = words.size() > 1 ? parse<std::int64_t>(words[1]) : 100'000;
      } else {
        quota = parse<std::int64_t>(read_text(folder / "cpu.cfs_quota_us"));  // -1: none
        period = parse<std::int64_t>(read_text(folder / "cpu.cfs_period_us"));
      }
      if (quota && period && *quota > 0 && *period > 0) {
        lower(least, static_cast<double>(*quota) / static_cast<double>(*period));
      }
    }
  }
  return least;
}

struct CgroupMemory {
  std::optional<std::uint64_t> limit;
  std::optional<std::uint64_t> room;  // least of limit - use, where page cache that can be dropped is no use
};

CgroupMemory cgroup_memory(const std::string& root) {
  // v1 writes "no limit" as the largest multiple of the page size.
  constexpr std::uint64_t kNoLimit = std::uint64_t{1} << 62;
  CgroupMemory memory;
  for (const CgroupChain& chain : cgroup_chains(root, "memory")) {
    for (const fs::path& folder : chain.folders) {
      const auto limit = parse<std::uint64_t>(read_text(folder / (chain.v2 ? "memory.max" : "memory.limit_in_bytes")));
      if (!limit || *limit >= kNoLimit) continue;
      lower(memory.limit, *limit);
      const auto used =
          parse<std::uint64_t>(read_text(folder / (chain.v2 ? "memory.current" : "memory.usage_in_bytes")));
      if (!used) continue;
      const auto cache =
          field(read_lines(folder / "memory.stat"), chain.v2 ? "inactive_file" : "total_inactive_file", ' ');
      const std::uint64_t dropped = std::min(*used, cache ? parse<std::uint64_t>(*cache).value_or(0) : 0);
      const std::uint64_t kept = *used - dropped;
      lower(memory.room, *limit > kept ? *limit - kept : 0);
    }
  }
  return memory;
}

/// One processor of /proc/cpuinfo: its number and its core, as (package, core).
struct Processor {
  int number;
  std::optional<std::pair<int, int>> core;
};

std::vector<Processor> processors(const std::string& root) {
  std::vector<Processor> found;
  constexpr int kUnknown = -1;
  int package = kUnknown;
  int core = kUnknown;
  const auto finish = [&] {
    if (!found.empty() && package != kUnknown && core != kUnknown) found.back().core = std::pair(package, core);
    package = core = kUnknown;
  };
  for (const std::string& line : read_lines(under(root, "/proc/cpuinfo"))) {
    const std::size_t at = line.find(':');
    if (at == std::string::npos) continue;
    const std::string_view key = trim(std::string_view(line).substr(0, at));
    const std::string_view value = std::string_view(line).substr(at + 1);
    if (key == "processor") {
      finish();
      if (const auto number = parse<int>(value)) found.push_back({*number, std::nullopt});
    } else if (key == "physical id") {
      package = parse<int>(value).value_or(kUnknown);
    } else if (key == "core id") {
      core = parse<int>(value).value_or(kUnknown);
    }
  }
  finish();
  return found;
}

/// How many caches of the last level these processors have between them, by sysfs; 1 where it does not say.
int count_last_level_caches(const std::string& root, const std::vector<int>& numbers) {
  std::set<std::string> shared;
  for (const int number : numbers) {
    int highest = 0;
    std::string sharing;
    for (int index = 0;; ++index) {
      const fs::path cache =
          under(root, "/sys/devices/system/cpu/cpu" + std::to_string(number) + "/cache/index" + std::to_string(index));
      const auto level = parse<int>(read_text(cache / "level"));
      if (!level) break;
      if (*level > highest) {
        highest = *level;
        sharing = read_text(cache / "shared_cpu_list");
      }
    }
    if (highest == 0) return 1;
    shared.insert(sharing);
  }
  return std::max(1, static_cast<int>(shared.size()));
}

#if defined(__x86_64__)

struct CpuidWords {
  unsigned a = 0, b = 0, c = 0, d = 0;
};

CpuidWords cpuid(unsigned leaf, unsigned subleaf) {
  CpuidWords words;
  if (__get_cpuid_count(leaf, subleaf, &words.a, &words.b, &words.c, &words.d) == 0) return {};
  return words;
}

/// XCR0: which register files the operating system saves.
std::uint64_t saved_registers() {
  unsigned low = 0;
  unsigned high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return std::uint64_t{high} << 32 | low;
}

/// Whether Linux lets a process ask for the tile registers, 5.16 and later.
bool tiles_permitted() {
  constexpr int kGetSupported = 0x1021;  // ARCH_GET_XCOMP_SUPP
  constexpr unsigned kTileData = 18;
  std::uint64_t mask = 0;
  return syscall(SYS_arch_prctl, kGetSupported, &mask) == 0 && (mask >> kTileData & 1) != 0;
}

CpuFeatures find_features() {
  const auto bit = [](unsigned word, unsigned place) { return (word >> place & 1) != 0; };
  const auto saves = [](std::uint64_t registers, std::uint64_t mask) { return (registers & mask) == mask; };
  CpuFeatures features;
  const CpuidWords one = cpuid(1, 0);
  if (!bit(one.c, 27)) return features;  // no OSXSAVE: no vector registers beyond SSE
  const std::uint64_t registers = saved_registers();
  const CpuidWords seven = cpuid(7, 0);
  const CpuidWords more = seven.a >= 1 ? cpuid(7, 1) : CpuidWords{};
  if (saves(registers, 0x6)) {
    features.f16c = bit(one.c, 29);
    features.fma = bit(one.c, 12);
    features.avx2 = bit(seven.b, 5);
  }
  if (saves(registers, 0xE6)) {
    features.avx512f = bit(seven.b, 16);
    features.avx512dq = bit(seven.b, 17);
    features.avx512bw = bit(seven.b, 30);
    features.avx512vl = bit(seven.b, 31);
    features.avx512_vnni = bit(seven.c, 11);
    features.avx512_bf16 = features.avx512f && bit(more.a, 5);
    features.avx512_fp16 = features.avx512f && bit(seven.d, 23);
  }
  if (saves(registers, 0x60000) && tiles_permitted()) {
    features.amx_tile = bit(seven.d, 24);
    features.amx_bf16 = features.amx_tile && bit(seven.d, 22);
    features.amx_fp16 = features.amx_tile && bit(more.a, 21);
  }
  return features;
}

#else

CpuFeatures find_features() { return {}; }

#endif

}  // namespace

std::string processor_name(const std::string& root) {
  const auto lines = read_lines(under(root, "/proc/cpuinfo"));
  for (const char* key : {"model name", "Model", "Processor"}) {
    if (const auto name = field(lines, key)) return *name;
  }
  return "";
}

CoreInfo read_cores(const std::string& root) {
  CoreInfo info;
  const std::vector<Processor> all = processors(root);
  std::map<int, std::pair<int, int>> core_of;
  std::set<std::pair<int, int>> cores;
  for (const Processor& one : all) {
    if (!one.core) continue;
    core_of[one.number] = *one.core;
    cores.insert(*one.core);
  }
  if (!all.empty()) info.logical = static_cast<int>(all.size());
  const bool cores_known = !all.empty() && core_of.size() == all.size();
  if (cores_known) info.physical = static_cast<int>(cores.size());

  const auto status = read_lines(under(root, "/proc/self/status"));
  if (const auto list = field(status, "Cpus_allowed_list")) {
    std::set<int> allowed = parse_list(*list);
    // The mask may name processors that are not plugged in.
    if (!all.empty()) {
      std::set<int> present;
      for (const Processor& one : all) present.insert(one.number);
      std::erase_if(allowed, [&](int number) { return present.count(number) == 0; });
    }
    if (!allowed.empty()) {
      info.affinity = static_cast<int>(allowed.size());
      if (cores_known) {
        cores.clear();
        for (const int number : allowed) {
          if (cores.insert(core_of[number]).second) info.one_a_core.push_back(number);
        }
        info.last_level_caches = count_last_level_caches(root, info.one_a_core);
      }
    }
  }
  info.quota = cpu_quota(root);
  const auto capped = [&](int count) {
    if (info.quota && *info.quota < count) count = static_cast<int>(std::floor(*info.quota));
    return std::max(count, 1);
  };
  const int usable = info.affinity.value_or(info.logical.value_or(1));
  info.usable = capped(usable);
  info.usable_physical = capped(cores_known ? static_cast<int>(cores.size()) : usable);
  return info;
}

MemoryInfo read_memory(const std::string& root) {
  MemoryInfo info;
  const auto machine = read_lines(under(root, "/proc/meminfo"));
  const auto status = read_lines(under(root, "/proc/self/status"));
  const CgroupMemory group = cgroup_memory(root);
  info.physical = kilobytes(field(machine, "MemTotal"));
  info.cgroup_limit = group.limit;
  info.limit = info.physical;
  if (group.limit) lower(info.limit, *group.limit);
  info.available = kilobytes(field(machine, "MemAvailable"));
  if (group.room) lower(info.available, *group.room);
  info.resident = kilobytes(field(status, "VmRSS"));
  info.peak_resident = kilobytes(field(status, "VmHWM"));
  return info;
}

const CpuFeatures& cpu_features() {
  static const CpuFeatures features = find_features();
  return features;
}

}  // namespace oxytorch
