/// The kernels that the fake driver knows, run on the host.
#pragma once

#include <functional>

/// Takes a launch's parameters and gives the work that does it.
using FakeKernel = std::function<void()> (*)(unsigned grid, unsigned block, unsigned shared_bytes, void** parameters);

/// The kernel of that name, or nullptr.
FakeKernel fake_kernel(const char* name);
