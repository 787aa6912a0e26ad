/// GPUConfig: the settings of one training process that belong to its accelerator, applied together and taken back.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "oxytorch/api.h"
#include "oxytorch/host.h"
#include "oxytorch/system.h"

namespace oxytorch::accelerator {

/// What became of one field.
struct FieldReport {
  std::string field;
  std::string wanted;
  std::string before;  ///< "" where it could not be read
  std::string now;     ///< read back after setting
  bool applied;
  std::string reason;  ///< one sentence: what it does here, or why it was not applied
};

/// The device's runtime, for what libtorch's generic headers cannot reach. Each may be empty: the fields that need it
/// are then reported as not applied. Python passes torch.cuda's functions.
struct DeviceRuntime {
  std::function<int()> device_count = {};  ///< visible devices, asked without initialising the runtime
  std::function<bool()> is_initialized = {};
  std::function<std::string(int)> device_name = {};
  std::function<double(int)> memory_fraction = {};  ///< of a device; may initialise the runtime
  std::function<void(int, double)> set_memory_fraction = {};
  /// For a language that keeps its own copy of the environment; empty removes. Where empty, setenv() is called.
  std::function<void(const std::string&, const std::optional<std::string>&)> set_variable = {};
};

/// Active settings; takes them back when it ends, unless keep() was called. Movable.
class OXY_API Applied {
 public:
  Applied() = default;
  Applied(Applied&&) noexcept = default;
  Applied& operator=(Applied&& other) noexcept;
  ~Applied();

  [[nodiscard]] const std::vector<FieldReport>& report() const noexcept { return report_; }
  /// True where every field was applied.
  [[nodiscard]] bool complete() const;
  [[nodiscard]] bool active() const noexcept { return !settings_.empty(); }
  /// Puts everything back to what it was, in reverse order; each setting is tried even where another fails, and the
  /// first failure is thrown at the end. A second call does nothing.
  void revert();
  /// Leaves the settings active for the rest of the process.
  void keep() { settings_.clear(); }

 private:
  friend struct GPUConfig;
  std::vector<FieldReport> report_;
  std::vector<HostSetting> settings_;
};

/// Fields that are empty leave torch's setting alone. Settings are those of the whole process, but for the autocast
/// dtype, which torch keeps per thread. Apply it before the first device call, from one thread, with no step running.
struct OXY_API GPUConfig {
  std::string device = "auto";  ///< "cuda", "hpu", "cpu", or "auto": cuda where one is, else cpu

  /// Of the devices that are visible now, by index and in this order; CUDA_VISIBLE_DEVICES is narrowed to them, which
  /// works only before CUDA is initialised.
  std::optional<std::vector<int>> devices = {};
  /// Share of each visible device's memory that torch's caching allocator may take, above 0 to 1.
  std::optional<double> memory_fraction = {};
  /// fp32 matrix products on CUDA: "ieee" or "tf32" (torch.backends.cuda.matmul.fp32_precision).
  std::optional<std::string> matmul_precision = {};
  /// fp32 convolutions and RNNs in cuDNN: "ieee" or "tf32" (torch.backends.cudnn.conv and .rnn).
  std::optional<std::string> conv_precision = {};
  /// fp32 matrix products, convolutions and RNNs in oneDNN on the CPU: "ieee", "tf32" or "bf16".
  std::optional<std::string> cpu_precision = {};
  std::optional<bool> cudnn_benchmark = {};
  /// torch.use_deterministic_algorithms: operations without a deterministic version raise.
  std::optional<bool> deterministic = {};
  /// Kernels that scaled_dot_product_attention may use: of "flash", "efficient", "cudnn", "math".
  std::optional<std::vector<std::string>> attention = {};
  /// dtype of torch.autocast where none is named: "bf16" or "fp16".
  std::optional<std::string> autocast_dtype = {};
  /// Intra-op threads.
  std::optional<int> threads = {};

  /// Name of the preset it came from, or "", and its reason per field.
  std::string preset_name = "";
  std::map<std::string, std::string> reasons = {};

  /// "A100", "H100", "H200", "Gaudi2", "Gaudi3", "cpu-avx512" or "cpu-amx", in any case;
  /// Error(InvalidArgument) with the nearest for others.
  static GPUConfig preset(std::string_view name);
  static std::vector<std::string> presets();

  /// "90%" or "0.9" as a fraction; Error(InvalidArgument) outside of (0, 1].
  static double parse_fraction(std::string_view text);

  /// Error(InvalidArgument) for a value that cannot be meant, and for deterministic with cudnn_benchmark.
  void check() const;

  /// check(), then each field: set, read back, reported. What does not exist here, or what the hardware would be slower
  /// with, is not applied, and the report says why. Where a setter throws, everything is put back and the error passes.
  [[nodiscard]] Applied apply(const DeviceRuntime& runtime = {}, const CpuFeatures& cpu = cpu_features()) const;

  /// Each field that is set, its value and its reason.
  [[nodiscard]] std::string explain() const;
  /// The fields that are set, as text.
  [[nodiscard]] std::map<std::string, std::string> values() const;
};

/// Sets torch's fp32_precision of operations ("matmul", "conv", "rnn") of "cuda" or "mkldnn", and of no other
/// operation. The way back is exact: what was inherited is inherited again.
OXY_API HostSetting set_float32_precision(const std::string& backend, const std::vector<std::string>& operations,
                                          const std::string& value);

/// The report for a reader, one line a field.
OXY_API std::string to_text(const std::vector<FieldReport>& report);

}  // namespace oxytorch::accelerator
