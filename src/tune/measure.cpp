#include "oxytorch/tune/measure.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/dot.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <span>
#include <utility>

namespace oxytorch::tune {
namespace {

constexpr std::int64_t kPiece = 1 << 16;  // elements in float64 at once
constexpr double kElement = 1e-3;
constexpr std::size_t kSample = 1 << 15;
constexpr double kSummedPlaces = 64;  // last places that a running mean or variance of 1e5 rows may be off by
constexpr double kLastPlace = 1e-4;   // a last place of float16 or bfloat16
constexpr double kRounded = 1e-5;     // relative: a norm of gradients that were clipped, each rounded

at::Tensor dense(const at::Tensor& t) { return (t.is_sparse() ? t.to_dense() : t).detach(); }

/// Calls `look` with slices along the longest dimension of tensors of one shape.
template <class Look>
void each_slice(const std::vector<at::Tensor>& tensors, const Look& look) {
  const auto& first = tensors.front();
  if (first.dim() == 0 || first.numel() <= kPiece) return look(tensors);
  const auto sizes = first.sizes();
  const std::int64_t dim = std::max_element(sizes.begin(), sizes.end()) - sizes.begin();
  const std::int64_t rows = std::max<std::int64_t>(1, kPiece / std::max<std::int64_t>(1, first.numel() / sizes[dim]));
  for (std::int64_t at = 0; at < sizes[dim]; at += rows) {
    std::vector<at::Tensor> cut;
    for (const auto& t : tensors) cut.push_back(t.narrow(dim, at, std::min(rows, sizes[dim] - at)));
    look(cut);
  }
}

at::Tensor flat_double(const at::Tensor& t) { return t.to(at::kDouble).reshape(-1); }
double product(const at::Tensor& a, const at::Tensor& b) { return at::dot(a, b).item<double>(); }

std::string brief(const at::Tensor& loss) {
  char text[32];
  std::snprintf(text, sizeof text, "%.4g", loss.to(at::kDouble).item<double>());
  return text;
}

double rms(double square, std::int64_t count) {
  return std::sqrt(square / static_cast<double>(std::max<std::int64_t>(1, count)));
}

/// Distance from 1 to the next number.
double epsilon(at::ScalarType type) {
  switch (type) {
    case at::kDouble: return std::numeric_limits<double>::epsilon();
    case at::kHalf: return 0x1p-10;
    case at::kBFloat16: return 0x1p-7;
    default: return std::numeric_limits<float>::epsilon();
  }
}

double norm_of(const std::vector<at::Tensor>& gradients) {
  double square = 0;
  for (const auto& g : gradients) {
    if (!g.defined()) continue;
    each_slice({dense(g)}, [&](const auto& cut) {
      const auto values = flat_double(cut[0]);
      square += product(values, values);
    });
  }
  return std::sqrt(square);
}

template <class T>
Change meter_of(const at::Tensor& before, const at::Tensor& after, const at::Tensor& wanted, double element) {
  const auto span = []<class U>(const at::Tensor& t, U*) {
    return std::span<const U>(t.const_data_ptr<U>(), static_cast<std::size_t>(t.numel()));
  };
  T* const own = nullptr;
  double* const exact = nullptr;
  ChangeMeter<T> meter(static_cast<std::size_t>(after.numel()), element, kSample);
  for (int look = 0; look < (meter.stands_out() ? 2 : 1); ++look) {
    meter.add(before.defined() ? span(before, own) : std::span<const T>(), span(after, own), span(wanted, exact));
  }
  return meter.found();
}

}  // namespace

ValueMeter::ValueMeter(double loss, double right) {
  errors_.loss = std::abs(loss - right);
  errors_.loss_size = std::abs(right);
  if (!std::isfinite(loss)) errors_.wrong.push_back("the loss is " + std::to_string(loss));
}

void ValueMeter::stepped(bool given, bool right) {
  if (given != right) errors_.wrong.emplace_back(right ? "the optimizer is not stepped" : "the optimizer is stepped");
}

void ValueMeter::gradient(const std::string& name, const at::Tensor& given, double factor, const at::Tensor& right) {
  const at::NoGradGuard no_grad;
  if (given.defined() != right.defined()) {
    errors_.wrong.push_back(name + " has " + (given.defined() ? "a" : "no") + " gradient");
  }
  if (!given.defined() || !right.defined()) return;
  const auto mine = dense(given), exact = dense(right);
  if (!mine.sizes().equals(exact.sizes())) {
    errors_.wrong.push_back("the gradient of " + name + " has another shape");
    return;
  }
  double offs = 0, squares = 0;
  each_slice({mine, exact}, [&](const auto& cut) {
    const auto wanted = flat_double(cut[1]), off = flat_double(cut[0]) * factor - wanted;
    offs += product(off, off);
    squares += product(wanted, wanted);
    along_ += product(off, wanted);
  });
  if (!std::isfinite(offs)) errors_.wrong.push_back("the gradient of " + name + " is not finite");
  errors_.gradients.push_back({name, rms(offs, mine.numel()), rms(squares, mine.numel()), mine.numel()});
  square_ += squares;
  count_ += mine.numel();
}

void ValueMeter::buffer(const std::string& name, const at::Tensor& given, const at::Tensor& right,
                        const at::Tensor& before) {
  const at::NoGradGuard no_grad;
  if (!given.defined() || !given.sizes().equals(right.sizes())) {
    errors_.wrong.push_back("the buffer " + name + " is " + (given.defined() ? "of another shape" : "missing"));
    return;
  }
  if (!right.is_floating_point()) {
    if (!at::equal(given, right)) errors_.wrong.push_back("the buffer " + name + " differs");
    return;
  }
  const auto exact = flat_double(dense(right)), off = flat_double(dense(given)) - exact;
  const auto change = before.defined() ? exact - flat_double(dense(before)) : exact;
  const auto count = exact.numel();
  // A running mean or variance is a sum over all rows, in whatever order.
  const double place = epsilon(given.scalar_type());
  const double places = rms(product(exact, exact), count) * (place < kLastPlace ? kSummedPlaces * place : place);
  errors_.buffers.push_back(
      {name, std::max(rms(product(off, off), count) - places, 0.0), rms(product(change, change), count), count});
}

ValueErrors ValueMeter::found() const {
  auto found = errors_;
  found.slope = square_ != 0 ? along_ / square_ : 0;
  found.whole = rms(square_, count_);
  return found;
}

std::string losses_fault(const std::vector<at::Tensor>& losses, const std::vector<at::Tensor>& as_given) {
  const at::NoGradGuard no_grad;
  const auto count = std::min(losses.size(), as_given.size());
  for (std::size_t i = 0; i < count; ++i) {
    const std::string step = "step " + std::to_string(i + 1) + ": the loss is ";
    if (!at::isfinite(losses[i]).all().item<bool>()) {
      return step + brief(losses[i]) + ", " + brief(as_given[i]) + " as given";
    }
    if (losses[i].element_size() < as_given[i].element_size()) {
      return step + "of " + c10::toString(losses[i].scalar_type()) + ", of " +
             c10::toString(as_given[i].scalar_type()) + " as given";
    }
  }
  for (const auto type : {at::kBFloat16, at::kHalf}) {
    const auto coarse = [&](const std::vector<at::Tensor>& all) {
      return std::all_of(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(count),
                         [&](const auto& loss) { return at::equal(loss.to(type).to(loss.scalar_type()), loss); });
    };
    if (count > 2 && coarse(losses) && !coarse(as_given)) {
      return std::string("the loss is computed in ") + c10::toString(type) + ": every one is a number of that dtype";
    }
  }
  return "";
}

NamedChange measured_change(std::string name, const at::Tensor& before, const at::Tensor& after,
                            const at::Tensor& wanted, bool state) {
  const at::NoGradGuard no_grad;
  NamedChange found{std::move(name), {}, after.numel(), state};
  if (after.numel() == 0) return found;
  const bool narrow = after.scalar_type() != at::kFloat && after.scalar_type() != at::kDouble;
  const auto type = narrow ? at::kFloat : after.scalar_type();
  const auto flat = [](const at::Tensor& t, at::ScalarType wanted_type) {
    return dense(t).to(at::kCPU, wanted_type).reshape(-1).contiguous();
  };
  const auto start = before.defined() ? flat(before, type) : before;
  const auto measure = type == at::kDouble ? meter_of<double> : meter_of<float>;
  // At least what arithmetic in the dtype of the parameter rounds away.
  const double element = std::max(kElement, 2 * epsilon(after.scalar_type()));
  found.change = measure(start, flat(after, type), flat(wanted, at::kDouble), element);
  return found;
}

double clip_factor(const std::vector<at::Tensor>& gradients, double norm) {
  const at::NoGradGuard no_grad;
  const double total = norm_of(gradients);
  if (!(total > norm * (1 + kRounded + kTimes * norm_error(gradients, norm)))) return 1;
  return norm / (total + 1e-6);
}

double norm_error(const std::vector<at::Tensor>& gradients, double norm) {
  const at::NoGradGuard no_grad;
  const double total = norm_of(gradients);
  if (!(0.5 * norm < total) || !std::isfinite(total)) return 0;
  std::vector<at::Tensor> norms;  // as torch.nn.utils.get_total_norm
  for (const auto& g : gradients) {
    if (g.defined()) norms.push_back(at::linalg_vector_norm(dense(g)));
  }
  const double own = at::linalg_vector_norm(at::stack(norms)).item<double>();
  return std::isfinite(own) ? std::abs(own / total - 1) : 0;
}

}  // namespace oxytorch::tune
