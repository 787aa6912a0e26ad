#include "ops/activation_cpu.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>

#include "ops/dispatch.h"
#include "ops/shares.h"
#include "ops/tiles.h"

namespace oxytorch::ops {
namespace {

using at::Tensor;
using kernels::ElementType;
using kernels::Rows;
using kernels::RowsTo;

// Elements below which a second thread costs more than it brings.
constexpr std::int64_t kActivationsOfThread = 8192;
// A row of memory that has no rows of its own.
constexpr std::int64_t kRun = 4096;

/// Rows of a tensor, which it keeps alive.
struct Plane {
  [[nodiscard]] Rows rows(std::int64_t first, std::int64_t count, std::int64_t columns) const {
    if (data == nullptr) return {};
    return Rows{element, data, stride, first + count, columns}.part(first, count);
  }
  [[nodiscard]] RowsTo to(std::int64_t first) const { return RowsTo{data, stride}.from(first, element); }

  Tensor tensor;
  ElementType element = ElementType::F32;
  void* data = nullptr;
  std::int64_t stride = 0;
};

/// The way through the elements: by rows of the last dimension, or, where all tensors fill a run of memory in the same
/// order, by that.
class Walk {
 public:
  Walk(const ActivatedTensor& of, const Tensor& also) : packed_(of.packed) {
    const Tensor& input = of.input;
    is_run_ = !of.packed && input.is_non_overlapping_and_dense() && optim::same_layout(also, input) &&
              (!of.times.defined() || optim::same_layout(of.times, input));
    columns_ = is_run_ ? kRun : std::max<std::int64_t>(1, input.dim() == 0 ? 1 : input.size(-1) / (packed_ ? 2 : 1));
    rows_ = input.numel() / columns_ / (packed_ ? 2 : 1);
    rest_ = is_run_ ? input.numel() % kRun : 0;
  }
  [[nodiscard]] bool is_run() const { return is_run_; }

  /// Of a packed tensor, its first or second half.
  [[nodiscard]] Plane plane(const Tensor& tensor, int half = 0) const {
    if (!tensor.defined()) return {};
    Tensor rows = is_run_ ? tensor : as_rows(tensor);
    const auto element = *optim::element_type(rows);
    void* data = const_cast<void*>(rows.const_data_ptr());
    if (half == 1) data = static_cast<std::byte*>(data) + columns_ * static_cast<std::int64_t>(rows.element_size());
    const auto stride = is_run_ ? kRun : rows.stride(0);
    return {std::move(rows), element, data, stride};
  }

  /// `act(first row, count, columns)`, by threads.
  template <class Act>
  void each(const Act& act) const {
    const std::int64_t of_task = std::max<std::int64_t>(1, kActivationsOfThread / columns_);
    share_out((rows_ + of_task - 1) / of_task, 1, [&](const auto& take) {
      for (std::int64_t task; (task = take()) >= 0;) {
        act(task * of_task, std::min(of_task, rows_ - task * of_task), columns_);
      }
    });
    if (rest_ > 0) act(rows_, std::int64_t{1}, rest_);
  }

 private:
  bool packed_, is_run_;
  std::int64_t rows_, columns_, rest_;
};

}  // namespace

bool activation_cpu_takes(const Tensor& input, const Tensor& times) {
  if (!has_kernel(input) || input.layout() != at::kStrided || input.numel() == 0) return false;
  return !times.defined() || (times.scalar_type() == input.scalar_type() && times.device().is_cpu() &&
                              times.layout() == at::kStrided && times.sizes() == input.sizes());
}

void activation_cpu_into(const ActivatedTensor& of, const Tensor& to) {
  const Walk walk(of, to);
  to.mutable_data_ptr();  // no longer shared with a lazy copy
  const Plane input = walk.plane(of.input), out = walk.plane(to);
  const Plane times = of.packed ? walk.plane(of.input, 1) : walk.plane(of.times);
  walk.each([&](std::int64_t first, std::int64_t count, std::int64_t columns) {
    kernels::activate({of.activation, input.rows(first, count, columns), times.rows(first, count, columns)},
                      out.to(first));
  });
}

Tensor activation_cpu(const ActivatedTensor& of) {
  Tensor like = of.input;
  if (of.packed) {
    auto sizes = of.input.sizes().vec();
    sizes.back() /= 2;
    like = at::empty(sizes, of.input.options());
  }
  const Tensor to = at::empty_like(like);
  if (to.is_contiguous() || optim::same_layout(to, of.input)) {
    activation_cpu_into(of, to);
    return to;
  }
  const Tensor rows = at::empty(to.sizes(), to.options());
  activation_cpu_into(of, rows);
  return to.copy_(rows);
}

std::array<Tensor, 2> activation_cpu_backward(const ActivatedTensor& of, const Tensor& grad,
                                              std::array<bool, 2> wanted) {
  const Tensor slopes = grad.to(of.input.scalar_type());
  const Walk walk(of, slopes);
  std::array<Tensor, 2> made, rows;
  for (std::size_t i = 0; i < (of.packed ? 1 : 2); ++i) {
    if (!wanted[i]) continue;
    made[i] = at::empty_like(of.input);
    rows[i] = walk.is_run() || made[i].is_contiguous() ? made[i] : at::empty(made[i].sizes(), made[i].options());
  }
  if (!made[0].defined() && !made[1].defined()) return made;
  const Plane input = walk.plane(of.input), slope = walk.plane(slopes), to_input = walk.plane(rows[0]);
  const Plane times = of.packed ? walk.plane(of.input, 1) : walk.plane(of.times);
  const Plane to_times = of.packed ? walk.plane(rows[0], 1) : walk.plane(rows[1]);
  walk.each([&](std::int64_t first, std::int64_t count, std::int64_t columns) {
    kernels::activate_backward({of.activation, input.rows(first, count, columns), times.rows(first, count, columns)},
                               slope.rows(first, count, columns), to_input.to(first), to_times.to(first));
  });
  for (std::size_t i = 0; i < 2; ++i) {
    if (made[i].defined() && !made[i].is_same(rows[i])) made[i].copy_(rows[i]);
  }
  return made;
}

}  // namespace oxytorch::ops
