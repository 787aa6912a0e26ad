#include "rules.h"

#include <algorithm>
#include <utility>

#include "oxytorch/spelling.h"
#include "value.h"

namespace oxytorch::environment {

std::optional<std::string> View::get(std::string_view name) const {
  const auto found = set.find(name);
  if (found == set.end() || !found->second.exact) return std::nullopt;
  return found->second.value;
}

bool View::on(std::string_view name) const {
  const auto value = get(name);
  return value && is_on(*value);
}

std::optional<long long> View::number(std::string_view name) const {
  const auto value = get(name);
  return value ? whole(*value) : std::nullopt;
}

std::optional<int> View::compare(std::string_view component, std::string_view version) const {
  const auto found = context.versions.find(std::string(component));
  if (found == context.versions.end() || found->second.empty()) return std::nullopt;
  return compare_versions(found->second, version);
}

std::string shown(const Assignment& assignment) {
  const auto plain = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
           std::string_view("_.,:/+-^=@%").find(c) != std::string_view::npos;
  };
  const std::string& value = assignment.value;
  const bool bare = !value.empty() && value.size() <= 80 && std::all_of(value.begin(), value.end(), plain);
  return assignment.name + "=" + (bare ? value : in_quotes(value));
}

std::string guess_backend(const std::map<std::string, Assignment, std::less<>>& set) {
  bool cuda = false;
  for (const auto& [name, assignment] : set) {
    const Setting* setting = find(name);
    if (name.starts_with("PT_HPU_") || name.starts_with("HABANA_") || name == "HCCL_OVER_OFI") return "hpu";
    if (setting == nullptr) continue;
    if (setting->family == Family::Gaudi) return "hpu";
    const bool build = setting->component == "nccl-build" || name == "CUDA_HOME" || name == "CUDA_PATH" ||
                       name == "CUDA_VERSION" || name.starts_with("NVIDIA_");
    cuda =
        cuda || (!build && (setting->family == Family::Nccl || name.starts_with("TORCH_NCCL_") ||
                            (name == "CUDA_VISIBLE_DEVICES" && !assignment.value.empty() && assignment.value != "-1")));
  }
  return cuda ? "cuda" : "";
}

namespace {

/// Rules write their findings through this.
class Judge {
 public:
  Judge(const View& view, const Assignment& assignment, const std::function<void(Finding)>& report)
      : view(view), assignment(assignment), report_(report) {}

  const View& view;
  const Assignment& assignment;

  [[nodiscard]] const std::string& value() const { return assignment.value; }
  [[nodiscard]] bool on() const { return is_on(value()); }

  /// `text` follows "NAME=value ".
  void harmful(Severity severity, const std::string& text, std::string replacement = "",
               std::string evidence = "") const {
    add(Verdict::Harmful, severity, text, "", std::move(replacement), std::move(evidence));
  }
  void contradicting(Severity severity, const std::string& other, const std::string& text) const {
    add(Verdict::Contradicting, severity, text, other, "", "");
  }
  void obsolete(Severity severity, const std::string& text, std::string replacement, std::string evidence = "") const {
    add(Verdict::Obsolete, severity, text, "", std::move(replacement), std::move(evidence));
  }
  void bad(Severity severity, const std::string& text) const { add(Verdict::BadValue, severity, text, "", "", ""); }

  /// The other setting as it is written, for texts.
  [[nodiscard]] std::string other(std::string_view name) const {
    const auto found = view.set.find(name);
    return found == view.set.end() ? std::string(name) : shown(found->second);
  }

 private:
  void add(Verdict verdict, Severity severity, const std::string& text, std::string other, std::string replacement,
           std::string evidence) const {
    const Setting* setting = find(assignment.name);
    if (evidence.empty() && setting != nullptr) evidence = setting->evidence;
    report_({verdict, severity, assignment.name, assignment.value, shown(assignment) + " " + text, std::move(other),
             std::move(replacement), std::move(evidence), assignment.file, assignment.line});
  }

  const std::function<void(Finding)>& report_;
};

constexpr Severity kNote = Severity::Note;
constexpr Severity kWarning = Severity::Warning;
constexpr Severity kError = Severity::Error;
constexpr char kEfaPage[] = "aws-ofi-nccl, doc/efa-env-var.md";
constexpr char kHostNicPage[] = "docs.habana.ai 1.23, Scale-out via Host NIC";

// ---- NCCL -----------------------------------------------------------------------------------------------------

void nccl_debug(const Judge& judge) {
  const std::string level = lower(judge.value());
  if (level == "trace")
    judge.harmful(kWarning, "logs every call of every rank: set WARN, and INFO while you look for a fault.", "WARN");
  if (level == "info")
    judge.harmful(kNote, "logs each communicator of each rank: set WARN once the run works.", "WARN");
}

bool on_efa(const View& view) {
  const auto provider = view.get("FI_PROVIDER");
  return view.context.efa.value_or(provider && *provider == "efa");
}

void p2p_disable(const Judge& judge) {
  if (judge.on())
    judge.harmful(kWarning,
                  "turns direct access between GPUs, NVLink included, off and sends through host memory: unset it.");
}

void shm_disable(const Judge& judge) {
  if (judge.on()) judge.harmful(kWarning, "sends between GPUs of one host over the network: unset it.");
}

void ib_disable(const Judge& judge) {
  // EFA is reached through libfabric, not through verbs.
  if (judge.on() && !on_efa(judge.view)) {
    judge.harmful(
        kWarning,
        "leaves InfiniBand and RoCE alone and sends through TCP sockets: unset it where the hosts have either.");
  }
}

void cumem_off(const Judge& judge) {
  if (judge.value() == "0")
    judge.harmful(
        kNote, "gives up NVLink SHARP and registered buffers, which need it: unset it unless it works around a fault.");
}

void topology_level(const Judge& judge) {
  const auto number = whole(judge.value());
  if (!number) return;
  const bool sys = *number > 4;
  if (sys && judge.assignment.name != "NCCL_P2P_LEVEL") {
    judge.harmful(kWarning,
                  "means SYS, which forces GPUDirect RDMA between sockets too: unset it, or write PXB or PHB.", "PXB");
  } else {
    judge.obsolete(kNote, "is an old number: write LOC, PIX, PXB, PHB or SYS.", "PHB");
  }
}

void nccl_proto(const Judge& judge) {
  std::string value = lower(judge.value());
  const bool forbids = !value.empty() && value[0] == '^';
  if (!forbids && value.find("ll128") != std::string::npos) {
    judge.harmful(
        kError,
        "forces LL128 on, which corrupts data where the links do not support it: unset it; NCCL knows where it may.");
  } else if (value == "simple") {
    const auto plugin = judge.view.compare("aws-ofi-nccl", "1.6");
    if (plugin && *plugin < 0) return;
    judge.harmful(kWarning,
                  "throws the fast protocols for small messages away: unset it; aws-ofi-nccl needs it up to 1.5 only "
                  "and later sets it itself where it must.",
                  "", kEfaPage);
  } else if (!value.empty()) {
    judge.harmful(kNote, "takes the choice of protocol from NCCL's tuner: unset it unless it works around a fault.");
  }
}

void takes_choice(const Judge& judge) {
  judge.harmful(kNote,
                "takes a choice from NCCL's tuner, which knows message sizes and links: unset it unless you measured "
                "that it pays.");
}

void nccl_buffsize(const Judge& judge) {
  if (on_efa(judge.view)) judge.harmful(kWarning, "is best left to the plugin on EFA: unset it.", "", kEfaPage);
}

void min_channels(const Judge& judge) {
  if (on_efa(judge.view)) judge.harmful(kWarning, "makes messages so small that EFA starves: unset it.", "", kEfaPage);
}

void socket_ifname(const Judge& judge) {
  const std::string& value = judge.value();
  if (value == "^docker,lo" || value == "^lo,docker" || value == "^docker" || value == "^lo" ||
      value == "^docker0,lo" || value == "^lo,docker0") {
    judge.harmful(kNote,
                  "is close to what NCCL prefers by itself, and setting it bypasses the automatic choice: unset it.");
  } else if ((value == "lo" || value == "=lo") && judge.view.number("SLURM_NNODES").value_or(1) > 1) {
    judge.contradicting(
        kError, "SLURM_NNODES",
        "is the loopback interface, but " + judge.other("SLURM_NNODES") + ": hosts cannot reach each other.");
  }
}

void socket_threads(const Judge& judge) {
  if (on_efa(judge.view)) {
    judge.harmful(kNote, "has no effect on EFA: unset it.", "", kEfaPage);
    return;
  }
  const auto threads = judge.view.number("NCCL_SOCKET_NTHREADS");
  const auto sockets = judge.view.number("NCCL_NSOCKS_PERTHREAD");
  if (judge.assignment.name == "NCCL_SOCKET_NTHREADS" && threads && sockets && *threads > 0 && *sockets > 0 &&
      *threads * *sockets > 64) {
    judge.contradicting(
        kWarning, "NCCL_NSOCKS_PERTHREAD",
        "times " + judge.other("NCCL_NSOCKS_PERTHREAD") + " is over 64 sockets, and NCCL takes fewer: lower one.");
  }
}

void min_over_max(const Judge& judge) {
  std::string most = judge.assignment.name;
  most.replace(most.find("_MIN_"), 5, "_MAX_");
  const auto low = whole(judge.value());
  const auto high = judge.view.number(most);
  if (low && high && *low > *high) judge.contradicting(kWarning, most, "is more than " + judge.other(most) + ".");
}

void check_pointers(const Judge& judge) {
  if (judge.on()) judge.harmful(kNote, "costs time in each collective: unset it once the fault is found.");
}

void gdr_flush_disable(const Judge& judge) {
  if (judge.on())
    judge.harmful(kWarning,
                  "may read data before it has arrived: unset it unless the platform's vendor says that it is safe.");
}

// ---- libfabric and EFA ----------------------------------------------------------------------------------------

/// aws-ofi-nccl and libfabric are known to be older than those that need no settings.
bool old_efa_software(const View& view) {
  const auto plugin = view.compare("aws-ofi-nccl", "1.7");
  const auto fabric = view.compare("libfabric", "1.18");
  return (plugin && *plugin < 0) || (fabric && *fabric < 0);
}

void device_rdma(const Judge& judge) {
  const View& view = judge.view;
  if (view.backend == "hpu") {
    if (!judge.on())
      judge.harmful(kWarning, "keeps Gaudi's host network cards from reaching its memory: set 1.", "1", kHostNicPage);
    if (judge.on() && !view.on("RDMAV_FORK_SAFE") && !(view.has("RDMAV_FORK_SAFE") && !view.get("RDMAV_FORK_SAFE"))) {
      judge.harmful(kNote, "works on Gaudi together with RDMAV_FORK_SAFE=1: set that too.", "RDMAV_FORK_SAFE",
                    kHostNicPage);
    }
    return;
  }
  if (view.backend != "cuda" || !judge.on() || old_efa_software(view)) return;
  judge.harmful(kWarning,
                "is not needed from libfabric 1.18 with aws-ofi-nccl 1.7 on, and ends the process on a card without "
                "RDMA: unset it.",
                "", kEfaPage);
}

void rdmav_fork_safe(const Judge& judge) {
  if (judge.view.backend == "cuda") {
    judge.harmful(kWarning, "breaks things on newer kernels under NCCL: unset it; libfabric makes fork safe by itself.",
                  "", kEfaPage);
  }
}

void fork_safe(const Judge& judge) {
  if (judge.view.backend == "cuda" && judge.on()) {
    judge.obsolete(kNote, "is what aws-ofi-nccl sets by itself: unset it.", "", kEfaPage);
  }
}

void shm_transfer(const Judge& judge) {
  if (judge.view.backend == "cuda" && judge.on())
    judge.obsolete(kNote, "has no effect under aws-ofi-nccl: unset it.", "", kEfaPage);
}

void fi_provider(const Judge& judge) {
  const auto plugin = judge.view.compare("aws-ofi-nccl", "1.6");
  if (judge.view.backend == "cuda" && judge.value() == "efa" && !(plugin && *plugin < 0)) {
    judge.obsolete(kWarning, "was needed up to aws-ofi-nccl 1.5: unset it.", "", kEfaPage);
  }
}

// ---- CUDA -----------------------------------------------------------------------------------------------------

void launch_blocking(const Judge& judge) {
  if (judge.on()) judge.harmful(kWarning, "makes the host wait for each kernel: unset it once the fault is found.");
}

void visible_devices(const Judge& judge) {
  const std::string& value = judge.value();
  if (judge.view.context.backend == "cuda" && (value.empty() || value[0] == '-')) {
    judge.harmful(kError, "hides every GPU: unset it.");
  }
}

void tf32_override(const Judge& judge) {
  if (judge.value() != "0") return;
  if (judge.view.on("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE")) {
    judge.contradicting(
        kWarning, "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
        "turns TF32 off in every library, against " + judge.other("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE") + ": unset one.");
  } else {
    judge.harmful(
        kNote, "turns TF32 off in every library, whatever the program asks for: set torch's fp32_precision instead.");
  }
}

void cublas_workspace(const Judge& judge) {
  if (judge.view.context.determinism.value_or(false) && judge.value() != ":4096:8" && judge.value() != ":16:8") {
    judge.harmful(kError, "makes torch.use_deterministic_algorithms raise: set :4096:8 or :16:8.", ":4096:8");
  }
}

void debug_of_cuda(const Judge& judge) {
  if (judge.on()) judge.harmful(kWarning, "is for debugging and costs time in every run: unset it.");
}

// ---- PyTorch --------------------------------------------------------------------------------------------------

void caching_off(const Judge& judge) {
  if (judge.value().empty()) return;
  judge.harmful(kWarning, "turns the caching allocator off, so that each allocation waits for the device: unset it.");
}

void alloc_conf(const Judge& judge) {
  const View& view = judge.view;
  const std::string& name = judge.assignment.name;
  if (name == "PYTORCH_CUDA_ALLOC_CONF" && view.has("PYTORCH_ALLOC_CONF") &&
      view.get("PYTORCH_ALLOC_CONF") != judge.value()) {
    judge.contradicting(
        kWarning, "PYTORCH_ALLOC_CONF",
        "is read in place of " + judge.other("PYTORCH_ALLOC_CONF") + " on CUDA: put all of it into one.");
  }
  std::map<std::string, std::string> keys;
  for (auto& [key, value] : pairs_of(judge.value(), ',', ':')) {
    if (const auto [at, fresh] = keys.emplace(key, value); !fresh && at->second != value) {
      judge.contradicting(kWarning, name, "sets " + key + " twice; the later counts.");
    }
  }
  const auto backend = keys.find("backend");
  if (backend == keys.end() || backend->second == "native") return;
  for (const char* native : {"expandable_segments", "max_split_size_mb", "garbage_collection_threshold",
                             "roundup_power2_divisions", "max_non_split_rounding_mb"}) {
    if (keys.count(native) != 0) {
      judge.contradicting(
          kWarning, name,
          "sets " + std::string(native) + ", which backend:" + backend->second + " does not read: drop one of them.");
    }
  }
}

void blocking_wait(const Judge& judge) {
  const auto handling = judge.view.number("TORCH_NCCL_ASYNC_ERROR_HANDLING");
  if (judge.on() && handling && *handling != 0) {
    judge.contradicting(kWarning, "TORCH_NCCL_ASYNC_ERROR_HANDLING",
                        "makes wait() raise, and " + judge.other("TORCH_NCCL_ASYNC_ERROR_HANDLING") +
                            " ends the process: only the first counts; unset one.");
  } else if (judge.on()) {
    judge.harmful(kWarning,
                  "makes the host wait for each collective: unset it; TORCH_NCCL_ASYNC_ERROR_HANDLING ends a stuck run "
                  "without that.");
  }
}

void desync_debug(const Judge& judge) {
  const auto handling = judge.view.number("TORCH_NCCL_ASYNC_ERROR_HANDLING");
  if (judge.on() && handling && *handling == 0) {
    judge.contradicting(
        kError, "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "needs error handling, which " + judge.other("TORCH_NCCL_ASYNC_ERROR_HANDLING") + " turns off: unset that.");
  }
}

void dump_on_timeout(const Judge& judge) {
  if (!judge.on()) return;
  const auto buffer = judge.view.has("TORCH_FR_BUFFER_SIZE") ? judge.view.number("TORCH_FR_BUFFER_SIZE")
                                                             : judge.view.number("TORCH_NCCL_TRACE_BUFFER_SIZE");
  if (buffer && *buffer == 0)
    judge.contradicting(
        kWarning, "TORCH_FR_BUFFER_SIZE",
        "has nothing to dump, since the flight recorder holds 0 events: set TORCH_FR_BUFFER_SIZE=2000.");
  const auto monitoring = judge.view.get("TORCH_NCCL_ENABLE_MONITORING");
  if (monitoring && !is_on(*monitoring)) {
    judge.contradicting(
        kWarning, "TORCH_NCCL_ENABLE_MONITORING",
        "needs the monitor, which " + judge.other("TORCH_NCCL_ENABLE_MONITORING") + " turns off: unset that.");
  }
}

void error_handling(const Judge& judge) {
  if (judge.value() == "0" && !judge.view.on("TORCH_NCCL_BLOCKING_WAIT")) {
    judge.harmful(kWarning, "lets a failed collective hang the run for ever: unset it.");
  }
}

void distributed_debug(const Judge& judge) {
  if (judge.value() == "DETAIL")
    judge.harmful(kWarning,
                  "checks each collective with collectives of its own: set INFO or unset it once the fault is found.");
}

void nan_check(const Judge& judge) {
  if (judge.on()) judge.harmful(kNote, "reads all that is sent once more: unset it once the fault is found.");
}

void compile_off(const Judge& judge) {
  if (!judge.on()) return;
  if (judge.view.context.compile.value_or(false)) {
    judge.harmful(kWarning, "turns torch.compile off, which the program uses: unset it.");
  }
  for (const char* other : {"TORCHINDUCTOR_MAX_AUTOTUNE", "TORCHINDUCTOR_CUDAGRAPHS", "TORCHINDUCTOR_FREEZING"}) {
    if (judge.view.on(other))
      judge.contradicting(kWarning, other, "turns off the compiler that " + judge.other(other) + " is for: unset one.");
  }
}

void compile_debug(const Judge& judge) {
  if (judge.on())
    judge.harmful(kWarning, "writes what each pass did to disk at each compilation: unset it once the fault is found.");
}

void caches_off(const Judge& judge) {
  if (!judge.on()) return;
  for (const char* other : {"TORCHINDUCTOR_FX_GRAPH_CACHE", "TORCHINDUCTOR_AUTOGRAD_CACHE"}) {
    if (judge.view.on(other)) {
      judge.contradicting(kWarning, other, "turns every cache off, " + judge.other(other) + " included: unset one.");
      return;
    }
  }
  judge.harmful(kWarning, "compiles everything anew in each process: unset it once the fault is found.");
}

void compile_threads(const Judge& judge) {
  const auto threads = whole(judge.value());
  if (threads && judge.view.context.cores && *threads > *judge.view.context.cores) {
    judge.harmful(kWarning, "is more than the " + std::to_string(*judge.view.context.cores) +
                                " hardware threads of this process: unset it.");
  }
}

void weights_only_off(const Judge& judge) {
  if (!judge.on()) return;
  if (judge.view.on("TORCH_FORCE_WEIGHTS_ONLY_LOAD")) {
    judge.contradicting(kError, "TORCH_FORCE_WEIGHTS_ONLY_LOAD",
                        "and " + judge.other("TORCH_FORCE_WEIGHTS_ONLY_LOAD") + " make torch.load raise: unset one.");
  } else {
    judge.harmful(kWarning,
                  "lets any file that torch.load opens run code: unset it and load such files with weights_only=False "
                  "where you trust them.");
  }
}

// ---- OpenMP ---------------------------------------------------------------------------------------------------

void thread_count(const Judge& judge) {
  const auto threads = whole(split(judge.value(), ',')[0]);
  const auto cores = judge.view.context.cores;
  if (!threads || !cores) return;
  if (*threads > *cores) {
    judge.harmful(kWarning,
                  "is more than the " + std::to_string(*cores) +
                      " hardware threads of this process, which then wait for each other: set at most " +
                      std::to_string(*cores) + ".",
                  std::to_string(*cores));
    return;
  }
  const auto processes = judge.view.number("LOCAL_WORLD_SIZE");
  if (judge.assignment.name == "OMP_NUM_THREADS" && processes && *processes > 1 && *processes <= 4096 &&
      *threads <= *cores && *threads > 1 && *threads * *processes > *cores) {
    judge.harmful(kNote, "for " + std::to_string(*processes) + " processes is more than the " + std::to_string(*cores) +
                             " hardware threads: set " + std::to_string(std::max(*cores / *processes, 1LL)) +
                             ", unless each process has processors of its own.");
  }
}

bool other_openmp(const View& view) {
  const std::string preload = lower(view.get("LD_PRELOAD").value_or(""));
  const std::string& loaded = view.context.openmp;
  return loaded == "libiomp5" || loaded == "libomp" || preload.find("libiomp5") != std::string::npos ||
         preload.find("libomp") != std::string::npos || (view.has("LD_PRELOAD") && !view.get("LD_PRELOAD"));
}

void kmp(const Judge& judge) {
  if (other_openmp(judge.view)) return;
  const bool known = judge.view.context.openmp == "libgomp";
  judge.harmful(
      known ? kWarning : kNote,
      "is read by Intel's and LLVM's OpenMP only, and torch's wheels use libgomp: unset it, or preload libiomp5.");
}

void kmp_duplicate(const Judge& judge) {
  if (judge.on())
    judge.harmful(kWarning,
                  "goes on with two OpenMP libraries in one process, which may crash or compute wrong: link one.");
}

void cpu_affinity(const Judge& judge) {
  for (const char* other : {"OMP_PROC_BIND", "OMP_PLACES", "KMP_AFFINITY"}) {
    const bool read = std::string_view(other) != "KMP_AFFINITY" || other_openmp(judge.view);
    if (read && judge.view.has(other)) {
      judge.contradicting(kWarning, other,
                          "and " + judge.other(other) + " both bind threads, and one counts: unset one.");
      return;
    }
  }
}

void proc_bind(const Judge& judge) {
  if (lower(judge.value()) == "false" && judge.view.has("OMP_PLACES")) {
    judge.contradicting(
        kWarning, "OMP_PLACES",
        "binds no thread, so that " + judge.other("OMP_PLACES") + " has no effect: set close or spread.");
  }
  if (judge.view.has("KMP_AFFINITY") && other_openmp(judge.view)) {
    judge.contradicting(kWarning, "KMP_AFFINITY",
                        "and " + judge.other("KMP_AFFINITY") + " both bind threads, and one counts: unset one.");
  }
}

void wait_policy(const Judge& judge) {
  const auto threads = judge.view.number("OMP_NUM_THREADS");
  const auto cores = judge.view.context.cores;
  if (lower(judge.value()) == "active" && threads && cores && *threads > *cores) {
    judge.contradicting(kWarning, "OMP_NUM_THREADS",
                        "makes threads spin on processors that others of " + judge.other("OMP_NUM_THREADS") +
                            " wait for: set passive.");
  }
}

void stack_twice(const Judge& judge) {
  if (judge.view.has("OMP_STACKSIZE"))
    judge.contradicting(kNote, "OMP_STACKSIZE", "and " + judge.other("OMP_STACKSIZE") + " set one thing: unset one.");
}

// ---- allocators -----------------------------------------------------------------------------------------------

std::string preloaded_allocator(const View& view) {
  const std::string preload = lower(view.get("LD_PRELOAD").value_or(""));
  for (const char* name : {"jemalloc", "tcmalloc", "mimalloc"}) {
    if (preload.find(name) != std::string::npos) return name;
  }
  return "";
}

void glibc_malloc(const Judge& judge) {
  const std::string allocator = preloaded_allocator(judge.view);
  if (!allocator.empty()) {
    judge.contradicting(kWarning, "LD_PRELOAD",
                        "is glibc's, and " + allocator + " is preloaded in its place: unset one.");
    return;
  }
  const auto tunables = judge.view.get("GLIBC_TUNABLES");
  std::string same = "glibc.malloc." + lower(judge.assignment.name).substr(7);
  if (!same.empty() && same.back() == '_') same.pop_back();
  if (tunables && (":" + *tunables).find(":" + same + "=") != std::string::npos) {
    judge.contradicting(kWarning, "GLIBC_TUNABLES", "and " + same + " of GLIBC_TUNABLES set one thing: unset one.");
  }
}

void heap_debugging(const Judge& judge) {
  if (judge.on()) judge.harmful(kWarning, "is for debugging and costs time in every allocation: unset it.");
  glibc_malloc(judge);
}

void glibc_tunables(const Judge& judge) {
  const std::string allocator = preloaded_allocator(judge.view);
  if (!allocator.empty() && judge.value().find("glibc.malloc.") != std::string::npos) {
    judge.contradicting(kWarning, "LD_PRELOAD",
                        "tunes glibc's malloc, and " + allocator + " is preloaded in its place: unset one.");
  }
}

void jemalloc_conf(const Judge& judge) {
  const std::string allocator = preloaded_allocator(judge.view);
  if (!allocator.empty() && allocator != "jemalloc") {
    judge.contradicting(kWarning, "LD_PRELOAD", "is jemalloc's, and " + allocator + " is preloaded: unset one.");
  } else if (allocator.empty() && !(judge.view.has("LD_PRELOAD") && !judge.view.get("LD_PRELOAD"))) {
    judge.harmful(kNote, "has no effect unless the program uses jemalloc: preload libjemalloc.so.2, or unset it.");
  }
}

// ---- Gaudi ----------------------------------------------------------------------------------------------------

void lazy_mode(const Judge& judge) {
  if (judge.value() != "1") return;
  const View& view = judge.view;
  for (const char* other : {"PT_HPU_ENABLE_COMPILED_AUTOGRAD", "PT_HPU_TC_MODE"}) {
    if (view.on(other)) {
      judge.contradicting(kError, other,
                          "excludes torch.compile, which " + judge.other(other) + " is for: set PT_HPU_LAZY_MODE=0.");
      return;
    }
  }
  const auto dynamo = view.get("ACCELERATE_DYNAMO_BACKEND");
  if (dynamo && lower(*dynamo) != "no" && !dynamo->empty()) {
    judge.contradicting(kError, "ACCELERATE_DYNAMO_BACKEND",
                        "excludes torch.compile, which " + judge.other("ACCELERATE_DYNAMO_BACKEND") +
                            " asks for: set PT_HPU_LAZY_MODE=0.");
  } else if (view.context.compile.value_or(false)) {
    judge.contradicting(kError, "torch.compile", "excludes torch.compile, which the program uses: set 0.");
  }
}

bool eager(const View& view) { return view.get("PT_HPU_LAZY_MODE") == "0"; }

void lazy_only(const Judge& judge) {
  if (eager(judge.view))
    judge.contradicting(kNote, "PT_HPU_LAZY_MODE",
                        "has an effect in lazy mode only, and " + judge.other("PT_HPU_LAZY_MODE") + ": unset one.");
}

void compound_op_size(const Judge& judge) {
  lazy_only(judge);
  const auto size = whole(judge.value());
  if (size && *size < 1'000'000 && !eager(judge.view)) {
    judge.harmful(
        kNote,
        "cuts lazy graphs after so many operators, where the default is no limit: unset it unless the model needs it.");
  }
}

void recipe_cache(const Judge& judge) {
  for (const char* old : {"PT_RECIPE_CACHE_PATH", "PT_CACHE_FOLDER_SIZE_MB", "PT_CACHE_FOLDER_DELETE"}) {
    if (judge.view.has(old)) {
      judge.contradicting(kWarning, old, "takes the place of " + judge.other(old) + ": unset the old one.");
      return;
    }
  }
}

void compile_only(const Judge& judge) {
  if (judge.on()) judge.harmful(kError, "never launches what it compiles, so that results are garbage: unset it.");
}

void pool_strategy(const Judge& judge) {
  if (judge.value() == "0")
    judge.harmful(kNote, "turns the memory pool off, so that each allocation goes to the driver: unset it.");
}

void gaudi_log_level(const Judge& judge) {
  const auto level = whole(judge.value());
  if (level && *level <= 1)
    judge.harmful(kWarning, "logs so much that it slows the run down: set 4 or unset it once the fault is found.", "4");
}

void graph_visualization(const Judge& judge) {
  if (judge.on()) judge.harmful(kNote, "writes each compiled graph to disk: unset it once you have seen them.");
}

void sync_for_debugging(const Judge& judge) {
  const bool async = judge.assignment.name == "PT_ENABLE_HABANA_STREAMASYNC";
  if (judge.on() != async)
    judge.harmful(kWarning, "makes the host wait for the device: unset it once the fault is found.");
}

void over_ofi(const Judge& judge) {
  if (judge.on())
    judge.harmful(
        kNote, "turns detection of the network off and goes through host memory: unset it unless detection is wrong.",
        "", kHostNicPage);
}

// ---- launchers ------------------------------------------------------------------------------------------------

void rank_in_world(const Judge& judge) {
  std::string world = judge.assignment.name;
  world = world == "RANK" ? "WORLD_SIZE" : world.replace(world.find("RANK"), 4, "WORLD_SIZE");
  const auto rank = whole(judge.value());
  const auto size = judge.view.number(world);
  if (rank && size && *rank >= *size) judge.contradicting(kError, world, "must be below " + judge.other(world) + ".");
}

void local_world(const Judge& judge) {
  const auto local = whole(judge.value());
  const auto world = judge.view.number("WORLD_SIZE");
  if (local && world && *local > *world)
    judge.contradicting(kError, "WORLD_SIZE", "must be at most " + judge.other("WORLD_SIZE") + ".");
}

void master_addr(const Judge& judge) {
  const auto nodes = judge.view.number("SLURM_NNODES");
  const bool local = judge.value() == "localhost" || judge.value() == "127.0.0.1" || judge.value() == "::1";
  if (local && nodes && *nodes > 1) {
    judge.contradicting(kError, "SLURM_NNODES",
                        "is each host itself, but " + judge.other("SLURM_NNODES") + ": set the first host's name.");
  }
}

struct Rule {
  const char* name;  ///< a name, or a prefix that ends in *
  void (*apply)(const Judge&);
};

constexpr Rule kRules[] = {
    {"NCCL_DEBUG", nccl_debug},
    {"NCCL_P2P_DISABLE", p2p_disable},
    {"NCCL_SHM_DISABLE", shm_disable},
    {"NCCL_IB_DISABLE", ib_disable},
    {"NCCL_CUMEM_ENABLE", cumem_off},
    {"NCCL_NET_GDR_LEVEL", topology_level},
    {"NCCL_P2P_LEVEL", topology_level},
    {"NCCL_PROTO", nccl_proto},
    {"NCCL_ALGO", takes_choice},
    {"NCCL_NTHREADS", takes_choice},
    {"NCCL_BUFFSIZE", nccl_buffsize},
    {"NCCL_MIN_NCHANNELS", min_channels},
    {"NCCL_MIN_NRINGS", min_channels},
    {"NCCL_MIN_CTAS", min_channels},
    {"NCCL_MIN_NCHANNELS", min_over_max},
    {"NCCL_MIN_CTAS", min_over_max},
    {"NCCL_MIN_P2P_NCHANNELS", min_over_max},
    {"NCCL_SOCKET_IFNAME", socket_ifname},
    {"NCCL_SOCKET_NTHREADS", socket_threads},
    {"NCCL_NSOCKS_PERTHREAD", socket_threads},
    {"NCCL_CHECK_POINTERS", check_pointers},
    {"NCCL_GDR_FLUSH_DISABLE", gdr_flush_disable},
    {"OFI_NCCL_GDR_FLUSH_DISABLE", gdr_flush_disable},
    {"FI_EFA_USE_DEVICE_RDMA", device_rdma},
    {"RDMAV_FORK_SAFE", rdmav_fork_safe},
    {"IBV_FORK_SAFE", rdmav_fork_safe},
    {"FI_EFA_FORK_SAFE", fork_safe},
    {"FI_EFA_ENABLE_SHM_TRANSFER", shm_transfer},
    {"FI_PROVIDER", fi_provider},
    {"CUDA_LAUNCH_BLOCKING", launch_blocking},
    {"CUDA_VISIBLE_DEVICES", visible_devices},
    {"CUDA_CACHE_DISABLE", debug_of_cuda},
    {"CUDA_FORCE_PTX_JIT", debug_of_cuda},
    {"CUDA_FORCE_JIT", debug_of_cuda},
    {"CUDA_DEVICE_WAITS_ON_EXCEPTION", debug_of_cuda},
    {"CUBLAS_LOGINFO_DBG", debug_of_cuda},
    {"NVIDIA_TF32_OVERRIDE", tf32_override},
    {"CUBLAS_WORKSPACE_CONFIG", cublas_workspace},
    {"PYTORCH_NO_CUDA_MEMORY_CACHING", caching_off},
    {"PYTORCH_CUDA_ALLOC_CONF", alloc_conf},
    {"PYTORCH_ALLOC_CONF", alloc_conf},
    {"TORCH_NCCL_BLOCKING_WAIT", blocking_wait},
    {"TORCH_NCCL_DESYNC_DEBUG", desync_debug},
    {"TORCH_NCCL_DUMP_ON_TIMEOUT", dump_on_timeout},
    {"TORCH_NCCL_ASYNC_ERROR_HANDLING", error_handling},
    {"TORCH_NCCL_NAN_CHECK", nan_check},
    {"TORCH_DISTRIBUTED_DEBUG", distributed_debug},
    {"TORCHDYNAMO_DISABLE", compile_off},
    {"TORCH_COMPILE_DISABLE", compile_off},
    {"TORCH_COMPILE_DEBUG", compile_debug},
    {"TORCHDYNAMO_TRANSLATION_VALIDATION", compile_debug},
    {"TORCHINDUCTOR_FORCE_DISABLE_CACHES", caches_off},
    {"TORCHINDUCTOR_COMPILE_THREADS", compile_threads},
    {"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", weights_only_off},
    {"OMP_NUM_THREADS", thread_count},
    {"MKL_NUM_THREADS", thread_count},
    {"KMP_DUPLICATE_LIB_OK", kmp_duplicate},
    {"KMP_*", kmp},
    {"GOMP_CPU_AFFINITY", cpu_affinity},
    {"GOMP_STACKSIZE", stack_twice},
    {"OMP_PROC_BIND", proc_bind},
    {"OMP_WAIT_POLICY", wait_policy},
    {"MALLOC_CHECK_", heap_debugging},
    {"MALLOC_PERTURB_", heap_debugging},
    {"MALLOC_ARENA_MAX", glibc_malloc},
    {"MALLOC_ARENA_TEST", glibc_malloc},
    {"MALLOC_MMAP_MAX_", glibc_malloc},
    {"MALLOC_MMAP_THRESHOLD_", glibc_malloc},
    {"MALLOC_TOP_PAD_", glibc_malloc},
    {"MALLOC_TRIM_THRESHOLD_", glibc_malloc},
    {"GLIBC_TUNABLES", glibc_tunables},
    {"MALLOC_CONF", jemalloc_conf},
    {"PT_HPU_LAZY_MODE", lazy_mode},
    {"PT_HPU_MAX_COMPOUND_OP_SIZE", compound_op_size},
    {"PT_HPU_ENABLE_LAZY_COLLECTIVES", lazy_only},
    {"PT_HPU_ENABLE_WEIGHT_CPU_PERMUTE", lazy_only},
    {"PT_HPU_ENABLE_WEIGHT_HPU_PERMUTE", lazy_only},
    {"PT_HPU_RECIPE_CACHE_CONFIG", recipe_cache},
    {"PT_COMPILE_ONLY_MODE", compile_only},
    {"PT_HPU_POOL_STRATEGY", pool_strategy},
    {"LOG_LEVEL_ALL", gaudi_log_level},
    {"LOG_LEVEL_ALL_PT", gaudi_log_level},
    {"GRAPH_VISUALIZATION", graph_visualization},
    {"PT_HPU_SYNC_LAUNCH", sync_for_debugging},
    {"PT_HPU_DISABLE_ASYNC_COLLECTIVE", sync_for_debugging},
    {"PT_ENABLE_HABANA_STREAMASYNC", sync_for_debugging},
    {"HCCL_OVER_OFI", over_ofi},
    {"RANK", rank_in_world},
    {"LOCAL_RANK", rank_in_world},
    {"GROUP_RANK", rank_in_world},
    {"ROLE_RANK", rank_in_world},
    {"LOCAL_WORLD_SIZE", local_world},
    {"MASTER_ADDR", master_addr},
};

}  // namespace

void apply_rules(const View& view, const Assignment& assignment, const std::function<void(Finding)>& report) {
  for (const Rule& rule : kRules) {
    const std::string_view name = rule.name;
    const bool prefix = name.back() == '*';
    const bool match = prefix ? assignment.name.starts_with(name.substr(0, name.size() - 1)) : assignment.name == name;
    if (match) rule.apply(Judge(view, assignment, report));
  }
}

}  // namespace oxytorch::environment
