/// `sim`, a fake device in every build: real memory and truly asynchronous queues on worker threads, with settable
/// size, speed and faults, so that code for accelerators runs and fails on any machine as it would on one.
///
/// Its memory cannot be touched by the host: reading a device pointer outside a copy ends the process, as on a card. It
/// checks what a card does not: every range of a copy or fill lies in one live allocation, when asked and when done, so
/// work on freed memory fails its queue with OXY_INVALID_STATE. Its native kernels are those of a GPU, run on an
/// emulated grid: slow, and the same bits.
///
/// `OXYTORCH_SIM` holds the settings at the start, as `key=value` separated by commas:
///   devices=1          1 to 16
///   memory=256MiB      of each device, up to 32GiB
///   latency_us=5       of each copy, fill and kernel, microseconds
///   link_gbps=0        host to device and back, gigabits a second; 0: no limit
///   fault=NAME:N       alloc:N  the Nth allocation from now is out of memory
///                      copy:N   the Nth copy from now fails after its call returned
///                      lost:N   the device that does the Nth work item (copy, fill, kernel) from now is lost
///                      slow_event:N  every event is reached N microseconds late
///                      several joined by '+', for example fault=alloc:3+slow_event:200
#pragma once

#include <cstdint>
#include <string>

#include "oxytorch/api.h"

namespace oxytorch::backend {

struct SimOptions {
  int devices = 1;
  std::uint64_t memory_bytes = std::uint64_t{256} << 20;
  double latency_us = 5;
  double link_gbps = 0;
  std::uint64_t fail_alloc = 0;  ///< 0: never; otherwise the Nth from now
  std::uint64_t fail_copy = 0;
  std::uint64_t lose_device = 0;
  double slow_event_us = 0;
};

/// The settings that `text` asks for, on top of the defaults. Error(InvalidArgument) for an unknown key or a bad value.
OXY_API SimOptions parse_sim_options(const std::string& text);

/// Sets every device from now on; memory in use stays. Lost devices are back, counters and faults count from zero,
/// failed queues stay failed. Any thread.
OXY_API void configure_sim(const SimOptions& options);

/// Where device memory at `address` really lies, for code that plays the device; NULL where no live allocation of that
/// device has it. Valid until the allocation is freed. Any thread.
OXY_API void* sim_host_address(int device, const void* address);

}  // namespace oxytorch::backend
