#include "oxytorch/memory/host_cap.h"

#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <fstream>
#include <optional>
#include <string>

#include "oxytorch/error.h"
#include "oxytorch/system.h"
#include "oxytorch/units.h"

namespace oxytorch {
namespace {

/// Bytes of private writable mappings, which RLIMIT_DATA is about.
std::optional<std::uint64_t> mapped_data() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("VmData:")) return std::stoull(line.substr(7)) * 1024;
  }
  return std::nullopt;
}

}  // namespace

HostSetting cap_host_memory(std::uint64_t limit) {
  const auto mapped = mapped_data();
  const auto resident = read_memory().resident;
  rlimit before{};
  if (!mapped || !resident || getrlimit(RLIMIT_DATA, &before) != 0) {
    return HostSetting::refused("memory_cap", "the kernel does not tell what this process has in use.");
  }
  rlimit capped = before;
  const auto room = *mapped + (limit > *resident ? limit - *resident : 0);
  capped.rlim_cur = before.rlim_cur == RLIM_INFINITY ? room : std::min<rlim_t>(before.rlim_cur, room);
  if (setrlimit(RLIMIT_DATA, &capped) != 0) {
    return HostSetting::refused("memory_cap", "the kernel refuses the limit.");
  }
  return HostSetting::applied("memory_cap", "allocations beyond " + format_size(limit) + " fail.", "",
                              [before] { setrlimit(RLIMIT_DATA, &before); });
}

namespace {

bool begin_host_peak() {
  std::ofstream clear("/proc/self/clear_refs");
  clear << '5' << std::flush;
  return clear.good();
}

}  // namespace

void reset_host_peak() { begin_host_peak(); }

std::optional<std::uint64_t> most_resident(const std::function<void()>& take) {
  static std::atomic<std::uint64_t> around = 0;  // the peak until this call, for one that this one is within
  struct Around {
    std::uint64_t before = std::max(around.load(), read_memory().peak_resident.value_or(0));
    Around() { around = 0; }
    ~Around() { around = std::max(before, around.load()); }
    Around(const Around&) = delete;
    Around& operator=(const Around&) = delete;
  };
  trim_heap();
  const Around outer;
  if (!begin_host_peak()) return std::nullopt;
  take();
  return std::max(around.load(), read_memory().peak_resident.value_or(0));
}

}  // namespace oxytorch
