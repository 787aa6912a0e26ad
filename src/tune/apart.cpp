#include "oxytorch/tune/apart.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/dot.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "oxytorch/error.h"

namespace oxytorch::tune {
namespace {

constexpr double kShareOfAll = 0.05;

at::Tensor wide(const at::Tensor& t) {
  const auto dense = t.is_sparse() ? t.to_dense() : t;
  return dense.detach().to(at::kDouble).reshape(-1);
}

double product(const at::Tensor& a, const at::Tensor& b) { return at::dot(a, b).item<double>(); }

}  // namespace

Apart gradients_apart(const std::vector<at::Tensor>& with, const std::vector<at::Tensor>& without) {
  OXY_CHECK(with.size() == without.size(), InvalidArgument, "there are ", with.size(),
            " gradients with the changes and ", without.size(), " without.");
  const at::NoGradGuard no_grad;
  Apart apart;
  double square = 0, along = 0, count = 0;
  std::vector<std::pair<double, double>> errors;  // root mean squares of error and value
  for (std::size_t i = 0; i < with.size(); ++i) {
    if (with[i].defined() != without[i].defined()) apart.gradient = std::numeric_limits<double>::infinity();
    if (!with[i].defined() || !without[i].defined() || without[i].numel() == 0) continue;
    const auto mine = wide(with[i]), usual = wide(without[i]), off = mine - usual;
    const auto size = static_cast<double>(usual.numel());
    const double own = product(usual, usual);
    errors.emplace_back(std::sqrt(product(off, off) / size), std::sqrt(own / size));
    square += own;
    along += product(off, usual);
    count += size;
  }
  const double all = std::sqrt(square / std::max(count, 1.0));
  for (const auto& [error, size] : errors) {
    if (error == 0) continue;
    const double relative = error / std::max(size, kShareOfAll * all);
    if (!(relative <= apart.gradient)) apart.gradient = relative;
  }
  if (along != 0) apart.factor = std::abs(along / square);
  return apart;
}

}  // namespace oxytorch::tune
