#include <algorithm>
#include <deque>

#include "suite.h"

namespace conformance {
namespace {

void alignment(const Subject& subject) {
  const std::uint64_t alignment = subject.properties().alignment;
  std::deque<Memory> live;
  for (const std::uint64_t bytes : {1, 2, 63, 64, 65, 1000, 4096, 4097, 100000}) {
    const Memory& memory = live.emplace_back(subject, bytes);
    expect(reinterpret_cast<std::uint64_t>(memory.at()) % alignment == 0,
           std::to_string(bytes) + " bytes aligned to " + std::to_string(alignment), hex(memory.at()));
  }
  // Each holds its own bytes, so none overlaps another.
  for (std::size_t i = 0; i < live.size(); ++i) live[i].write(pattern(live[i].size(), static_cast<std::uint32_t>(i)));
  for (std::size_t i = 0; i < live.size(); ++i) {
    expect_same(live[i].read(live[i].size()), pattern(live[i].size(), static_cast<std::uint32_t>(i)),
                "allocation " + std::to_string(i) + " of several live ones");
  }
}

void zero_bytes(const Subject& subject) {
  const oxy_backend& table = subject.table;
  int marker = 0;
  void* memory = &marker;
  expect_ok(subject, table.alloc(0, OXY_MEMORY_DEVICE, 0, &memory), "alloc of 0 bytes");
  expect(memory == nullptr, "alloc of 0 bytes gives NULL", hex(memory));
  expect_ok(subject, table.free(0, nullptr), "free of NULL");
  expect_ok(subject, table.copy_async(0, nullptr, nullptr, nullptr, 0, OXY_COPY_HOST_TO_DEVICE), "copy of 0 bytes");
  expect_ok(subject, table.copy_async(0, nullptr, nullptr, nullptr, 0, OXY_COPY_DEVICE_TO_HOST), "copy of 0 bytes");
  expect_ok(subject, table.fill_async(0, nullptr, nullptr, 1, 0), "fill of 0 bytes");
}

void too_much(const Subject& subject) {
  const std::uint64_t total = subject.memory().total_bytes;
  for (const std::uint64_t bytes : {total + 1, total * 2, std::uint64_t{1} << 50, std::uint64_t{1} << 62,
                                    std::uint64_t{1} << 63, UINT64_MAX - 4096, UINT64_MAX - 1, UINT64_MAX}) {
    int marker = 0;
    void* memory = &marker;
    expect_status(subject, subject.table.alloc(0, OXY_MEMORY_DEVICE, bytes, &memory), OXY_OUT_OF_MEMORY,
                  "alloc of " + std::to_string(bytes) + " bytes of " + std::to_string(total));
    expect(memory == nullptr, "a failed alloc gives NULL", hex(memory));
  }
  const Memory usable(subject, 1000);
  usable.write(pattern(1000, 1));
  expect_same(usable.read(1000), pattern(1000, 1), "the device after it was out of memory");
}

void accounting(const Subject& subject) {
  const std::uint64_t start = subject.memory().allocated_bytes;
  std::uint64_t sum = 0;
  {
    std::deque<Memory> live;
    for (const std::uint64_t bytes : {1, 1000, 65536, 1 << 20}) {
      live.emplace_back(subject, bytes);
      sum += bytes;
      const oxy_memory_info info = subject.memory();
      expect(info.allocated_bytes >= start + sum,
             "allocated_bytes of at least " + std::to_string(start + sum) + " with " + std::to_string(sum) + " live",
             std::to_string(info.allocated_bytes));
      expect(info.free_bytes <= info.total_bytes,
             "free_bytes of at most total_bytes " + std::to_string(info.total_bytes), std::to_string(info.free_bytes));
    }
  }
  const std::uint64_t end = subject.memory().allocated_bytes;
  expect(end == start, "allocated_bytes back at " + std::to_string(start) + " when all is freed", std::to_string(end));
}

void thousand(const Subject& subject) {
  const std::uint64_t start = subject.memory().allocated_bytes;
  for (std::uint64_t turn = 0; turn < 1000; ++turn) {
    const std::uint64_t bytes = 1 + turn * 37 % 100000;
    void* memory = nullptr;
    expect_ok(subject, subject.table.alloc(0, OXY_MEMORY_DEVICE, bytes, &memory), "alloc " + std::to_string(turn));
    expect_ok(subject, subject.table.free(0, memory), "free " + std::to_string(turn));
  }
  const std::uint64_t end = subject.memory().allocated_bytes;
  expect(end == start, "allocated_bytes back at " + std::to_string(start) + " after 1,000 allocations",
         std::to_string(end));
}

void until_full(const Subject& subject) {
  const std::uint64_t total = subject.memory().total_bytes;
  if (total > std::uint64_t{1} << 30) throw NotApplicable{"the device has over 1 GiB; it is not filled up"};
  const std::uint64_t start = subject.memory().allocated_bytes;
  std::size_t held[2] = {0, 0};
  for (std::size_t& count : held) {
    std::vector<void*> live;
    oxy_status status = OXY_OK;
    void* memory = nullptr;
    const std::uint64_t bytes = std::max<std::uint64_t>(total / 64, 1);
    while ((status = subject.table.alloc(0, OXY_MEMORY_DEVICE, bytes, &memory)) == OXY_OK && live.size() < 1000) {
      live.push_back(memory);
    }
    count = live.size();
    for (void* block : live) expect_ok(subject, subject.table.free(0, block), "free");
    expect_status(subject, status, OXY_OUT_OF_MEMORY, "alloc on a full device");
  }
  expect(held[0] == held[1] && held[0] > 0, "as many blocks the second time: " + std::to_string(held[0]),
         std::to_string(held[1]));
  const std::uint64_t end = subject.memory().allocated_bytes;
  expect(end == start, "allocated_bytes back at " + std::to_string(start), std::to_string(end));
}

void bad_free(const Subject& subject) {
  if ((subject.properties().flags & OXY_DEVICE_CHECKS_POINTERS) == 0) {
    throw NotApplicable{"the backend does not promise to check pointers"};
  }
  const std::uint64_t start = subject.memory().allocated_bytes;
  void* memory = nullptr;
  expect_ok(subject, subject.table.alloc(0, OXY_MEMORY_DEVICE, 4096, &memory), "alloc");
  expect_status(subject, subject.table.free(0, static_cast<std::uint8_t*>(memory) + 64), OXY_INVALID_ARGUMENT,
                "free of a pointer into an allocation");
  expect_ok(subject, subject.table.free(0, memory), "free");
  expect_status(subject, subject.table.free(0, memory), OXY_INVALID_ARGUMENT, "the second free of one pointer");
  int on_the_stack = 0;
  expect_status(subject, subject.table.free(0, &on_the_stack), OXY_INVALID_ARGUMENT, "free of a host variable");
  const std::uint64_t end = subject.memory().allocated_bytes;
  expect(end == start, "allocated_bytes back at " + std::to_string(start), std::to_string(end));
}

void host_kind(const Subject& subject) {
  const std::uint64_t start = subject.memory().allocated_bytes;
  constexpr std::uint64_t kBytes = 100000;
  void* memory = nullptr;
  const oxy_status status = subject.table.alloc(0, OXY_MEMORY_HOST, kBytes, &memory);
  if (status == OXY_NOT_SUPPORTED) {
    expect(memory == nullptr, "a refused alloc gives NULL", hex(memory));
    throw NotApplicable{"the device has no host memory of its own"};
  }
  expect_ok(subject, status, "alloc of host memory");
  auto* host = static_cast<std::uint8_t*>(memory);
  const Bytes wanted = pattern(kBytes, 5);
  std::copy(wanted.begin(), wanted.end(), host);
  const std::uint64_t during = subject.memory().allocated_bytes;
  {
    const Memory device(subject, kBytes);
    const auto copy = [&](void* to, const void* from, oxy_copy kind) {
      return subject.table.copy_async(0, nullptr, to, from, kBytes, kind);
    };
    expect_ok(subject, copy(device.at(), host, OXY_COPY_HOST_TO_DEVICE), "copy from host memory");
    std::fill(host, host + kBytes, 0);
    expect_ok(subject, copy(host, device.at(), OXY_COPY_DEVICE_TO_HOST), "copy to host memory");
  }
  expect_same(Bytes(host, host + kBytes), wanted, "host memory after a round trip");
  expect_ok(subject, subject.table.free(0, memory), "free of host memory");
  expect(during == start, "host memory is not counted: allocated_bytes " + std::to_string(start),
         std::to_string(during));
}

}  // namespace

void add_memory_checks(std::vector<Check>& checks) {
  checks.insert(checks.end(),
                {
                    {"memory.alignment", "M1", "alloc gives usable, aligned bytes of the caller's own", alignment},
                    {"memory.zero_bytes", "M2", "0 bytes are fine everywhere", zero_bytes},
                    {"memory.too_much", "M3", "more than there is: OXY_OUT_OF_MEMORY and NULL", too_much},
                    {"memory.accounting", "M4", "allocated_bytes grows with allocations and comes back", accounting},
                    {"memory.thousand", "M4", "nothing leaks", thousand},
                    {"memory.until_full", "M3", "a full device says so and stays usable", until_full},
                    {"memory.bad_free", "M5", "free of a wrong pointer is refused", bad_free},
                    {"memory.host_kind", "M4", "host memory works and is not counted", host_kind},
                });
}

}  // namespace conformance
