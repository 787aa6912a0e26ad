/// Weights of linear layers that stay laid out for their products from one batch to the next.
#pragma once

#include <cstdint>

#include "oxytorch/api.h"

namespace oxytorch::ops {

/// While one lives, linear() on a CPU that multiplies bfloat16 keeps the weights that it has laid out for its products,
/// and lays out a weight anew only where it has changed. With few rows that takes as long as the products: it pays
/// where the gradients of several small batches are accumulated between two steps of the optimizer. Bits stay what they
/// are.
///
/// Memory: 2 bytes for each element of a weight from its first forward on, and 2 more from its first backward on, until
/// the last PackedWeights of the process ends or the weight does.
///
/// A change is seen by torch's version counter, which operators and optimizers advance, and, for writes that pass it by
/// (through `.data` or a pointer), by 64 elements that are compared. Call clear() after a write to few elements that
/// passes the counter by.
///
/// Threads. It acts on all threads of the process, and every function may be called from any of them.
class OXY_API PackedWeights {
 public:
  PackedWeights();
  ~PackedWeights();
  PackedWeights(const PackedWeights&) = delete;
  PackedWeights& operator=(const PackedWeights&) = delete;

  /// Forgets all that is kept, by whichever object.
  static void clear() noexcept;

  /// Bytes that are kept in this process.
  [[nodiscard]] static std::int64_t bytes() noexcept;
};

}  // namespace oxytorch::ops
