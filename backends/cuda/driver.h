/// The CUDA driver's C interface as far as this backend uses it, declared here so that no CUDA header and no CUDA
/// library is needed to build or to load the backend. driver_abi.cpp holds every line against cuda.h where there is
/// one.
#pragma once

#include <cstddef>
#include <cstdint>

// The names of cuda.h, so that both may be seen by one unit.
struct CUctx_st;
struct CUstream_st;
struct CUevent_st;
struct CUmod_st;
struct CUfunc_st;

namespace oxytorch::backend::cuda {

using Result = int;  // CUresult
using Device = int;  // CUdevice
using Address = unsigned long long;
using Context = CUctx_st*;
using Stream = CUstream_st*;
using Event = CUevent_st*;
using Module = CUmod_st*;
using Function = CUfunc_st*;
using HostFunction = void (*)(void*);

// The constants that the backend tells apart: our name, that of cuda.h, value.
#define OXY_CUDA_CONSTANTS(X)                                                \
  X(kSuccess, CUDA_SUCCESS, 0)                                               \
  X(kInvalidValue, CUDA_ERROR_INVALID_VALUE, 1)                              \
  X(kOutOfMemory, CUDA_ERROR_OUT_OF_MEMORY, 2)                               \
  X(kNotInitialized, CUDA_ERROR_NOT_INITIALIZED, 3)                          \
  X(kDeinitialized, CUDA_ERROR_DEINITIALIZED, 4)                             \
  X(kDeviceUnavailable, CUDA_ERROR_DEVICE_UNAVAILABLE, 46)                   \
  X(kNoDevice, CUDA_ERROR_NO_DEVICE, 100)                                    \
  X(kInvalidDevice, CUDA_ERROR_INVALID_DEVICE, 101)                          \
  X(kInvalidImage, CUDA_ERROR_INVALID_IMAGE, 200)                            \
  X(kInvalidContext, CUDA_ERROR_INVALID_CONTEXT, 201)                        \
  X(kNoBinaryForGpu, CUDA_ERROR_NO_BINARY_FOR_GPU, 209)                      \
  X(kEccUncorrectable, CUDA_ERROR_ECC_UNCORRECTABLE, 214)                    \
  X(kInvalidPtx, CUDA_ERROR_INVALID_PTX, 218)                                \
  X(kNvlinkUncorrectable, CUDA_ERROR_NVLINK_UNCORRECTABLE, 220)              \
  X(kJitCompilerNotFound, CUDA_ERROR_JIT_COMPILER_NOT_FOUND, 221)            \
  X(kUnsupportedPtx, CUDA_ERROR_UNSUPPORTED_PTX_VERSION, 222)                \
  X(kInvalidHandle, CUDA_ERROR_INVALID_HANDLE, 400)                          \
  X(kNotFound, CUDA_ERROR_NOT_FOUND, 500)                                    \
  X(kNotReady, CUDA_ERROR_NOT_READY, 600)                                    \
  X(kIllegalAddress, CUDA_ERROR_ILLEGAL_ADDRESS, 700)                        \
  X(kLaunchOutOfResources, CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, 701)          \
  X(kLaunchTimeout, CUDA_ERROR_LAUNCH_TIMEOUT, 702)                          \
  X(kContextIsDestroyed, CUDA_ERROR_CONTEXT_IS_DESTROYED, 709)               \
  X(kAssert, CUDA_ERROR_ASSERT, 710)                                         \
  X(kHardwareStackError, CUDA_ERROR_HARDWARE_STACK_ERROR, 714)               \
  X(kIllegalInstruction, CUDA_ERROR_ILLEGAL_INSTRUCTION, 715)                \
  X(kMisalignedAddress, CUDA_ERROR_MISALIGNED_ADDRESS, 716)                  \
  X(kInvalidAddressSpace, CUDA_ERROR_INVALID_ADDRESS_SPACE, 717)             \
  X(kInvalidPc, CUDA_ERROR_INVALID_PC, 718)                                  \
  X(kLaunchFailed, CUDA_ERROR_LAUNCH_FAILED, 719)                            \
  X(kNotPermitted, CUDA_ERROR_NOT_PERMITTED, 800)                            \
  X(kNotSupported, CUDA_ERROR_NOT_SUPPORTED, 801)                            \
  X(kSystemNotReady, CUDA_ERROR_SYSTEM_NOT_READY, 802)                       \
  X(kMpsConnectionFailed, CUDA_ERROR_MPS_CONNECTION_FAILED, 805)             \
  X(kMpsRpcFailure, CUDA_ERROR_MPS_RPC_FAILURE, 806)                         \
  X(kCaptureUnsupported, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, 900)         \
  X(kCaptureWrongThread, CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD, 908)        \
  X(kUnknown, CUDA_ERROR_UNKNOWN, 999)                                       \
  X(kStreamNonBlocking, CU_STREAM_NON_BLOCKING, 1)                           \
  X(kMemHostAllocPortable, CU_MEMHOSTALLOC_PORTABLE, 1)                      \
  X(kAttributeMultiprocessors, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 16) \
  X(kAttributeMajor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 75)       \
  X(kAttributeMinor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 76)       \
  X(kPointerMemoryType, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, 2)                 \
  X(kPointerDeviceOrdinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, 9)           \
  X(kCaptureNone, CU_STREAM_CAPTURE_STATUS_NONE, 0)
#define OXY_CUDA_CONSTANT(name, theirs, value) inline constexpr int name = value;
OXY_CUDA_CONSTANTS(OXY_CUDA_CONSTANT)
#undef OXY_CUDA_CONSTANT

// Every function by the name that the library exports, and its parameters. All are there since driver 11.3.
#define OXY_CUDA_FUNCTIONS(X)                                                                                  \
  X(cuInit, (unsigned flags))                                                                                  \
  X(cuDriverGetVersion, (int* version))                                                                        \
  X(cuGetErrorName, (Result result, const char** name))                                                        \
  X(cuGetErrorString, (Result result, const char** text))                                                      \
  X(cuDeviceGetCount, (int* count))                                                                            \
  X(cuDeviceGet, (Device * device, int ordinal))                                                               \
  X(cuDeviceGetName, (char* name, int length, Device device))                                                  \
  X(cuDeviceTotalMem_v2, (std::size_t * bytes, Device device))                                                 \
  X(cuDeviceGetAttribute, (int* value, int attribute, Device device))                                          \
  X(cuDeviceGetPCIBusId, (char* id, int length, Device device))                                                \
  X(cuDevicePrimaryCtxRetain, (Context * context, Device device))                                              \
  X(cuCtxGetCurrent, (Context * context))                                                                      \
  X(cuCtxPushCurrent_v2, (Context context))                                                                    \
  X(cuCtxPopCurrent_v2, (Context * context))                                                                   \
  X(cuCtxGetDevice, (Device * device))                                                                         \
  X(cuMemGetInfo_v2, (std::size_t * free, std::size_t * total))                                                \
  X(cuMemAlloc_v2, (Address * address, std::size_t bytes))                                                     \
  X(cuMemFree_v2, (Address address))                                                                           \
  X(cuMemHostAlloc, (void** memory, std::size_t bytes, unsigned flags))                                        \
  X(cuMemFreeHost, (void* memory))                                                                             \
  X(cuPointerGetAttribute, (void* value, int attribute, Address address))                                      \
  X(cuMemcpyHtoDAsync_v2, (Address to, const void* from, std::size_t bytes, Stream stream))                    \
  X(cuMemcpyDtoHAsync_v2, (void* to, Address from, std::size_t bytes, Stream stream))                          \
  X(cuMemcpyDtoDAsync_v2, (Address to, Address from, std::size_t bytes, Stream stream))                        \
  X(cuMemcpyPeerAsync,                                                                                         \
    (Address to, Context to_context, Address from, Context from_context, std::size_t bytes, Stream stream))    \
  X(cuMemsetD8Async, (Address to, unsigned char value, std::size_t bytes, Stream stream))                      \
  X(cuLaunchHostFunc, (Stream stream, HostFunction function, void* data))                                      \
  X(cuStreamCreateWithPriority, (Stream * stream, unsigned flags, int priority))                               \
  X(cuStreamDestroy_v2, (Stream stream))                                                                       \
  X(cuStreamSynchronize, (Stream stream))                                                                      \
  X(cuStreamWaitEvent, (Stream stream, Event event, unsigned flags))                                           \
  X(cuStreamGetCtx, (Stream stream, Context * context))                                                        \
  X(cuStreamIsCapturing, (Stream stream, int* status))                                                         \
  X(cuEventCreate, (Event * event, unsigned flags))                                                            \
  X(cuEventRecord, (Event event, Stream stream))                                                               \
  X(cuEventQuery, (Event event))                                                                               \
  X(cuEventSynchronize, (Event event))                                                                         \
  X(cuEventElapsedTime, (float* milliseconds, Event from, Event to))                                           \
  X(cuModuleLoadData, (Module * module, const void* image))                                                    \
  X(cuModuleGetFunction, (Function * function, Module module, const char* name))                               \
  X(cuLaunchKernel,                                                                                            \
    (Function function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y, \
     unsigned block_z, unsigned shared_bytes, Stream stream, void** parameters, void** extra))

struct Driver {
#define OXY_CUDA_MEMBER(name, parameters) Result(*name) parameters;  // NOLINT(bugprone-macro-parentheses)
  OXY_CUDA_FUNCTIONS(OXY_CUDA_MEMBER)
#undef OXY_CUDA_MEMBER
};

/// What there is on this machine: found out once, by the first call of any thread. Makes no context.
struct Installation {
  const char* reason = nullptr;  ///< one sentence
  int devices = 0;               ///< 0: unusable, for that reason
  int version = 0;               ///< of the driver's interface, for example 13000
  Driver driver{};
};
const Installation& installation();

/// The functions; only where the installation has devices.
inline const Driver& driver() { return installation().driver; }

/// Whether this process is a fork of one in which the driver was initialized: it does not work here.
bool forked();

/// Drivers before 12.0 (R525) are refused: PyTorch supports none of them either.
constexpr int kLeastVersion = 12000;

}  // namespace oxytorch::backend::cuda
