#include "oxytorch/backend/device.h"

#include <limits>

#include "oxytorch/error.h"

namespace oxytorch::backend {
namespace {

ErrorCode code_of(oxy_status status) {
  switch (status) {
    case OXY_INVALID_ARGUMENT: return ErrorCode::InvalidArgument;
    case OXY_OUT_OF_MEMORY: return ErrorCode::OutOfMemory;
    case OXY_NOT_SUPPORTED: return ErrorCode::NotSupported;
    case OXY_INVALID_STATE: return ErrorCode::InvalidState;
    case OXY_INTERNAL: return ErrorCode::Internal;
    default: return ErrorCode::DeviceError;
  }
}

oxy_queue_options default_options(int priority) {
  oxy_queue_options options{};
  options.size = sizeof(options);
  options.priority = priority;
  return options;
}

}  // namespace

const char* status_name(oxy_status status) noexcept {
  switch (status) {
    case OXY_OK: return "OXY_OK";
    case OXY_NOT_READY: return "OXY_NOT_READY";
    case OXY_INVALID_ARGUMENT: return "OXY_INVALID_ARGUMENT";
    case OXY_OUT_OF_MEMORY: return "OXY_OUT_OF_MEMORY";
    case OXY_NOT_SUPPORTED: return "OXY_NOT_SUPPORTED";
    case OXY_INVALID_STATE: return "OXY_INVALID_STATE";
    case OXY_DEVICE_ERROR: return "OXY_DEVICE_ERROR";
    case OXY_DEVICE_LOST: return "OXY_DEVICE_LOST";
    case OXY_INTERNAL: return "OXY_INTERNAL";
    default: return "unknown status";
  }
}

namespace detail {
void raise_status(const oxy_backend& table, oxy_status status, const char* call) {
  const char* text = table.last_error();
  oxytorch::detail::raise(code_of(status), "backend '", table.name, "', ", call, ": ",
                          text != nullptr && *text != '\0' ? text : "no reason given", " (", status_name(status), " ",
                          status, ")");
}
}  // namespace detail

Device::Device(const Backend& backend, int index) : backend_(&backend), index_(index) {
  const char* reason = nullptr;
  std::int32_t devices = 0;
  const int score = backend.table().score(&reason, &devices);
  OXY_CHECK(score > 0, InvalidState, "backend '", backend.name(), "' is unusable here: ", reason);
  OXY_CHECK(index >= 0 && index < devices, OutOfRange, "backend '", backend.name(), "' has ", devices,
            " device(s); there is no device ", index, ".");
}

oxy_device_properties Device::properties() const {
  oxy_device_properties properties{};
  properties.size = sizeof(properties);
  detail::check(table(), table().device_properties(index_, &properties), "device_properties");
  return properties;
}

oxy_memory_info Device::memory_info() const {
  oxy_memory_info info{};
  info.size = sizeof(info);
  detail::check(table(), table().memory_info(index_, &info), "memory_info");
  return info;
}

std::vector<oxy_counter> Device::counters() const {
  std::vector<oxy_counter> counters;
  if (table().counters == nullptr) return counters;
  std::uint32_t count = 0;
  detail::check(table(), table().counters(index_, nullptr, 0, &count), "counters");
  counters.resize(count);
  std::uint32_t present = 0;
  detail::check(table(), table().counters(index_, counters.data(), count, &present), "counters");
  if (present < count) counters.resize(present);
  return counters;
}

double Device::counter(const std::string& name) const {
  std::string known;
  for (const oxy_counter& counter : counters()) {
    if (name == counter.name) return counter.value;
    known += (known.empty() ? "" : ", ") + std::string(counter.name);
  }
  oxytorch::detail::raise(ErrorCode::InvalidArgument, "backend '", backend_->name(), "' has no counter '", name,
                          "'; it has: ", known.empty() ? "none" : known, ".");
}

void Device::synchronize() const {
  if (table().synchronize == nullptr) return;
  detail::check(table(), table().synchronize(index_, nullptr), "synchronize");
}

Buffer::Buffer(const Device& device, std::uint64_t bytes, oxy_memory kind) : device_(device), bytes_(bytes) {
  detail::check(device_.table(), device_.table().alloc(device_.index(), kind, bytes, &data_), "alloc");
}

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  std::swap(device_, other.device_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

Buffer::~Buffer() {
  if (data_ != nullptr) device_.table().free(device_.index(), data_);
}

void Buffer::reset() {
  bytes_ = 0;
  if (void* memory = std::exchange(data_, nullptr)) {
    detail::check(device_.table(), device_.table().free(device_.index(), memory), "free");
  }
}

Event& Event::operator=(Event&& other) noexcept {
  std::swap(table_, other.table_);
  std::swap(handle_, other.handle_);
  return *this;
}

Event::~Event() {
  if (handle_ != nullptr) table_->event_destroy(handle_);
}

bool Event::done() const {
  if (handle_ == nullptr) return true;
  const oxy_status status = table_->event_wait(nullptr, handle_, 0, nullptr);
  if (status == OXY_NOT_READY) return false;
  detail::check(*table_, status, "event_wait");
  return true;
}

std::uint64_t Event::wait() const {
  std::uint64_t time = 0;
  if (handle_ != nullptr) {
    const auto forever = std::numeric_limits<std::uint64_t>::max();
    detail::check(*table_, table_->event_wait(nullptr, handle_, forever, &time), "event_wait");
  }
  return time;
}

Queue::Queue(const Device& device, int priority) : Queue(device, default_options(priority)) {}

Queue::Queue(const Device& device, const oxy_queue_options& options) : device_(device) {
  if (table().queue_create == nullptr) return;
  detail::check(table(), table().queue_create(device_.index(), &options, &handle_), "queue_create");
}

Queue Queue::wrap(const Device& device, void* native_handle) {
  OXY_CHECK(device.backend().has_queues(), NotSupported, "backend '", device.backend().name(),
            "' has no queues, so no native stream can be wrapped.");
  oxy_queue_options options = default_options(0);
  options.flags = OXY_QUEUE_WRAP_NATIVE;
  options.native_handle = native_handle;
  return Queue(device, options);
}

Queue& Queue::operator=(Queue&& other) noexcept {
  std::swap(device_, other.device_);
  std::swap(handle_, other.handle_);
  return *this;
}

Queue::~Queue() {
  if (handle_ != nullptr) table().queue_destroy(handle_);
}

void Queue::record(Event& event) {
  if (handle_ == nullptr) return;
  OXY_CHECK(event.table_ == nullptr || event.table_ == &table(), InvalidArgument, "an event of backend '",
            event.table_->name, "' cannot be recorded on a queue of backend '", table().name, "'.");
  event.table_ = &table();
  detail::check(table(), table().event_record(handle_, &event.handle_), "event_record");
}

void Queue::wait(const Event& event) {
  if (event.handle_ == nullptr) return;
  if (handle_ == nullptr) {
    // A queue of a synchronous device is the calling thread itself.
    event.wait();
    return;
  }
  OXY_CHECK(event.table_ == &table(), InvalidArgument, "a queue of backend '", table().name,
            "' cannot wait for an event of backend '", event.table_->name, "'; wait for the event on the host first.");
  detail::check(table(), table().event_wait(handle_, event.handle_, 0, nullptr), "event_wait");
}

void Queue::synchronize() {
  if (handle_ == nullptr) return;
  detail::check(table(), table().synchronize(device_.index(), handle_), "synchronize");
}

}  // namespace oxytorch::backend
