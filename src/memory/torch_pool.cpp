// The pool of host memory under torch's CPU tensors, as a setting.
#include <pthread.h>

#include <atomic>
#include <fstream>
#include <mutex>
#include <string>

#include "memory/cpu_allocator.h"
#include "oxytorch/error.h"
#include "oxytorch/memory.h"
#include "oxytorch/system.h"
#include "oxytorch/units.h"

namespace oxytorch {
namespace {

constexpr const char* kName = "host_pool";

std::mutex setting_mutex;
// Never destroyed: tensors outlive every static object.
std::atomic<HostPool*> process_pool{nullptr};

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
  memory::serve_from(nullptr);
  process_pool.load()->set_retain_limit(0);
}

}  // namespace

HostSetting use_host_pool(std::optional<uint64_t> retain_limit) {
  std::lock_guard lock(setting_mutex);
  if (memory::is_serving_from_pool()) return HostSetting::unchanged(kName, "already in use in this process.");
  if (const auto refusal = memory::allocator_refusal(); !refusal.empty()) return HostSetting::refused(kName, refusal);
  if (strict_accounting())
    return HostSetting::refused(kName,
                                "the kernel accounts memory strictly (vm.overcommit_memory = 2): the pool's "
                                "addresses would count as memory.");
  const uint64_t limit = retain_limit.value_or(default_retain_limit());
  try {
    auto& pool = made_pool(limit);
    const bool huge = pool.asks_for_huge_pages();
    memory::serve_from(&pool);
    trim_heap();  // what tensors have left free there is of no use to them now
    return HostSetting::applied(
        kName, std::string("memory of CPU tensors is kept for the next step") + (huge ? ", on huge pages." : "."),
        "resident memory stays at its peak; free pages above " + format_size(limit) + " are given back.", take_out);
  } catch (const Error& error) {
    return HostSetting::refused(kName, error.what());
  }
}

void give_back_host_memory() {
  const std::lock_guard lock(setting_mutex);
  if (auto* const pool = process_pool.load()) {
    const auto limit = pool->stats().limit_bytes;
    pool->set_retain_limit(0);
    pool->set_retain_limit(limit);
  }
  trim_heap();
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
