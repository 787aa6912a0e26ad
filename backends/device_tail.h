/// The host side of a device's native step tail, for any backend: tables, checks and the launches of a round.
///
/// A backend gives a TailDevice, which owns nothing but the way to its device, and gets the members of oxy_kernels:
/// its own `tail_create` makes one and calls create_tail(), the other five are the functions below. Tables are written
/// by launches that carry the bytes as arguments, so no staging memory has to outlive a call and a captured graph
/// holds what it uploads. Nothing is allocated after the first round, nor is a device value read.
#pragma once

#include <cstdint>
#include <memory>

#include "kernels/device/tail_arguments.h"
#include "oxytorch/backend_kernels.h"

namespace oxytorch::backend {

/// What a tail asks of its device. Calls come from one thread at a time; a failing one leaves its sentence behind
/// last_error.
class TailDevice {
 public:
  virtual ~TailDevice() = default;
  /// Device memory, aligned to at least 64.
  virtual oxy_status allocate(std::uint64_t bytes, void** memory) = 0;
  virtual oxy_status free(void* memory) = 0;
  /// Runs `kernel` on `blocks` (at least 1) blocks of kernels::device::kThreads threads with a copy of `arguments`.
  /// `queue` NULL: is done when the call returns.
  virtual oxy_status launch(kernels::device::TailKernel kernel, std::uint32_t blocks, const void* arguments,
                            std::uint32_t bytes, oxy_queue queue) = 0;
};

/// The rest of oxy_kernels.tail_create once the backend has made `device`.
oxy_status create_tail(std::unique_ptr<TailDevice> device, const oxy_tail_tensor* tensors, std::uint32_t count,
                       oxy_tail* tail);
oxy_status destroy_tail(oxy_tail tail);
oxy_status configure_tail(oxy_tail tail, oxy_queue queue, const oxy_tail_tensor* tensors, std::uint32_t count,
                          const oxy_tail_group* groups, std::uint32_t group_count);
oxy_status measure_tail(oxy_tail tail, oxy_queue queue, double* sums);
oxy_status judge_tail(oxy_tail tail, oxy_queue queue, const double* sums, const oxy_tail_settings* settings,
                      const oxy_tail_results* results, oxy_tail_verdict* verdict);
oxy_status apply_tail(oxy_tail tail, oxy_queue queue, const oxy_tail_verdict* verdict,
                      const oxy_tail_settings* settings, const oxy_tail_results* results);

/// oxy_kernels of a backend whose tails `create` makes.
constexpr oxy_kernels tail_kernels(decltype(oxy_kernels::tail_create) create) {
  return {sizeof(oxy_kernels), OXY_KERNELS_VERSION, create,     destroy_tail,
          configure_tail,      measure_tail,        judge_tail, apply_tail};
}

}  // namespace oxytorch::backend
