/// What this process runs on: processor, cores, memory, instruction sets. Linux.
///
/// The readers take the root of the file tree, so that tests can give them another machine's. A file that is absent
/// or unreadable makes its value unknown (an empty optional, an empty text), never an error.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "oxytorch/api.h"

namespace oxytorch {

/// Bytes; unknown values are empty.
struct MemoryInfo {
  std::optional<std::uint64_t> physical;       ///< of the machine
  std::optional<std::uint64_t> cgroup_limit;   ///< least limit on the way up the cgroup tree (v1 or v2)
  std::optional<std::uint64_t> limit;          ///< what this process may use: the lesser of the two
  std::optional<std::uint64_t> available;      ///< what it may still take now without swapping or being killed
  std::optional<std::uint64_t> resident;       ///< of this process (VmRSS)
  std::optional<std::uint64_t> peak_resident;  ///< of this process since it started (VmHWM)
};

struct CoreInfo {
  std::optional<int> logical;   ///< hardware threads of the machine
  std::optional<int> physical;  ///< cores of the machine
  std::optional<int> affinity;  ///< hardware threads in this process's affinity mask
  std::optional<double> quota;  ///< processors' worth of time the cgroup allows (v1 or v2, least on the way up)
  /// Hardware threads to use: the affinity mask, capped by the quota rounded down; at least 1.
  int usable = 1;
  /// The same counting each core once: hyperthreads of one core do not add to matrix arithmetic.
  int usable_physical = 1;
  std::vector<int> one_a_core;  ///< the first hardware thread of each core in the affinity mask; empty where unknown
  int last_level_caches = 1;    ///< that those hardware threads have between them; 1 where unknown
};

/// Instruction sets that this processor has and its operating system lets a process use.
struct OXY_API CpuFeatures {
  bool f16c = false;
  bool fma = false;
  bool avx2 = false;
  bool avx512f = false;
  bool avx512bw = false;
  bool avx512dq = false;
  bool avx512vl = false;
  bool avx512_vnni = false;
  bool avx512_bf16 = false;
  bool avx512_fp16 = false;
  bool amx_tile = false;
  bool amx_bf16 = false;
  bool amx_fp16 = false;
  /// bf16 products in hardware: without it bf16 training is slower than fp32.
  [[nodiscard]] bool has_native_bf16() const noexcept { return avx512_bf16 || amx_bf16; }
  /// fp16 products in hardware; F16C only converts.
  [[nodiscard]] bool has_native_fp16() const noexcept { return avx512_fp16 || amx_fp16; }
};

/// The model name, or "".
OXY_API std::string processor_name(const std::string& root = "/");

OXY_API CoreInfo read_cores(const std::string& root = "/");

OXY_API MemoryInfo read_memory(const std::string& root = "/");

/// Of this machine, found once.
OXY_API const CpuFeatures& cpu_features();

}  // namespace oxytorch
