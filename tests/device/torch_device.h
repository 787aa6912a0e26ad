/// A torch device of this machine's own, for tests without a card: `hpu` on torch's true key for it, or a PrivateUse1
/// device, both over the memory, queues and faults of the backend `sim`.
///
/// OXYTORCH_DEVICE chooses, and loading the library registers:
///   hpu           DispatchKey::HPU, hooks, autocast lists and what else a card's torch bridge brings
///   sim           PrivateUse1 under the name of the backend, whose native kernels then serve it
///   privateuse1   PrivateUse1 under a name that no backend has: every step runs as operators
/// Any other value (cpu, cuda, nothing) registers no device.
///
/// An operator runs on the processor over the device's own memory, without copies of its operands, and refuses operands
/// of another device as a card does. Device pointers cannot be read by the host.
///
/// OXYTORCH_FAKE takes away what some bridges lack, and adds what cards do, separated by commas:
///   one_device         one device whatever `sim` has; choosing a device does nothing
///   plain_allocator    a c10::Allocator that is no c10::DeviceAllocator
///   silent_allocator   no profiler is told of its blocks
///   no_hooks           torch.accelerator, pinned memory and generators do not know the device
///   no_streams         one stream, which cannot be waited for; no events
///   no_events          streams without events
///   asynchronous       copies that need not block are done later: before the stream's next operator, or when waited
///   for
#pragma once

#include <c10/core/Device.h>

#include <cstdint>

#define OXY_TEST_API __attribute__((visibility("default")))

namespace oxytorch::test {

/// The first device of the library's kind; the CPU where it registered none.
OXY_TEST_API c10::Device torch_device();

/// The device that tests of this program run on: as OXYTORCH_DEVICE says, cuda included.
OXY_TEST_API c10::Device test_device();

/// Values that the host has read from the device so far: `item()`, copies to the CPU, and operators that answer with a
/// number.
OXY_TEST_API std::int64_t host_reads();

/// What each device of the library has, from here on; 0: as `sim` says.
OXY_TEST_API void set_memory_limit(std::int64_t bytes);

}  // namespace oxytorch::test
