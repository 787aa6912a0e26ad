#include <algorithm>
#include <cstring>

#include "oxytorch/backend_kernels.h"
#include "suite.h"

namespace conformance {
namespace {

constexpr std::uint8_t kUntouched = 0xEE;
constexpr std::size_t kTail = 64;

void table(const Subject& subject) {
  const oxy_backend& table = subject.table;
  expect(table.api_version == OXY_BACKEND_API_VERSION, "api_version " + std::to_string(OXY_BACKEND_API_VERSION),
         std::to_string(table.api_version));
  expect(table.size >= OXY_BACKEND_SIZE_V1, "size of at least " + std::to_string(OXY_BACKEND_SIZE_V1),
         std::to_string(table.size));
  if (table.kernels != nullptr) {
    expect(table.kernels->size >= 8, "a table of kernels of at least 8 bytes", std::to_string(table.kernels->size));
    expect(table.kernels->version == OXY_KERNELS_VERSION, "kernels of version " + std::to_string(OXY_KERNELS_VERSION),
           std::to_string(table.kernels->version));
  }
}

void texts(const Subject& subject) {
  expect(*subject.table.description != '\0', "a description of one sentence", "an empty text");
  const char* error = subject.table.last_error();
  expect(error != nullptr, "last_error is a text from the start", "NULL");
  const char* reason = nullptr;
  std::int32_t devices = -1;
  const std::int32_t score = subject.table.score(&reason, &devices);
  expect(reason != nullptr && *reason != '\0', "score gives a reason", reason == nullptr ? "NULL" : "an empty text");
  expect(score >= 0 && score <= 100, "a score from 0 to 100", std::to_string(score));
  expect((score == 0) == (devices == 0), "devices if and only if the score is not 0",
         "score " + std::to_string(score) + ", " + std::to_string(devices) + " devices");
  for (std::int32_t device = 0; device < devices; ++device) {
    const oxy_device_properties properties = subject.properties(device);
    expect(properties.name != nullptr && *properties.name != '\0', "device_properties gives a name",
           properties.name == nullptr ? "NULL" : "an empty text");
    expect(properties.architecture != nullptr, "device_properties gives an architecture, or \"\"", "NULL");
  }
}

void score_stable(const Subject& subject) {
  for (int call = 0; call < 100; ++call) {
    const char* reason = nullptr;
    std::int32_t devices = 0;
    const std::int32_t score = subject.table.score(&reason, &devices);
    expect(score == subject.score && devices == subject.devices,
           "the same answer each time: score " + std::to_string(subject.score) + ", devices " +
               std::to_string(subject.devices),
           "call " + std::to_string(call) + " gives score " + std::to_string(score) + ", devices " +
               std::to_string(devices));
  }
}

// Calls with a structure of `Size` bytes in front of a tail that must stay as it is.
template <class Structure, class Call>
void structure_size(const Subject& subject, const std::string& name, Call call) {
  alignas(16) std::uint8_t storage[sizeof(Structure) + kTail];
  const auto untouched_from = [&](std::size_t from) {
    const auto wrong = std::find_if(storage + from, std::end(storage), [](std::uint8_t b) { return b != kUntouched; });
    expect(wrong == std::end(storage), name + " writes no byte behind the caller's size",
           "byte " + std::to_string(wrong - storage) + " was written, size was " + std::to_string(from));
  };
  for (const std::uint32_t size : {sizeof(Structure), sizeof(Structure) + 32}) {
    std::memset(storage, kUntouched, sizeof(storage));
    std::memcpy(storage, &size, sizeof(size));
    expect_ok(subject, call(reinterpret_cast<Structure*>(storage)), name + " with size " + std::to_string(size));
    untouched_from(size);
  }
  for (const std::uint32_t size : {0u, 4u, 8u}) {
    std::memset(storage, kUntouched, sizeof(storage));
    std::memcpy(storage, &size, sizeof(size));
    expect_status(subject, call(reinterpret_cast<Structure*>(storage)), OXY_INVALID_ARGUMENT,
                  name + " with size " + std::to_string(size));
    untouched_from(std::max<std::size_t>(size, sizeof(size)));
  }
}

void structure_sizes(const Subject& subject) {
  structure_size<oxy_device_properties>(subject, "device_properties", [&](oxy_device_properties* properties) {
    return subject.table.device_properties(0, properties);
  });
  structure_size<oxy_memory_info>(subject, "memory_info",
                                  [&](oxy_memory_info* info) { return subject.table.memory_info(0, info); });
}

void properties_stable(const Subject& subject) {
  const oxy_device_properties first = subject.properties();
  expect(first.alignment >= 64 && (first.alignment & (first.alignment - 1)) == 0,
         "an alignment that is a power of two of at least 64", std::to_string(first.alignment));
  expect(first.memory_bytes > 0, "memory_bytes over 0", "0");
  for (int call = 0; call < 10; ++call) {
    const oxy_device_properties again = subject.properties();
    expect(std::memcmp(&first, &again, sizeof(first)) == 0, "the same properties each time",
           "call " + std::to_string(call) + " differs");
  }
}

void counters(const Subject& subject) {
  if (subject.table.counters == nullptr) throw NotApplicable{"the backend has no counters"};
  std::uint32_t count = 0;
  expect_ok(subject, subject.table.counters(0, nullptr, 0, &count), "counters with capacity 0");
  const oxy_counter marker{"untouched", "untouched", -1};
  for (const std::uint32_t capacity : {0u, 1u, count / 2, count, count + 3}) {
    std::vector<oxy_counter> table(count + 4, marker);
    std::uint32_t present = 0;
    expect_ok(subject, subject.table.counters(0, table.data(), capacity, &present), "counters");
    expect(present == count, "the number of counters stays " + std::to_string(count), std::to_string(present));
    for (std::uint32_t i = 0; i < table.size(); ++i) {
      const bool inside = i < std::min(capacity, count);
      expect(table[i].name != nullptr && table[i].unit != nullptr, "counters have names and units", "NULL");
      expect((std::strcmp(table[i].name, "untouched") != 0) == inside,
             "exactly the first " + std::to_string(std::min(capacity, count)) + " counters are written",
             "counter " + std::to_string(i) + (inside ? " was not" : " was"));
    }
  }
  expect_status(subject, subject.table.counters(0, nullptr, 0, nullptr), OXY_INVALID_ARGUMENT,
                "counters without a place for their number");
}

}  // namespace

void add_contract_checks(std::vector<Check>& checks) {
  checks.insert(checks.end(),
                {
                    {"contract.table", "C1", "size and api_version are those the backend was compiled with", table},
                    {"contract.texts", "C2", "no text is NULL", texts},
                    {"contract.score_stable", "C5", "score gives the same answer each time", score_stable},
                    {"contract.structure_sizes", "C4", "no byte behind the caller's size is written", structure_sizes},
                    {"contract.properties_stable", "M1", "facts of a device do not change", properties_stable},
                    {"contract.counters", "C4", "counters writes the first `capacity` counters, no more", counters},
                });
}

}  // namespace conformance
