/// The step tail's kernels as CUDA functions: include this in one .cu file, compiled with --fmad=false, and write
/// OXY_TAIL_DEFINE_CUDA_KERNELS in it. Each gets the symbol that tail_arguments.h lists.
#pragma once

#ifndef __CUDACC__
#error "cuda_grid.h is for nvcc"
#endif

#include "kernels/device/tail_kernels.h"

namespace oxytorch::kernels::device {

/// A block of threads: see HostBlock in emulated_grid.h, which does the same on the processor.
struct CudaBlock {
  std::uint32_t index;
  /// Runs `phase` once for each thread of the block; all are done, and see what the others wrote, when it returns.
  template <class Phase>
  OXY_HOST_DEVICE void each(Phase&& phase) const {
#ifdef __CUDA_ARCH__
    phase(static_cast<std::uint32_t>(threadIdx.x));
    __syncthreads();
#endif
  }
  /// The `count` elements that lie at `device_address`.
  template <class T>
  OXY_HOST_DEVICE T* array(T* device_address, std::int64_t count) const {
    return device_address;
  }
};

template <class Kernel>
__device__ __forceinline__ void run_kernel(const typename Kernel::Arguments& arguments) {
  __shared__ typename Kernel::Shared shared;
  Kernel::run(CudaBlock{blockIdx.x}, shared, arguments);
}

}  // namespace oxytorch::kernels::device

#define OXY_TAIL_CUDA_KERNEL(id, symbol, ...)                                     \
  extern "C" __global__ void __launch_bounds__(kThreads)                          \
      symbol(const __grid_constant__ typename __VA_ARGS__::Arguments arguments) { \
    run_kernel<__VA_ARGS__>(arguments);                                           \
  }
#define OXY_TAIL_DEFINE_CUDA_KERNELS     \
  namespace oxytorch::kernels::device {  \
  OXY_TAIL_KERNELS(OXY_TAIL_CUDA_KERNEL) \
  }
