#include "ops/embedding_cpu.h"

#include <ATen/Parallel.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>
#include <limits>
#include <utility>

#include "ops/dispatch.h"
#include "ops/tiles.h"
#include "optim/dense.h"
#include "oxytorch/kernels/embedding.h"

namespace oxytorch::ops {
namespace {

using at::Tensor;

constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();

std::int32_t* ints(Scratch& scratch, std::int64_t count) {
  return reinterpret_cast<std::int32_t*>(scratch.bytes(count * static_cast<std::int64_t>(sizeof(std::int32_t))));
}

// A stable sort of indices, with the position that each came from.
class SortedIndices {
 public:
  // False where an index is out of range.
  template <class Index>
  bool take(const Index* indices, std::int64_t count, std::int64_t rows, std::int64_t padding) {
    for (Column* column : {&here_, &there_}) *column = {ints(scratch_, count), ints(scratch_, count)};
    bool sorted = true;
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t index = indices[i];
      if (index < 0 || index >= rows) return false;
      if (index == padding) continue;
      here_.targets[count_] = static_cast<std::int32_t>(index);
      here_.sources[count_] = static_cast<std::int32_t>(i);
      sorted = sorted && (count_ == 0 || here_.targets[count_ - 1] <= index);
      ++count_;
    }
    for (int shift = 0; !sorted && (rows - 1) >> shift != 0; shift += kBits) by_digit(shift);
    return true;
  }

  [[nodiscard]] const std::int32_t* targets() const { return here_.targets; }
  [[nodiscard]] const std::int32_t* sources() const { return here_.sources; }
  [[nodiscard]] std::int64_t count() const { return count_; }
  [[nodiscard]] std::int64_t largest_count() const {
    std::int64_t most = 0;
    for (std::int64_t first = 0, i = 0; i < count_; ++i) {
      if (here_.targets[i] != here_.targets[first]) first = i;
      most = std::max(most, i - first + 1);
    }
    return most;
  }
  // The first position from `place` on where another index begins.
  [[nodiscard]] std::int64_t next_index_from(std::int64_t place) const {
    while (place > 0 && place < count_ && here_.targets[place] == here_.targets[place - 1]) ++place;
    return place;
  }

 private:
  static constexpr int kBits = 11;
  static constexpr std::int32_t kMask = (1 << kBits) - 1;

  // One pass of a radix sort, least significant digit first.
  void by_digit(int shift) {
    std::array<std::int32_t, kMask + 1> next{};
    for (std::int64_t i = 0; i < count_; ++i) ++next[here_.targets[i] >> shift & kMask];
    std::int32_t begin = 0;
    for (auto& one : next) begin += std::exchange(one, begin);
    for (std::int64_t i = 0; i < count_; ++i) {
      const auto to = next[here_.targets[i] >> shift & kMask]++;
      there_.targets[to] = here_.targets[i];
      there_.sources[to] = here_.sources[i];
    }
    std::swap(here_, there_);
  }

  struct Column {
    std::int32_t* targets = nullptr;
    std::int32_t* sources = nullptr;
  };
  Scratch scratch_;
  Column here_, there_;
  std::int64_t count_ = 0;
};

}  // namespace

bool embedding_gradient_cpu_takes(const Tensor& grad_output, const Tensor& input, std::int64_t rows) {
  const auto type = input.scalar_type();
  return has_kernel(grad_output) && grad_output.layout() == at::kStrided && !grad_output.is_neg() &&
         input.device().is_cpu() && input.layout() == at::kStrided && (type == at::kLong || type == at::kInt) &&
         grad_output.dim() == input.dim() + 1 && grad_output.sizes().slice(0, input.dim()) == input.sizes() &&
         rows <= kMost && input.numel() <= kMost;
}

std::optional<Tensor> embedding_gradient_cpu(const Tensor& grad_output, const Tensor& input, std::int64_t rows,
                                             std::int64_t padding, const Tensor& sum) {
  const std::int64_t columns = grad_output.size(-1);
  const Tensor indices = input.contiguous();
  SortedIndices sorted;
  const bool inside = indices.scalar_type() == at::kLong
                          ? sorted.take(indices.const_data_ptr<std::int64_t>(), indices.numel(), rows, padding)
                          : sorted.take(indices.const_data_ptr<std::int32_t>(), indices.numel(), rows, padding);
  if (!inside) return std::nullopt;
  Tensor made = sum.defined() ? sum : at::zeros({rows, columns}, grad_output.options());
  const std::int64_t count = sorted.count();
  if (made.numel() == 0 || count == 0) return made;

  const Tensor from = as_rows(grad_output);
  const auto element = optim::element_type(made).value();
  const std::int64_t size = made.element_size(), threads = at::get_num_threads();
  // Threads share the columns of a row that most indices point to.
  constexpr std::int64_t kStrip = 64;
  const std::int64_t strips =
      sorted.largest_count() * 2 * threads > count ? std::clamp<std::int64_t>(columns / kStrip, 1, threads) : 1;
  const std::int64_t width = round_up((columns + strips - 1) / strips, kStrip);
  const std::int64_t parts = std::clamp<std::int64_t>(count * columns / at::internal::GRAIN_SIZE, 1, 4 * threads);
  at::parallel_for(0, parts * strips, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t item = begin; item < end; ++item) {
      const std::int64_t part = item / strips, column = std::min(item % strips * width, columns);
      const std::int64_t first = sorted.next_index_from(count * part / parts);
      const kernels::RowSums sums{.from = {.element = element,
                                           .data = static_cast<const char*>(from.const_data_ptr()) + column * size,
                                           .stride = from.stride(0),
                                           .rows = from.size(0),
                                           .columns = std::min(width, columns - column)},
                                  .targets = sorted.targets() + first,
                                  .sources = sorted.sources() + first,
                                  .count = sorted.next_index_from(count * (part + 1) / parts) - first,
                                  .adds = sum.defined()};
      kernels::sum_rows(sums, static_cast<char*>(made.mutable_data_ptr()) + column * size, columns);
    }
  });
  return made;
}

}  // namespace oxytorch::ops
