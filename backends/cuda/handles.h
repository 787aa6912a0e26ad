/// What the opaque handles of oxytorch/backend.h are here, and what every call asks first.
#pragma once

#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <utility>

#include "backends/cuda/queue.h"
#include "backends/last_error.h"

namespace oxytorch::backend::cuda {

struct QueueHandle {
  std::shared_ptr<Queue> queue;
};

/// The event's newest mark.
class EventHandle {
 public:
  void set(std::shared_ptr<Mark> mark) {
    const std::lock_guard lock(mutex_);
    mark_.swap(mark);
  }
  std::shared_ptr<Mark> get() {
    const std::lock_guard lock(mutex_);
    return mark_;
  }

 private:
  std::mutex mutex_;
  std::shared_ptr<Mark> mark_;
};

inline Queue& queue_of(oxy_queue queue) { return *reinterpret_cast<QueueHandle*>(queue)->queue; }
inline EventHandle& event_of(oxy_event event) { return *reinterpret_cast<EventHandle*>(event); }

/// F2, a process that forked, and no driver.
oxy_status check(std::int32_t index);
/// The same, and F4.
oxy_status check_alive(std::int32_t index);
/// The same, and the device has its context.
oxy_status check_open(std::int32_t index);

/// A queue that works for the device, or none.
inline oxy_status check_owner(std::int32_t index, oxy_queue queue) {
  const int owner = queue == nullptr ? index : queue_of(queue).gpu().index();
  if (owner == index) return OXY_OK;
  return fail(OXY_INVALID_ARGUMENT, "a queue of CUDA device %d cannot work for device %d", owner, index);
}

/// Nothing may be thrown across the border (C6).
template <class Call>
oxy_status guarded(Call call) {
  try {
    return call();
  } catch (const std::bad_alloc&) {
    return fail(OXY_OUT_OF_MEMORY, "no host memory left for the CUDA backend");
  } catch (const std::exception& error) {
    return fail(OXY_INTERNAL, "the CUDA backend failed: %s", error.what());
  }
}

}  // namespace oxytorch::backend::cuda
