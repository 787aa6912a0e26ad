#include "ops/rotary_cpu.h"

#include <ATen/Parallel.h>

#include <algorithm>

#include "ops/dispatch.h"
#include "ops/tiles.h"
#include "optim/dense.h"
#include "oxytorch/kernels/rotary.h"

namespace oxytorch::ops {
namespace {

using at::Tensor;

// Tokens whose angles stay in the cache while all heads take their turns.
constexpr std::int64_t kTokensAtOnce = 32;

// A table over all rows, without a copy for each of them.
Tensor over_rows(const Tensor& table, const Tensor& x) {
  return dense(table).expand({x.size(0), x.size(1), x.size(2), table.size(3)});
}

std::int64_t row_offset(const Tensor& tensor, std::int64_t batch, std::int64_t head, std::int64_t token) {
  return batch * tensor.stride(0) + head * tensor.stride(1) + token * tensor.stride(2);
}

}  // namespace

bool rotary_cpu_takes(const Tensor& x, const Tensor& cos, const Tensor& sin) {
  if (!has_kernel(x) || x.dim() != 4 || x.layout() != at::kStrided || x.is_neg()) return false;
  const auto fits = [&](const Tensor& table) {
    if (table.scalar_type() != at::kFloat || !table.device().is_cpu() || table.dim() != 4 || table.is_neg())
      return false;
    for (std::int64_t d = 0; d < 3; ++d) {
      if (table.size(d) != 1 && table.size(d) != x.size(d)) return false;
    }
    return 2 * table.size(3) <= x.size(3);
  };
  return fits(cos) && fits(sin) && cos.size(3) == sin.size(3);
}

Tensor rotary_cpu(const Tensor& x, const Tensor& cos, const Tensor& sin, bool interleaved, bool inverse) {
  const Tensor from = dense(x), wide_cos = over_rows(cos, x), wide_sin = over_rows(sin, x);
  Tensor to = empty_heads(x);
  const auto element = optim::element_type(x).value();
  const std::int64_t heads = x.size(1), tokens = x.size(2), width = x.size(3), size = x.element_size();
  const std::int64_t chunks = (tokens + kTokensAtOnce - 1) / kTokensAtOnce;
  const std::int64_t grain =
      std::max<std::int64_t>(1, at::internal::GRAIN_SIZE / (kTokensAtOnce * std::max<std::int64_t>(1, width)));
  at::parallel_for(0, x.size(0) * chunks * heads, grain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t item = begin; item < end; ++item) {
      const std::int64_t h = item % heads, b = item / heads / chunks, t = item / heads % chunks * kTokensAtOnce;
      const kernels::RotaryRule rule{.pairs = cos.size(3),
                                     .interleaved = interleaved,
                                     .inverse = inverse,
                                     .cos = wide_cos.const_data_ptr<float>() + row_offset(wide_cos, b, h, t),
                                     .sin = wide_sin.const_data_ptr<float>() + row_offset(wide_sin, b, h, t),
                                     .cos_stride = wide_cos.stride(2),
                                     .sin_stride = wide_sin.stride(2)};
      const auto* rows = static_cast<const char*>(from.const_data_ptr()) + row_offset(from, b, h, t) * size;
      auto* out = static_cast<char*>(to.mutable_data_ptr()) + row_offset(to, b, h, t) * size;
      kernels::rotate_rows(rule, {element, rows, from.stride(2), std::min(kTokensAtOnce, tokens - t), width}, out,
                           to.stride(2));
    }
  });
  return to;
}

}  // namespace oxytorch::ops
