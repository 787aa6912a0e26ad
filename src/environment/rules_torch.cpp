// Rules about CUDA and PyTorch.
#include <map>

#include "judge.h"
#include "value.h"

namespace oxytorch::environment {
namespace {

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

constexpr Rule kTorchRules[] = {
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
};

}  // namespace

std::span<const Rule> torch_rules() { return kTorchRules; }

}  // namespace oxytorch::environment
