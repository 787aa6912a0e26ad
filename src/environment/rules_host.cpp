// Rules about OpenMP, allocators and launchers.
#include <algorithm>

#include "judge.h"
#include "value.h"

namespace oxytorch::environment {
namespace {

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

constexpr Rule kHostRules[] = {
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
    {"RANK", rank_in_world},
    {"LOCAL_RANK", rank_in_world},
    {"GROUP_RANK", rank_in_world},
    {"ROLE_RANK", rank_in_world},
    {"LOCAL_WORLD_SIZE", local_world},
    {"MASTER_ADDR", master_addr},
};

}  // namespace

std::span<const Rule> host_rules() { return kHostRules; }

}  // namespace oxytorch::environment
