// Rows on pages, NUMA, swap and the page cache; and on the limits of this process.
#include <algorithm>

#include "machine/host_reader.h"
#include "oxytorch/units.h"

namespace oxytorch::machine {
namespace {

constexpr std::uint64_t kGiB = std::uint64_t{1} << 30;
const std::string kThp = "/sys/kernel/mm/transparent_hugepage/";
const std::string kVm = "/proc/sys/vm/";

void transparent_hugepages(HostReader& host) {
  const std::string enabled = selected(host.text(kThp + "enabled").value_or(""));
  if (enabled == "never") {
    host.change("transparent hugepages", kThp + "enabled", enabled, "madvise",
                "torch asks for huge pages by madvise (THP_MEM_ALLOC_ENABLE=1) and gets none; a page fault then brings "
                "4 KiB, not 2 MiB.",
                "echo madvise | tee " + kThp + "enabled");
  } else if (enabled == "madvise" || enabled == "always") {
    host.fine("transparent hugepages", kThp + "enabled", enabled,
              enabled == "madvise" ? "Who asks by madvise gets them: THP_MEM_ALLOC_ENABLE=1 makes torch ask."
                                   : "Every large block gets them.");
  }
  const std::string defrag = selected(host.text(kThp + "defrag").value_or(""));
  if (defrag == "always") {
    host.change("hugepage defragmentation", kThp + "defrag", defrag, "defer+madvise",
                "With 'always' a page fault waits while the kernel moves other pages together (kernel: "
                "admin-guide/mm/transhuge).",
                "echo defer+madvise | tee " + kThp + "defrag");
  } else if (!defrag.empty()) {
    host.fine("hugepage defragmentation", kThp + "defrag", defrag,
              "Page faults of ordinary memory do not wait for it.");
  }
}

void reserved_hugepages(HostReader& host, const std::vector<std::string>& meminfo) {
  const auto total = detail::parse<std::uint64_t>(detail::field(meminfo, "HugePages_Total").value_or(""));
  const auto free = detail::parse<std::uint64_t>(detail::field(meminfo, "HugePages_Free").value_or(""));
  const auto size = detail::kilobytes(detail::field(meminfo, "Hugepagesize"));
  if (!total || !free || !size || *size == 0 || *free > *total || *total > UINT64_MAX / *size) return;
  const std::uint64_t unused = *free * *size;
  const std::string value =
      std::to_string(*total) + " of " + format_size(*size) + ", " + std::to_string(*free) + " free";
  const std::string where = "/proc/meminfo";
  if (host.memory().physical && unused > *host.memory().physical / 4) {
    host.change("hugepages", where, value, std::to_string(*total - *free),
                format_size(unused) +
                    " are reserved for hugetlb pages that nobody uses; neither tensors nor the page "
                    "cache can have them.",
                sysctl("vm.nr_hugepages", std::to_string(*total - *free)));
  } else {
    host.reported("hugepages", where, value,
                  "Only programs that ask for hugetlb pages use them, for example libfabric's EFA provider; torch's "
                  "allocator does not.");
  }
}

void numa(HostReader& host) {
  const int nodes = host.numa_nodes();
  if (nodes == 0) return;
  host.reported("NUMA nodes", "/sys/devices/system/node", std::to_string(nodes),
                nodes == 1 ? "All memory is equally near."
                           : "Start a process a node with numactl --cpunodebind and --membind, or memory of the other "
                             "node is read across the socket link.");
  const auto balancing = host.number("/proc/sys/kernel/numa_balancing");
  if (balancing && nodes > 1 && *balancing != 0) {
    host.change("NUMA balancing", "/proc/sys/kernel/numa_balancing", std::to_string(*balancing), "0",
                "It unmaps pages to see who touches them; the kernel's own advice (admin-guide/sysctl/kernel) is to "
                "switch it off where processes are bound to nodes.",
                sysctl("kernel.numa_balancing", "0"));
  } else if (balancing) {
    host.fine("NUMA balancing", "/proc/sys/kernel/numa_balancing", std::to_string(*balancing),
              nodes > 1 ? "Pages stay where they were placed." : "With one node there is nothing to balance.");
  }
  const auto reclaim = host.number(kVm + "zone_reclaim_mode");
  if (reclaim && *reclaim != 0 && nodes > 1) {
    host.change("zone reclaim", kVm + "zone_reclaim_mode", std::to_string(*reclaim), "0",
                "A node that is full drops its page cache rather than use the other node's free memory (kernel: "
                "admin-guide/sysctl/vm), so data is read from disk again.",
                sysctl("vm.zone_reclaim_mode", "0"));
  }
}

void swap(HostReader& host, const std::vector<std::string>& meminfo) {
  const auto swappiness = host.number(kVm + "swappiness");
  const auto total = detail::kilobytes(detail::field(meminfo, "SwapTotal"));
  if (!swappiness || !total) return;
  const std::string value = std::to_string(*swappiness) + ", " + format_size(*total) + " of swap";
  if (*total > 0 && *swappiness > 10) {
    host.change("swappiness", kVm + "swappiness", value, "10",
                "The page cache of a data set that is read once pushes pages of the training process out to swap; a "
                "step that touches them waits for the disk.",
                sysctl("vm.swappiness", "10"));
  } else {
    host.fine("swappiness", kVm + "swappiness", value,
              *total == 0 ? "There is no swap." : "Page cache is dropped before process memory is swapped.");
  }
}

void dirty_pages(HostReader& host) {
  const auto bytes = host.number<std::uint64_t>(kVm + "dirty_background_bytes").value_or(0);
  const auto ratio = host.number<std::uint64_t>(kVm + "dirty_background_ratio");
  const auto hard = host.number<std::uint64_t>(kVm + "dirty_ratio");
  const auto physical = host.memory().physical;
  if ((bytes == 0 && (!ratio || *ratio > 100)) || !physical) return;
  const std::uint64_t limit = bytes != 0 ? bytes : *physical / 100 * *ratio;
  const std::string where = kVm + (bytes != 0 ? "dirty_background_bytes" : "dirty_background_ratio");
  const std::string value = bytes != 0 ? format_size(bytes)
                                       : std::to_string(*ratio) + "% = " + format_size(limit) +
                                             (hard ? "; writers stop at " + std::to_string(*hard) + "%" : "");
  if (limit > 16 * kGiB) {
    host.change("dirty pages", where, value, "2 GiB",
                "Nothing is written to disk before " + format_size(limit) +
                    " are dirty; the fsync of a checkpoint then waits for all of it at once.",
                sysctl("vm.dirty_background_bytes", "2147483648"));
  } else {
    host.fine("dirty pages", where, value, "The kernel starts writing early enough for a checkpoint's fsync.");
  }
}

void overcommit(HostReader& host) {
  const auto mode = host.number(kVm + "overcommit_memory");
  if (!mode) return;
  if (*mode == 2) {
    host.change("overcommit", kVm + "overcommit_memory", "2", "0",
                "Strict accounting refuses address space that is reserved and not used, which CUDA reserves by the "
                "terabyte, and the fork of a large process for data workers.",
                sysctl("vm.overcommit_memory", "0"));
  } else {
    host.fine("overcommit", kVm + "overcommit_memory", std::to_string(*mode), "Reservations are not refused.");
  }
}

void memory_limit(HostReader& host) {
  const MemoryInfo& memory = host.memory();
  if (!memory.physical) return;
  if (memory.cgroup_limit && *memory.cgroup_limit < *memory.physical) {
    host.reported("cgroup memory limit", "/proc/self/cgroup",
                  format_size(*memory.cgroup_limit) + " of " + format_size(*memory.physical),
                  "The process is killed beyond it, page cache that cannot be dropped included.");
  } else {
    host.fine("cgroup memory limit", "/proc/self/cgroup", "none, " + format_size(*memory.physical),
              "The machine's memory is the limit.");
  }
}

void shared_memory(HostReader& host) {
  const detail::Mount* shm = nullptr;
  for (const detail::Mount& mount : host.mounts()) shm = mount.point == "/dev/shm" ? &mount : shm;  // the last hides
  if (shm == nullptr || shm->type != "tmpfs") return;
  std::optional<std::uint64_t> bytes;
  for (const std::string& option : shm->super_options) {
    if (!option.starts_with("size=") || !option.ends_with('k')) continue;
    const auto count = detail::parse<std::uint64_t>(std::string_view(option).substr(5, option.size() - 6));
    if (count && *count <= UINT64_MAX / 1024) bytes = *count * 1024;
  }
  if (!bytes && host.memory().physical) bytes = *host.memory().physical / 2;  // tmpfs without size=
  if (!bytes) return;
  const std::string where = "/proc/self/mountinfo: /dev/shm";
  if (*bytes < kGiB) {
    const bool container = host.exists("/.dockerenv") || host.exists("/run/.containerenv");
    host.change("/dev/shm", where, format_size(*bytes), "8 GiB or more",
                "torch's data workers and NCCL's ranks of one node pass data through it; a full one is a bus error.",
                container ? "docker run --shm-size=8g ..." : "mount -o remount,size=8g /dev/shm", !container);
  } else {
    host.fine("/dev/shm", where, format_size(*bytes),
              "Data workers and NCCL's ranks of one node pass data through it.");
  }
}

/// Soft and hard limit of one line of /proc/self/limits; UINT64_MAX is "unlimited".
struct Limit {
  std::uint64_t soft;
  std::uint64_t hard;
};

std::optional<Limit> limit_of(const std::vector<std::string>& lines, std::string_view key) {
  const auto value = [](std::string_view word) {
    return word == "unlimited" ? std::optional(UINT64_MAX) : detail::parse<std::uint64_t>(word);
  };
  for (const std::string& line : lines) {
    if (!line.starts_with(key)) continue;
    std::vector<std::string> words = detail::split(line.substr(key.size()), ' ');
    std::erase(words, "");
    if (words.size() < 2) return std::nullopt;
    const auto soft = value(words[0]);
    const auto hard = value(words[1]);
    return soft && hard ? std::optional(Limit{*soft, *hard}) : std::nullopt;
  }
  return std::nullopt;
}

std::string count_text(std::uint64_t count) { return count == UINT64_MAX ? "unlimited" : std::to_string(count); }
std::string bytes_text(std::uint64_t count) { return count == UINT64_MAX ? "unlimited" : format_size(count); }

void process_limits(HostReader& host) {
  const std::string where = "/proc/self/limits";
  const auto lines = detail::read_lines(detail::under(host.options().root, where));
  if (const auto files = limit_of(lines, "Max open files ")) {
    const std::string value = count_text(files->soft) + ", hard " + count_text(files->hard);
    constexpr std::uint64_t kEnough = 65536;
    if (files->soft < kEnough) {
      host.change("open files", where, value, std::to_string(kEnough),
                  "torch's data workers hold a descriptor for every tensor in flight (sharing strategy "
                  "'file_descriptor'), and a shard or a connection holds one each.",
                  "ulimit -n " + std::to_string(kEnough), files->hard < kEnough);
    } else {
      host.fine("open files", where, value, "Enough for data workers, shards and connections.");
    }
  }
  if (const auto locked = limit_of(lines, "Max locked memory ")) {
    const std::string value = bytes_text(locked->soft) + ", hard " + bytes_text(locked->hard);
    const bool rdma = !host.names("/sys/class/infiniband").empty();
    if (locked->soft == UINT64_MAX) {
      host.fine("locked memory", where, value, "Adapters and io_uring may pin what they need.");
    } else if (rdma) {
      host.change("locked memory", where, value, "unlimited",
                  "Memory that an InfiniBand, RoCE or EFA adapter reads must be locked; beyond the limit its "
                  "registration fails and NCCL ends with an error.",
                  "ulimit -l unlimited", locked->hard != UINT64_MAX);
    } else {
      host.reported("locked memory", where, value,
                    "It matters with an adapter for remote memory access; none is here.");
    }
  }
  if (const auto processes = limit_of(lines, "Max processes ")) {
    const std::string value = count_text(processes->soft) + ", hard " + count_text(processes->hard);
    if (processes->soft < 4096) {
      host.change("processes", where, value, "4096",
                  "Every thread counts: each rank starts threads for arithmetic, data and communication.",
                  "ulimit -u 4096", processes->hard < 4096);
    } else {
      host.fine("processes", where, value, "Enough for the threads of all ranks.");
    }
  }
}

}  // namespace

void read_memory_rows(HostReader& host) {
  const auto meminfo = detail::read_lines(detail::under(host.options().root, "/proc/meminfo"));
  memory_limit(host);
  transparent_hugepages(host);
  reserved_hugepages(host, meminfo);
  numa(host);
  swap(host, meminfo);
  dirty_pages(host);
  overcommit(host);
}

void read_limit_rows(HostReader& host) {
  process_limits(host);
  shared_memory(host);
}

}  // namespace oxytorch::machine
