// Presets by hardware: each value with its reason, the figures from the hardware table.
#include <algorithm>
#include <cmath>

#include "base/spelling.h"
#include "oxytorch/accelerator.h"
#include "oxytorch/error.h"
#include "oxytorch/machine/hardware.h"

namespace oxytorch::accelerator {
namespace {

/// "494.5 against 67 TFLOP/s (source)".
std::string against(const char* row, const char* fast, const char* slow) {
  const machine::Hardware* hardware = machine::find_hardware(row).hardware;
  OXY_ASSERT(hardware != nullptr, row);
  const auto tera = [&](const char* dtype) {
    std::string text = std::to_string(hardware->peak_ops_per_s.at(dtype) / 1e12);
    text.erase(text.find_last_not_of('0') + 1);
    if (text.ends_with('.')) text.pop_back();
    return text;
  };
  return tera(fast) + " against " + tera(slow) + " TFLOP/s (" + hardware->source + ")";
}

GPUConfig cuda(const char* name, const char* row) {
  GPUConfig config;
  config.device = "cuda";
  config.preset_name = name;
  config.matmul_precision = "tf32";
  config.conv_precision = "tf32";
  config.cudnn_benchmark = true;
  config.attention = {"flash", "efficient", "cudnn", "math"};
  config.autocast_dtype = "bf16";
  config.reasons = {
      {"matmul_precision",
       "tf32 products of fp32 matrices: " + against(row, "tf32", "fp32") + "; 10 bits of mantissa instead of 23."},
      {"conv_precision", "tf32 is torch's own default for cuDNN; set, so that no parent setting changes it."},
      {"cudnn_benchmark",
       "convolutions of fixed shapes run with the algorithm that was fastest here; each new shape is "
       "timed anew, so leave it off where shapes vary."},
      {"attention", "every kernel allowed: torch takes the first that serves the inputs, flash before math."},
      {"autocast_dtype",
       "bf16 products: " + against(row, "bf16", "tf32") + "; fp32's range, so no loss scale is needed."},
      {"memory_fraction", "the process has the card to itself."},
      {"deterministic", "deterministic kernels are slower; a choice of the run, not of the card."},
  };
  return config;
}

GPUConfig gaudi(const char* name, const char* row) {
  GPUConfig config;
  config.device = "hpu";
  config.preset_name = name;
  config.autocast_dtype = "bf16";
  config.reasons = {
      {"autocast_dtype",
       "bf16 is what its matrix engine is built for: " +
           std::to_string(
               static_cast<int>(std::lround(machine::find_hardware(row).hardware->peak_ops_per_s.at("bf16") / 1e12))) +
           " TFLOP/s (" + machine::find_hardware(row).hardware->source + "); no loss scale is needed."},
      {"devices", "a process has one HPU."},
      {"matmul_precision", "tf32 is NVIDIA's; the setting does not reach an HPU."},
      {"memory_fraction", "torch.hpu has no such setting."},
  };
  return config;
}

GPUConfig processor(const char* name, bool amx) {
  GPUConfig config;
  config.device = "cpu";
  config.preset_name = name;
  config.cpu_precision = amx ? "bf16" : "ieee";
  if (amx) config.autocast_dtype = "bf16";
  const auto classes = machine::cpu_classes();
  const auto& best = classes[amx ? 3 : 1];
  const auto ops = [&](const char* dtype) { return std::to_string(static_cast<int>(best.ops_per_cycle.at(dtype))); };
  config.reasons = {
      {"cpu_precision", amx ? "oneDNN computes fp32 products in AMX bf16, summed in fp32: " + ops("bf16") +
                                  " against " + ops("fp32") +
                                  " operations a cycle and core; 8 bits of mantissa instead of 24."
                            : "without AMX or avx512_bf16 a narrower product is slower than fp32's " + ops("fp32") +
                                  " operations a cycle and core."},
      {"autocast_dtype", amx ? "bf16 products run in AMX; activations take half the memory."
                             : "bf16 training is 2 to 3 times slower without avx512_bf16 or AMX; see "
                               "oxytorch.amp.recommend_dtype."},
      {"threads", "the trainer sizes them by affinity and cgroup."},
  };
  return config;
}

}  // namespace

std::vector<std::string> GPUConfig::presets() {
  return {"A100", "H100", "H200", "Gaudi2", "Gaudi3", "cpu-avx512", "cpu-amx"};
}

GPUConfig GPUConfig::preset(std::string_view name) {
  std::string wanted(name);
  std::erase_if(wanted, [](char c) { return c == ' ' || c == '_'; });
  std::transform(wanted.begin(), wanted.end(), wanted.begin(),
                 [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; });
  if (wanted == "a100") return cuda("A100", "A100 SXM 80GB");
  if (wanted == "h100") return cuda("H100", "H100 SXM");
  if (wanted == "h200") return cuda("H200", "H200 SXM");
  if (wanted == "gaudi2") return gaudi("Gaudi2", "Gaudi 2");
  if (wanted == "gaudi3") return gaudi("Gaudi3", "Gaudi 3");
  if (wanted == "cpu-avx512") return processor("cpu-avx512", false);
  if (wanted == "cpu-amx") return processor("cpu-amx", true);
  detail::raise(ErrorCode::InvalidArgument, "unknown preset ", in_quotes(name), "; ", did_you_mean(name, presets()),
                "there are ", list_of(presets()), '.');
}

}  // namespace oxytorch::accelerator
