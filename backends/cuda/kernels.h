/// The native kernels, where the backend was built with them.
#pragma once

#include "oxytorch/backend.h"
#include "oxytorch/backend_kernels.h"

namespace oxytorch::backend::cuda {

#if defined(OXY_CUDA_KERNELS)
extern const oxy_kernels kKernelTable;
inline constexpr const oxy_kernels* kKernels = &kKernelTable;
#else
inline constexpr const oxy_kernels* kKernels = nullptr;
#endif

}  // namespace oxytorch::backend::cuda
