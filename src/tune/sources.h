/// What tuning reads of the system while it measures: time, page faults, and numbers that nothing on trial can foresee.
/// Tests put sources of their own in their place, so that no verdict depends on who else uses the machine.
#pragma once

#include <cstdint>
#include <functional>

#include "oxytorch/api.h"

namespace oxytorch::tune {

/// Seconds since an arbitrary moment; never steps back.
OXY_API double seconds_now();
/// Seconds of processor time of this thread.
OXY_API double thread_seconds_now();
/// Page faults of this process since it started.
OXY_API std::int64_t page_faults_now();
/// 64 random bits of the system.
OXY_API std::uint64_t fresh_bits();

/// An empty one is the system's.
struct Sources {
  std::function<double()> seconds = {};
  std::function<double()> thread_seconds = {};
  std::function<std::int64_t()> page_faults = {};
  std::function<std::uint64_t()> bits = {};
};

/// These are read, from any thread, as long as it lives. One at a time.
class OXY_API ScopedSources {
 public:
  explicit ScopedSources(Sources sources);
  ~ScopedSources();
  ScopedSources(const ScopedSources&) = delete;
  ScopedSources& operator=(const ScopedSources&) = delete;

 private:
  Sources sources_;
};

}  // namespace oxytorch::tune
