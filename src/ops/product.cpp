#include "ops/product.h"

#include <ATen/native/CPUBlas.h>

#include <array>

namespace oxytorch::ops {

using kernels::ElementType;
using kernels::TileFormat;

namespace {

// torch refuses pairs where its library has no kernel for them, and says so by an exception alone.
bool multiplies_bf16() {
  std::array<at::BFloat16, 256> a{}, b{};
  std::array<float, 256> c{};
  a[0] = b[0] = 3;
  try {
    at::native::cpublas::brgemm(16, 16, 16, 16, 16, 16, false, a.data(), b.data(), c.data(), true);
    at::native::cpublas::brgemm_release(true);
  } catch (const c10::Error&) {
    return false;
  }
  return c[0] == 9;
}

}  // namespace

TileFormat product_format(ElementType element) {
  static const bool bf16 = multiplies_bf16();
  return element == ElementType::BF16 && bf16 ? TileFormat::BFloat16 : TileFormat::Float32;
}

void product(TileFormat format, std::int64_t m, std::int64_t n, std::int64_t k, const void* a, std::int64_t lda,
             const void* b, std::int64_t ldb, float* c, std::int64_t ldc, bool add) {
  if (format == TileFormat::BFloat16) {
    at::native::cpublas::brgemm(m, n, k, lda, ldb, ldc, add, static_cast<const at::BFloat16*>(a),
                                static_cast<const at::BFloat16*>(b), c, true);
  } else {
    at::native::cpublas::brgemm(m, n, k, lda, ldb, ldc, add, static_cast<const float*>(a), static_cast<const float*>(b),
                                c, false);
  }
}

ProductScope::~ProductScope() { at::native::cpublas::brgemm_release(format_ == TileFormat::BFloat16); }

}  // namespace oxytorch::ops
