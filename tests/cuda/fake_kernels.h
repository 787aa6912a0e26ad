/// The kernels that the fake driver knows: the device's own text, run by the emulated grid.
#pragma once

#include <cstdint>
#include <functional>

/// The kernel's number, or -1 for a name that it does not know.
int fake_kernel(const char* name);

/// Whether [address, address + bytes) lies in device memory.
using FakeMemoryCheck = bool (*)(std::uint64_t address, std::uint64_t bytes);

/// Copies a launch's arguments and gives the work that does it; false where it reached outside of device memory.
std::function<bool()> fake_launch(int kernel, unsigned blocks, unsigned threads, void** parameters,
                                  FakeMemoryCheck check);
