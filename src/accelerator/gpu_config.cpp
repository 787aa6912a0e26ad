#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/CUDAHooksInterface.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <exception>
#include <memory>
#include <set>
#include <utility>

#include "accelerator/float32_precision.h"
#include "base/spelling.h"
#include "oxytorch/accelerator.h"
#include "oxytorch/amp.h"
#include "oxytorch/error.h"
#include "oxytorch/units.h"

namespace oxytorch::accelerator {
namespace {

using Backend = Float32Backend;
using Op = Float32Op;

constexpr const char* kVisible = "CUDA_VISIBLE_DEVICES";

std::string on_off(bool value) { return value ? "on" : "off"; }

std::string number_text(double value) {
  std::array<char, 32> buffer{};
  const auto result = std::to_chars(buffer.data(), buffer.data() + buffer.size(), value);
  return {buffer.data(), result.ptr};
}

template <class List>
std::string joined(const List& list) {
  std::string text;
  for (const auto& one : list) {
    if (!text.empty()) text += ',';
    if constexpr (std::is_same_v<std::decay_t<decltype(one)>, std::string>) {
      text += one;
    } else {
      text += std::to_string(one);
    }
  }
  return text;
}

void check_word(const char* field, const std::optional<std::string>& value, const std::vector<std::string>& allowed) {
  if (!value || std::find(allowed.begin(), allowed.end(), *value) != allowed.end()) return;
  detail::raise(ErrorCode::InvalidArgument, field, " must be ", list_of(allowed), ", not ", in_quotes(*value), ". ",
                did_you_mean(*value, allowed));
}

const std::vector<std::string>& attention_names() {
  static const std::vector<std::string> names{"flash", "efficient", "cudnn", "math"};
  return names;
}

std::vector<std::string> enabled_attention() {
  const auto& context = at::globalContext();
  std::vector<std::string> names;
  if (context.userEnabledFlashSDP()) names.emplace_back("flash");
  if (context.userEnabledMemEfficientSDP()) names.emplace_back("efficient");
  if (context.userEnabledCuDNNSDP()) names.emplace_back("cudnn");
  if (context.userEnabledMathSDP()) names.emplace_back("math");
  return names;
}

void enable_attention(const std::vector<std::string>& names) {
  auto& context = at::globalContext();
  const auto has = [&](const char* name) { return std::find(names.begin(), names.end(), name) != names.end(); };
  context.setSDPUseFlash(has("flash"));
  context.setSDPUseMemEfficient(has("efficient"));
  context.setSDPUseCuDNN(has("cudnn"));
  context.setSDPUseMath(has("math"));
}

/// The entries of CUDA_VISIBLE_DEVICES as CUDA reads them: numbers or UUIDs, up to the first that is empty or negative.
std::vector<std::string> visible_entries(const std::string& text) {
  std::vector<std::string> entries;
  std::size_t at = 0;
  while (at <= text.size()) {
    const std::size_t comma = std::min(text.find(',', at), text.size());
    std::string entry = text.substr(at, comma - at);
    std::erase_if(entry, [](char c) { return c == ' ' || c == '\t'; });
    if (entry.empty() || entry.front() == '-') break;
    entries.push_back(std::move(entry));
    at = comma + 1;
  }
  return entries;
}

void set_variable(const std::string& name, const std::optional<std::string>& value) {
  const int failed = value ? ::setenv(name.c_str(), value->c_str(), 1) : ::unsetenv(name.c_str());
  OXY_CHECK(failed == 0, InvalidState, "the environment refused to set ", name, '.');
}

std::optional<std::string> variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? std::nullopt : std::optional<std::string>(value);
}

/// Applies one configuration field by field.
class Applier {
 public:
  Applier(const GPUConfig& config, const DeviceRuntime& runtime, const CpuFeatures& cpu,
          std::vector<FieldReport>& report, std::vector<HostSetting>& settings)
      : config_(config), runtime_(runtime), cpu_(cpu), report_(report), settings_(settings) {
    // Asking libtorch initialises CUDA, after which `devices` would come too late.
    if (runtime.device_count) {
      devices_ = runtime.device_count();
    } else if (!config.devices && at::globalContext().hasCUDA()) {
      devices_ = static_cast<int>(at::detail::getCUDAHooks().deviceCount());
    }
    device_ = config.device != "auto" ? config.device : devices_ > 0 ? "cuda" : "cpu";
  }

  void run() {
    set_devices();  // before anything that may initialise CUDA
    set_memory_fraction();
    set_precision("matmul_precision", config_.matmul_precision, Backend::CUDA, {Op::MATMUL}, cuda_note());
    set_precision("conv_precision", config_.conv_precision, Backend::CUDA, {Op::CONV, Op::RNN}, cuda_note());
    set_cpu_precision();
    set_flag(
        "cudnn_benchmark", config_.cudnn_benchmark, [] { return at::globalContext().benchmarkCuDNN(); },
        [](bool on) { at::globalContext().setBenchmarkCuDNN(on); },
        "cuDNN times its algorithms on the first batch of each shape" + cuda_note());
    set_deterministic();
    set_attention();
    set_autocast();
    set_threads();
    note_preset();
  }

 private:
  void skip(const char* field, std::string wanted, std::string before, std::string reason) {
    report_.push_back({field, std::move(wanted), before, before, false, std::move(reason)});
  }

  /// Sets, reads back, and remembers the way back; what did not take is put back at once.
  template <class Set, class Undo, class Read>
  void put(const char* field, const std::string& wanted, const std::string& before, const Set& set, Undo undo,
           const Read& read, std::string reason) {
    settings_.push_back(HostSetting::applied(field, reason, "", std::move(undo)));
    set();
    const std::string now = read();
    const bool applied = now == wanted;
    if (!applied) {
      HostSetting refused = std::move(settings_.back());
      settings_.pop_back();
      refused.revert();
      reason = "torch kept " + now + " when it was set to " + wanted + ".";
    }
    report_.push_back({field, wanted, before, applied ? now : before, applied, std::move(reason)});
  }

  [[nodiscard]] std::string cuda_note() const {
    return devices_ > 0 ? "." : "; the flag is set, and with no CUDA device here nothing reads it.";
  }

  void note_preset() {
    if (config_.preset_name.empty() || device_ != "cuda") return;
    if (devices_ == 0) {
      skip("preset", config_.preset_name, "", "no CUDA device is usable here; its flags are set all the same.");
      return;
    }
    // Asking the name initialises CUDA, which is not for a preset to do.
    if (!runtime_.device_name || !runtime_.is_initialized || !runtime_.is_initialized()) return;
    const std::string name = runtime_.device_name(0);
    if (name.find(config_.preset_name) != std::string::npos) return;
    skip("preset", config_.preset_name, name, "the device is another one; the flags are set all the same.");
  }

  void set_devices() {
    if (!config_.devices) return;
    const auto old = variable(kVisible);
    const std::string wanted = joined(*config_.devices);
    const std::string before = old.value_or("");
    if (device_ != "cuda" || devices_ == 0) {
      skip("devices", wanted, before,
           device_ == "hpu"   ? "a process has one HPU; the launcher picks it by HABANA_VISIBLE_MODULES."
           : device_ == "cpu" ? "the device is the CPU."
                              : "no CUDA device is usable here.");
      return;
    }
    for (const int id : *config_.devices) {
      OXY_CHECK(id < devices_, InvalidArgument, "devices has ", id, ", and ", devices_,
                " devices are visible; the last is ", devices_ - 1, '.');
    }
    if (!runtime_.is_initialized || runtime_.is_initialized()) {
      skip("devices", wanted, before,
           std::string("CUDA is initialised and does not read ") + kVisible +
               " again; apply this before the first "
               "CUDA call.");
      return;
    }
    const auto entries = old ? visible_entries(*old) : std::vector<std::string>{};
    std::vector<std::string> chosen;
    for (const int id : *config_.devices) {
      const bool listed = static_cast<std::size_t>(id) < entries.size();
      chosen.push_back(listed ? entries[static_cast<std::size_t>(id)] : std::to_string(id));
    }
    const std::string value = joined(chosen);
    const auto write = runtime_.set_variable ? runtime_.set_variable : decltype(runtime_.set_variable)(set_variable);
    put(
        "devices", value, before, [&] { write(kVisible, value); }, [write, old] { write(kVisible, old); },
        [] { return variable(kVisible).value_or(""); },
        std::string(kVisible) + " names them; CUDA reads it once, when it is initialised.");
    devices_ = static_cast<int>(chosen.size());
  }

  void set_memory_fraction() {
    if (!config_.memory_fraction) return;
    const double wanted = *config_.memory_fraction;
    if (device_ != "cuda" || devices_ == 0 || !runtime_.set_memory_fraction || !runtime_.memory_fraction) {
      skip("memory_fraction", number_text(wanted), "",
           device_ == "hpu"   ? "torch.hpu has no such setting; PT_HPU_POOL_MEM_ACQUIRE_PERC bounds the pool at start."
           : device_ == "cpu" ? "it bounds CUDA's caching allocator; the host's memory is bounded by its cgroup."
           : devices_ == 0    ? "no CUDA device is usable here."
                              : "the program gave no way to CUDA's allocator.");
      return;
    }
    std::vector<double> old;
    for (int i = 0; i < devices_; ++i) old.push_back(runtime_.memory_fraction(i));
    const auto set_all = [set = runtime_.set_memory_fraction](const std::vector<double>& values) {
      for (std::size_t i = 0; i < values.size(); ++i) set(static_cast<int>(i), values[i]);
    };
    const auto text = [](const std::vector<double>& values) {
      const bool same = std::all_of(values.begin(), values.end(), [&](double one) { return one == values[0]; });
      std::string all;
      for (const double one : values) {
        if (!all.empty()) all += ',';
        all += number_text(one);
      }
      return same ? number_text(values[0]) : all;
    };
    const int count = devices_;
    put(
        "memory_fraction", number_text(wanted), text(old), [&] { set_all(std::vector<double>(old.size(), wanted)); },
        [set_all, old] { set_all(old); },
        [&] {
          std::vector<double> now;
          for (int i = 0; i < count; ++i) now.push_back(runtime_.memory_fraction(i));
          return text(now);
        },
        "of each of " + std::to_string(count) + " devices; more raises torch.OutOfMemoryError.");
  }

  void set_precision(const char* field, const std::optional<std::string>& wanted, Backend backend, std::vector<Op> ops,
                     const std::string& note) {
    if (!wanted) return;
    const auto read = [ops, backend] {
      std::set<std::string> words;
      for (const Op op : ops) words.insert(precision2str(float32_precision(backend, op)));
      return joined(words);
    };
    // Shared, since the way back is known only once it is set.
    const auto set = std::make_shared<HostSetting>(HostSetting::unchanged(field, ""));
    put(
        field, *wanted, read(), [&] { *set = accelerator::set_precision(backend, ops, str2precision(*wanted)); },
        [set] { set->revert(); }, read,
        std::string(*wanted == "tf32"   ? "fp32 products keep 10 bits of mantissa and fp32's range"
                    : *wanted == "bf16" ? "fp32 products are computed in bf16 and summed in fp32"
                                        : "fp32 products are fp32's own") +
            note);
  }

  void set_cpu_precision() {
    if (!config_.cpu_precision) return;
    const std::string& wanted = *config_.cpu_precision;
    std::string missing;
    if (!at::globalContext().userEnabledMkldnn()) {
      missing = "oneDNN is switched off (torch.backends.mkldnn.enabled).";
    } else if (!at::Context::hasMKLDNN()) {
      missing = "this torch was built without oneDNN.";
    } else if (wanted == "bf16") {
      const auto support = amp::hardware_support(at::kCPU, at::kBFloat16, cpu_);
      if (!support.native) missing = support.reason;
    } else if (wanted == "tf32" && !cpu_.amx_fp16) {
      missing = "oneDNN computes tf32 on processors with amx_fp16, which this one has not.";
    }
    if (!missing.empty()) {
      skip("cpu_precision", wanted, precision2str(float32_precision(Backend::MKLDNN, Op::MATMUL)), missing);
      return;
    }
    set_precision("cpu_precision", config_.cpu_precision, Backend::MKLDNN, {Op::MATMUL, Op::CONV, Op::RNN}, ".");
  }

  template <class Read, class Write>
  void set_flag(const char* field, const std::optional<bool>& wanted, const Read& read, const Write& write,
                std::string reason) {
    if (!wanted) return;
    const bool old = read();
    put(
        field, on_off(*wanted), on_off(old), [&] { write(*wanted); }, [write, old] { write(old); },
        [&] { return on_off(read()); }, std::move(reason));
  }

  void set_deterministic() {
    if (!config_.deterministic) return;
    auto& context = at::globalContext();
    const bool old = context.deterministicAlgorithms();
    const bool old_warn = context.deterministicAlgorithmsWarnOnly();
    std::string reason = *config_.deterministic ? "operations without a deterministic version raise."
                                                : "operations may use atomic additions, whose order is free.";
    const std::string workspace = variable("CUBLAS_WORKSPACE_CONFIG").value_or("");
    if (*config_.deterministic && device_ == "cuda" && workspace != ":4096:8" && workspace != ":16:8") {
      reason =
          "operations without a deterministic version raise, and so do cuBLAS products unless "
          "CUBLAS_WORKSPACE_CONFIG=:4096:8 is set before the first CUDA call.";
    }
    put(
        "deterministic", on_off(*config_.deterministic), on_off(old),
        [&] { context.setDeterministicAlgorithms(*config_.deterministic, /*warn_only=*/false); },
        [old, old_warn] { at::globalContext().setDeterministicAlgorithms(old, old_warn); },
        [&] { return on_off(context.deterministicAlgorithms()); }, std::move(reason));
  }

  void set_attention() {
    if (!config_.attention) return;
    std::vector<std::string> wanted;  // in torch's order, each once
    for (const std::string& name : attention_names()) {
      if (std::find(config_.attention->begin(), config_.attention->end(), name) != config_.attention->end()) {
        wanted.push_back(name);
      }
    }
    const auto old = enabled_attention();
    put(
        "attention", joined(wanted), joined(old), [&] { enable_attention(wanted); }, [old] { enable_attention(old); },
        [] { return joined(enabled_attention()); },
        "scaled_dot_product_attention takes the first of these that can serve the inputs, and raises where none can.");
  }

  void set_autocast() {
    if (!config_.autocast_dtype) return;
    const at::DeviceType type = device_ == "cuda" ? at::kCUDA : device_ == "hpu" ? at::kHPU : at::kCPU;
    const at::ScalarType wanted = *config_.autocast_dtype == "bf16" ? at::kBFloat16 : at::kHalf;
    const auto name = [](at::ScalarType dtype) -> std::string {
      return dtype == at::kBFloat16 ? "bf16" : dtype == at::kHalf ? "fp16" : at::toString(dtype);
    };
    const at::ScalarType old = at::autocast::get_autocast_dtype(type);
    const auto support = amp::hardware_support(type, wanted, cpu_);
    if (!support.native) {
      skip("autocast_dtype", *config_.autocast_dtype, name(old), support.reason);
      return;
    }
    put(
        "autocast_dtype", *config_.autocast_dtype, name(old), [&] { at::autocast::set_autocast_dtype(type, wanted); },
        [type, old] { at::autocast::set_autocast_dtype(type, old); },
        [&] { return name(at::autocast::get_autocast_dtype(type)); }, support.reason + " torch keeps it per thread.");
  }

  void set_threads() {
    if (!config_.threads) return;
    const int old = at::get_num_threads();
    const int usable = read_cores().usable;
    if (at::in_parallel_region() || *config_.threads > usable) {
      skip("threads", std::to_string(*config_.threads), std::to_string(old),
           at::in_parallel_region() ? "called inside a parallel region."
                                    : "this process may use " + std::to_string(usable) + " processors.");
      return;
    }
    put(
        "threads", std::to_string(*config_.threads), std::to_string(old),
        [&] { at::set_num_threads(*config_.threads); }, [old] { at::set_num_threads(old); },
        [] { return std::to_string(at::get_num_threads()); },
        "of " + std::to_string(usable) + " processors; the order of some sums follows it.");
  }

  const GPUConfig& config_;
  const DeviceRuntime& runtime_;
  const CpuFeatures& cpu_;
  std::vector<FieldReport>& report_;
  std::vector<HostSetting>& settings_;
  int devices_ = 0;
  std::string device_;
};

}  // namespace

Applied& Applied::operator=(Applied&& other) noexcept {
  if (this != &other) {
    try {
      revert();
    } catch (...) {  // as in the destructor
    }
    report_ = std::move(other.report_);
    settings_ = std::move(other.settings_);
    other.settings_.clear();
  }
  return *this;
}

Applied::~Applied() {
  try {
    revert();
  } catch (...) {  // a caller that wants to know calls revert() itself
  }
}

bool Applied::complete() const {
  return std::all_of(report_.begin(), report_.end(), [](const FieldReport& one) { return one.applied; });
}

void Applied::revert() {
  auto settings = std::exchange(settings_, {});
  std::exception_ptr first;
  for (auto setting = settings.rbegin(); setting != settings.rend(); ++setting) {
    try {
      setting->revert();
    } catch (...) {
      if (!first) first = std::current_exception();
    }
  }
  if (first) std::rethrow_exception(first);
}

double GPUConfig::parse_fraction(std::string_view text) {
  double value = 0;
  if (text.find('%') != std::string_view::npos) {
    const Size share = Size::parse(text);
    constexpr std::uint64_t kParts = 1'000'000'000;
    value = static_cast<double>(share.resolve(kParts)) / static_cast<double>(kParts);
  } else {
    const auto [end, status] = std::from_chars(text.data(), text.data() + text.size(), value);
    OXY_CHECK(status == std::errc() && end == text.data() + text.size(), InvalidArgument, "memory_fraction ",
              in_quotes(text), " is no share; write '90%' or 0.9.");
  }
  OXY_CHECK(value > 0 && value <= 1, InvalidArgument, "memory_fraction must be above 0 and at most 1, not ", value,
            "; write '90%' or 0.9.");
  return value;
}

void GPUConfig::check() const {
  check_word("device", device, {"auto", "cuda", "hpu", "cpu"});
  check_word("matmul_precision", matmul_precision, {"ieee", "tf32"});
  check_word("conv_precision", conv_precision, {"ieee", "tf32"});
  check_word("cpu_precision", cpu_precision, {"ieee", "tf32", "bf16"});
  check_word("autocast_dtype", autocast_dtype, {"bf16", "fp16"});
  if (attention) {
    OXY_CHECK(!attention->empty(), InvalidArgument, "attention is empty; name at least one of ",
              list_of(attention_names()), '.');
    for (const std::string& name : *attention) check_word("attention", name, attention_names());
  }
  if (devices) {
    OXY_CHECK(!devices->empty(), InvalidArgument, "devices is empty; use device='cpu' to train without one.");
    std::set<int> seen;
    for (const int id : *devices) {
      OXY_CHECK(id >= 0, InvalidArgument, "devices has ", id, "; ids count from 0.");
      OXY_CHECK(seen.insert(id).second, InvalidArgument, "devices has ", id, " twice; keep one of them.");
    }
  }
  OXY_CHECK(!memory_fraction || (*memory_fraction > 0 && *memory_fraction <= 1), InvalidArgument,
            "memory_fraction must be above 0 and at most 1, not ", memory_fraction.value_or(0),
            "; write '90%' or 0.9.");
  OXY_CHECK(!threads || (*threads >= 1 && *threads <= 4096), InvalidArgument, "threads must be from 1 to 4096, not ",
            threads.value_or(0), '.');
  OXY_CHECK(!(deterministic.value_or(false) && cudnn_benchmark.value_or(false)), InvalidArgument,
            "deterministic and cudnn_benchmark contradict each other: the benchmark picks algorithms by their time, so "
            "that two runs may pick different ones. Leave one of them out.");
}

Applied GPUConfig::apply(const DeviceRuntime& runtime, const CpuFeatures& cpu) const {
  check();
  Applied applied;  // its destructor puts everything back if a setter throws
  Applier(*this, runtime, cpu, applied.report_, applied.settings_).run();
  return applied;
}

std::map<std::string, std::string> GPUConfig::values() const {
  std::map<std::string, std::string> all;
  if (devices) all["devices"] = joined(*devices);
  if (memory_fraction) all["memory_fraction"] = number_text(*memory_fraction);
  if (matmul_precision) all["matmul_precision"] = *matmul_precision;
  if (conv_precision) all["conv_precision"] = *conv_precision;
  if (cpu_precision) all["cpu_precision"] = *cpu_precision;
  if (cudnn_benchmark) all["cudnn_benchmark"] = on_off(*cudnn_benchmark);
  if (deterministic) all["deterministic"] = on_off(*deterministic);
  if (attention) all["attention"] = joined(*attention);
  if (autocast_dtype) all["autocast_dtype"] = *autocast_dtype;
  if (threads) all["threads"] = std::to_string(*threads);
  return all;
}

std::string GPUConfig::explain() const {
  std::string text =
      "device            " + device + (preset_name.empty() ? "" : "  (preset " + preset_name + ")") + '\n';
  for (const auto& [field, value] : values()) {
    const auto reason = reasons.find(field);
    std::string line = field;
    line.resize(18, ' ');
    line += value;
    line.resize(std::max<std::size_t>(line.size() + 2, 30), ' ');
    text += line + (reason == reasons.end() ? "set by the caller" : reason->second) + '\n';
  }
  for (const auto& [field, reason] : reasons) {
    if (values().count(field) != 0) continue;
    std::string line = field;
    line.resize(18, ' ');
    line += "left alone  ";
    text += line + reason + '\n';
  }
  return text;
}

std::string to_text(const std::vector<FieldReport>& report) {
  std::string text;
  for (const FieldReport& one : report) {
    text += one.field + ": " + (one.applied ? one.before + " -> " + one.now : "not applied (" + one.wanted + ")") +
            ": " + one.reason + '\n';
  }
  return text;
}

}  // namespace oxytorch::accelerator
