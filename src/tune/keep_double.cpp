#include "oxytorch/tune/keep_double.h"

#include <ATen/ops/_to_copy.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/convolution.h>
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

/// Bytes that a row of the batch takes as windows: torch lays them out side by side, an input for each element of the
/// kernel, and does so for the whole batch before it multiplies.
std::int64_t window_bytes(const at::Tensor& input, const at::Tensor& weight, at::IntArrayRef stride,
                          at::IntArrayRef padding, at::IntArrayRef dilation) {
  std::int64_t elements = weight.size(1);  // of a group, each of which is computed after the other
  for (std::int64_t d = 2; d < weight.dim(); ++d) {
    const auto of = [d](at::IntArrayRef values) {
      return values[values.size() == 1 ? 0 : static_cast<std::size_t>(d - 2)];
    };
    const auto places = (input.size(d) + 2 * of(padding) - of(dilation) * (weight.size(d) - 1) - 1) / of(stride) + 1;
    elements *= weight.size(d) * std::max<std::int64_t>(places, 1);
  }
  return elements * static_cast<std::int64_t>(sizeof(double));
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
  const auto rows = std::max<std::int64_t>(1, kWindowBytes / window_bytes(input, weight, stride, padding, dilation));
  if (rows >= input.size(0)) return some(input);
  std::vector<at::Tensor> outputs;
  for (const auto& part : input.split(rows)) outputs.push_back(some(part));
  return at::cat(outputs);
}

TORCH_LIBRARY_IMPL(aten, TESTING_ONLY_GenericWrapper, m) {
  m.impl("_to_copy", &to_copy);
  m.impl("convolution", &convolution);
}

}  // namespace

KeepDouble::KeepDouble() : mode_(kAboveAutograd) {}

}  // namespace oxytorch::tune
