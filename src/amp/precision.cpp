#include "oxytorch/amp/precision.h"

#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/instancenorm.h>
#include <torch/nn/modules/normalization.h>
#include <torch/types.h>

#include <c10/util/Type.h>

#include <array>
#include <unordered_map>
#include <unordered_set>

#include "oxytorch/error.h"
#include "oxytorch/optim.h"

namespace oxytorch::amp {
namespace {

constexpr std::array<const char*, 4> kNames{"O0", "O1", "O2", "O3"};

using TensorSet = std::unordered_set<const c10::TensorImpl*>;

template <class... Modules>
bool is_any(const torch::nn::Module& module) {
  return (... || (dynamic_cast<const Modules*>(&module) != nullptr));
}

/// Whether LibTorch runs this layer with float32 parameters on 16-bit inputs.
bool is_mixed_norm(const torch::nn::Module& module, bool cpu) {
  using namespace torch::nn;
  return is_any<BatchNorm1dImpl, BatchNorm2dImpl, BatchNorm3dImpl, InstanceNorm1dImpl, InstanceNorm2dImpl,
                InstanceNorm3dImpl>(module) ||
         (cpu && is_any<LayerNormImpl, GroupNormImpl>(module));
}

bool is_norm(const torch::nn::Module& module) { return is_mixed_norm(module, /*cpu=*/true); }

bool is_16_bit(at::ScalarType dtype) { return dtype == at::kHalf || dtype == at::kBFloat16; }

/// The parameters and buffers that change dtype, and the layers that do not.
struct Conversion {
  std::vector<at::Tensor> tensors;
  int64_t kept_layers = 0;
  int64_t narrowed_norms = 0;
};

Conversion plan_conversion(torch::nn::Module& model, bool keep_norm, bool cpu) {
  Conversion plan;
  TensorSet kept, seen;
  const auto own = [](const torch::nn::Module& module) {
    auto all = module.parameters(/*recurse=*/false);
    for (auto& buffer : module.buffers(/*recurse=*/false)) all.push_back(std::move(buffer));
    return all;
  };
  for (const auto& module : model.modules()) {
    const auto tensors = own(*module);
    if (tensors.empty() || !is_norm(*module)) continue;
    if (keep_norm && is_mixed_norm(*module, cpu)) {
      ++plan.kept_layers;
      for (const auto& tensor : tensors) kept.insert(tensor.unsafeGetTensorImpl());
    } else {
      ++plan.narrowed_norms;
    }
  }
  for (const auto& module : model.modules()) {
    for (auto& tensor : own(*module)) {
      const bool once = seen.insert(tensor.unsafeGetTensorImpl()).second;
      if (once && tensor.is_floating_point() && !kept.contains(tensor.unsafeGetTensorImpl())) {
        plan.tensors.push_back(std::move(tensor));
      }
    }
  }
  return plan;
}

std::string kind(const torch::optim::Optimizer& optimizer) { return c10::demangle(typeid(optimizer).name()); }

/// Whether `optimizer` can serve `level`; throws with one that can.
void check_optimizer(const torch::optim::Optimizer& optimizer, PrecisionLevel level, at::ScalarType dtype) {
  const auto* tail = dynamic_cast<const optim::TailOptimizer*>(&optimizer);
  const bool masters = tail && tail->tail().options().master_weights != optim::MasterFormat::None;
  if (level == PrecisionLevel::O2) {
    OXY_CHECK(masters, NotSupported, "level O2 needs an optimizer with master weights, and ", kind(optimizer),
              " keeps none. Make it one of oxytorch::optim with .master_weights(MasterFormat::Float32), for example "
              "AdamW(model->parameters(), AdamWOptions(1e-3).master_weights(MasterFormat::Float32)).");
  }
  if (level != PrecisionLevel::O3) return;
  OXY_CHECK(!masters, InvalidArgument,
            "level O3 keeps no master weights, but the optimizer does. Use level O2, or an optimizer without them.");
  OXY_CHECK(tail || dtype != at::kHalf, NotSupported, "the loss scale of float16 gradients is not served by ",
            kind(optimizer), ". Use an optimizer of oxytorch::optim, or bfloat16.");
  OXY_CHECK(tail || optimizer.state().empty(), InvalidState, kind(optimizer),
            " has stepped already, and its state keeps its dtype. Prepare before the first step, or use an optimizer "
            "of oxytorch::optim.");
}

at::ScalarType choose_dtype(const PrecisionOptions& options, at::DeviceType device) {
  if (options.level == PrecisionLevel::O0) return at::kFloat;
  const auto advice = recommend_dtype(device, options.cpu);
  at::ScalarType dtype = options.dtype.value_or(advice.dtype);
  if (!options.dtype && dtype == at::kFloat && options.allow_slow) dtype = at::kBFloat16;
  OXY_CHECK(options.dtype || dtype != at::kFloat, NotSupported, "level ", name(options.level),
            " does not pay here: ", advice.reason, " Use level O0, or insist with allow_slow = true.");
  OXY_CHECK(is_16_bit(dtype), InvalidType, "the dtype of level ", name(options.level), " is ", at::toString(dtype),
            ", expected at::kHalf or at::kBFloat16.");
  const auto support = hardware_support(device, dtype, options.cpu);
  OXY_CHECK(support.native || options.allow_slow, NotSupported, "level ", name(options.level),
            " would be slow: ", support.reason, " Use level O0, or insist with allow_slow = true.");
  return dtype;
}

}  // namespace

PrecisionLevel parse_precision_level(const std::string& text) {
  for (size_t i = 0; i < kNames.size(); ++i) {
    if (text == kNames[i]) return static_cast<PrecisionLevel>(i);
  }
  oxytorch::detail::raise(ErrorCode::InvalidArgument, "the precision level is '", text,
                          "', expected O0, O1, O2 or O3.");
}

const char* name(PrecisionLevel level) noexcept { return kNames[static_cast<size_t>(level)]; }

Precision::Precision(PrecisionLevel level, at::ScalarType dtype, at::DeviceType device, GradScalerOptions scaler)
    : level_(level), dtype_(dtype), device_(device), scaler_(std::move(scaler)) {}

std::optional<Autocast> Precision::autocast() const {
  if (level_ != PrecisionLevel::O1) return std::nullopt;
  return std::optional<Autocast>(std::in_place, device_, dtype_);
}

at::Tensor Precision::input(const at::Tensor& tensor) const {
  return narrow_weights() && tensor.is_floating_point() ? tensor.to(dtype_) : tensor;
}

at::Tensor Precision::output(const at::Tensor& tensor) const {
  return narrow_weights() && is_16_bit(tensor.scalar_type()) ? tensor.to(at::kFloat) : tensor;
}

std::string Precision::explain() const {
  std::string text;
  for (const auto& line : lines_) text += line + '\n';
  return text;
}

Precision prepare(torch::nn::Module& model, torch::optim::Optimizer* optimizer, const PrecisionOptions& options) {
  const auto parameters = model.parameters();
  OXY_CHECK(!parameters.empty(), InvalidArgument, "the model has no parameters.");
  const auto device = parameters.front().device();
  const auto level = options.level;
  const bool narrow = level >= PrecisionLevel::O2;
  for (const auto& item : model.named_parameters()) {
    OXY_CHECK(item->device() == device, InvalidArgument, "parameter '", item.key(), "' is on ", item->device(),
              " and others on ", device, ". Prepare a model on one device.");
    OXY_CHECK(narrow || !is_16_bit(item->scalar_type()), InvalidArgument, "parameter '", item.key(), "' is ",
              at::toString(item->scalar_type()), ", and level ", name(level),
              " keeps weights in float32. Use O2 or O3, or convert the model with to(at::kFloat) first.");
  }
  const auto dtype = choose_dtype(options, device.type());
  if (optimizer) check_optimizer(*optimizer, level, dtype);

  auto scaler = options.scaler;
  scaler.enabled = scaler.enabled && dtype == at::kHalf;
  Precision made(level, dtype, device.type(), std::move(scaler));
  const std::string type = dtype == at::kHalf ? "float16" : dtype == at::kBFloat16 ? "bfloat16" : "float32";
  made.lines_.push_back("level " + std::string(name(level)) + ": products in " + type +
                        (narrow                        ? "."
                         : level == PrecisionLevel::O1 ? " by autocast, weights in float32."
                                                       : "."));
  made.lines_.push_back(level == PrecisionLevel::O0 ? "nothing is changed."
                                                    : hardware_support(device.type(), dtype, options.cpu).reason);
  if (narrow) {
    const bool keep_norm = options.keep_norm_fp32.value_or(level == PrecisionLevel::O2);
    const auto plan = plan_conversion(model, keep_norm, device.is_cpu());
    const at::NoGradGuard no_grad;
    for (auto parameter : parameters) parameter.mutable_grad().reset();
    std::unordered_map<const c10::TensorImpl*, at::Tensor> wide;
    for (auto tensor : plan.tensors) {
      if (optimizer && level == PrecisionLevel::O2) {
        wide[tensor.unsafeGetTensorImpl()] = tensor.detach().to(at::kFloat, /*non_blocking=*/false, /*copy=*/true);
      }
      tensor.set_data(tensor.to(dtype));
    }
    if (auto* tail = dynamic_cast<optim::TailOptimizer*>(optimizer)) tail->adopt_dtypes(wide);
    made.lines_.push_back(std::to_string(plan.tensors.size()) + " parameters and buffers are " + type + ", " +
                          std::to_string(plan.kept_layers) + " normalisation layers are float32" +
                          (keep_norm && plan.narrowed_norms > 0
                               ? ", " + std::to_string(plan.narrowed_norms) +
                                     " are not, since this device takes no float32 weights with 16-bit inputs."
                               : "."));
    made.lines_.push_back(level == PrecisionLevel::O3 ? "the optimizer updates the 16-bit weights: updates below half "
                                                        "a unit in the last place are lost."
                          : optimizer ? "the optimizer keeps master weights, started from the float32 weights."
                                      : "make an optimizer with .master_weights(MasterFormat::Float32).");
  }
  made.lines_.push_back(made.scaler_.is_enabled() ? "the loss is scaled, since float16 gradients may underflow."
                        : dtype == at::kHalf      ? "no loss scale, as was asked for."
                                                  : "no loss scale: " + type + " has the range of float32.");
  return made;
}

}  // namespace oxytorch::amp
