// The pool of host memory as torch's CPU allocator.
#include <c10/core/CPUAllocator.h>
#include <malloc.h>
#include <pthread.h>

#include <atomic>
#include <fstream>
#include <mutex>
#include <string>

#include "oxytorch/error.h"
#include "oxytorch/memory.h"
#include "oxytorch/system.h"
#include "oxytorch/units.h"

namespace oxytorch {
namespace {

constexpr const char* kName = "host_pool";

/// Of the memory that is available, what a pool that is taken out may keep: whoever trains beside it has the rest.
constexpr uint64_t kKeptShare = 8;

std::mutex setting_mutex;
int keepers = 0;
// Never destroyed: tensors outlive every static object.
std::atomic<HostPool*> process_pool{nullptr};

/// Tensors keep a pointer to the allocator that made them and may resize by it long after the pool was taken out: it
/// lives on and hands them to torch's own.
class PoolAllocator final : public c10::Allocator {
 public:
  explicit PoolAllocator(c10::Allocator* torchs) : torchs_(torchs) { torchs_deleter_ = torchs->raw_deleter(); }

  c10::DataPtr allocate(size_t bytes) override {
    if (bytes >= kPooledBytes && on_.load(std::memory_order_relaxed)) {
      if (void* memory = process_pool.load(std::memory_order_relaxed)->allocate(bytes)) {
        c10::profiledCPUMemoryReporter().New(memory, bytes);
        return {memory, memory, &free, c10::Device(c10::DeviceType::CPU)};
      }
    }
    auto data = torchs_->allocate(bytes);
    // raw_deleter() promises one deleter for all.
    const bool exchanged = data.compare_exchange_deleter(torchs_deleter_, &free);
    OXY_ASSERT(exchanged, "torch's CPU allocator gave another deleter than its own.");
    return data;
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free; }
  bool is_simple_data_ptr(const c10::DataPtr& data) const override { return data.get() == data.get_context(); }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }

  void switch_to(bool on) noexcept { on_.store(on, std::memory_order_relaxed); }

 private:
  static void free(void* memory) {
    auto* pool = process_pool.load(std::memory_order_relaxed);
    if (!pool->owns(memory)) return torchs_deleter_(memory);
    c10::profiledCPUMemoryReporter().Delete(memory);
    pool->release(memory);
  }

  c10::Allocator* torchs_;
  static inline c10::DeleterFnPtr torchs_deleter_ = nullptr;
  std::atomic<bool> on_{false};
};

PoolAllocator& pool_allocator() {
  static auto* allocator = new PoolAllocator(c10::GetDefaultCPUAllocator());
  return *allocator;
}

/// torch lets a priority be replaced by an equal or a higher one; the least that is needed leaves room for others.
void set_cpu_allocator(c10::Allocator* allocator) {
  for (int priority = 0; priority <= UINT8_MAX && c10::GetCPUAllocator() != allocator; ++priority)
    c10::SetCPUAllocator(allocator, static_cast<uint8_t>(priority));
}

bool strict_accounting() {
  int mode = 0;
  std::ifstream("/proc/sys/vm/overcommit_memory") >> mode;
  return mode == 2;
}

/// The process's pool, made at the first call.
HostPool& made_pool(uint64_t retain_limit) {
  if (auto* pool = process_pool.load()) {
    pool->set_retain_limit(retain_limit);
    return *pool;
  }
  const uint64_t memory = read_memory().physical.value_or(uint64_t{64} << 30);
  auto* pool = new HostPool(2 * memory, retain_limit);
  process_pool.store(pool);
  pthread_atfork([] { process_pool.load()->before_fork(); }, [] { process_pool.load()->after_fork(); },
                 [] { process_pool.load()->after_fork(); });
  return *pool;
}

void take_out() {
  std::lock_guard lock(setting_mutex);
  pool_allocator().switch_to(false);
  // Whoever was put in since then may hand on to the pool's: it stays, switched off.
  if (c10::GetCPUAllocator() == &pool_allocator()) set_cpu_allocator(c10::GetDefaultCPUAllocator());
  process_pool.load()->set_retain_limit(keepers > 0 ? read_memory().available.value_or(0) / kKeptShare : 0);
}

void keep_no_longer() {
  std::lock_guard lock(setting_mutex);
  auto* const pool = process_pool.load();
  if (--keepers == 0 && pool != nullptr && c10::GetCPUAllocator() != &pool_allocator()) pool->set_retain_limit(0);
}

}  // namespace

HostSetting use_host_pool(std::optional<uint64_t> retain_limit) {
  std::lock_guard lock(setting_mutex);
  const auto* current = c10::GetCPUAllocator();
  if (current == &pool_allocator()) return HostSetting::unchanged(kName, "already in use in this process.");
  if (current != c10::GetDefaultCPUAllocator() || !current->raw_deleter())
    return HostSetting::refused(kName, "another allocator than torch's own serves CPU tensors.");
  if (strict_accounting())
    return HostSetting::refused(kName,
                                "the kernel accounts memory strictly (vm.overcommit_memory = 2): the pool's "
                                "addresses would count as memory.");
  const uint64_t limit = retain_limit.value_or(default_retain_limit());
  try {
    const bool huge = made_pool(limit).asks_for_huge_pages();
    pool_allocator().switch_to(true);
    set_cpu_allocator(&pool_allocator());
    return HostSetting::applied(
        kName, std::string("memory of CPU tensors is kept for the next step") + (huge ? ", on huge pages." : "."),
        "resident memory stays at its peak; free pages above " + format_size(limit) + " are given back.", take_out);
  } catch (const Error& error) {
    return HostSetting::refused(kName, error.what());
  }
}

HostSetting keep_host_pool() {
  std::lock_guard lock(setting_mutex);
  ++keepers;
  return HostSetting::applied("kept_host_pool", "The pool keeps its free pages while it is taken out.",
                              "an eighth of the memory that is available then, at most.", keep_no_longer);
}

void give_back_host_memory() {
  const std::lock_guard lock(setting_mutex);
  if (auto* const pool = process_pool.load()) {
    const auto limit = pool->stats().limit_bytes;
    pool->set_retain_limit(0);
    pool->set_retain_limit(limit);
  }
  malloc_trim(0);
}

HostPoolStats host_pool_stats() {
  const auto* pool = process_pool.load();
  return pool ? pool->stats() : HostPoolStats{};
}

uint64_t host_pool_huge_page_bytes() {
  const auto* pool = process_pool.load();
  return pool ? pool->huge_page_bytes() : 0;
}

}  // namespace oxytorch
