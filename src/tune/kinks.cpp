#include "oxytorch/tune/kinks.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/eye.h>
#include <ATen/ops/linalg_solve.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/topk.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <tuple>
#include <utility>

#include "oxytorch/error.h"

namespace oxytorch::tune {
namespace {

constexpr double kStates = 8, kBytes = 1 << 29;
constexpr double kMost = 2;  // times the largest jump of the reference that an error may be, and still be explained
constexpr double kRidge = 1e-9;
constexpr double kTiny = 1e-300;

at::Tensor wide(const at::Tensor& t) { return (t.is_sparse() ? t.to_dense() : t).detach().to(at::kDouble); }

}  // namespace

std::vector<at::Tensor> unexplained(const std::vector<at::Tensor>& given, const std::vector<at::Tensor>& right,
                                    const std::vector<std::vector<at::Tensor>>& jumps) {
  OXY_CHECK(given.size() == right.size(), InvalidArgument, "there are ", given.size(), " gradients and ", right.size(),
            " of the reference.");
  for (const auto& jump : jumps) {
    OXY_CHECK(jump.size() == right.size(), InvalidArgument, "there are ", right.size(),
              " gradients of the reference and ", jump.size(), " of a state a rounding apart.");
  }
  if (jumps.empty()) return given;
  const at::NoGradGuard no_grad;
  const auto count = static_cast<std::int64_t>(jumps.size());
  auto gram = at::zeros({count, count}, at::kDouble), along = at::zeros({count}, at::kDouble);
  struct Shared {
    std::size_t place;
    at::Tensor moved;  // by each jump
    at::Tensor gram;   // of that, by the tensor's size
    double weight;
  };
  std::vector<Shared> shared;
  for (std::size_t i = 0; i < given.size(); ++i) {
    if (!given[i].defined() || !right[i].defined() || !given[i].sizes().equals(right[i].sizes())) continue;
    if (std::any_of(jumps.begin(), jumps.end(), [&](const auto& jump) { return !jump[i].defined(); })) continue;
    const auto exact = wide(right[i]);
    const double weight = 1 / std::max(exact.norm().item<double>(), kTiny);
    std::vector<at::Tensor> moves;
    for (const auto& jump : jumps) moves.push_back((wide(jump[i]) - exact).reshape(-1));
    auto moved = at::stack(moves);
    const auto weighted = moved * weight;
    auto own = weighted.mm(weighted.t()).cpu();
    gram += own;
    along += weighted.mv((wide(given[i]) - exact).reshape(-1) * weight).cpu();
    shared.push_back({i, std::move(moved), std::move(own), weight});
  }
  const double size = gram.diagonal().max().item<double>();
  if (!(size > 0) || !std::isfinite(size) || !along.isfinite().all().item<bool>()) return given;
  const auto regular = gram + kRidge * size * at::eye(count, at::kDouble);
  auto part = at::linalg_solve(regular, along);
  const double reach = part.dot(gram.mv(part)).item<double>();
  part *= std::min(1.0, kMost * std::sqrt(size / std::max(reach, kTiny)));
  // Column j: the jump j less what the others explain of it.
  auto apart = at::linalg_solve(regular, at::eye(count, at::kDouble));
  apart = apart / apart.diagonal();
  auto left = given;
  for (const auto& [i, moved, own, weight] : shared) {
    const auto explained = moved.t().mv(part.to(moved.device())).reshape(given[i].sizes());
    left[i] = wide(given[i]) - explained;
    if (count < 2) continue;
    const auto unspanned = apart.t().mm(own).mm(apart).diagonal().clamp_min(0).sqrt();
    const double second = std::get<0>(unspanned.topk(2))[1].item<double>();
    const auto exact = wide(right[i]);
    if ((left[i] - exact).norm().item<double>() * weight <= second) left[i] = exact;
  }
  return left;
}

double kink_nudge(bool reduced_precision) noexcept { return reduced_precision ? 0x1p-8 : 0x1p-16; }

bool nudged_in_float64(const std::vector<at::Tensor>& parameters) {
  return std::any_of(parameters.begin(), parameters.end(), [](const at::Tensor& p) {
    return p.is_floating_point() && p.scalar_type() != at::kFloat && p.scalar_type() != at::kDouble;
  });
}

int kink_states(double elements) noexcept {
  return static_cast<int>(std::clamp(kBytes / std::max(8 * elements, 1.0), 2.0, kStates));
}

}  // namespace oxytorch::tune
