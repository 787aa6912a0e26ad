/// torch's fp32_precision settings as they are stored, not as they are resolved.
///
/// A reader of torch resolves a setting that inherits through its parents, so that writing back what was read would pin
/// it. What is stored is found by changing the parents and looking. cuDNN's settings start out unwritten: tf32, unless
/// a parent says otherwise. torch lets nobody write that state again, so an unwritten one is changed by its parent.
#pragma once

#include <optional>
#include <vector>

#include "optim/torch_versions.h"
#include "oxytorch/host.h"

namespace oxytorch::accelerator {

/// Empty: unwritten.
std::optional<Float32Precision> stored_precision(Float32Backend backend, Float32Op op);

/// Sets operations of one backend, and no other operation, to `value`; the way back is exact.
HostSetting set_precision(Float32Backend backend, const std::vector<Float32Op>& ops, Float32Precision value);

}  // namespace oxytorch::accelerator
