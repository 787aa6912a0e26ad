/// A cap on the memory of this process, and its peak.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>

#include "oxytorch/api.h"
#include "oxytorch/host.h"

namespace oxytorch {

/// Has allocations fail that would take this process beyond `limit` resident bytes (RLIMIT_DATA), so that it gets an
/// error in place of being killed. A cap that is lower already stays. revert() puts the limit of before back. Refused
/// where the kernel does not tell what is in use.
OXY_API HostSetting cap_host_memory(std::uint64_t limit);

/// Begins the peak of read_memory() anew; without the right to, it stays that since the process began.
OXY_API void reset_host_peak();

/// The most bytes of this process that are in memory while `take` runs, whose exceptions pass through. Free memory of
/// the heap is given back before. Calls may lie within each other: an inner one begins the peak anew and loses nothing
/// of the outer. Empty where the kernel lets nobody begin the peak anew.
OXY_API std::optional<std::uint64_t> most_resident(const std::function<void()>& take);

}  // namespace oxytorch
