#include "memory/device_bytes.h"

#include <ATen/Context.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/profiler/orchestration/observer.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <utility>
#include <vector>

#include "oxytorch/error.h"

namespace oxytorch::memory {
namespace {

using torch::profiler::impl::ActiveProfilerType;
using torch::profiler::impl::ProfilerConfig;
using torch::profiler::impl::ProfilerState;
using torch::profiler::impl::ProfilerStateBase;

struct Peaks {
  std::mutex mutex;
  std::vector<DevicePeak*> running;
};

Peaks& peaks() {
  static auto* all = new Peaks;
  return *all;
}

/// Free and all; torch 2.9 has no such question.
template <class Allocator>
std::optional<std::pair<std::size_t, std::size_t>> memory_of(Allocator& allocator, c10::DeviceIndex index) {
  if constexpr (requires { allocator.getMemoryInfo(index); }) {
    try {
      return allocator.getMemoryInfo(index);
    } catch (const c10::NotImplementedError&) {
      return std::nullopt;
    }
  } else {
    return std::nullopt;
  }
}

std::int64_t current(const c10::CachingAllocator::StatArray& of) {
  return of[static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE)].current;
}

}  // namespace

void synchronize(c10::Device device) {
  if (!device.is_cpu()) c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(indexed(device).index());
}

c10::Device indexed(c10::Device device) {
  if (device.is_cpu() || device.has_index()) return device;
  return c10::impl::VirtualGuardImpl(device.type()).getDevice();
}

c10::DeviceAllocator* statistics_of(c10::Device device) {
  auto* const allocator = dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(device.type()));
  if (allocator == nullptr) return nullptr;
  if (device.is_cuda()) at::globalContext().lazyInitDevice(device.type());  // it has none before
  try {
    static_cast<void>(allocator->getDeviceStats(indexed(device).index()));
  } catch (const c10::Error&) {  // an allocator that a program has put in its place may have none
    return nullptr;
  }
  return allocator;
}

DeviceMemory memory_of(c10::Device device) {
  const auto index = indexed(device).index();
  auto* const allocator = statistics_of(device);
  const auto found = allocator == nullptr ? std::nullopt : memory_of(*allocator, index);
  OXY_CHECK(found, NotSupported, "torch's allocator for ", device.str(),
            " does not tell how much memory is left. Give a budget in bytes, such as '900MiB'.");
  const auto kept = allocator->getDeviceStats(index);
  const auto taken = current(kept.allocated_bytes);
  const auto cached = std::max<std::int64_t>(current(kept.reserved_bytes) - taken, 0);
  return {found->first + static_cast<std::uint64_t>(cached), static_cast<std::uint64_t>(taken), found->second};
}

DevicePeak::DevicePeak(c10::Device device, Of of)
    : device_(indexed(device)), allocator_(statistics_of(device)), of_(of) {
  OXY_CHECK(allocator_ != nullptr, NotSupported, "torch's allocator for ", device.str(), " has no statistics.");
  const std::lock_guard lock(peaks().mutex);
  begin_anew();
  peaks().running.push_back(this);
}

DevicePeak::~DevicePeak() {
  const std::lock_guard lock(peaks().mutex);
  std::erase(peaks().running, this);
}

std::int64_t DevicePeak::live() const { return bytes().current; }

std::int64_t DevicePeak::peak() const {
  const std::lock_guard lock(peaks().mutex);
  return std::max(highest_, bytes().peak);
}

void DevicePeak::reset() {
  const std::lock_guard lock(peaks().mutex);
  begin_anew();
  highest_ = 0;
}

void DevicePeak::begin_anew() {
  for (auto* const other : peaks().running) {
    if (other->device_ == device_) other->highest_ = std::max(other->highest_, other->bytes().peak);
  }
  allocator_->resetPeakStats(device_.index());
}

c10::CachingAllocator::Stat DevicePeak::bytes() const {
  const auto found = allocator_->getDeviceStats(device_.index());
  const auto& all = of_ == Of::Tensors ? found.allocated_bytes : found.reserved_bytes;
  return all[static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
}

/// Takes a profiler's place of the thread, which backward passes inherit. It is a profiler's base, and disabled: torch
/// asks whatever has that place for its configuration.
class DeviceBlocks::Reports final : public ProfilerStateBase {
 public:
  explicit Reports(c10::Device device)
      : ProfilerStateBase(ProfilerConfig(ProfilerState::Disabled, /*report_input_shapes=*/false,
                                         /*profile_memory=*/true)),
        device_(device) {}

  void reportMemoryUsage(void* block, std::int64_t bytes, std::size_t /*allocated*/, std::size_t /*reserved*/,
                         c10::Device device) override {
    if (device != device_) return;
    was_told_ = true;
    const std::shared_lock lock(mutex_);
    if (observer_ == nullptr) return;
    if (bytes >= 0) {
      observer_->taken(block, static_cast<std::size_t>(bytes));
    } else {
      observer_->released(block, static_cast<std::size_t>(-bytes));
    }
  }
  ActiveProfilerType profilerType() override { return ActiveProfilerType::NONE; }

  /// nullptr: none from here on; waits for threads that are inside.
  void show(BlockObserver* observer) {
    const std::lock_guard lock(mutex_);
    observer_ = observer;
  }
  [[nodiscard]] bool is_idle() {
    const std::shared_lock lock(mutex_);
    return observer_ == nullptr;
  }
  [[nodiscard]] bool was_told() const { return was_told_; }

 private:
  const c10::Device device_;
  std::shared_mutex mutex_;
  BlockObserver* observer_ = nullptr;
  std::atomic<bool> was_told_{false};
};

DeviceBlocks::DeviceBlocks(c10::Device device, BlockObserver& observer)
    : reports_(std::make_shared<Reports>(indexed(device))) {
  if (auto* const other = c10::ThreadLocalDebugInfo::get(c10::DebugInfoKind::PROFILER_STATE)) {
    auto* const left = dynamic_cast<Reports*>(other);  // by one that ended on another thread
    OXY_CHECK(left != nullptr && left->is_idle(), InvalidState, "a profiler of torch runs on this thread, and torch's ",
              "allocator for ", device.str(), " tells it alone of its blocks. Stop it first.");
  }
  const auto why = refusal(device);
  OXY_CHECK(why.empty(), NotSupported, why);
  place_ = std::make_unique<c10::DebugInfoGuard>(c10::DebugInfoKind::PROFILER_STATE, reports_);
  reports_->show(&observer);
}

std::string DeviceBlocks::refusal(c10::Device device) {
  if (statistics_of(device) == nullptr) return "torch's allocator for " + device.str() + " has no statistics.";
  const auto reports = std::make_shared<Reports>(indexed(device));
  const c10::DebugInfoGuard place(c10::DebugInfoKind::PROFILER_STATE, reports);
  const c10::DeviceGuard on(indexed(device));
  static_cast<void>(c10::GetAllocator(device.type())->allocate(1));
  if (reports->was_told()) return "";
  return "torch's allocator for " + device.str() + " reports no blocks, so that no timeline of them can be recorded.";
}

DeviceBlocks::~DeviceBlocks() {
  reports_->show(nullptr);
  if (std::this_thread::get_id() != thread_)
    static_cast<void>(place_.release());  // that thread's place, not this one's
}

}  // namespace oxytorch::memory
