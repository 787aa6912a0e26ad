/// What a call of a torch operator does, told by its name and arguments.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

namespace oxytorch::tune {

using Arguments = std::vector<c10::IValue>;

[[nodiscard]] bool is_operator(const c10::OperatorHandle& op, const char* name, const char* overload = nullptr);

/// Whether an argument is a defined tensor: C++ gives an undefined one for none.
[[nodiscard]] bool is_tensor(const c10::IValue& argument);

/// An argument as a number: a scalar, or a plain tensor of one on the CPU without dimensions and without a gradient.
[[nodiscard]] std::optional<double> number_of(const c10::IValue& argument);

/// The dtype that the first argument is converted to, where nothing else is done to it.
[[nodiscard]] std::optional<at::ScalarType> converted_to(const c10::OperatorHandle& op, const Arguments& arguments);

/// Orders of dimensions in which an einsum of two tensors is a product of batches of matrices.
struct EinsumProduct {
  std::vector<std::int64_t> left;    ///< batches, rows, what is summed over
  std::vector<std::int64_t> right;   ///< batches, what is summed over, columns
  std::vector<std::int64_t> result;  ///< from batches, rows, columns to what the equation asks for
};
/// Nothing where it is another sum, or its labels do not say all.
[[nodiscard]] std::optional<EinsumProduct> einsum_product(std::string_view equation, std::int64_t left_dims,
                                                          std::int64_t right_dims);

/// Tensors among the arguments that are no lists, in their order.
[[nodiscard]] std::vector<at::Tensor> tensors_of(const Arguments& arguments);

}  // namespace oxytorch::tune
