/// Memory of a training run: the pool of host memory under torch's CPU tensors.
#pragma once

#include <cstdint>
#include <optional>

#include "oxytorch/api.h"
#include "oxytorch/host.h"
#include "oxytorch/memory/batch_forecast.h"
#include "oxytorch/memory/batch_search.h"
#include "oxytorch/memory/block.h"
#include "oxytorch/memory/budget_search.h"
#include "oxytorch/memory/checkpoint.h"
#include "oxytorch/memory/host_cap.h"
#include "oxytorch/memory/host_pool.h"
#include "oxytorch/memory/meter.h"
#include "oxytorch/memory/pack_saved_tensors.h"
#include "oxytorch/memory/parked.h"
#include "oxytorch/memory/saved_format.h"

namespace oxytorch {

/// Tensors of at least this many bytes come from the pool; smaller ones stay with torch's allocator.
inline constexpr size_t kPooledBytes = size_t{16} << 10;

/// Puts a HostPool under torch's CPU tensors (c10::SetAllocator), so that a step finds the memory of the step before,
/// on huge pages where the kernel has them. Results keep every bit. torch's memory profiler goes on counting.
///
/// Free pages above `retain_limit` bytes (default: default_retain_limit()) go back to the kernel as they are freed.
/// Free memory of glibc's heap is given back. revert() hands new tensors to torch's allocator again and gives free
/// memory of the pool back; tensors that live in the pool stay
/// valid, and their memory goes back when they go. It can be put in and taken out any number of times, by one thread at
/// a time, with no step running. A forked child goes on with a pool of its own.
///
/// Refused where the pool is in use already, where another allocator than torch's own serves CPU tensors, and where the
/// kernel refuses the addresses or accounts memory strictly (vm.overcommit_memory = 2).
OXY_API HostSetting use_host_pool(std::optional<uint64_t> retain_limit = std::nullopt);

/// Gives free memory that the pool and glibc's heap only keep back to the kernel, whatever their settings: for the end
/// of what needed much more than the steps that follow. Those fault in anew what they use. Milliseconds: not for the
/// step path.
OXY_API void give_back_host_memory();

/// Of the process's pool; zeros where it was never in use.
OXY_API HostPoolStats host_pool_stats();

/// Bytes of the process's pool that lie on huge pages now. Reads /proc/self/smaps: not for the step path.
OXY_API uint64_t host_pool_huge_page_bytes();

}  // namespace oxytorch
