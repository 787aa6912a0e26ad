/// The step tail's kernels on an emulated grid: the device's own text, run on the processor.
///
/// A phase is a loop over the threads of a block, in any order that is asked for; nothing else is different, so that
/// equal bits here prove the arithmetic, the tables and the chunk logic of a device. Not fast.
#pragma once

#include <cstdint>

#include "kernels/device/tail_arguments.h"

namespace oxytorch::kernels::device {

/// Where the device addresses of an emulated launch lie on the host. May throw; the launch then ends there.
class EmulatedMemory {
 public:
  virtual ~EmulatedMemory() = default;
  virtual void* resolve(const void* device_address, std::uint64_t bytes) = 0;
};

/// The order in which threads of a phase, and blocks of a launch, have their turn.
enum class ThreadOrder : std::uint8_t { Forward, Backward, Shuffled };

/// Runs one launch of `blocks` blocks on the calling thread. `memory` NULL: addresses are those of the host.
void emulated_launch(TailKernel kernel, std::uint32_t blocks, const void* arguments, EmulatedMemory* memory = nullptr,
                     ThreadOrder order = ThreadOrder::Forward);

}  // namespace oxytorch::kernels::device
