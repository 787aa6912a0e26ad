/// The C table in C++: owners that free themselves, and statuses turned into `oxytorch::Error`.
///
/// A thin layer: each call is one call through the table and one comparison. Statuses map to codes as follows:
/// OXY_INVALID_ARGUMENT InvalidArgument, OXY_OUT_OF_MEMORY OutOfMemory, OXY_NOT_SUPPORTED NotSupported,
/// OXY_INVALID_STATE InvalidState, OXY_DEVICE_ERROR, OXY_DEVICE_LOST and unknown statuses DeviceError, OXY_INTERNAL
/// Internal. The message carries the backend's own `last_error`. Objects may move between threads; one object is used
/// by one thread at a time. On a backend without queues every queue is a null queue and every event is already reached.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "oxytorch/api.h"
#include "oxytorch/backend.h"
#include "oxytorch/backend/registry.h"

namespace oxytorch::backend {

namespace detail {
[[noreturn]] OXY_API void raise_status(const oxy_backend& table, oxy_status status, const char* call);
inline void check(const oxy_backend& table, oxy_status status, const char* call) {
  if (__builtin_expect(status != OXY_OK, 0)) raise_status(table, status, call);
}
}  // namespace detail

/// Name of a status as the header writes it, for example "OXY_OUT_OF_MEMORY"; "unknown status" for others.
OXY_API const char* status_name(oxy_status status) noexcept;

class Buffer;
class Queue;

/// One device of a backend: a small value, copied freely.
class OXY_API Device {
 public:
  /// Error(InvalidState) where the backend is unusable here, Error(OutOfRange) where it has no such device.
  explicit Device(const Backend& backend, int index = 0);

  [[nodiscard]] const Backend& backend() const noexcept { return *backend_; }
  [[nodiscard]] const oxy_backend& table() const noexcept { return backend_->table(); }
  [[nodiscard]] int index() const noexcept { return index_; }
  [[nodiscard]] oxy_device_properties properties() const;
  [[nodiscard]] oxy_memory_info memory_info() const;
  /// Empty where the backend has no counters.
  [[nodiscard]] std::vector<oxy_counter> counters() const;
  /// Value of one counter; Error(InvalidArgument) where there is none of that name.
  [[nodiscard]] double counter(const std::string& name) const;
  /// Waits for all work of all queues of this device.
  void synchronize() const;

 private:
  const Backend* backend_;
  int index_;
};

/// Owns memory of a device, or host memory made for it.
class OXY_API Buffer {
 public:
  Buffer(const Device& device, std::uint64_t bytes, oxy_memory kind = OXY_MEMORY_DEVICE);
  Buffer(Buffer&& other) noexcept
      : device_(other.device_), data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  Buffer& operator=(Buffer&& other) noexcept;
  ~Buffer();

  [[nodiscard]] void* data() const noexcept { return data_; }
  [[nodiscard]] std::uint64_t bytes() const noexcept { return bytes_; }
  [[nodiscard]] const Device& device() const noexcept { return device_; }
  /// Frees now and reports a failure, which the destructor cannot.
  void reset();

 private:
  Device device_;
  void* data_ = nullptr;
  std::uint64_t bytes_ = 0;
};

/// Owns an event. Empty until a queue records it.
class OXY_API Event {
 public:
  Event() = default;
  Event(Event&& other) noexcept
      : table_(std::exchange(other.table_, nullptr)), handle_(std::exchange(other.handle_, nullptr)) {}
  Event& operator=(Event&& other) noexcept;
  ~Event();

  /// Whether the mark is reached; true for an event that was never recorded.
  [[nodiscard]] bool done() const;
  /// Waits for the mark and gives the device's clock there in nanoseconds, 0 where it has none.
  std::uint64_t wait() const;
  [[nodiscard]] oxy_event handle() const noexcept { return handle_; }

 private:
  friend class Queue;
  const oxy_backend* table_ = nullptr;
  oxy_event handle_ = nullptr;
};

/// Owns an in-order queue. The destructor waits for its work (clause Q5).
class OXY_API Queue {
 public:
  explicit Queue(const Device& device, int priority = 0);
  /// Enqueues on a stream that the vendor's runtime made, for example torch's current one, which outlives this.
  static Queue wrap(const Device& device, void* native_handle);
  Queue(Queue&& other) noexcept : device_(other.device_), handle_(std::exchange(other.handle_, nullptr)) {}
  Queue& operator=(Queue&& other) noexcept;
  ~Queue();

  [[nodiscard]] const Device& device() const noexcept { return device_; }
  [[nodiscard]] oxy_queue handle() const noexcept { return handle_; }

  void copy(void* to, const void* from, std::uint64_t bytes, oxy_copy kind) {
    detail::check(table(), table().copy_async(device_.index(), handle_, to, from, bytes, kind), "copy_async");
  }
  void copy_to_device(void* to, const void* from, std::uint64_t bytes) {
    copy(to, from, bytes, OXY_COPY_HOST_TO_DEVICE);
  }
  void copy_to_host(void* to, const void* from, std::uint64_t bytes) { copy(to, from, bytes, OXY_COPY_DEVICE_TO_HOST); }
  void fill(void* to, std::uint8_t value, std::uint64_t bytes) {
    detail::check(table(), table().fill_async(device_.index(), handle_, to, value, bytes), "fill_async");
  }
  /// Marks this point in `event`, which is made if it is empty and moved here if it is not.
  void record(Event& event);
  /// Starts nothing enqueued from here on until `event` is reached; an event never recorded is no wait.
  void wait(const Event& event);
  void synchronize();

 private:
  Queue(const Device& device, const oxy_queue_options& options);
  [[nodiscard]] const oxy_backend& table() const noexcept { return device_.table(); }

  Device device_;
  oxy_queue handle_ = nullptr;
};

}  // namespace oxytorch::backend
