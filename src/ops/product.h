/// Products of small matrices by the library that torch brings for them.
#pragma once

#include <cstdint>

#include "oxytorch/kernels/attention.h"

namespace oxytorch::ops {

/// The format in which products of `element` are computed here: bf16 where the processor multiplies it, else fp32.
[[nodiscard]] kernels::TileFormat product_format(kernels::ElementType element);

/// c = a b, or c += a b: `m` x `k` times `k` x `n`, rows `lda`, `ldb`, `ldc` elements apart; `b` is a right operand.
void product(kernels::TileFormat format, std::int64_t m, std::int64_t n, std::int64_t k, const void* a,
             std::int64_t lda, const void* b, std::int64_t ldb, float* c, std::int64_t ldc, bool add);

/// Gives back what the processor reserves for products; called by a thread when it is done with them.
class ProductScope {
 public:
  explicit ProductScope(kernels::TileFormat format) : format_(format) {}
  ~ProductScope();
  ProductScope(const ProductScope&) = delete;
  ProductScope& operator=(const ProductScope&) = delete;

 private:
  kernels::TileFormat format_;
};

}  // namespace oxytorch::ops
