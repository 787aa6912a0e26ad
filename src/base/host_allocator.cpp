#include <dlfcn.h>
#include <link.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "oxytorch/host.h"
#include "oxytorch/system.h"

#if defined(__GLIBC__)
#include <malloc.h>
#endif

namespace oxytorch {

HostSetting HostSetting::refused(std::string name, std::string reason) {
  HostSetting setting;
  setting.name_ = std::move(name);
  setting.reason_ = std::move(reason);
  return setting;
}

HostSetting HostSetting::unchanged(std::string name, std::string reason) {
  auto setting = refused(std::move(name), std::move(reason));
  setting.unchanged_ = true;
  return setting;
}

HostSetting HostSetting::applied(std::string name, std::string reason, std::string cost, std::function<void()> undo) {
  auto setting = refused(std::move(name), std::move(reason));
  setting.cost_ = std::move(cost);
  setting.applied_ = true;
  setting.undo_ = std::move(undo);
  return setting;
}

void HostSetting::revert() {
  if (!std::exchange(applied_, false)) return;
  if (undo_) undo_();
  undo_ = nullptr;
}

uint64_t default_retain_limit() {
  const auto memory = read_memory();
  return std::max(memory.available.value_or(memory.limit.value_or(uint64_t{4} << 30)) / 2, uint64_t{64} << 20);
}

uint64_t page_faults() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<uint64_t>(usage.ru_minflt) + static_cast<uint64_t>(usage.ru_majflt);
}

#if defined(__GLIBC__)
namespace {

constexpr const char* kName = "allocator";
constexpr uint64_t kMiB = 1ULL << 20;
std::atomic<uint64_t> trim_count{0};

/// Gives memory back when more than `limit` bytes lie free. Never destroyed: threads do not survive a fork.
class Watcher {
 public:
  void start(uint64_t limit) {
    std::lock_guard lock(mutex_);
    if (running_) return;
    running_ = true;
    owner_ = getpid();
    thread_ = std::thread([this, limit] { watch(limit); });
  }

  void stop() {
    {
      std::lock_guard lock(mutex_);
      if (!running_) return;
      running_ = false;
    }
    wake_.notify_all();
    if (owner_ == getpid()) {
      thread_.join();
    } else {
      thread_.detach();
    }
  }

 private:
  void watch(uint64_t limit) {
    std::unique_lock lock(mutex_);
    while (running_) {
      wake_.wait_for(lock, std::chrono::seconds(1), [this] { return !running_; });
      if (!running_) break;
      lock.unlock();
      if (allocator_retained_bytes().value_or(0) > limit) {
        trim_heap(64 * kMiB);
        trim_count.fetch_add(1, std::memory_order_relaxed);
      }
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::thread thread_;
  bool running_ = false;
  pid_t owner_ = 0;
};

Watcher& watcher() {
  static auto* instance = new Watcher;
  return *instance;
}

std::mutex allocator_mutex;
bool allocator_tuned = false;
int heaps_kept = 0;
int blocks_mapped = 0;

// An object that the loader loaded.
struct Origin {
  const void* base = nullptr;
  std::string file = "an unknown file";
  bool is_reference = false;  // a program's own address for a function that a library defines
};

Origin origin_of(const void* address) {
  Dl_info info{};
  ElfW(Sym)* symbol = nullptr;
  if (!address || !dladdr1(address, &info, reinterpret_cast<void**>(&symbol), RTLD_DL_SYMENT)) return {};
  return {info.dli_fbase, info.dli_fname ? info.dli_fname : "", symbol && symbol->st_shndx == SHN_UNDEF};
}

std::vector<std::string> loaded_files() {
  std::vector<std::string> names;
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* to) {
        static_cast<std::vector<std::string>*>(to)->emplace_back(info->dlpi_name);
        return 0;
      },
      &names);
  return names;
}

/// Where the function that a call by this name reaches is defined. A program that is not position-independent has one
/// address for it, in itself; the loader binds that to the first library that defines it.
Origin definition_of(const char* name) {
  Origin found = origin_of(dlsym(RTLD_DEFAULT, name));
  if (!found.is_reference) return found;
  for (const std::string& file : loaded_files()) {
    void* const library = file.empty() ? nullptr : dlopen(file.c_str(), RTLD_LAZY | RTLD_NOLOAD);
    if (!library) continue;
    const Origin defined = origin_of(dlsym(library, name));  // there, or in what it depends on
    link_map* map = nullptr;
    const bool here = dlinfo(library, RTLD_DI_LINKMAP, &map) == 0 && map->l_name == defined.file;
    dlclose(library);
    if (here) return defined;
  }
  return found;
}

/// The file that malloc comes from, or empty where that is glibc.
std::string foreign_malloc() {
  const Origin malloc_origin = definition_of("malloc");
  const Origin libc_origin = definition_of("gnu_get_libc_version");
  if (libc_origin.base && malloc_origin.base == libc_origin.base) return "";
  return malloc_origin.file;
}

/// The environment variable by which the user already tunes glibc's malloc, or empty.
std::string environment_choice() {
  const char* tunables = std::getenv("GLIBC_TUNABLES");
  if (tunables && std::strstr(tunables, "glibc.malloc")) return "GLIBC_TUNABLES";
  for (const char* name : {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_"}) {
    if (std::getenv(name)) return name;
  }
  return "";
}

uint64_t resident_bytes() {
  std::ifstream file("/proc/self/statm");
  uint64_t size = 0, resident = 0;
  file >> size >> resident;
  return file ? resident * static_cast<uint64_t>(sysconf(_SC_PAGESIZE)) : INT64_MAX;
}

/// Resident bytes that no block of malloc uses: what it holds free, and what the process has beside it.
int64_t resident_beside(const struct mallinfo2& info) {
  return static_cast<int64_t>(resident_bytes()) - static_cast<int64_t>(info.uordblks + info.hblkhd);
}

/// Of those, at most what the process has beside malloc: known once the heap is trimmed.
std::atomic<int64_t> beside_heap{0};

std::string mebibytes(uint64_t bytes) { return std::to_string(bytes / kMiB) + " MiB"; }

/// glibc's own values, and those between which it moves its thresholds by what a program frees.
constexpr uint64_t kLeastThreshold = 128 << 10;
constexpr uint64_t kMostThreshold = 32 * kMiB;
constexpr int kTopPad = 128 << 10;
constexpr uint64_t kMapped = kMiB;  // bytes of a block that map_large_blocks() maps

/// The flag in front of a block that has a mapping of its own; of glibc's malloc since 1996. Apart from its caller, or
/// the compiler takes what is in front of a block for a mistake.
[[gnu::noinline]] bool has_own_mapping(const void* block) {
  size_t head = 0;
  std::memcpy(&head, static_cast<const char*>(block) - sizeof head, sizeof head);
  return (head & 2U) != 0;
}

/// Whether malloc would take a block of so many bytes from a mapping of its own, if its heap had none that is free.
/// Free blocks of the heap are held until one is not found there. Empty where that is not to be had.
std::optional<bool> maps(uint64_t bytes) {
  constexpr size_t kMostHeld = 4096;
  std::vector<void*> held;
  std::optional<bool> answer;
  while (!answer && held.size() < kMostHeld) {
    const auto before = mallinfo2().arena;
    void* const block = malloc(bytes);
    if (!block) break;
    if (has_own_mapping(block)) {
      answer = true;
      // Freed as it is, it would move the threshold; a page is too small for that.
      void* const page = realloc(block, 1024);
      free(page ? page : block);
    } else {
      held.push_back(block);
      if (mallinfo2().arena > before) answer = false;
    }
  }
  for (void* block : held) free(block);
  return answer;
}

/// Bytes from which a block has its own mapping, to a page.
std::optional<uint64_t> read_threshold() {
  uint64_t below = kLeastThreshold - 4096, from = kMostThreshold + 4096;
  while (from - below > 4096) {
    const uint64_t middle = (below + from) / 2 / 4096 * 4096;
    const auto mapped = maps(middle);
    if (!mapped) return std::nullopt;
    (*mapped ? from : below) = middle;
  }
  return std::clamp(from, kLeastThreshold, kMostThreshold);
}

/// What the program's own steps have made of the heap, before anything was set here: where they have moved the
/// threshold, and the bytes that stay free in it between steps.
std::optional<uint64_t> noted_threshold;
uint64_t noted_free = 0;
bool was_set = false;

void note() {
  if (was_set) return;
  noted_threshold = read_threshold();
  noted_free = mallinfo2().fordblks;
}

/// Sets what the settings that are applied together ask for; false where glibc refuses. Mapped blocks come before a
/// tuned heap; without either it is as the program itself left it, but for trimming where somebody keeps the heap.
/// glibc trims above twice the threshold for mappings once it has moved that. What lay below a block in use was not
/// trimmed, whatever it was: where trials have moved such blocks, each step would give it back and fault it in again.
bool set_thresholds() {
  was_set = true;
  if (allocator_tuned && blocks_mapped == 0) {
    // Older releases of glibc cap the threshold at 32 MiB: there, no block at all gets its own mapping.
    if (mallopt(M_MMAP_THRESHOLD, 1 << 30) != 1) mallopt(M_MMAP_MAX, 0);
    return mallopt(M_TRIM_THRESHOLD, INT_MAX) == 1 && mallopt(M_TOP_PAD, 64 << 20) == 1;
  }
  const uint64_t threshold = blocks_mapped > 0 ? kMapped : noted_threshold.value_or(kMostThreshold);
  uint64_t trim = threshold > kLeastThreshold ? 2 * threshold : kLeastThreshold;
  if (blocks_mapped == 0) trim = std::min<uint64_t>(std::max(trim, noted_free + kTopPad), INT_MAX);
  mallopt(M_MMAP_MAX, 65536);
  mallopt(M_MMAP_THRESHOLD, static_cast<int>(threshold));
  mallopt(M_TRIM_THRESHOLD, heaps_kept > 0 && blocks_mapped == 0 ? INT_MAX : static_cast<int>(trim));
  mallopt(M_TOP_PAD, kTopPad);
  return true;
}

void untune() {
  set_thresholds();
  if (heaps_kept > 0) return;
  watcher().stop();
  malloc_trim(0);
}

/// Why malloc is not ours to set, or empty.
std::string refusal() {
  if (const auto other = foreign_malloc(); !other.empty()) {
    return "malloc comes from " + other + ", not from glibc; its own settings apply.";
  }
  if (const auto variable = environment_choice(); !variable.empty()) {
    return variable + " already tunes malloc; unset it to let Oxytorch do so.";
  }
  return "";
}

uint64_t limit_of(std::optional<uint64_t> retain_limit) {
  return std::max(retain_limit.value_or(default_retain_limit()), 64 * kMiB);
}

std::string cost_of(uint64_t limit) {
  return "resident memory stays at its peak; more than " + mebibytes(limit) +
         " of free memory is given back once a second.";
}

}  // namespace

HostSetting tune_allocator(std::optional<uint64_t> retain_limit) {
  std::lock_guard lock(allocator_mutex);
  if (allocator_tuned) return HostSetting::unchanged(kName, "already tuned in this process.");
  if (const auto reason = refusal(); !reason.empty()) return HostSetting::refused(kName, reason);
  if (!noted_threshold) note();
  allocator_tuned = true;
  if (!set_thresholds()) {
    allocator_tuned = false;
    untune();
    return HostSetting::refused(kName, "this glibc refuses the settings.");
  }
  const uint64_t limit = limit_of(retain_limit);
  watcher().start(limit);
  return HostSetting::applied(kName, "freed memory is kept for the next step instead of being faulted in again.",
                              cost_of(limit), [] {
                                std::lock_guard lock(allocator_mutex);
                                allocator_tuned = false;
                                untune();
                              });
}

HostSetting keep_heap(std::optional<uint64_t> retain_limit) {
  constexpr const char* kHeap = "keep_heap";
  std::lock_guard lock(allocator_mutex);
  if (const auto reason = refusal(); !reason.empty()) return HostSetting::refused(kHeap, reason);
  const uint64_t limit = limit_of(retain_limit);
  if (!noted_threshold) note();
  ++heaps_kept;
  if (!allocator_tuned) untune();
  watcher().start(limit);
  return HostSetting::applied(kHeap, "the heap is not trimmed between steps: freed memory stays for the next one.",
                              cost_of(limit), [] {
                                std::lock_guard lock(allocator_mutex);
                                --heaps_kept;
                                if (!allocator_tuned) untune();
                              });
}

HostSetting map_large_blocks() {
  constexpr const char* kBlocks = "map_large_blocks";
  std::lock_guard lock(allocator_mutex);
  if (const auto reason = refusal(); !reason.empty()) return HostSetting::refused(kBlocks, reason);
  if (!noted_threshold) note();
  ++blocks_mapped;
  set_thresholds();
  return HostSetting::applied(kBlocks, "blocks of 1 MiB or more go back to the kernel as they are freed.",
                              "they are faulted in anew each time.", [] {
                                std::lock_guard lock(allocator_mutex);
                                --blocks_mapped;
                                set_thresholds();
                              });
}

void note_heap() {
  std::lock_guard lock(allocator_mutex);
  if (refusal().empty()) note();
}

std::optional<uint64_t> heap_mmap_threshold() {
  std::lock_guard lock(allocator_mutex);
  return refusal().empty() ? read_threshold() : std::nullopt;
}

std::optional<uint64_t> allocator_retained_bytes() {
  // Pages already given back stay in glibc's count of free bytes, so it is held against what is resident beyond what
  // was when they were.
  const auto info = mallinfo2();
  const int64_t beside = std::max<int64_t>(resident_beside(info), 0);
  int64_t base = beside_heap.load(std::memory_order_relaxed);
  while (beside < base && !beside_heap.compare_exchange_weak(base, beside, std::memory_order_relaxed)) {
  }
  return std::min<uint64_t>(info.fordblks, static_cast<uint64_t>(std::max<int64_t>(beside - base, 0)));
}

void trim_heap(uint64_t keep) {
  malloc_trim(keep);
  const auto info = mallinfo2();
  const auto kept = static_cast<int64_t>(std::min<uint64_t>(keep, info.keepcost));
  beside_heap = std::max<int64_t>(resident_beside(info) - kept, 0);
}

uint64_t allocator_trims() { return trim_count.load(std::memory_order_relaxed); }

#else

HostSetting tune_allocator(std::optional<uint64_t>) {
  return HostSetting::refused("allocator", "the C library is not glibc; its malloc has no such settings.");
}
HostSetting keep_heap(std::optional<uint64_t>) {
  return HostSetting::refused("keep_heap", "the C library is not glibc; its malloc has no such settings.");
}
HostSetting map_large_blocks() {
  return HostSetting::refused("map_large_blocks", "the C library is not glibc; its malloc has no such settings.");
}
void note_heap() {}
std::optional<uint64_t> heap_mmap_threshold() { return std::nullopt; }
std::optional<uint64_t> allocator_retained_bytes() { return std::nullopt; }
void trim_heap(uint64_t) {}
uint64_t allocator_trims() { return 0; }

#endif

}  // namespace oxytorch
