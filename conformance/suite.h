/// The checks that every backend must pass. Each cites a clause of oxytorch/backend.h or backend_kernels.h and talks to
/// the raw table.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "oxytorch/backend/registry.h"

namespace conformance {

using Bytes = std::vector<std::uint8_t>;

/// What a check throws: the backend broke the clause.
struct Violation {
  std::string expected;
  std::string seen;
};

/// What a check throws where this backend has nothing to check.
struct NotApplicable {
  std::string reason;
};

/// The backend under test.
struct Subject {
  explicit Subject(const oxytorch::backend::Backend& backend);

  const oxytorch::backend::Backend& backend;
  const oxy_backend& table;
  std::int32_t score = 0;
  std::int32_t devices = 0;
  std::string reason;

  [[nodiscard]] bool has_queues() const { return backend.has_queues(); }
  void need_queues() const;
  void need_devices(std::int32_t count) const;
  /// Applies settings that inject a fault; NotApplicable where the backend takes none.
  void inject(const char* settings) const;
  [[nodiscard]] oxy_device_properties properties(std::int32_t device = 0) const;
  [[nodiscard]] oxy_memory_info memory(std::int32_t device = 0) const;
};

struct Check {
  const char* name;    ///< group.name
  const char* clause;  ///< of oxytorch/backend.h
  const char* says;    ///< the clause in short
  void (*run)(const Subject&);
};

/// Every check in the order in which they run.
std::vector<Check> all_checks();
void add_contract_checks(std::vector<Check>& checks);
void add_memory_checks(std::vector<Check>& checks);
void add_copy_checks(std::vector<Check>& checks);
void add_order_checks(std::vector<Check>& checks);
void add_fault_checks(std::vector<Check>& checks);
void add_thread_checks(std::vector<Check>& checks);
void add_kernel_checks(std::vector<Check>& checks);

/// Called with the violation before it is thrown. A worker process reports and ends there: unwinding would free memory
/// that a broken backend may still be working on.
extern void (*on_violation)(const Violation&);

/// Throws Violation unless `holds`.
void expect(bool holds, const std::string& expected, const std::string& seen);
/// Throws Violation unless a call gave the status it should.
void expect_status(const Subject& subject, oxy_status seen, oxy_status wanted, const std::string& call);
void expect_ok(const Subject& subject, oxy_status seen, const std::string& call);
/// Throws Violation at the first byte that differs.
void expect_same(const Bytes& seen, const Bytes& wanted, const std::string& where);

/// Bytes that differ from their neighbours and from one seed to the next.
Bytes pattern(std::uint64_t bytes, std::uint32_t seed);
std::string hex(const void* pointer);

/// Memory of the device that is freed at the end, also after a violation.
class Memory {
 public:
  Memory(const Subject& subject, std::uint64_t bytes, std::int32_t device = 0, oxy_memory kind = OXY_MEMORY_DEVICE);
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  [[nodiscard]] std::uint8_t* at(std::uint64_t offset = 0) const { return static_cast<std::uint8_t*>(data_) + offset; }
  /// Blocking transfers (queue NULL).
  void write(const Bytes& bytes, std::uint64_t offset = 0) const;
  [[nodiscard]] Bytes read(std::uint64_t bytes, std::uint64_t offset = 0) const;
  void fill(std::uint8_t value) const;
  [[nodiscard]] std::uint64_t size() const { return bytes_; }

 private:
  const Subject& subject_;
  std::int32_t device_;
  std::uint64_t bytes_;
  void* data_ = nullptr;
};

/// A queue that is destroyed at the end; its calls must succeed.
class Queue {
 public:
  explicit Queue(const Subject& subject, std::int32_t device = 0);
  ~Queue();
  Queue(const Queue&) = delete;
  Queue& operator=(const Queue&) = delete;

  void copy(void* to, const void* from, std::uint64_t bytes, oxy_copy kind) const;
  void fill(void* to, std::uint8_t value, std::uint64_t bytes) const;
  void record(oxy_event* event) const;
  void wait(oxy_event event) const;
  void synchronize() const;
  /// Gives the handle away: the caller destroys it.
  oxy_queue release();
  [[nodiscard]] oxy_queue handle() const { return handle_; }

 private:
  const Subject& subject_;
  std::int32_t device_;
  oxy_queue handle_ = nullptr;
};

/// An event that is destroyed at the end.
class Event {
 public:
  explicit Event(const Subject& subject) : subject_(subject) {}
  ~Event();
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  oxy_status wait(std::uint64_t timeout_ns = UINT64_MAX, std::uint64_t* time_ns = nullptr) const;
  void destroy();
  oxy_event handle = nullptr;

 private:
  const Subject& subject_;
};

/// Work that keeps one queue busy for some milliseconds, measured once on this device. Its memory is one queue's at a
/// time.
class Load {
 public:
  explicit Load(const Subject& subject, std::int32_t device = 0);
  void enqueue(const Queue& queue) const;
  /// Twice the work from here on: for a check that a busy host, which stops between two calls, could mistake.
  void lengthen() { rounds_ *= 2; }

 private:
  Memory memory_;
  std::uint64_t rounds_ = 4;
};

}  // namespace conformance
