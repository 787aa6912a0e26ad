/// The native kernels of the simulated devices: the step tail on an emulated grid, each launch a piece of work.
#pragma once

#include <cstdint>
#include <vector>
#include "oxytorch/backend_kernels.h"

#include "backends/device_tail.h"
#include "backends/sim/queue.h"

namespace oxytorch::backend::sim {

/// One launch, with its own copy of the arguments.
struct Launch {
  kernels::device::TailKernel kernel;
  std::uint32_t blocks;
  std::vector<std::uint64_t> arguments;
};

/// Runs it on the calling thread. Every range that a kernel touches lies in one live allocation, or it fails.
Failure run_launch(std::int32_t device, Launch& launch);

oxy_status create_sim_tail(std::int32_t device, const oxy_tail_tensor* tensors, std::uint32_t count, oxy_tail* tail);

inline constexpr oxy_kernels kTailKernels = tail_kernels(create_sim_tail);

}  // namespace oxytorch::backend::sim
