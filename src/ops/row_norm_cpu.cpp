#include "ops/row_norm_cpu.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/result_type.h>

#include <algorithm>
#include <vector>

#include "ops/dispatch.h"
#include "ops/shares.h"
#include "ops/tiles.h"
#include "oxytorch/kernels/row_norm.h"

namespace oxytorch::ops {
namespace {

using at::Tensor;
using kernels::Rows;

/// Rows in equal parts, by their size alone: a sum over rows has one order for any number of threads.
class NormParts {
 public:
  NormParts(std::int64_t rows, std::int64_t columns)
      : rows_(rows),
        size_(std::clamp<std::int64_t>(16384 / std::max<std::int64_t>(columns, 1), kernels::kNormGroup, 64)) {}
  [[nodiscard]] std::int64_t count() const { return (rows_ + size_ - 1) / size_; }
  /// `act(part, first row, rows, scratch)`; the scratch holds what the kernels want.
  template <class Act>
  void each(std::int64_t columns, const Act& act) const {
    share_out(count(), 1, [&](const auto& take) {
      Scratch scratch;
      float* work = scratch.floats(2 * kernels::kNormGroup * columns);
      for (std::int64_t part; (part = take()) >= 0;) {
        act(part, part * size_, std::min(size_, rows_ - part * size_), work);
      }
    });
  }

 private:
  std::int64_t rows_, size_;
};

/// Rows of a tensor, which it keeps alive; of none, no data.
struct Matrix {
  explicit Matrix(const Tensor& of) {
    if (!of.defined()) return;
    tensor = as_rows(of);
    rows = rows_of(tensor);
  }
  [[nodiscard]] Rows part(std::int64_t first, std::int64_t count) const {
    return rows.data == nullptr ? Rows() : rows.part(first, count);
  }
  Tensor tensor;
  Rows rows;
};

/// Where rows of a contiguous tensor go; of none, nowhere.
kernels::RowsOf rows_to(const Tensor& tensor, std::int64_t columns, std::int64_t first) {
  if (!tensor.defined()) return {};
  const auto element = *optim::element_type(tensor);
  return {element, kernels::RowsTo{tensor.mutable_data_ptr(), columns}.from(first, element)};
}

Tensor floats_of(const Tensor& tensor) { return tensor.defined() ? tensor.to(at::kFloat).contiguous() : tensor; }
const float* data_or_null(const Tensor& tensor) { return tensor.defined() ? tensor.const_data_ptr<float>() : nullptr; }

Tensor contiguous_like(const Tensor& tensor, at::ScalarType type) {
  return at::empty(tensor.sizes(), tensor.options().dtype(type));
}

}  // namespace

at::ScalarType NormOfSum::type() const {
  return residual.defined() ? at::result_type(input, residual) : input.scalar_type();
}

bool row_norm_cpu_takes(const NormOfSum& of) {
  const auto is_taken = [](const Tensor& t) { return has_kernel(t) && t.layout() == at::kStrided; };
  if (!is_taken(of.input) || of.input.dim() < 1 || of.input.sym_numel() == 0) return false;
  for (const Tensor& like : {of.residual, of.keep}) {
    if (like.defined() && (!is_taken(like) || like.sym_sizes() != of.input.sym_sizes())) return false;
  }
  const auto is_of_row = [&](const Tensor& t) {
    return !t.defined() || (is_taken(t) && t.dim() == 1 && t.sym_size(0) == of.input.sym_size(-1) &&
                            (t.scalar_type() == at::kFloat || t.scalar_type() == of.type()));
  };
  // A bias's gradient has the dtype of the weight's.
  return is_of_row(of.weight) && is_of_row(of.bias) &&
         (!of.bias.defined() || (of.weight.defined() && of.weight.scalar_type() == of.bias.scalar_type()));
}

NormedRows row_norm_cpu(const NormOfSum& of) {
  const Matrix input(of.input), residual(of.residual), keep(of.keep);
  const std::int64_t columns = input.rows.columns;
  const Tensor weight = floats_of(of.weight), bias = floats_of(of.bias);
  const kernels::RowNorm norm{data_or_null(weight), data_or_null(bias), static_cast<float>(of.eps), of.is_centered};
  auto of_rows = of.input.sizes().vec();
  of_rows.back() = 1;
  const auto floats = of.input.options().dtype(at::kFloat);
  NormedRows made{contiguous_like(of.input, of.result_type()),
                  of.has_sum() ? contiguous_like(of.input, of.type()) : Tensor(),
                  of.is_centered ? at::empty(of_rows, floats) : at::empty({0}, floats), at::empty(of_rows, floats)};
  auto* mean = made.mean.mutable_data_ptr<float>();
  auto* invstd = made.invstd.mutable_data_ptr<float>();
  NormParts(input.rows.rows, columns).each(columns, [&](auto, std::int64_t first, std::int64_t count, float* work) {
    const kernels::RowSum sum{input.part(first, count), keep.part(first, count), static_cast<float>(of.keep_scale),
                              residual.part(first, count)};
    kernels::normalize_sums(sum, norm, rows_to(made.sum, columns, first), rows_to(made.output, columns, first),
                            of.is_centered ? mean + first : nullptr, invstd + first, work);
  });
  return made;
}

bool is_one_gradient(const Tensor& keep, at::ScalarType input_type, at::ScalarType residual_type,
                     std::array<bool, 4> wanted) {
  return wanted[0] && wanted[1] && !keep.defined() && input_type == residual_type;
}

std::array<Tensor, 4> row_norm_cpu_backward(const NormedSum& of, const Tensor& grad_output, const Tensor& grad_sum,
                                            std::array<bool, 4> wanted) {
  const Matrix sum(of.sum), keep(of.keep), grad(grad_output), beside(grad_sum);
  const std::int64_t columns = sum.rows.columns;
  const Tensor weight = floats_of(of.weight);
  std::array<Tensor, 4> made;
  if (wanted[0]) made[0] = contiguous_like(of.sum, of.input_type);
  if (wanted[1] && !is_one_gradient(of.keep, of.input_type, of.residual_type, wanted)) {
    made[1] = contiguous_like(of.sum, of.residual_type);
  }
  const NormParts parts(sum.rows.rows, columns);
  Scratch scratch;
  const auto sums_of_parts = [&](bool is_wanted) {
    if (!is_wanted) return static_cast<float*>(nullptr);
    float* sums = scratch.floats(parts.count() * columns);
    std::fill_n(sums, parts.count() * columns, 0.0F);
    return sums;
  };
  float *of_weight = sums_of_parts(wanted[2]), *of_bias = sums_of_parts(wanted[3]);
  const auto* mean = of.mean.const_data_ptr<float>();
  const auto* invstd = of.invstd.const_data_ptr<float>();
  parts.each(columns, [&](std::int64_t part, std::int64_t first, std::int64_t count, float* work) {
    const kernels::RowNormGradient rows{grad.part(first, count),
                                        beside.part(first, count),
                                        sum.part(first, count),
                                        of.is_centered ? mean + first : nullptr,
                                        invstd + first,
                                        keep.part(first, count),
                                        static_cast<float>(of.keep_scale),
                                        {data_or_null(weight), nullptr, 0, of.is_centered}};
    const auto at_part = [&](float* sums) { return sums == nullptr ? nullptr : sums + part * columns; };
    kernels::row_norm_gradient(rows, rows_to(made[0], columns, first), rows_to(made[1], columns, first),
                               at_part(of_weight), at_part(of_bias), work);
  });
  const auto total = [&](const float* sums) {
    std::vector<double> all(static_cast<std::size_t>(columns));
    for (std::int64_t part = 0; part < parts.count(); ++part) {
      for (std::size_t c = 0; c < all.size(); ++c) all[c] += sums[part * columns + static_cast<std::int64_t>(c)];
    }
    Tensor one = at::empty({columns}, of.sum.options().dtype(at::kFloat));
    std::copy(all.begin(), all.end(), one.mutable_data_ptr<float>());
    return one.to(of.weight.defined() ? of.weight.scalar_type() : at::kFloat);
  };
  if (wanted[2]) made[2] = total(of_weight);
  if (wanted[3]) made[3] = total(of_bias);
  return made;
}

}  // namespace oxytorch::ops
