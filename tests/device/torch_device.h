/// A torch device (PrivateUse1) over a backend of oxytorch/backend.h, for tests on machines without a card.
///
/// Memory, copies and fills go through the backend's table; an operator without a kernel of its own runs on CPU copies.
/// So whatever works here touches device memory through operators alone. The backend is the one that
/// OXYTORCH_TORCH_DEVICE names, `sim` unless set, and the torch device has its name. Loading the library registers it.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>

namespace oxytorch::test {

/// The first device.
__attribute__((visibility("default"))) c10::Device torch_device();

/// Values that the host has read from the device so far: `item()` and copies to the CPU, those of the CPU fallback left
/// out.
__attribute__((visibility("default"))) std::int64_t host_reads();

}  // namespace oxytorch::test
