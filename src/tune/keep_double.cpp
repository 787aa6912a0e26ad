#include "oxytorch/tune/keep_double.h"

#include <ATen/ops/_to_copy.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/convolution.h>
#include <c10/util/accumulate.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "tune/above_autograd.h"

namespace oxytorch::tune {
namespace {

at::Tensor to_copy(const at::Tensor& given, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                   std::optional<at::Device> device, std::optional<bool> pin_memory, bool non_blocking,
                   std::optional<at::MemoryFormat> memory_format) {
  const c10::impl::ExcludeDispatchKeyGuard once(kAboveAutograd);
  const at::Tensor self = values_of(given);
  if (self.scalar_type() == at::kDouble && dtype && at::isFloatingType(*dtype)) dtype = at::kDouble;
  return at::_to_copy(self, dtype, layout, device, pin_memory, non_blocking, memory_format);
}

/// The most memory that a convolution of float64 on a CPU may take for windows, where several rows are computed at
/// once.
constexpr std::int64_t kWindowBytes = 8 << 20;

/// About the bytes that a row of the batch takes as windows: torch lays them out side by side, an input for each
/// element of the kernel, and does so for the whole batch before it multiplies. Groups are computed one after the
/// other.
std::int64_t window_bytes(const at::Tensor& input, const at::Tensor& weight) {
  const auto elements = [](const at::Tensor& t) { return c10::multiply_integers(t.sizes().slice(2)); };
  return weight.size(1) * elements(input) * elements(weight) * static_cast<std::int64_t>(sizeof(double));
}

/// Some rows at a time: a step in float64 is to take no more than twice the memory of one in float32.
at::Tensor convolution(const at::Tensor& given_input, const at::Tensor& given_weight,
                       const std::optional<at::Tensor>& bias, at::IntArrayRef stride, at::IntArrayRef padding,
                       at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding, std::int64_t groups) {
  const c10::impl::ExcludeDispatchKeyGuard once(kAboveAutograd);
  const at::Tensor input = values_of(given_input), weight = values_of(given_weight);
  const auto some = [&](const at::Tensor& rows) {
    return at::convolution(rows, weight, bias, stride, padding, dilation, transposed, output_padding, groups);
  };
  const bool lays_out = input.is_cpu() && input.scalar_type() == at::kDouble && input.dim() > 2 &&
                        input.dim() == weight.dim() && input.size(0) > 1 && !transposed;
  if (!lays_out) return some(input);
  const auto rows = kWindowBytes / std::max<std::int64_t>(1, window_bytes(input, weight));
  if (rows >= input.size(0)) return some(input);
  std::vector<at::Tensor> outputs;
  for (const auto& part : input.split(std::max<std::int64_t>(1, rows))) outputs.push_back(some(part));
  return at::cat(outputs);
}

TORCH_LIBRARY_IMPL(aten, TESTING_ONLY_GenericWrapper, m) {
  m.impl("_to_copy", &to_copy);
  m.impl("convolution", &convolution);
}

}  // namespace

KeepDouble::KeepDouble() : mode_(kAboveAutograd) {}

}  // namespace oxytorch::tune
