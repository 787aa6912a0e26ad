#include "oxytorch/tune/kinks.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/eye.h>
#include <ATen/ops/linalg_solve.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <utility>

#include "oxytorch/error.h"
#include "oxytorch/memory/parked.h"

namespace oxytorch::tune {
namespace {

constexpr std::int64_t kSampled = 1 << 16;  // elements of a tensor in which directions are compared
constexpr double kMost = 2;                 // times the largest jump of the reference that may be explained by jumps
constexpr double kRidge = 1e-9;             // of their products, as states may jump alike
constexpr double kMostAlong = 4;            // times the largest jump along the gradient
constexpr double kSlack = 0.5, kDeviations = 4;      // beyond which errors agree: see agree()
constexpr double kFine = 0x1p-14, kCoarse = 0x1p-7;  // of a parameter, that it is moved by
constexpr double kTiny = 1e-300;

at::Tensor wide(const at::Tensor& t) { return (t.is_sparse() ? t.to_dense() : t).detach().to(at::kDouble); }

/// The same elements of every tensor of a size.
at::Tensor sampled(const at::Tensor& t) {
  const auto flat = t.reshape(-1);
  if (flat.numel() <= kSampled) return flat.cpu().clone();
  const auto which = at::randint(flat.numel(), {kSampled}, at::make_generator<at::CPUGeneratorImpl>(0), at::kLong);
  return flat.index_select(0, which.to(flat.device())).cpu();
}

double size_of(const at::Tensor& t) { return t.norm().item<double>(); }

/// That part of `error` which scales `exact`.
double along(const at::Tensor& error, const at::Tensor& exact) {
  return std::abs((error * exact).sum().item<double>()) / std::max(size_of(exact), kTiny);
}

/// Whether the errors have a part in common. Of independent ones, the square of their sum is that of all together, give
/// or take what products of pairs say.
bool agree(const std::vector<at::Tensor>& errors) {
  const auto all = at::stack(errors);
  const auto products = all.mm(all.t());
  const double squares = products.trace().item<double>();
  if (!(squares > 0)) return false;
  const auto pairs = products - products.diagonal().diag();
  const double deviation = std::sqrt(2 * pairs.square().sum().item<double>());
  return !(pairs.sum().item<double>() <= kSlack * squares + kDeviations * deviation);
}

bool comparable(const at::Tensor& given, const at::Tensor& right) {
  return given.defined() && right.defined() && given.sizes().equals(right.sizes());
}

}  // namespace

Kinks::Kinks(std::vector<at::Tensor> given, std::vector<at::Tensor> right)
    : given_(std::move(given)), right_(std::move(right)), found_(given_.size()) {
  OXY_CHECK(given_.size() == right_.size(), InvalidArgument, "there are ", given_.size(), " gradients and ",
            right_.size(), " of the reference.");
}

void Kinks::add(const std::vector<at::Tensor>& given, const std::vector<at::Tensor>& right) {
  OXY_CHECK(given.size() == given_.size() && right.size() == given_.size(), InvalidArgument, "there are ",
            given_.size(), " gradients, and at a state apart ", given.size(), " and ", right.size(),
            " of the reference.");
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < given_.size(); ++i) {
    if (!comparable(given_[i], right_[i]) || !comparable(given[i], right[i]) || !comparable(right_[i], right[i])) {
      continue;
    }
    const auto exact = wide(right_[i]), here = wide(right[i]);
    const auto jump = here - exact, error = wide(given[i]) - here;
    auto& found = found_[i];
    found.jump = std::max(found.jump, size_of(jump));
    found.jump_along = std::max(found.jump_along, along(jump, exact));
    found.sum = found.sum.defined() ? found.sum.add_(error) : memory::park(error);
    found.errors.push_back(memory::park(sampled(error)));
    found.jumps.push_back(memory::park(sampled(jump)));
  }
}

std::vector<bool> Kinks::spanned() const {
  std::size_t states = 0;
  for (const auto& found : found_) states = std::max(states, found.jumps.size());
  const auto count = static_cast<std::int64_t>(states);
  auto gram = at::zeros({count, count}, at::kDouble), products = at::zeros({count}, at::kDouble);
  std::map<std::size_t, at::Tensor> all;  // products of the jumps of a tensor
  for (std::size_t i = 0; i < given_.size(); ++i) {
    if (states == 0 || found_[i].jumps.size() < states) continue;
    const auto exact = wide(right_[i]);
    const auto jumps = at::stack(found_[i].jumps), error = sampled(wide(given_[i]) - exact);
    auto own = jumps.mm(jumps.t());
    // Each tensor by its own size, as its elements are a sample.
    const double size = std::max(size_of(exact), kTiny);
    const double weight = static_cast<double>(exact.numel()) / static_cast<double>(error.numel()) / (size * size);
    gram += weight * own;
    products += weight * jumps.mv(error);
    all.emplace(i, std::move(own));
  }
  std::vector<bool> found(given_.size(), false);
  const double largest = all.empty() ? 0 : gram.diagonal().max().item<double>();
  if (!(largest > 0) || !std::isfinite(largest) || !products.isfinite().all().item<bool>()) return found;
  const auto regular = gram + kRidge * largest * at::eye(count, at::kDouble);
  auto part = at::linalg_solve(regular, products);
  const double reach = part.dot(gram.mv(part)).item<double>();
  part *= std::min(1.0, kMost * std::sqrt(largest / std::max(reach, kTiny)));
  // Column j: the jump j less what the others explain of it.
  auto apart = at::linalg_solve(regular, at::eye(count, at::kDouble));
  apart = apart / apart.diagonal();
  for (const auto& [i, own] : all) {
    const auto jumps = at::stack(found_[i].jumps), error = sampled(wide(given_[i]) - wide(right_[i]));
    const double most = apart.t().mm(own).mm(apart).diagonal().clamp_min(0).max().item<double>();
    found[i] = size_of(error - jumps.t().mv(part)) <= std::sqrt(most);
  }
  return found;
}

std::vector<bool> Kinks::within() const {
  auto found = spanned();
  for (std::size_t i = 0; i < given_.size(); ++i) {
    if (!found[i]) continue;
    const auto exact = wide(right_[i]), error = wide(given_[i]) - exact;
    // Written so that a size that is no number explains nothing.
    found[i] = size_of(error) <= found_[i].jump && along(error, exact) <= kMostAlong * found_[i].jump_along;
  }
  return found;
}

std::vector<at::Tensor> Kinks::unexplained() const {
  const at::NoGradGuard no_grad;
  const auto explained = within();
  auto left = given_;
  for (std::size_t i = 0; i < given_.size(); ++i) {
    if (!explained[i]) continue;
    const auto exact = wide(right_[i]), error = wide(given_[i]) - exact;
    auto errors = found_[i].errors;
    errors.push_back(sampled(error));
    left[i] = exact;
    if (agree(errors)) left[i] = exact + (found_[i].sum + error) / static_cast<double>(errors.size());
  }
  return left;
}

void KnownKinks::learn(const Kinks& kinks) {
  const at::NoGradGuard no_grad;
  const auto explained = kinks.within();
  if (steps_++ == 0) jumps_.resize(explained.size());
  OXY_CHECK(explained.size() == jumps_.size(), InvalidArgument, "there are ", explained.size(), " gradients, and ",
            jumps_.size(), " in the steps before.");
  for (std::size_t i = 0; i < jumps_.size(); ++i) {
    auto& jump = jumps_[i];
    const bool was_not = jump.size < 0;
    if (was_not || !explained[i]) {
      jump = {-1, -1};
      continue;
    }
    const double size = std::max(size_of(wide(kinks.right_[i])), kTiny);
    jump.size = std::max(jump.size, kinks.found_[i].jump / size);
    jump.along = std::max(jump.along, kinks.found_[i].jump_along / size);
  }
}

std::vector<at::Tensor> KnownKinks::unexplained(const std::vector<at::Tensor>& given,
                                                const std::vector<at::Tensor>& right) const {
  const at::NoGradGuard no_grad;
  auto left = given;
  if (!speak()) return left;
  OXY_CHECK(given.size() == jumps_.size() && right.size() == jumps_.size(), InvalidArgument, "there are ", given.size(),
            " and ", right.size(), " gradients, and ", jumps_.size(), " in the steps before.");
  for (std::size_t i = 0; i < given.size(); ++i) {
    const auto& jump = jumps_[i];
    if (!(jump.size > 0) || !comparable(given[i], right[i])) continue;
    const auto exact = wide(right[i]), error = wide(given[i]) - exact;
    const double size = size_of(exact);
    if (size_of(error) <= jump.size * size && along(error, exact) <= kMostAlong * jump.along * size) left[i] = exact;
  }
  return left;
}

Nudge::Nudge(const std::vector<at::Tensor>& parameters, bool reduced_precision, int step, int state)
    : size_(reduced_precision ? kCoarse : kFine),
      random_(at::make_generator<at::CPUGeneratorImpl>(static_cast<std::uint64_t>(step) * kKinkStates +
                                                       static_cast<std::uint64_t>(state))) {
  for (const auto& p : parameters) {
    if (p.is_floating_point() && p.scalar_type() != at::kFloat && p.scalar_type() != at::kDouble) size_ = kCoarse;
  }
}

at::Tensor Nudge::moved(const at::Tensor& parameter) {
  if (!parameter.is_floating_point()) return parameter;
  const at::NoGradGuard no_grad;
  const auto part = at::rand(parameter.sizes(), random_, at::kDouble).to(parameter.device());
  return (parameter.to(at::kDouble) * (1 + size_ * (2 * part - 1))).to(parameter.scalar_type());
}

}  // namespace oxytorch::tune
