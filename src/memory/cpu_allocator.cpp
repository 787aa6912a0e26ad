#include "memory/cpu_allocator.h"

#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <set>
#include <utility>

#include "base/size_text.h"
#include "oxytorch/error.h"
#include "oxytorch/memory.h"
#include "oxytorch/system.h"

namespace oxytorch::memory {
namespace {

std::mutex setting_mutex;
int counters = 0;  // how many want bytes counted
std::multiset<std::uint64_t> limits;
int pauses = 0;                 // of the limits
std::uint64_t not_counted = 0;  // of this process, when it was last looked at

/// Tensors keep a pointer to the allocator that made them and may resize by it long after it was taken out: it lives
/// on and hands them to torch's own.
class CpuAllocator final : public c10::Allocator {
 public:
  explicit CpuAllocator(c10::Allocator* torchs) : torchs_(torchs) { torchs_deleter_ = torchs->raw_deleter(); }

  c10::DataPtr allocate(std::size_t bytes) override {
    const bool counts = counting_.load(std::memory_order_relaxed) && bytes > 0;
    if (!counts) return allocate_uncounted(bytes);
    auto& count = tensor_bytes();
    if (!count.reserve(bytes)) make_room(bytes);
    try {
      auto data = allocate_uncounted(bytes);
      count.hold(data.get(), bytes);
      return data;
    } catch (...) {
      count.cancel(bytes);
      throw;
    }
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free; }
  bool is_simple_data_ptr(const c10::DataPtr& data) const override { return data.get() == data.get_context(); }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }

  // Never destroyed: tensors outlive every static object.
  static inline std::atomic<HostPool*> pool_{nullptr};
  std::atomic<bool> pooling_{false}, counting_{false};

 private:
  c10::DataPtr allocate_uncounted(std::size_t bytes) {
    if (bytes >= kPooledBytes && pooling_.load(std::memory_order_relaxed)) {
      if (void* memory = pool_.load(std::memory_order_relaxed)->allocate(bytes)) {
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

  /// Reserves `bytes` after giving back what is only kept; raises where they do not fit even so.
  static void make_room(std::size_t bytes);

  static void free(void* memory) {
    // Before the block can be another's.
    if (tensor_bytes().has_blocks()) tensor_bytes().release(memory);
    auto* pool = pool_.load(std::memory_order_relaxed);
    if (pool == nullptr || !pool->owns(memory)) return torchs_deleter_(memory);
    c10::profiledCPUMemoryReporter().Delete(memory);
    pool->release(memory);
  }

  c10::Allocator* torchs_;
  static inline c10::DeleterFnPtr torchs_deleter_ = nullptr;
};

CpuAllocator& cpu_allocator() {
  static auto* allocator = new CpuAllocator(c10::GetDefaultCPUAllocator());
  return *allocator;
}

/// torch lets a priority be replaced by an equal or a higher one; the least that is needed leaves room for others.
void set_cpu_allocator(c10::Allocator* allocator) {
  for (int priority = 0; priority <= UINT8_MAX && c10::GetCPUAllocator() != allocator; ++priority)
    c10::SetCPUAllocator(allocator, static_cast<std::uint8_t>(priority));
}

/// In place where it is wanted. Whoever was put in since then may hand on to ours: it stays then, switched off.
void put_in_or_take_out() {
  auto& ours = cpu_allocator();
  if (ours.pooling_ || ours.counting_) return set_cpu_allocator(&ours);
  if (c10::GetCPUAllocator() == &ours) set_cpu_allocator(c10::GetDefaultCPUAllocator());
}

/// Looks at what of the process is not counted, and sets the count's limit by it. Needs setting_mutex.
void measure_the_rest() {
  auto& count = tensor_bytes();
  if (limits.empty() || pauses > 0) return count.set_limit(ByteCount::kNoLimit);
  const auto resident = static_cast<std::int64_t>(read_memory().resident.value_or(0));
  // Pages that no one has touched yet are counted but not resident.
  not_counted = static_cast<std::uint64_t>(std::max<std::int64_t>(resident - count.live(), 0));
  const auto left = *limits.begin() > not_counted ? *limits.begin() - not_counted : 0;
  count.set_limit(static_cast<std::int64_t>(std::min<std::uint64_t>(left, ByteCount::kNoLimit)));
}

void CpuAllocator::make_room(std::size_t bytes) {
  auto& count = tensor_bytes();
  give_back_host_memory();
  const std::lock_guard lock(setting_mutex);
  measure_the_rest();
  if (count.reserve(bytes)) return;
  const auto lowest = limits.empty() ? 0 : *limits.begin();
  TORCH_CHECK_WITH(OutOfMemoryError, false, "A tensor of ", format_size(bytes), " passes the memory limit of ",
                   format_size(lowest), ": tensors take ", size_text(count.live()), " and the rest of the process ",
                   format_size(not_counted),
                   ". Use a smaller batch or checkpoint(), or raise the limit (oxytorch.memory.set_limit, "
                   "memory_limit in a configuration).");
}

}  // namespace

ByteCount& tensor_bytes() {
  static auto* count = [] {
    auto* made = new ByteCount;
    pthread_atfork([] { tensor_bytes().before_fork(); }, [] { tensor_bytes().after_fork(); },
                   [] { tensor_bytes().after_fork(); });
    return made;
  }();
  return *count;
}

std::string allocator_refusal() {
  const auto* current = c10::GetCPUAllocator();
  if (current == &cpu_allocator()) return {};
  if (current != c10::GetDefaultCPUAllocator() || !current->raw_deleter())
    return "another allocator than torch's own serves CPU tensors.";
  return {};
}

Counting::Counting() {
  const std::lock_guard lock(setting_mutex);
  if (counters == 0) {
    const auto refusal = allocator_refusal();
    OXY_CHECK(refusal.empty(), NotSupported, "bytes of CPU tensors cannot be counted: ", refusal);
  }
  ++counters;
  cpu_allocator().counting_ = true;
  put_in_or_take_out();
}

Counting::~Counting() {
  const std::lock_guard lock(setting_mutex);
  if (--counters > 0) return;
  cpu_allocator().counting_ = false;
  put_in_or_take_out();
}

void serve_from(HostPool* pool) {
  const std::lock_guard lock(setting_mutex);
  if (pool != nullptr) CpuAllocator::pool_ = pool;
  cpu_allocator().pooling_ = pool != nullptr;
  put_in_or_take_out();
}

bool is_serving_from_pool() { return c10::GetCPUAllocator() == &cpu_allocator() && cpu_allocator().pooling_; }

void add_limit(std::uint64_t bytes) {
  const std::lock_guard lock(setting_mutex);
  limits.insert(bytes);
  measure_the_rest();
}

void lift_limit(std::uint64_t bytes) {
  const std::lock_guard lock(setting_mutex);
  limits.erase(limits.find(bytes));
  measure_the_rest();
}

void pause_limits() {
  const std::lock_guard lock(setting_mutex);
  ++pauses;
  measure_the_rest();
}

void resume_limits() {
  const std::lock_guard lock(setting_mutex);
  --pauses;
  measure_the_rest();
}

void pause_counting() {
  const std::lock_guard lock(setting_mutex);
  if (counters != 1 || !limits.empty()) return;
  cpu_allocator().counting_ = false;
  put_in_or_take_out();
}

void resume_counting() {
  const std::lock_guard lock(setting_mutex);
  cpu_allocator().counting_ = counters > 0;
  put_in_or_take_out();
}

std::optional<std::uint64_t> process_limit() {
  const std::lock_guard lock(setting_mutex);
  return limits.empty() ? std::nullopt : std::optional(*limits.begin());
}

}  // namespace oxytorch::memory
