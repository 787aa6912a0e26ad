#include "oxytorch/tune/keep_double.h"

#include <ATen/ops/_to_copy.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/native_batch_norm_backward.h>
#include <c10/util/accumulate.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <tuple>
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

/// The most memory that an operator of float64 on a CPU may take beside its results, where several rows or channels are
/// computed at once.
constexpr std::int64_t kScratchBytes = 8 << 20;

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
  const auto rows = kScratchBytes / std::max<std::int64_t>(1, window_bytes(input, weight));
  if (rows >= input.size(0)) return some(input);
  std::vector<at::Tensor> outputs;
  for (const auto& part : input.split(std::max<std::int64_t>(1, rows))) outputs.push_back(some(part));
  return at::cat(outputs);
}

/// Some channels at a time: torch takes as much again as the input.
std::tuple<at::Tensor, at::Tensor, at::Tensor> batch_norm_backward(
    const at::Tensor& gradient, const at::Tensor& given_input, const std::optional<at::Tensor>& weight,
    const std::optional<at::Tensor>& running_mean, const std::optional<at::Tensor>& running_variance,
    const std::optional<at::Tensor>& mean, const std::optional<at::Tensor>& inverse_deviation, bool train, double eps,
    std::array<bool, 3> wanted) {
  const c10::impl::ExcludeDispatchKeyGuard once(kAboveAutograd);
  const at::Tensor input = values_of(given_input);
  const auto channels = input.dim() > 1 ? input.size(1) : 0;
  const auto bytes = static_cast<std::int64_t>(input.nbytes());
  const auto some = [&](std::int64_t first, std::int64_t count) {
    const auto part = [&](const std::optional<at::Tensor>& of_channels) {
      const bool has = of_channels && of_channels->defined() && of_channels->numel() == channels;
      return has ? of_channels->narrow(0, first, count) : of_channels;
    };
    const auto rows = [&](const at::Tensor& of) {
      return count == channels ? of : of.narrow(1, first, count).contiguous();
    };
    return at::native_batch_norm_backward(rows(gradient), rows(input), part(weight), part(running_mean),
                                          part(running_variance), part(mean), part(inverse_deviation), train, eps,
                                          wanted);
  };
  const bool is_large = input.is_cpu() && input.scalar_type() == at::kDouble && channels > 1 && bytes > kScratchBytes;
  if (!is_large || !wanted[0]) return some(0, channels);
  constexpr std::int64_t kCopies = 4;  // of the gradient and the input, the result and what torch takes beside it
  const auto count = std::max<std::int64_t>(1, channels * kScratchBytes / (kCopies * bytes));
  const auto of_input = at::empty_like(input);
  std::vector<at::Tensor> of_weight, of_bias;
  for (std::int64_t first = 0; first < channels; first += count) {
    const auto length = std::min(count, channels - first);
    const auto [to_input, to_weight, to_bias] = some(first, length);
    of_input.narrow(1, first, length).copy_(to_input);
    of_weight.push_back(to_weight);
    of_bias.push_back(to_bias);
  }
  const auto whole = [](bool is_wanted, const std::vector<at::Tensor>& parts) {
    return is_wanted && parts.front().defined() ? at::cat(parts) : at::Tensor();
  };
  return {of_input, whole(wanted[1], of_weight), whole(wanted[2], of_bias)};
}

TORCH_LIBRARY_IMPL(aten, TESTING_ONLY_GenericWrapper, m) {
  m.impl("_to_copy", &to_copy);
  m.impl("convolution", &convolution);
  m.impl("native_batch_norm_backward", &batch_norm_backward);
}

}  // namespace

KeepDouble::KeepDouble() : mode_(kAboveAutograd) {}

}  // namespace oxytorch::tune
