/// Arithmetic that has the same bits on host and device: one rounding where one is written.
#pragma once

#include <cmath>
#include <cstdint>

#include "oxytorch/random.h"

// Before a loop of constant length whose arrays must stay in registers.
#ifdef __CUDACC__
#define OXY_UNROLL _Pragma("unroll")
#else
#define OXY_UNROLL
#endif

namespace oxytorch::kernels::device {

OXY_HOST_DEVICE inline float fma(float a, float b, float c) {
#ifdef __CUDA_ARCH__
  return __fmaf_rn(a, b, c);
#else
  return std::fma(a, b, c);
#endif
}
OXY_HOST_DEVICE inline double fma(double a, double b, double c) {
#ifdef __CUDA_ARCH__
  return __fma_rn(a, b, c);
#else
  return std::fma(a, b, c);
#endif
}
OXY_HOST_DEVICE inline float divide(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}
OXY_HOST_DEVICE inline float sqrt(float value) {
#ifdef __CUDA_ARCH__
  return __fsqrt_rn(value);
#else
  return std::sqrt(value);
#endif
}
OXY_HOST_DEVICE inline double sqrt(double value) {
#ifdef __CUDA_ARCH__
  return __dsqrt_rn(value);
#else
  return std::sqrt(value);
#endif
}

OXY_HOST_DEVICE inline std::uint32_t bits_of(float value) { return __builtin_bit_cast(std::uint32_t, value); }
OXY_HOST_DEVICE inline float float_of(std::uint32_t bits) { return __builtin_bit_cast(float, bits); }

OXY_HOST_DEVICE inline bool is_finite(double value) { return value - value == 0; }

OXY_HOST_DEVICE inline float lerp(float from, float to, float weight) { return fma(weight, to - from, from); }

/// The halving tree over 16 lanes: the order in which every sum of squares ends.
template <class T>
OXY_HOST_DEVICE inline double tree_of_16(const T* lane) {
  double sum[8];
  for (int i = 0; i < 8; ++i) sum[i] = lane[i] + lane[i + 8];
  for (int width = 4; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) sum[i] += sum[i + width];
  }
  return sum[0];
}

}  // namespace oxytorch::kernels::device
