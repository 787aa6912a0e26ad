// Settings of the CUDA driver, runtime and libraries.
#include "table.h"

namespace oxytorch::environment {
namespace {

constexpr Row kCuda[] = {
    {"CUDA_VISIBLE_DEVICES", "grammar cuda_devices", "",
     "Cards that a process sees, as numbers or UUIDs; the list ends at the first that is not there."},
    {"CUDA_DEVICE_ORDER", "choice FASTEST_FIRST/PCI_BUS_ID", "FASTEST_FIRST", "Order in which cards are numbered."},
    {"CUDA_LAUNCH_BLOCKING", "digit", "0", "Makes each launch wait for its end; for debugging."},
    {"CUDA_DEVICE_MAX_CONNECTIONS", "int 1..32", "8",
     "Queues between host and card; 1 orders launches for tensor parallelism that overlaps."},
    {"CUDA_MODULE_LOADING", "choice DEFAULT/LAZY/EAGER", "LAZY", "Whether kernels are loaded when first used."},
    {"CUDA_MODULE_DATA_LOADING", "choice DEFAULT/LAZY/EAGER", "LAZY",
     "Whether a module's data is loaded when first used."},
    {"CUDA_CACHE_DISABLE", "digit", "0", "Turns the cache of compiled kernels off."},
    {"CUDA_CACHE_PATH", "path", "~/.nv/ComputeCache", "Folder of that cache."},
    {"CUDA_CACHE_MAXSIZE", "int 0..4294967296", "1073741824", "Bytes of that cache."},
    {"CUDA_FORCE_PTX_JIT", "digit", "0", "Compiles kernels anew from PTX; a test for forward compatibility."},
    {"CUDA_DISABLE_PTX_JIT", "digit", "0", "Never compiles kernels from PTX."},
    {"CUDA_FORCE_JIT", "digit", "0", "Compiles kernels anew."},
    {"CUDA_DISABLE_JIT", "digit", "0", "Never compiles kernels at run time."},
    {"CUDA_AUTO_BOOST", "digit", "1", "Lets clocks rise; read by old cards."},
    {"CUDA_MANAGED_FORCE_DEVICE_ALLOC", "digit", "0", "Keeps managed memory on cards."},
    {"CUDA_DEVICE_WAITS_ON_EXCEPTION", "digit", "0", "Halts at a device exception for a debugger."},
    {"CUDA_ENABLE_COREDUMP_ON_EXCEPTION", "digit", "0", "Writes a core dump at a device exception."},
    {"CUDA_ENABLE_CPU_COREDUMP_ON_EXCEPTION", "digit", "1", "Writes the host's core dump with it."},
    {"CUDA_ENABLE_LIGHTWEIGHT_COREDUMP", "digit", "0", "Leaves memory out of that dump."},
    {"CUDA_ENABLE_USER_TRIGGERED_COREDUMP", "digit", "0", "Lets a user ask for a dump."},
    {"CUDA_COREDUMP_FILE", "path", "", "Where that dump goes."},
    {"CUDA_COREDUMP_PIPE", "path", "", "Pipe by which a user asks for a dump."},
    {"CUDA_MPS_PIPE_DIRECTORY", "path", "/tmp/nvidia-mps", "Where a client finds the multi-process service."},
    {"CUDA_MPS_LOG_DIRECTORY", "path", "/var/log/nvidia-mps", "Where the multi-process service logs."},
    {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "number 0..100", "100",
     "Share of a card that a client of the multi-process service gets."},
    {"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "text", "", "Memory that a client of the multi-process service may take."},
    {"CUDA_HOME", "path", "", "Folder of the toolkit, for building."},
    {"CUDA_PATH", "path", "", "Folder of the toolkit, for building."},
    {"CUDA_VERSION", "text", "", "Version of the toolkit, set by container images."},
    {"NVIDIA_TF32_OVERRIDE", "digit", "", "0 turns TF32 off in every NVIDIA library, whatever the program asks for."},
    {"NVIDIA_VISIBLE_DEVICES", "text", "", "Cards that the container runtime shows."},
    {"NVIDIA_DRIVER_CAPABILITIES", "list", "", "Parts of the driver that the container runtime shows."},
    {"CUBLAS_WORKSPACE_CONFIG", "grammar cublas_workspace", "",
     "cuBLAS workspaces as :KiB:count; :4096:8 or :16:8 make its results repeat."},
    {"CUBLASLT_WORKSPACE_SIZE", "int 0..", "", "KiB of torch's workspace for cuBLASLt."},
    {"CUBLAS_LOGINFO_DBG", "digit", "0", "Logs cuBLAS calls."},
    {"CUBLAS_LOGDEST_DBG", "text", "", "Where cuBLAS logs."},
    {"CUBLASLT_LOG_LEVEL", "int 0..5", "0", "How much cuBLASLt logs."},
    {"CUBLASLT_LOG_FILE", "path", "", "Where cuBLASLt logs."},
    {"CUDNN_LOGLEVEL_DBG", "int 0..3", "0", "How much cuDNN logs."},
    {"CUDNN_LOGDEST_DBG", "text", "", "Where cuDNN logs."},
    {"CUDNN_LOGINFO_DBG", "digit", "0", "Logs cuDNN calls; of cuDNN 8.", "", "", "9", "CUDNN_LOGLEVEL_DBG"},
    {"CUDNN_LOGWARN_DBG", "digit", "0", "Logs cuDNN warnings; of cuDNN 8.", "", "", "9", "CUDNN_LOGLEVEL_DBG"},
    {"CUDNN_LOGERR_DBG", "digit", "0", "Logs cuDNN errors; of cuDNN 8.", "", "", "9", "CUDNN_LOGLEVEL_DBG"},
};

constexpr Table kTables[] = {
    {Family::Cuda, "cuda", "CUDA C++ Programming Guide 13, environment variables", kCuda},
};

}  // namespace

std::span<const Table> cuda_tables() { return kTables; }

}  // namespace oxytorch::environment
