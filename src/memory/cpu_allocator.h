/// The one allocator that this library puts under torch's CPU tensors: the pool of host memory, and the count of what
/// tensors take. It is in place while either is wanted.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "memory/byte_count.h"

namespace oxytorch {
class HostPool;
}

namespace oxytorch::memory {

/// Of all CPU tensors that were made while somebody counted.
[[nodiscard]] ByteCount& tensor_bytes();

/// Why the allocator cannot be put under torch's tensors; empty where it can, or is.
[[nodiscard]] std::string allocator_refusal();

/// Counts until the last that began has ended. Error(NotSupported) with allocator_refusal().
class Counting {
 public:
  Counting();
  ~Counting();
  Counting(const Counting&) = delete;
  Counting& operator=(const Counting&) = delete;
};

/// Serves tensors from `pool`, which lives as long as the process; nullptr: from torch's allocator again.
void serve_from(HostPool* pool);
[[nodiscard]] bool is_serving_from_pool();

/// The most that this process may have resident; of several limits the lowest holds. What is not counted is taken as it
/// is now and measured anew before an allocation is refused.
void add_limit(std::uint64_t bytes);
void lift_limit(std::uint64_t bytes);
[[nodiscard]] std::optional<std::uint64_t> process_limit();
/// From the first pause to the last resume no limit holds; each pause needs its resume.
void pause_limits();
void resume_limits();
/// Where one alone wants bytes counted and no limit holds, its allocator is out of place until counting resumes.
void pause_counting();
void resume_counting();

}  // namespace oxytorch::memory
