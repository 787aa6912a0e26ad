#include <algorithm>

#include "base/spelling.h"
#include "oxytorch/environment.h"
#include "oxytorch/error.h"

namespace oxytorch::environment {
namespace {

constexpr char kTuningGuide[] = "PyTorch performance tuning guide";
constexpr char kGaudiFlags[] = "docs.habana.ai 1.23, Runtime Environment Variables";
constexpr char kHostNic[] = "docs.habana.ai 1.23, Scale-out via Host NIC";

bool latency(const Preset& preset) { return preset.goal == "latency"; }

void threads(Preset& preset, const PresetOptions& options) {
  const int each = std::max(options.cores / options.processes, 1);
  preset.settings.push_back({"OMP_NUM_THREADS", std::to_string(each),
                             "each process gets its share of the physical cores; torchrun sets 1 where nothing is set",
                             kTuningGuide});
}

void cuda(Preset& preset, const PresetOptions& options) {
  preset.advice =
      "Set no NCCL and no libfabric variables: NCCL and its plugin pick buffers, channels, protocols and network cards "
      "for "
      "the machine they find. Precision, cuDNN benchmarking and determinism are torch's settings, not the "
      "environment's.";
  threads(preset, options);
  if (latency(preset)) {
    preset.settings.push_back({"CUDA_MODULE_LOADING", "EAGER",
                               "loads every kernel at start, so that none is loaded in a step; the start takes longer",
                               "CUDA C++ Programming Guide, Lazy Loading"});
    return;
  }
  preset.settings.push_back({"PYTORCH_ALLOC_CONF", "expandable_segments:True",
                             "grows segments instead of taking new ones, so that sizes that change leave no holes",
                             "PyTorch CUDA semantics, memory management"});
}

void hpu(Preset& preset, const PresetOptions& options) {
  preset.advice =
      "Leave the mode alone: eager with torch.compile is the default, and PT_HPU_LAZY_MODE=1 excludes torch.compile. "
      "Pipelines, caches in memory and the memory pool are on by default.";
  threads(preset, options);
  if (!options.recipe_cache.empty()) {
    preset.settings.push_back(
        {"PT_HPU_RECIPE_CACHE_CONFIG", options.recipe_cache + ",false,1024,false",
         latency(preset) ? "finds compiled recipes on disk, so that a shape seen in an earlier run costs no compilation"
                         : "finds compiled recipes on disk, so that a restart compiles nothing twice",
         kGaudiFlags});
  }
  if (options.efa) {
    preset.settings.push_back(
        {"FI_EFA_USE_DEVICE_RDMA", "1", "lets the host's network cards read and write Gaudi's memory", kHostNic});
    preset.settings.push_back({"RDMAV_FORK_SAFE", "1", "is required with it", kHostNic});
  }
}

void cpu(Preset& preset, const PresetOptions& options) {
  preset.advice =
      "KMP_ settings are not here: torch's wheels use libgomp, which does not read them. oxytorch.Trainer sets threads "
      "and "
      "glibc's allocator by itself where nothing is set.";
  threads(preset, options);
  if (options.processes == 1) {
    preset.settings.push_back({"OMP_PROC_BIND", latency(preset) ? "close" : "spread",
                               latency(preset) ? "keeps threads where their caches are, close together"
                                               : "keeps threads where their caches are, over all memory channels",
                               "OpenMP 5.2, OMP_PROC_BIND"});
    preset.settings.push_back(
        {"OMP_PLACES", "cores", "gives each thread a core of its own, not half of one", "OpenMP 5.2, OMP_PLACES"});
  }
  if (latency(preset)) {
    preset.settings.push_back({"OMP_WAIT_POLICY", "active", "lets threads spin between operators instead of sleeping",
                               "OpenMP 5.2, OMP_WAIT_POLICY"});
  }
  if (options.jemalloc) {
    preset.settings.push_back({"LD_PRELOAD", "libjemalloc.so.2", "keeps freed memory for the next step", kTuningGuide});
    preset.settings.push_back({"MALLOC_CONF", "background_thread:true,dirty_decay_ms:10000,muzzy_decay_ms:10000",
                               "gives memory back on a thread of its own, after ten seconds",
                               "jemalloc 5.3, TUNING.md"});
  }
}

bool plain(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
         std::string_view("_.,:/+-@%").find(c) != std::string_view::npos;
}

/// In single quotes where the shell would read any of it.
std::string shell_quoted(const std::string& value) {
  if (!value.empty() && std::all_of(value.begin(), value.end(), plain)) return value;
  std::string quoted = "'";
  for (const char c : value) {
    if (c == '\'') {
      quoted += "'\\''";
    } else {
      quoted += c;
    }
  }
  return quoted += '\'';
}

}  // namespace

Preset preset(const std::string& goal, const std::string& device, const PresetOptions& options) {
  const std::vector<std::string> goals = {"throughput", "latency"};
  OXY_CHECK(std::find(goals.begin(), goals.end(), goal) != goals.end(), InvalidArgument, "there is no preset ",
            in_quotes(goal), "; ", did_you_mean(goal, goals), "choose ", list_of(goals), ".");
  const std::pair<std::string, void (*)(Preset&, const PresetOptions&)> devices[] = {
      {"cuda", cuda}, {"hpu", hpu}, {"cpu", cpu}};
  const auto* found =
      std::find_if(std::begin(devices), std::end(devices), [&](const auto& one) { return one.first == device; });
  OXY_CHECK(found != std::end(devices), InvalidArgument, "there is no preset for the device ", in_quotes(device),
            "; choose 'cuda', 'hpu' or 'cpu'.");
  OXY_CHECK(options.cores >= 1, InvalidArgument, "cores must be at least 1, not ", options.cores, ".");
  OXY_CHECK(options.processes >= 1, InvalidArgument, "processes must be at least 1, not ", options.processes, ".");
  OXY_CHECK(options.recipe_cache.find_first_of(",\n") == std::string::npos, InvalidArgument, "recipe_cache is ",
            in_quotes(options.recipe_cache),
            ", and the setting it goes into is separated by commas; choose a folder without one.");
  Preset made{goal, device, "", {}};
  found->second(made, options);
  return made;
}

std::string shell_text(const Preset& preset) {
  std::string text = "# " + preset.goal + " on " + preset.device + ". " + preset.advice + "\n";
  for (const PresetSetting& one : preset.settings) {
    text += "# " + one.reason + " (" + one.evidence + ")\n";
    text += "export " + one.name + "=" + shell_quoted(one.value) + "\n";
  }
  return text;
}

}  // namespace oxytorch::environment
