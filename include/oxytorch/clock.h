/// The clock that durations are measured with.
#pragma once

#include <chrono>
#include <cstdint>

namespace oxytorch {

/// Nanoseconds since an arbitrary moment; never steps back, unaffected by changes of the wall clock.
inline std::int64_t monotonic_ns() noexcept {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

/// The same in seconds.
inline double monotonic_seconds() noexcept { return 1e-9 * static_cast<double>(monotonic_ns()); }

/// Seconds that have passed since `start`.
inline double seconds_since(std::chrono::steady_clock::time_point start) noexcept {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace oxytorch
