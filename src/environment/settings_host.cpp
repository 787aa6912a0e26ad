// Settings of the host side: OpenMP, allocators, oneDNN, MKL, Gloo, launchers.
#include "table.h"

namespace oxytorch::environment {
namespace {

constexpr Row kOpenmp[] = {
    {"OMP_NUM_THREADS", "grammar thread_counts", "cores", "Threads of a parallel region, one number for each level."},
    {"OMP_DYNAMIC", "Choice true/false", "false", "Lets the runtime take fewer threads."},
    {"OMP_NESTED", "Choice true/false", "false", "Allows parallel regions inside others.", "", "", "5.0",
     "OMP_MAX_ACTIVE_LEVELS"},
    {"OMP_MAX_ACTIVE_LEVELS", "int 0..", "1", "Levels of parallel regions that take more than one thread."},
    {"OMP_THREAD_LIMIT", "int 1..", "", "Threads of the whole program."},
    {"OMP_PROC_BIND", "grammar proc_bind", "false",
     "Whether threads stay on their places: false, true, or primary, close, spread for each level."},
    {"OMP_PLACES", "grammar places", "",
     "Places for threads: threads, cores, sockets, ll_caches, numa_domains or lists."},
    {"OMP_SCHEDULE", "grammar schedule", "", "How loops with schedule(runtime) are shared out."},
    {"OMP_STACKSIZE", "grammar stack_size", "", "Stack of each thread, in KiB or with B, K, M or G."},
    {"OMP_WAIT_POLICY", "Choice active/passive", "", "Whether waiting threads spin."},
    {"OMP_CANCELLATION", "Choice true/false", "false", "Allows cancelling."},
    {"OMP_DISPLAY_ENV", "Choice true/false/verbose", "false", "Prints the settings at start."},
    {"OMP_DISPLAY_AFFINITY", "Choice true/false", "false", "Prints where threads run."},
    {"OMP_AFFINITY_FORMAT", "text", "", "Format of that print."},
    {"OMP_DEFAULT_DEVICE", "text", "0", "Device of target regions."},
    {"OMP_MAX_TASK_PRIORITY", "int 0..", "0", "Highest priority of a task."},
    {"OMP_TARGET_OFFLOAD", "Choice mandatory/disabled/default", "default",
     "Whether target regions must run on a device."},
    {"OMP_NUM_TEAMS", "int 1..", "", "Teams of a teams region."},
    {"OMP_TEAMS_THREAD_LIMIT", "int 1..", "", "Threads of a team."},
    {"OMP_ALLOCATOR", "text", "", "Allocator for OpenMP's own allocations."},
    {"OMP_TOOL", "choice enabled/disabled", "enabled", "Whether tools may attach."},
    {"OMP_TOOL_LIBRARIES", "text", "", "Tools to attach."},
    {"OMP_TOOL_VERBOSE_INIT", "text", "disabled", "Prints how tools attach."},
    {"OMP_DEBUG", "choice enabled/disabled", "disabled", "Lets debuggers see the runtime."},
};

constexpr Row kLibgomp[] = {
    {"GOMP_CPU_AFFINITY", "grammar cpu_affinity", "",
     "Processors for threads, as numbers, ranges and ranges with a step."},
    {"GOMP_DEBUG", "text", "0", "Prints the runtime's debugging text."},
    {"GOMP_STACKSIZE", "grammar stack_size", "", "Stack of each thread."},
    {"GOMP_SPINCOUNT", "grammar spin_count", "by policy", "Rounds that a waiting thread spins."},
    {"GOMP_RTEMS_THREAD_POOLS", "text", "", "Thread pools on RTEMS."},
};

constexpr Row kLibomp[] = {
    {"KMP_AFFINITY", "text", "", "How Intel's and LLVM's runtime binds threads."},
    {"KMP_HIDDEN_HELPER_AFFINITY", "text", "", "The same for hidden helper threads."},
    {"KMP_ALL_THREADS", "int 1..", "", "Threads of the whole program."},
    {"KMP_BLOCKTIME", "text", "200", "Milliseconds that a thread spins after a region, or infinite."},
    {"KMP_CPUINFO_FILE", "path", "", "Where the machine's layout is read from."},
    {"KMP_DETERMINISTIC_REDUCTION", "bool", "false", "Reduces in one order."},
    {"KMP_DUPLICATE_LIB_OK", "bool", "false", "Goes on with two OpenMP runtimes in one process; results may be wrong."},
    {"KMP_DYNAMIC_MODE", "text", "", "How the number of threads is chosen."},
    {"KMP_FORCE_REDUCTION", "text", "", "How reductions are done."},
    {"KMP_HANDLE_SIGNALS", "bool", "false", "Whether the runtime handles signals."},
    {"KMP_HOT_TEAMS_MAX_LEVEL", "int 0..", "1", "Levels at which teams are kept."},
    {"KMP_HOT_TEAMS_MODE", "int 0..1", "0", "What happens to threads that a kept team does not need."},
    {"KMP_HW_SUBSET", "text", "", "Part of the machine to use."},
    {"KMP_INHERIT_FP_CONTROL", "bool", "true", "Gives threads the main thread's floating-point modes."},
    {"KMP_INIT_AT_FORK", "bool", "true", "Starts anew after fork."},
    {"KMP_LIBRARY", "choice throughput/turnaround/serial", "throughput", "Whether waiting threads give way."},
    {"KMP_PLACE_THREADS", "text", "", "Old name of KMP_HW_SUBSET.", "", "", "", "KMP_HW_SUBSET"},
    {"KMP_SETTINGS", "bool", "false", "Prints the settings at start."},
    {"KMP_STACKSIZE", "text", "", "Stack of each thread."},
    {"KMP_TOPOLOGY_METHOD", "text", "", "How the machine's layout is found."},
    {"KMP_USER_LEVEL_MWAIT", "bool", "false", "Waits with the processor's user-level monitor."},
    {"KMP_VERSION", "bool", "false", "Prints the runtime's version."},
    {"KMP_WARNINGS", "bool", "true", "Prints warnings."},
    {"KMP_TEAMS_THREAD_LIMIT", "int 1..", "", "Threads of a team."},
    {"KMP_TPAUSE", "int 0..", "0", "Waits with the processor's timed pause."},
    {"KMP_ENABLE_TASK_THROTTLING", "bool", "true", "Runs tasks at once when too many wait."},
};

constexpr Row kGlibc[] = {
    {"MALLOC_ARENA_MAX", "int 0..", "8 per core", "Most arenas."},
    {"MALLOC_ARENA_TEST", "int 0..", "8", "Arenas from which their number is limited."},
    {"MALLOC_CHECK_", "int 0..7", "", "Checks the heap; needs libc_malloc_debug preloaded since 2.34."},
    {"MALLOC_MMAP_MAX_", "int 0..", "65536", "Most blocks mapped each by itself; 0 for none."},
    {"MALLOC_MMAP_THRESHOLD_", "int 0..", "131072",
     "Bytes from which a block is mapped by itself; setting it stops the threshold from growing."},
    {"MALLOC_PERTURB_", "int 0..255", "0", "Fills blocks with a pattern; for debugging."},
    {"MALLOC_TOP_PAD_", "int 0..", "131072", "Bytes taken beyond what is needed when the heap grows."},
    {"MALLOC_TRIM_THRESHOLD_", "int -1..", "131072", "Free bytes at the top at which memory goes back to the kernel."},
    {"GLIBC_TUNABLES", "grammar glibc_tunables", "", "glibc's settings as name=value, separated by colons."},
    {"LD_PRELOAD", "text", "", "Libraries loaded before all others."},
};

constexpr Row kJemalloc[] = {
    {"MALLOC_CONF", "grammar malloc_conf", "", "jemalloc's settings as name:value, separated by commas."},
    {"_RJEM_MALLOC_CONF", "grammar malloc_conf", "", "The same for jemalloc built with Rust's prefix."},
    {"JE_MALLOC_CONF", "grammar malloc_conf", "", "The same for jemalloc built with the prefix je_."},
};

constexpr Row kTcmalloc[] = {
    {"TCMALLOC_MAX_TOTAL_THREAD_CACHE_BYTES", "int 0..", "33554432", "Bytes of all thread caches together."},
    {"TCMALLOC_RELEASE_RATE", "number 0..", "1", "How readily memory goes back to the kernel; 0 for never."},
    {"TCMALLOC_LARGE_ALLOC_REPORT_THRESHOLD", "int 0..", "1073741824",
     "Bytes from which a block is reported; 0 for never."},
    {"TCMALLOC_SAMPLE_PARAMETER", "int 0..", "0", "Bytes between sampled blocks."},
    {"TCMALLOC_AGGRESSIVE_DECOMMIT", "bool", "false", "Gives memory back at once."},
    {"TCMALLOC_HEAP_LIMIT_MB", "int 0..", "0", "Most megabytes; 0 for no limit."},
    {"TCMALLOC_TRANSFER_NUM_OBJ", "int 0..", "32", "Objects moved between caches at once."},
    {"TCMALLOC_SKIP_MMAP", "bool", "false", "Never maps memory."},
    {"TCMALLOC_SKIP_SBRK", "bool", "false", "Never grows the heap."},
    {"TCMALLOC_DISABLE_MEMORY_RELEASE", "bool", "false", "Never gives memory back."},
    {"TCMALLOC_OVERRIDE_PAGESIZE", "int 0..", "", "Bytes of tcmalloc's page."},
    {"TCMALLOC_MEMFS_MALLOC_PATH", "path", "", "Mount of huge pages to take memory from."},
    {"TCMALLOC_MEMFS_LIMIT_MB", "int 0..", "0", "Most megabytes from there."},
    {"TCMALLOC_MEMFS_ABORT_ON_FAIL", "bool", "false", "Stops when that mount is full."},
    {"TCMALLOC_MEMFS_IGNORE_MMAP_FAIL", "bool", "false", "Goes on when mapping from there fails."},
    {"TCMALLOC_MEMFS_MAP_PRIVATE", "bool", "false", "Maps privately from there."},
    {"TCMALLOC_MEMFS_DISABLE_FALLBACK", "bool", "false", "Takes memory from nowhere else."},
    {"TCMALLOC_ENABLE_SIZED_DELETE", "bool", "false", "Trusts the size given to delete."},
    {"TCMALLOC_STACKTRACE_METHOD", "text", "", "How stacks are read."},
    {"TCMALLOC_STACKTRACE_METHOD_VERBOSE", "text", "", "Prints which way that is."},
};

constexpr Row kOnednn[] = {
    {"ONEDNN_VERBOSE", "text", "none", "What oneDNN prints of its primitives."},
    {"ONEDNN_VERBOSE_TIMESTAMP", "digit", "0", "Puts the time into those lines."},
    {"ONEDNN_VERBOSE_LOGFILE", "path", "", "Where those lines go."},
    {"ONEDNN_VERBOSE_LOGFILE_SIZE", "int 0..", "", "Bytes of that file."},
    {"ONEDNN_VERBOSE_NUM_LOGFILES", "int 0..", "", "Files kept."},
    {"ONEDNN_VERBOSE_LOG_WITH_CONSOLE", "digit", "", "Prints to the terminal too."},
    {"ONEDNN_MAX_CPU_ISA",
     "Choice "
     "DEFAULT/ALL/SSE41/AVX/AVX2/AVX2_VNNI/AVX2_VNNI_2/AVX512_CORE/AVX512_CORE_VNNI/AVX512_CORE_BF16/AVX512_CORE_FP16/"
     "AVX512_CORE_AMX/AVX512_CORE_AMX_FP16/AVX10_1_512/AVX10_1_512_AMX/AVX10_1_512_AMX_FP16/AVX10_2/AVX10_2_512/"
     "AVX10_2_512_AMX_2/AVX10_2_AMX_2/AVX10_2_ACE",
     "DEFAULT", "Highest instruction set that oneDNN may use."},
    {"ONEDNN_CPU_ISA_HINTS", "Choice NO_HINTS/PREFER_YMM", "NO_HINTS", "Prefers narrower registers."},
    {"ONEDNN_PRIMITIVE_CACHE_CAPACITY", "int 0..", "1024", "Primitives kept for reuse."},
    {"ONEDNN_DEFAULT_FPMATH_MODE", "Choice STRICT/BF16/F16/TF32/ANY", "STRICT",
     "Precision that oneDNN may use for fp32."},
    {"ONEDNN_JIT_PROFILE", "int 0..", "1", "Tells profilers of generated code."},
    {"ONEDNN_JIT_DUMP", "digit", "0", "Writes generated code to files."},
    {"ONEDNN_GRAPH_DUMP", "text", "", "Writes graphs to files."},
    {"ONEDNN_CACHE_CONTEXT_UNSAFE", "text", "", "Reuses torch's oneDNN contexts without checks."},
    {"DNNL_VERBOSE", "text", "none", "Old name of ONEDNN_VERBOSE.", "", "", "", "ONEDNN_VERBOSE"},
    {"DNNL_MAX_CPU_ISA", "text", "", "Old name of ONEDNN_MAX_CPU_ISA.", "", "", "", "ONEDNN_MAX_CPU_ISA"},
    {"DNNL_CPU_ISA_HINTS", "text", "", "Old name of ONEDNN_CPU_ISA_HINTS.", "", "", "", "ONEDNN_CPU_ISA_HINTS"},
    {"DNNL_PRIMITIVE_CACHE_CAPACITY", "int 0..", "1024", "Old name of ONEDNN_PRIMITIVE_CACHE_CAPACITY.", "", "", "",
     "ONEDNN_PRIMITIVE_CACHE_CAPACITY"},
    {"DNNL_DEFAULT_FPMATH_MODE", "text", "", "Old name of ONEDNN_DEFAULT_FPMATH_MODE.", "", "", "",
     "ONEDNN_DEFAULT_FPMATH_MODE"},
    {"DNNL_JIT_PROFILE", "int 0..", "1", "Old name of ONEDNN_JIT_PROFILE.", "", "", "", "ONEDNN_JIT_PROFILE"},
    {"DNNL_JIT_DUMP", "digit", "0", "Old name of ONEDNN_JIT_DUMP.", "", "", "", "ONEDNN_JIT_DUMP"},
    {"DNNL_GRAPH_COMPILED_PARTITION_CACHE_CAPACITY", "int 0..", "1024", "Compiled graph partitions kept for reuse."},
};

constexpr Row kMkl[] = {
    {"MKL_NUM_THREADS", "int 0..", "OMP_NUM_THREADS", "Threads of MKL."},
    {"MKL_DOMAIN_NUM_THREADS", "text", "", "Threads of MKL by domain."},
    {"MKL_NUM_STRIPES", "int", "", "How a matrix product is cut for threads."},
    {"MKL_DYNAMIC", "Choice true/false", "true", "Lets MKL take fewer threads."},
    {"MKL_CBWR", "text", "", "Makes results repeat on other processors."},
    {"MKL_VERBOSE", "int 0..2", "0", "Prints calls of MKL."},
    {"MKL_VERBOSE_OUTPUT_FILE", "path", "", "Where those lines go."},
    {"MKL_ENABLE_INSTRUCTIONS", "text", "", "Highest instruction set that MKL may use."},
    {"MKL_DISABLE_FAST_MM", "text", "", "Keeps MKL from holding memory for reuse."},
    {"MKL_FAST_MEMORY_LIMIT", "int 0..", "", "Megabytes of fast memory."},
    {"MKL_THREADING_LAYER", "Choice INTEL/GNU/TBB/SEQUENTIAL/PGI", "INTEL",
     "Threads of the MKL that is one library; torch's own is linked in."},
    {"MKL_INTERFACE_LAYER", "text", "LP64", "Integers of the MKL that is one library."},
    {"MKL_SERVICE_FORCE_INTEL", "text", "", "Keeps mkl-service from adapting to another OpenMP runtime."},
    {"MKL_MPI_PPN", "int 1..", "", "Processes on this host."},
};

constexpr Row kGloo[] = {
    {"GLOO_SOCKET_IFNAME", "list", "", "Network interfaces of Gloo; all ranks name as many, in one order."},
    {"GLOO_DEVICE_TRANSPORT", "Choice TCP/TCP_TLS/UV/IBVERBS", "TCP", "Transport of Gloo."},
    {"GLOO_DISABLE_CONNECTION_RETRIES", "text", "", "Gives up at the first refused connection."},
    {"GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER", "text", "", "Internal: how connections are numbered."},
    {"GLOO_ENABLE_STORE_V2_API", "text", "", "Internal: how Gloo speaks to the store."},
    {"GLOO_LOG_LEVEL", "text", "", "How much Gloo logs."},
    {"TORCH_GLOO_LAZY_INIT", "bool", "false", "Connects Gloo's ranks when they first speak."},
    {"TP_SOCKET_IFNAME", "text", "", "Network interface of TensorPipe."},
    {"TP_VERBOSE_LOGGING", "text", "", "How much TensorPipe logs."},
};

constexpr Row kTorchrun[] = {
    {"MASTER_ADDR", "text", "", "Host of rank 0."},
    {"MASTER_PORT", "int 0..65535", "", "Port of rank 0's store."},
    {"RANK", "int 0..", "", "Number of this process among all."},
    {"WORLD_SIZE", "int 1..", "", "Processes in all."},
    {"LOCAL_RANK", "int 0..", "", "Number of this process on its host."},
    {"LOCAL_WORLD_SIZE", "int 1..", "", "Processes on this host."},
    {"GROUP_RANK", "int 0..", "", "Number of this host's agent."},
    {"GROUP_WORLD_SIZE", "int 1..", "", "Agents in all."},
    {"ROLE_RANK", "int 0..", "", "Number of this process among those of its role."},
    {"ROLE_WORLD_SIZE", "int 1..", "", "Processes of this role."},
    {"ROLE_NAME", "text", "default", "Name of the role."},
    {"TORCHELASTIC_RESTART_COUNT", "int 0..", "", "Times that the group has been started again."},
    {"TORCHELASTIC_MAX_RESTARTS", "int 0..", "", "Times that it may be."},
    {"TORCHELASTIC_RUN_ID", "text", "", "Name of the run."},
    {"TORCHELASTIC_USE_AGENT_STORE", "choice True/False", "", "Whether the agent serves the store."},
    {"TORCHELASTIC_ERROR_FILE", "path", "", "Where a process writes its error."},
    {"TORCHELASTIC_SIGNALS_TO_HANDLE", "list", "SIGTERM,SIGINT,SIGHUP,SIGQUIT", "Signals that torchrun hands on."},
    {"TORCHELASTIC_ENABLE_FILE_TIMER", "digit", "0", "Watches processes through a named pipe."},
    {"TORCHELASTIC_TIMER_FILE", "path", "", "That pipe."},
    {"TORCHELASTIC_HEALTH_CHECK_PORT", "int 0..65535", "", "Port on which the agent says that it lives."},
    {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "text", "", "Prefix of each line of the processes' output."},
    {"TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT", "text", "",
     "How long the agent waits for a process that cannot be stopped."},
    {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "int 0..", "30", "Seconds between the signal and the kill."},
    {"TORCH_ELASTIC_WORKER_IDENTICAL", "digit", "0", "Treats processes as interchangeable."},
};

constexpr Table kTables[] = {
    {Family::OpenMp, "openmp", "OpenMP 5.2, chapter 21; libgomp manual", kOpenmp},
    {Family::OpenMp, "libgomp", "libgomp manual, environment variables", kLibgomp},
    {Family::OpenMp, "libomp", "LLVM OpenMP runtime, Runtimes.rst; Intel C++ compiler reference", kLibomp},
    {Family::Allocator, "glibc", "glibc manual, mallopt(3) and tunables; ld.so --list-tunables", kGlibc},
    {Family::Allocator, "jemalloc", "jemalloc 5.3, TUNING.md and src/jemalloc.c", kJemalloc},
    {Family::Allocator, "tcmalloc", "gperftools, docs/tcmalloc.adoc and src", kTcmalloc},
    {Family::OneDnn, "onednn", "oneDNN 3.14 developer guide", kOnednn},
    {Family::Mkl, "mkl", "oneMKL developer guide; libtorch_cpu 2.13", kMkl},
    {Family::Gloo, "gloo", "libtorch_cpu 2.13 and its Gloo", kGloo},
    {Family::Launcher, "torchrun",
     "torch 2.13, torch/distributed/run.py and elastic/agent/server/local_elastic_agent.py", kTorchrun},
};

}  // namespace

std::span<const Table> host_tables() { return kTables; }

}  // namespace oxytorch::environment
