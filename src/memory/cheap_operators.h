/// Operators whose results take less time to make again than they are worth in memory.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>

#include <cstddef>
#include <optional>

namespace oxytorch::memory {

/// Below autograd, where an operator makes or writes its own result.
[[nodiscard]] bool inside_operator();

struct CheapOperator {
  c10::OperatorHandle handle;
  /// It writes its result into its first argument.
  bool is_inplace = false;
  bool is_batch_norm = false;
  /// Of a product or a convolution, whose worth depends on its sizes, the argument that the first is multiplied by.
  std::size_t factor = 0;
  /// Whether a tensor of zeros and one other value has such a result: scaling by a number.
  bool keeps_two_values = false;
  /// It fills its argument with zeros and ones at random, and cannot be run again.
  bool draws_zeros_and_ones = false;
};

/// The operator that is called, where its results depend on its arguments alone, with the same bits each time, and are
/// cheap: elementwise operators (torch's tag `pointwise`), normalisation, softmax, copies, pooling and lookups, and
/// products and convolutions of few terms. Not those that draw random numbers, of which those that draw masks are known
/// as such.
const std::optional<CheapOperator>& cheap_operator(const at::RecordFunction& call);

/// Whether each element of a product with this factor, a matrix or the weights of a convolution, is a sum of so few
/// terms that it takes no longer to compute than to read and write.
[[nodiscard]] bool has_few_terms(const CheapOperator& product, c10::ArrayRef<const c10::IValue> inputs);

}  // namespace oxytorch::memory
