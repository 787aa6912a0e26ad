/// Environment variables that decide how a training run behaves: a registry of those that exist, and a judge.
///
/// The registry holds what public sources say of each name: CUDA, NCCL, libfabric and its EFA provider, Intel Gaudi,
/// OpenMP, memory allocators, PyTorch, oneDNN, MKL, Gloo and the launchers. The judge reads a mapping or a shell
/// script, never runs anything, and says what is unknown, obsolete, harmful here, contradicting or badly written. A
/// name outside the known prefixes is the user's own and gets no verdict.
///
/// All functions are pure and may be called from any thread.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "oxytorch/api.h"

namespace oxytorch::environment {

/// Whose setting it is.
enum class Family {
  Cuda,       ///< CUDA driver, runtime, cuBLAS and cuDNN
  Nccl,       ///< NCCL and the plugins in its repository
  Fabric,     ///< aws-ofi-nccl, libfabric with its EFA provider, rdma-core
  Gaudi,      ///< Intel Gaudi: the PyTorch bridge, HCCL, the software below them, Optimum for Gaudi
  OpenMp,     ///< the OpenMP specification, libgomp, LLVM's and Intel's libomp
  Allocator,  ///< glibc malloc, jemalloc, tcmalloc
  PyTorch,    ///< libtorch, torch.compile, torch.distributed
  OneDnn,     ///< oneDNN
  Mkl,        ///< Intel MKL
  Gloo,       ///< Gloo
  Launcher,   ///< set by torchrun, Slurm or mpirun for each process
};

/// "cuda", "nccl", "fabric", "gaudi", "openmp", "allocator", "pytorch", "onednn", "mkl", "gloo" or "launcher".
OXY_API const char* name(Family family) noexcept;

enum class Kind {
  Flag,     ///< a word for yes or no
  Digit,    ///< 0 or 1; the component takes no words
  Integer,  ///< from `low` to `high`
  Number,   ///< from `low` to `high`
  Size,     ///< bytes, with a suffix where the component takes one
  Choice,   ///< one of `choices`
  List,     ///< comma separated
  Path,
  Text,
  Grammar,  ///< a language of its own, named by `grammar`
};

OXY_API const char* name(Kind kind) noexcept;

/// One row of the registry.
struct OXY_API Setting {
  std::string name;
  Family family;
  std::string component;  ///< what `since` and `until` count: "nccl", "torch", "libfabric", ...
  Kind kind;
  std::optional<std::int64_t> low;
  std::optional<std::int64_t> high;
  std::vector<std::string> choices;
  bool any_case = false;    ///< choices are compared without regard to case
  std::string grammar;      ///< "cuda_alloc", "malloc_conf", ...; "" for other kinds
  std::string standard;     ///< the default as text; "" where unset is the default or it is not documented
  std::string since;        ///< first version of the component; "" where unknown or older than the sources read
  std::string until;        ///< first version without it; "" where it is still read
  std::string deprecated;   ///< version from which `replacement` is asked for; "" where unknown or not deprecated
  std::string replacement;  ///< what to set instead; "" where nothing
  std::string what;         ///< what it does, one sentence
  std::string evidence;     ///< the public source
  /// What may be set, for messages: "0 or 1", "a whole number from 1 to 32", "'LOC', 'PIX' or 'SYS'".
  [[nodiscard]] std::string allowed() const;
};

/// The registry, ordered by family, then by data file and name. Read when first asked for, once.
OXY_API const std::vector<Setting>& settings();

/// The row of `name`, or null. Names are compared exactly, as getenv does.
OXY_API const Setting* find(std::string_view name);

enum class Verdict {
  Fine,
  Unknown,        ///< nothing that we know reads it
  Obsolete,       ///< it was read once, or another name has taken its place
  Harmful,        ///< it works against the run in this context, or has no effect in it
  Contradicting,  ///< another setting says otherwise; only one of them counts
  BadValue,       ///< the component cannot read the value, or reads another one
};

/// "fine", "unknown", "obsolete", "harmful", "contradicting" or "bad value".
OXY_API const char* name(Verdict verdict) noexcept;

enum class Severity {
  Note,     ///< worth knowing; leaving it is all right
  Warning,  ///< costs speed or does nothing
  Error,    ///< the run fails, hangs or computes something else
};

OXY_API const char* name(Severity severity) noexcept;

/// What the settings are judged for. Everything may be left unknown; a rule that needs what is unknown is silent.
struct Context {
  std::string backend;  ///< "cuda", "hpu", "cpu", or "" for unknown: guessed from the names that are set
  /// Versions known: "nccl", "libfabric", "aws-ofi-nccl", "torch", "gaudi", "glibc"; as "2.27.3".
  std::map<std::string, std::string> versions;
  std::optional<int> cores;         ///< hardware threads that one process may use
  std::optional<bool> efa;          ///< the network is AWS EFA
  std::optional<bool> compile;      ///< the program uses torch.compile
  std::optional<bool> determinism;  ///< the program uses torch.use_deterministic_algorithms(True)
  std::string openmp;               ///< the OpenMP library loaded: "libgomp", "libiomp5", "libomp", or ""
  bool fine = false;                ///< list the settings that are fine too
  std::string neighbours = {};      ///< what other programs use of the same cores, where they share them; else empty
};

/// One variable as it is set. `line` is 0 where it does not come from a text.
struct Assignment {
  std::string name;
  std::string value;
  bool exact = true;     ///< false: the value is known only when the script runs, and is not judged
  bool removed = false;  ///< unset, as by `unset NAME`
  bool exported = true;  ///< false: the script's own variable, which no program sees unless it was set before
  int scope = 0;         ///< 0: from here on; else the command it is set for alone, each its own number
  std::string file;
  int line = 0;
};

/// One judgement. `message` is one sentence or two: what is wrong with which value, and what to do.
struct EnvironmentIssue {
  Verdict verdict;
  Severity severity;
  std::string name;
  std::string value;
  std::string message;
  std::string other;        ///< the setting it contradicts, or ""
  std::string replacement;  ///< what to set instead, or the nearest real name, or ""
  std::string evidence;     ///< the public source, or ""
  std::string file;
  int line = 0;
};

/// Judges assignments in the order in which a script makes them. Each is judged by itself; contradictions are judged
/// within what is set at the end, and within what each command with settings of its own sees.
OXY_API std::vector<EnvironmentIssue> lint(const std::vector<Assignment>& assignments, const Context& context = {});

/// Judges an environment.
OXY_API std::vector<EnvironmentIssue> lint(const std::map<std::string, std::string>& variables,
                                           const Context& context = {});

/// Reads a POSIX shell, bash or sbatch script without running it: `A=B`, `export A=B`, `declare -x A=B`,
/// `env A=B command`, `A=B command`, `unset A`, `#SBATCH --export=...` and `srun --export=...`, with quotes, comments,
/// continued lines, here-documents and `${A:-default}`. Values that depend on the run are marked so. Any text is
/// accepted; what cannot be read as an assignment is passed over.
OXY_API std::vector<Assignment> read_script(std::string_view text, const std::string& file = "");

/// One setting of a preset.
struct PresetSetting {
  std::string name;
  std::string value;
  std::string reason;
  std::string evidence;
};

struct Preset {
  std::string goal;    ///< "throughput" or "latency"
  std::string device;  ///< "cuda", "hpu" or "cpu"
  std::string advice;  ///< what to leave alone, and why, one sentence or two
  std::vector<PresetSetting> settings;
};

/// Facts that decide values in a preset.
struct PresetOptions {
  int cores = 1;             ///< physical cores that all processes of this host share
  int processes = 1;         ///< training processes on this host
  bool efa = false;          ///< Gaudi: scale out over the host's EFA network cards
  bool jemalloc = false;     ///< CPU: libjemalloc is preloaded
  std::string recipe_cache;  ///< Gaudi: a directory on a local disk for compiled recipes; "" for none
};

/// Few settings, each with a reason, that serve `goal` on `device`; none that the judge has an issue for. Throws
/// Error(InvalidArgument) for an unknown goal or device or counts below 1.
OXY_API Preset preset(const std::string& goal, const std::string& device, const PresetOptions& options = {});

/// A preset as lines for a shell: a comment with the reason, then `export NAME=value` with the value quoted.
OXY_API std::string shell_text(const Preset& preset);

}  // namespace oxytorch::environment
