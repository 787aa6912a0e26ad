/// What tensors of a device take, as torch's allocator of it tells.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Device.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <cstdint>
#include <memory>
#include <string>
#include <thread>

#include "memory/byte_count.h"

namespace oxytorch::memory {

/// Waits until the device has done what it was asked for; a CPU has.
void synchronize(c10::Device device);

/// `device` with its index: the current device's where it has none.
[[nodiscard]] c10::Device indexed(c10::Device device);

/// None where it has no statistics.
[[nodiscard]] c10::DeviceAllocator* statistics_of(c10::Device device);

struct DeviceMemory {
  std::uint64_t available = 0;  ///< to tensors: free, or kept by torch's allocator
  std::uint64_t taken = 0;      ///< by tensors of this process
  std::uint64_t total = 0;
};
/// Error(NotSupported) where torch's allocator does not tell.
[[nodiscard]] DeviceMemory memory_of(c10::Device device);

/// A watermark of what tensors of a device take, or of what the allocator has taken for them. The allocator has one
/// peak of each, which every watermark begins anew: all that run take in what it was until then.
class DevicePeak {
 public:
  enum class Of : std::uint8_t { Tensors, Allocator };
  /// Error(NotSupported) where the allocator has no statistics.
  explicit DevicePeak(c10::Device device, Of of = Of::Tensors);
  ~DevicePeak();
  DevicePeak(const DevicePeak&) = delete;
  DevicePeak& operator=(const DevicePeak&) = delete;

  [[nodiscard]] std::int64_t live() const;
  [[nodiscard]] std::int64_t peak() const;
  void reset();

 private:
  [[nodiscard]] c10::CachingAllocator::Stat bytes() const;
  void begin_anew();

  c10::Device device_;
  c10::DeviceAllocator* allocator_;
  Of of_;
  std::int64_t highest_ = 0;
};

/// Shows `observer` each block of a device that this thread takes or gives back, or a backward pass that it begins, by
/// what the allocator reports to a profiler. Ends on the thread that began it; elsewhere that thread's place for a
/// profiler stays taken, by one that is disabled.
class DeviceBlocks {
 public:
  /// Error(NotSupported) with refusal(); Error(InvalidState) where torch's profiler runs on this thread: one of both is
  /// told.
  DeviceBlocks(c10::Device device, BlockObserver& observer);
  /// Waits for threads that are inside.
  ~DeviceBlocks();
  DeviceBlocks(const DeviceBlocks&) = delete;
  DeviceBlocks& operator=(const DeviceBlocks&) = delete;

  /// Why no blocks are shown; empty where they are. Takes a block and gives it back.
  [[nodiscard]] static std::string refusal(c10::Device device);

 private:
  class Reports;
  std::shared_ptr<Reports> reports_;
  std::unique_ptr<c10::DebugInfoGuard> place_;
  std::thread::id thread_ = std::this_thread::get_id();
};

}  // namespace oxytorch::memory
