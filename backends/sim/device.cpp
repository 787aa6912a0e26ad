#include "backends/sim/device.h"

#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <cinttypes>
#include <cstring>
#include <new>
#include <utility>

#include "backends/last_error.h"
#include "backends/sim/mutants.h"

namespace oxytorch::backend::sim {
namespace {

// Device addresses come from a range that no one may touch, so that a host access ends as it would with a card.
constexpr std::uint64_t kAddressSpace = std::uint64_t{128} << 30;

std::atomic<bool> in_forked_child{false};

std::uint64_t round_up(std::uint64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace

Settings& settings() {
  static Settings* const instance = new Settings();
  return *instance;
}

// Never destroyed: worker threads run until the process ends.
SimDevice& device(std::int32_t index) {
  static SimDevice* const devices = [] {
    pthread_atfork(nullptr, nullptr, [] { in_forked_child.store(true); });
    return new SimDevice[kMaxDevices];
  }();
  return devices[index];
}

bool forked() { return in_forked_child.load(std::memory_order_relaxed); }

// Next fit, with a gap behind each block: an address comes back late, so that stale pointers are noticed.
std::uint64_t SimDevice::reserve(std::uint64_t bytes) {
  if (base_ == 0) {
    void* space = mmap(nullptr, kAddressSpace, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (space == MAP_FAILED) return 0;
    base_ = next_ = round_up(reinterpret_cast<std::uint64_t>(space));
  }
  const std::uint64_t wanted = round_up(bytes) + kAlignment;
  const std::uint64_t end = base_ + kAddressSpace - kAlignment;
  for (int turn = 0; turn < 2; ++turn, next_ = base_) {
    while (next_ + wanted <= end) {
      auto following = blocks_.lower_bound(next_);
      const bool free_before = following == blocks_.begin() ||
                               std::prev(following)->second->address + std::prev(following)->second->bytes <= next_;
      if (free_before && (following == blocks_.end() || next_ + wanted <= following->first)) {
        return std::exchange(next_, next_ + wanted);
      }
      const auto& obstacle = free_before ? following->second : std::prev(following)->second;
      next_ = round_up(obstacle->address + obstacle->bytes) + kAlignment;
    }
  }
  return 0;
}

oxy_status SimDevice::alloc(oxy_memory kind, std::uint64_t bytes, void** out) {
  *out = nullptr;
  if (bytes == 0) return OXY_OK;
  if (kind == OXY_MEMORY_DEVICE && strikes(settings().fail_alloc)) {
    if (mutant("oom_leaves_pointer")) *out = reinterpret_cast<void*>(kAlignment);
    return fail(OXY_OUT_OF_MEMORY, "allocation of %" PRIu64 " bytes failed, as the settings asked", bytes);
  }
  const std::lock_guard lock(mutex_);
  const std::uint64_t limit = settings().memory_bytes.load(std::memory_order_relaxed);
  if (mutant("size_overflow") && bytes > (std::uint64_t{1} << 60)) bytes = kAlignment;
  if (bytes > limit || (kind == OXY_MEMORY_DEVICE && bytes > limit - std::min(limit, allocated_))) {
    if (mutant("oom_says_ok")) return OXY_OK;
    if (mutant("oom_leaves_pointer")) *out = reinterpret_cast<void*>(kAlignment);
    return fail(OXY_OUT_OF_MEMORY, "cannot allocate %" PRIu64 " bytes: %" PRIu64 " of %" PRIu64 " are in use", bytes,
                allocated_, limit);
  }
  try {
    auto block = std::make_shared<Block>();
    block->bytes = bytes;
    block->kind = kind;
    if (kind == OXY_MEMORY_HOST) {
      block->address = reinterpret_cast<std::uint64_t>(::operator new(bytes, std::align_val_t{kAlignment}));
    } else {
      block->storage.reset(new std::uint8_t[bytes]);
      // Undefined contents shall look it.
      std::memset(block->storage.get(), 0xCD, bytes);
      block->address = reserve(bytes);
      if (block->address == 0) return fail(OXY_OUT_OF_MEMORY, "no device addresses left for %" PRIu64 " bytes", bytes);
      if (mutant("misaligned")) block->address += 8;
      allocated_ += mutant("counts_blocks") ? 1 : bytes;
    }
    blocks_.emplace(block->address, block);
    *out = reinterpret_cast<void*>(block->address);
  } catch (const std::bad_alloc&) {
    return fail(OXY_OUT_OF_MEMORY, "no host memory left for %" PRIu64 " simulated bytes", bytes);
  }
  counters.allocs.fetch_add(1, std::memory_order_relaxed);
  return OXY_OK;
}

oxy_status SimDevice::free(void* memory) {
  if (memory == nullptr) return mutant("free_null_refused") ? fail(OXY_INVALID_ARGUMENT, "free of NULL") : OXY_OK;
  const std::lock_guard lock(mutex_);
  const auto found = blocks_.find(reinterpret_cast<std::uint64_t>(memory));
  if (found == blocks_.end()) {
    if (mutant("double_free_ok")) return OXY_OK;
    return fail(OXY_INVALID_ARGUMENT, "free of %p, which is no live allocation of this device; freed twice?", memory);
  }
  if (found->second->kind == OXY_MEMORY_HOST) {
    ::operator delete(memory, std::align_val_t{kAlignment});
  } else if (!mutant("leak")) {
    allocated_ -= mutant("counts_blocks") ? 1 : found->second->bytes;
  }
  blocks_.erase(found);
  counters.frees.fetch_add(1, std::memory_order_relaxed);
  return OXY_OK;
}

Range SimDevice::find(const void* address, std::uint64_t bytes) {
  const auto start = reinterpret_cast<std::uint64_t>(address);
  const std::lock_guard lock(mutex_);
  const auto after = blocks_.upper_bound(start);
  if (after == blocks_.begin()) return {};
  const std::shared_ptr<Block>& block = std::prev(after)->second;
  const std::uint64_t offset = start - block->address;
  if (block->kind != OXY_MEMORY_DEVICE || offset > block->bytes || bytes > block->bytes - offset) return {};
  return {block, block->storage.get() + offset, block->bytes - offset};
}

std::uint64_t SimDevice::allocated_bytes() {
  const std::lock_guard lock(mutex_);
  return mutant("memory_info_zero") ? 0 : allocated_;
}

void SimDevice::add(const std::shared_ptr<QueueState>& queue) {
  const std::lock_guard lock(mutex_);
  queues_.push_back(queue);
}

void SimDevice::remove(const std::shared_ptr<QueueState>& queue) {
  const std::lock_guard lock(mutex_);
  queues_.erase(std::remove(queues_.begin(), queues_.end(), queue), queues_.end());
}

std::vector<std::shared_ptr<QueueState>> SimDevice::queues() {
  const std::lock_guard lock(mutex_);
  return queues_;
}

}  // namespace oxytorch::backend::sim
