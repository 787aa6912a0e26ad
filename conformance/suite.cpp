#include "suite.h"

#include <algorithm>
#include <chrono>
#include <cstdio>

#include "oxytorch/backend/device.h"

namespace conformance {

using oxytorch::backend::status_name;

void (*on_violation)(const Violation&) = nullptr;

namespace {

[[noreturn]] void violated(Violation violation) {
  if (on_violation != nullptr) on_violation(violation);
  throw violation;
}

std::string described(const Subject& subject, oxy_status status) {
  std::string text = std::string(status_name(status)) + " (" + std::to_string(status) + ")";
  const char* error = subject.table.last_error();
  if (status != OXY_OK && status != OXY_NOT_READY && error != nullptr)
    text += ", last_error \"" + std::string(error) + "\"";
  return text;
}

}  // namespace

Subject::Subject(const oxytorch::backend::Backend& backend) : backend(backend), table(backend.table()) {
  const char* text = nullptr;
  score = table.score(&text, &devices);
  reason = text == nullptr ? "(null)" : text;
}

void Subject::need_queues() const {
  if (!has_queues()) throw NotApplicable{"the device is synchronous: it has no queues"};
}

void Subject::need_devices(std::int32_t count) const {
  if (devices < count)
    throw NotApplicable{"needs " + std::to_string(count) + " devices, there is " + std::to_string(devices)};
}

void Subject::inject(const char* settings) const {
  const auto configure = backend.configure();
  if (configure == nullptr)
    throw NotApplicable{"the backend exports no oxy_backend_configure, so no fault can be injected"};
  const oxy_status status = configure(settings);
  if (status != OXY_OK) throw NotApplicable{std::string("the backend does not know the setting ") + settings};
}

oxy_device_properties Subject::properties(std::int32_t device) const {
  oxy_device_properties properties{};
  properties.size = sizeof(properties);
  expect_ok(*this, table.device_properties(device, &properties), "device_properties");
  return properties;
}

oxy_memory_info Subject::memory(std::int32_t device) const {
  oxy_memory_info info{};
  info.size = sizeof(info);
  expect_ok(*this, table.memory_info(device, &info), "memory_info");
  return info;
}

std::vector<Check> all_checks() {
  std::vector<Check> checks;
  add_contract_checks(checks);
  add_memory_checks(checks);
  add_copy_checks(checks);
  add_order_checks(checks);
  add_fault_checks(checks);
  add_thread_checks(checks);
  add_kernel_checks(checks);
  return checks;
}

void expect(bool holds, const std::string& expected, const std::string& seen) {
  if (!holds) violated({expected, seen});
}

void expect_status(const Subject& subject, oxy_status seen, oxy_status wanted, const std::string& call) {
  if (seen != wanted) violated({call + " gives " + status_name(wanted), described(subject, seen)});
}

void expect_ok(const Subject& subject, oxy_status seen, const std::string& call) {
  expect_status(subject, seen, OXY_OK, call);
}

void expect_same(const Bytes& seen, const Bytes& wanted, const std::string& where) {
  const auto [left, right] = std::mismatch(wanted.begin(), wanted.end(), seen.begin(), seen.end());
  if (left == wanted.end() && right == seen.end()) return;
  const auto index = left - wanted.begin();
  char text[64];
  std::snprintf(text, sizeof(text), "byte %td of %zu is 0x%02x", index, wanted.size(),
                left == wanted.end() ? 0 : *left);
  std::string expected = where + ": " + text;
  std::snprintf(text, sizeof(text), "0x%02x", right == seen.end() ? 0 : *right);
  violated({expected, text});
}

Bytes pattern(std::uint64_t bytes, std::uint32_t seed) {
  Bytes made(bytes);
  std::uint32_t state = seed * 2654435761u + 12345u;
  for (std::uint8_t& byte : made) {
    state = state * 1664525u + 1013904223u;
    byte = static_cast<std::uint8_t>(state >> 24);
  }
  return made;
}

std::string hex(const void* pointer) {
  char text[32];
  std::snprintf(text, sizeof(text), "%p", pointer);
  return text;
}

Memory::Memory(const Subject& subject, std::uint64_t bytes, std::int32_t device, oxy_memory kind)
    : subject_(subject), device_(device), bytes_(bytes) {
  expect_ok(subject, subject.table.alloc(device, kind, bytes, &data_), "alloc of " + std::to_string(bytes) + " bytes");
  expect(bytes == 0 || data_ != nullptr, "alloc of " + std::to_string(bytes) + " bytes gives a pointer", "NULL");
}

Memory::~Memory() { subject_.table.free(device_, data_); }

void Memory::write(const Bytes& bytes, std::uint64_t offset) const {
  expect_ok(
      subject_,
      subject_.table.copy_async(device_, nullptr, at(offset), bytes.data(), bytes.size(), OXY_COPY_HOST_TO_DEVICE),
      "copy_async to the device, queue NULL,");
}

Bytes Memory::read(std::uint64_t bytes, std::uint64_t offset) const {
  Bytes read(bytes, 0xEE);
  expect_ok(subject_,
            subject_.table.copy_async(device_, nullptr, read.data(), at(offset), bytes, OXY_COPY_DEVICE_TO_HOST),
            "copy_async to the host, queue NULL,");
  return read;
}

void Memory::fill(std::uint8_t value) const {
  expect_ok(subject_, subject_.table.fill_async(device_, nullptr, data_, value, bytes_), "fill_async, queue NULL,");
}

Queue::Queue(const Subject& subject, std::int32_t device) : subject_(subject), device_(device) {
  subject.need_queues();
  expect_ok(subject, subject.table.queue_create(device, nullptr, &handle_), "queue_create");
  expect(handle_ != nullptr, "queue_create gives a queue", "NULL");
}

Queue::~Queue() {
  if (handle_ != nullptr) subject_.table.queue_destroy(handle_);
}

void Queue::copy(void* to, const void* from, std::uint64_t bytes, oxy_copy kind) const {
  expect_ok(subject_, subject_.table.copy_async(device_, handle_, to, from, bytes, kind), "copy_async");
}

void Queue::fill(void* to, std::uint8_t value, std::uint64_t bytes) const {
  expect_ok(subject_, subject_.table.fill_async(device_, handle_, to, value, bytes), "fill_async");
}

void Queue::record(oxy_event* event) const {
  expect_ok(subject_, subject_.table.event_record(handle_, event), "event_record");
  expect(*event != nullptr, "event_record makes an event", "NULL");
}

void Queue::wait(oxy_event event) const {
  expect_ok(subject_, subject_.table.event_wait(handle_, event, 0, nullptr), "event_wait by a queue");
}

void Queue::synchronize() const {
  expect_ok(subject_, subject_.table.synchronize(device_, handle_), "synchronize of a queue");
}

oxy_queue Queue::release() {
  oxy_queue handle = handle_;
  handle_ = nullptr;
  return handle;
}

Event::~Event() { destroy(); }

oxy_status Event::wait(std::uint64_t timeout_ns, std::uint64_t* time_ns) const {
  return subject_.table.event_wait(nullptr, handle, timeout_ns, time_ns);
}

void Event::destroy() {
  if (handle != nullptr) subject_.table.event_destroy(handle);
  handle = nullptr;
}

Load::Load(const Subject& subject, std::int32_t device)
    : memory_(subject, std::min<std::uint64_t>(std::uint64_t{4} << 20, subject.properties(device).memory_bytes / 8),
              device) {
  const Queue queue(subject, device);
  enqueue(queue);  // the first use also pays for the memory's pages
  queue.synchronize();
  for (; rounds_ < 1 << 14; rounds_ *= 2) {
    const auto start = std::chrono::steady_clock::now();
    enqueue(queue);
    queue.synchronize();
    if (std::chrono::steady_clock::now() - start > std::chrono::milliseconds(5)) return;
  }
}

void Load::enqueue(const Queue& queue) const {
  const std::uint64_t half = memory_.size() / 2;
  auto* const at = static_cast<std::uint8_t*>(memory_.at());
  for (std::uint64_t round = 0; round < rounds_; ++round) {
    queue.copy(at + half, at, half, OXY_COPY_DEVICE_TO_DEVICE);
    queue.copy(at, at + half, half, OXY_COPY_DEVICE_TO_DEVICE);
  }
}

}  // namespace conformance
