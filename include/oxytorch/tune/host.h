/// Host settings that need torch: its intra-op threads, denormal numbers on each of them, and MKL's vector functions.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "oxytorch/api.h"
#include "oxytorch/host.h"

namespace oxytorch {

/// Makes the processor take denormal numbers as zero, on the calling thread and on every intra-op worker.
///
/// Arithmetic on denormals is 10 to 200 times slower, and optimizer state falls into them. torch's own
/// `set_flush_denormal` reaches the calling thread only. CPU backward runs on the thread that calls backward(), so
/// this thread and the workers are all that a step uses; threads created later by this one inherit the setting.
/// Results change only where a number below 1.2e-38 (float32) took part. revert() restores what each thread had.
OXY_API HostSetting flush_denormals();

/// Sets torch's intra-op threads to the cores this process may use (affinity and cgroup), never above.
///
/// Unchanged, with a sentence, where the number is right already or OMP_NUM_THREADS or MKL_NUM_THREADS asks for one.
/// `threads`, if given, is used as it is but capped at the cores this process may use. The order of some reductions
/// depends on the number of threads, so results may change in the last bits.
OXY_API HostSetting size_threads(std::optional<int> threads = std::nullopt);

/// Sets the number of threads that run whole operators beside each other (torch::jit::fork, at::launch).
///
/// torch takes it once in a process, before the first such operator: refused, with a sentence, where it is another one
/// by then. For the same reason revert() cannot take it back; it says so in the log.
OXY_API HostSetting size_interop_threads(int threads);

/// Keeps each of torch's intra-op workers on a core of its own, so that it finds its part of the data in the caches and
/// the memory where it worked on it last. The calling thread stays free: threads and processes that it starts later
/// inherit where it may run. Bits do not change.
///
/// Refused, with a sentence, for one thread, for more threads than cores in the affinity mask, and where OMP_PROC_BIND,
/// OMP_PLACES, GOMP_CPU_AFFINITY or KMP_AFFINITY decides. Workers that torch makes anew, after a change of their
/// number, are free again. revert() gives each worker the mask it had.
OXY_API HostSetting pin_threads();

/// torch's deterministic algorithms: an operation without one raises. May be applied several times; the last revert()
/// restores what was before the first, unless somebody else has changed it since.
OXY_API HostSetting use_deterministic_algorithms();

/// How many of torch's intra-op threads flush denormals now, and how many there are. For tests and reports.
struct FlushState {
  int flushing;
  int threads;
};
OXY_API FlushState flush_state();

/// torch.set_flush_denormal() of every intra-op thread; torch's own is of the calling thread alone.
OXY_API void set_flush_denormals(bool flush);

/// Has MKL choose its kernel for each vector function that torch calls, in float32 and float64, from this thread.
///
/// MKL chooses at a function's first call. Where the intra-op threads make that call together, one of them may take a
/// kernel of lower accuracy for its part, and the first step of an optimizer comes out otherwise
/// (github.com/pytorch/pytorch/issues/188792; of MKL 2024.2, which torch's wheels hold). Done at `import oxytorch`, by
/// each TrainingStep (of Run, accelerate() and Trainer) and by adam_step(); a program whose own operators come first
/// calls it first. Thread-safe; of no effect after the first time and without MKL. Returns what was called, such as
/// "sqrt.float32", for the whole process.
OXY_API const std::vector<std::string>& resolve_vector_math();

}  // namespace oxytorch
