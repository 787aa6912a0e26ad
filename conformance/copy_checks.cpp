#include <algorithm>

#include "suite.h"

namespace conformance {
namespace {

constexpr std::uint64_t kGuard = 256;
constexpr std::uint8_t kSentinel = 0xA5;
constexpr std::uint64_t kSizes[] = {
    1, 2, 3, 7, 8, 15, 16, 63, 64, 65, 255, 4095, 4096, 65535, 65537, 99991, 1 << 20, (1 << 20) + 3, (4 << 20) + 1};

// What a buffer of sentinels must hold after `bytes` were written at `offset`.
Bytes guarded(std::uint64_t total, const Bytes& inside, std::uint64_t offset) {
  Bytes wanted(total, kSentinel);
  std::copy(inside.begin(), inside.end(), wanted.begin() + static_cast<std::ptrdiff_t>(offset));
  return wanted;
}

std::string named(const char* what, std::uint64_t bytes, std::uint64_t offset) {
  return std::string(what) + " of " + std::to_string(bytes) + " bytes at offset " + std::to_string(offset) +
         " (sentinels around)";
}

void round_trip(const Subject& subject) {
  for (const std::uint64_t bytes : kSizes) {
    const Memory memory(subject, bytes);
    for (std::uint32_t seed = 1; seed <= 2; ++seed) {
      memory.write(pattern(bytes, seed));
      expect_same(memory.read(bytes), pattern(bytes, seed), "round trip of " + std::to_string(bytes) + " bytes");
    }
  }
}

void host_to_device(const Subject& subject) {
  const Memory memory(subject, (1 << 16) + 4 * kGuard);
  for (const std::uint64_t bytes : {1, 3, 8, 17, 64, 1000, 65537}) {
    for (const std::uint64_t offset : {kGuard, kGuard + 1, kGuard + 7, kGuard + 13, 2 * kGuard}) {
      memory.fill(kSentinel);
      const Bytes wanted = pattern(bytes, static_cast<std::uint32_t>(offset));
      memory.write(wanted, offset);
      expect_same(memory.read(memory.size()), guarded(memory.size(), wanted, offset),
                  named("copy to the device", bytes, offset));
    }
  }
}

void device_to_host(const Subject& subject) {
  const Memory memory(subject, (1 << 16) + 4 * kGuard);
  const Bytes source = pattern(memory.size(), 3);
  memory.write(source);
  for (const std::uint64_t bytes : {1, 3, 8, 17, 64, 1000, 65537}) {
    for (const std::uint64_t offset : {kGuard, kGuard + 1, kGuard + 9}) {
      Bytes host(memory.size(), kSentinel);
      expect_ok(subject,
                subject.table.copy_async(0, nullptr, host.data() + offset, memory.at(2 * offset), bytes,
                                         OXY_COPY_DEVICE_TO_HOST),
                "copy to the host");
      const auto from = source.begin() + static_cast<std::ptrdiff_t>(2 * offset);
      const Bytes wanted(from, from + static_cast<std::ptrdiff_t>(bytes));
      expect_same(host, guarded(host.size(), wanted, offset), named("copy to the host", bytes, offset));
    }
  }
  expect_same(memory.read(memory.size()), source, "the source after copies to the host");
}

void device_to_device(const Subject& subject) {
  const Memory from(subject, (1 << 16) + 4 * kGuard);
  const Memory to(subject, from.size());
  const Bytes source = pattern(from.size(), 4);
  from.write(source);
  for (const std::uint64_t bytes : {1, 5, 8, 31, 64, 4097, 65536}) {
    for (const std::uint64_t offset : {kGuard, kGuard + 3, kGuard + 8}) {
      to.fill(kSentinel);
      expect_ok(
          subject,
          subject.table.copy_async(0, nullptr, to.at(offset), from.at(offset + 5), bytes, OXY_COPY_DEVICE_TO_DEVICE),
          "copy within the device");
      const auto start = source.begin() + static_cast<std::ptrdiff_t>(offset + 5);
      const Bytes wanted(start, start + static_cast<std::ptrdiff_t>(bytes));
      expect_same(to.read(to.size()), guarded(to.size(), wanted, offset),
                  named("copy within the device", bytes, offset));
    }
  }
  expect_same(from.read(from.size()), source, "the source after copies within the device");
}

void fill(const Subject& subject) {
  const Memory memory(subject, (1 << 16) + 4 * kGuard);
  for (const std::uint64_t bytes : {1, 2, 3, 5, 8, 63, 64, 65, 1001, 65537}) {
    for (const std::uint64_t offset : {kGuard, kGuard + 1, kGuard + 6}) {
      for (const std::uint8_t value : {0x00, 0x01, 0x7F, 0x80, 0xFF}) {
        memory.fill(kSentinel);
        expect_ok(subject, subject.table.fill_async(0, nullptr, memory.at(offset), value, bytes), "fill_async");
        expect_same(memory.read(memory.size()), guarded(memory.size(), Bytes(bytes, value), offset),
                    named("fill", bytes, offset));
      }
    }
  }
}

void blocking(const Subject& subject) {
  constexpr std::uint64_t kBytes = 1 << 20;
  const Memory memory(subject, kBytes);
  for (std::uint32_t seed = 1; seed <= 20; ++seed) {
    Bytes host = pattern(kBytes, seed);
    memory.write(host);
    // The caller may reuse its memory at once.
    std::fill(host.begin(), host.end(), 0);
    expect_same(memory.read(kBytes), pattern(kBytes, seed), "copies with queue NULL, host memory reused at once");
  }
}

void peer(const Subject& subject) {
  subject.need_devices(2);
  if ((subject.properties().flags & OXY_DEVICE_PEER_COPY) == 0) throw NotApplicable{"no copies between devices"};
  constexpr std::uint64_t kBytes = 100001;
  const Memory from(subject, kBytes, 0);
  const Memory to(subject, kBytes, 1);
  from.write(pattern(kBytes, 6));
  to.fill(0);
  expect_ok(subject, subject.table.copy_async(1, nullptr, to.at(), from.at(), kBytes, OXY_COPY_DEVICE_TO_DEVICE),
            "copy from device 0 to device 1");
  expect_same(to.read(kBytes), pattern(kBytes, 6), "copy between devices");
}

}  // namespace

void add_copy_checks(std::vector<Check>& checks) {
  const char* exact = "copies and fills touch exactly the bytes they were asked for";
  checks.insert(checks.end(), {
                                  {"copy.round_trip", "M6", exact, round_trip},
                                  {"copy.host_to_device", "M6", exact, host_to_device},
                                  {"copy.device_to_host", "M6", exact, device_to_host},
                                  {"copy.device_to_device", "M6", exact, device_to_device},
                                  {"copy.fill", "M6", exact, fill},
                                  {"copy.blocking", "Q4", "a call with queue NULL is done when it returns", blocking},
                                  {"copy.peer", "M6", exact, peer},
                              });
}

}  // namespace conformance
