/// The precision levels O0 to O3: what they stand for today, and what they change of a model and its optimizer.
#pragma once

#include <torch/optim/optimizer.h>

#include <optional>
#include <string>
#include <vector>

#include "oxytorch/amp.h"

namespace torch::nn {
class Module;
}

namespace oxytorch::amp {

/// How a model is trained in a 16-bit dtype. The names are those of NVIDIA's Apex; what they stand for today:
///
/// | level | weights | forward | optimizer | loss scale |
/// |---|---|---|---|---|
/// | O0 | float32 | float32 | as it is | none |
/// | O1 | float32 | autocast | as it is | for float16 |
/// | O2 | 16-bit, normalisation layers float32 | 16-bit | keeps float32 master weights | for float16 |
/// | O3 | 16-bit | 16-bit | updates the 16-bit weights | for float16 |
enum class PrecisionLevel { O0, O1, O2, O3 };

/// "O0" to "O3"; Error(InvalidArgument) for another text.
OXY_API PrecisionLevel parse_precision_level(const std::string& text);
OXY_API const char* name(PrecisionLevel level) noexcept;

/// Settings of prepare().
struct PrecisionOptions {
  PrecisionLevel level = PrecisionLevel::O1;
  std::optional<at::ScalarType> dtype = {};  ///< float16 or bfloat16; where not given, recommend_dtype()
  std::optional<bool> keep_norm_fp32 = {};   ///< O2 and O3; where not given, true for O2 and false for O3
  bool allow_slow = false;                   ///< also where the hardware does not multiply the dtype natively
  GradScalerOptions scaler = {};             ///< of the loss scale, where the level has one
  CpuFeatures cpu = cpu_features();          ///< the processor that is asked about
};

class Precision;

/// Puts `model` and `optimizer` (which may be null, and be made afterwards) on a precision level. At O2 and O3 the
/// weights and floating-point buffers change dtype in place: each tensor stays the same object, so an optimizer that
/// holds it already, also one that has stepped, works on, and its masters start from the float32 weights. Gradients are
/// dropped. Normalisation layers that are kept in float32 are torch's BatchNorm and InstanceNorm, and on CPU LayerNorm
/// and GroupNorm; they take 16-bit inputs and give 16-bit outputs. (LibTorch has no hooks to cast at a module's edge.)
///
/// Throws before anything is changed: NotSupported where the hardware does not multiply the dtype natively, naming the
/// missing instruction, and for an optimizer that cannot serve the level, with one that can; InvalidType for a dtype
/// that is neither float16 nor bfloat16; InvalidArgument for a model without parameters, on several devices, or at O0
/// and O1 with 16-bit weights.
OXY_API Precision prepare(torch::nn::Module& model, torch::optim::Optimizer* optimizer = nullptr,
                          const PrecisionOptions& options = {});

/// What prepare() made: what a training loop puts around its own forward, backward and step.
///
/// ```cpp
/// optim::AdamW optimizer(model->parameters(), optim::AdamWOptions(1e-3).master_weights(optim::MasterFormat::Float32));
/// auto precision = amp::prepare(*model, &optimizer, {.level = amp::PrecisionLevel::O2});
/// {
///   const auto scope = precision.autocast();
///   loss = criterion(precision.output(model->forward(precision.input(x))), y);
/// }
/// precision.scaler().scale(loss).backward();
/// precision.scaler().step(optimizer);
/// precision.scaler().update();
/// ```
class OXY_API Precision {
 public:
  [[nodiscard]] PrecisionLevel level() const noexcept { return level_; }
  /// The dtype of products: float32 at O0.
  [[nodiscard]] at::ScalarType dtype() const noexcept { return dtype_; }
  /// A scope for the forward pass at O1; empty at the other levels.
  [[nodiscard]] std::optional<Autocast> autocast() const;
  /// At O2 and O3 a floating-point `tensor` in dtype(), for the model; else itself.
  [[nodiscard]] at::Tensor input(const at::Tensor& tensor) const;
  /// At O2 and O3 a 16-bit `tensor` in float32, for the loss; else itself.
  [[nodiscard]] at::Tensor output(const at::Tensor& tensor) const;
  /// Disabled where the level needs no loss scale, so a loop is the same at all levels.
  [[nodiscard]] GradScaler& scaler() noexcept { return scaler_; }
  /// What was done and why, a line each.
  [[nodiscard]] std::string explain() const;

 private:
  friend Precision prepare(torch::nn::Module& model, torch::optim::Optimizer* optimizer,
                           const PrecisionOptions& options);
  Precision(PrecisionLevel level, at::ScalarType dtype, at::DeviceType device, GradScalerOptions scaler);
  [[nodiscard]] bool narrow_weights() const noexcept { return level_ >= PrecisionLevel::O2; }

  PrecisionLevel level_;
  at::ScalarType dtype_;
  at::DeviceType device_;
  GradScaler scaler_;
  std::vector<std::string> lines_;
};

}  // namespace oxytorch::amp
