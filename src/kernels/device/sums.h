/// Sums of squares in the processor's order, by blocks of threads.
///
/// A chunk has 32 lanes, one for each thread of a warp: element i adds to lane i % 32, but the last few behind whole
/// blocks of 16 add to lanes 16 and up; two halving trees end it. Sums of chunks are added in runs of kRun, and the
/// runs in order.
#pragma once

#include "kernels/device/elements.h"
#include "kernels/device/tail_arguments.h"

namespace oxytorch::kernels::device {

// An array as fp32, `at` an element of it.
struct Floats {
  const float* data;
  OXY_HOST_DEVICE float operator[](std::int64_t at) const { return data[at]; }
};
struct Bf16s {
  const std::uint16_t* data;
  OXY_HOST_DEVICE float operator[](std::int64_t at) const { return from_bf16(data[at]); }
};
struct Halves {
  const std::uint16_t* data;
  OXY_HOST_DEVICE float operator[](std::int64_t at) const { return from_f16(data[at]); }
};
struct SplitWeights {
  const std::uint16_t* high;
  const std::int8_t* low;
  OXY_HOST_DEVICE float operator[](std::int64_t at) const { return join_weight(high[at], low[at]); }
};

/// Lane `lane` of 32 of the sum over [begin, end).
template <class Array>
OXY_HOST_DEVICE inline double lane_sum(const Array& array, std::int64_t begin, std::int64_t end, std::int64_t lane) {
  double sum = 0;
  const auto add = [&](std::int64_t at) {
    const auto value = static_cast<double>(array[at]);
    sum = fma(value, value, sum);
  };
  const std::int64_t whole = begin + (end - begin) / 32 * 32;
#ifdef __CUDA_ARCH__
#pragma unroll 16
#endif
  for (std::int64_t i = begin + lane; i < whole; i += 32) add(i);
  const std::int64_t left = end - whole;
  if (left >= 16 ? lane < left : lane >= 16 && lane - 16 < left) add(left >= 16 ? whole + lane : whole + lane - 16);
  return sum;
}

template <class Block>
OXY_HOST_DEVICE inline double lane_sum(const Block& block, const void* array, oxy_element type, std::int64_t begin,
                                       std::int64_t end, std::int64_t lane) {
  if (type == OXY_F32) {
    return lane_sum(Floats{block.array(static_cast<const float*>(array) + begin, end - begin)}, 0, end - begin, lane);
  }
  const auto* bits = block.array(static_cast<const std::uint16_t*>(array) + begin, end - begin);
  return type == OXY_BF16 ? lane_sum(Bf16s{bits}, 0, end - begin, lane) : lane_sum(Halves{bits}, 0, end - begin, lane);
}

/// The same of the weights at their best precision.
template <class Block>
OXY_HOST_DEVICE inline double weight_lane_sum(const Block& block, const oxy_tail_tensor& tensor, std::int64_t begin,
                                              std::int64_t end, std::int64_t lane) {
  if (tensor.master != nullptr) return lane_sum(block, tensor.master, OXY_F32, begin, end, lane);
  if (tensor.low_bits == nullptr) return lane_sum(block, tensor.param, tensor.type, begin, end, lane);
  const SplitWeights split{block.array(static_cast<const std::uint16_t*>(tensor.param) + begin, end - begin),
                           block.array(tensor.low_bits + begin, end - begin)};
  return lane_sum(split, 0, end - begin, lane);
}

OXY_HOST_DEVICE inline double tree_of_32(const double* lane) { return tree_of_16(lane) + tree_of_16(lane + 16); }

/// Adds `count` sums of chunks in runs; the total is in `total` when the phase after it begins.
struct RunTotal {
  double run[kThreads];
  double total;
};
template <class Block>
OXY_HOST_DEVICE inline void add_runs(const Block& block, RunTotal& shared, const double* sums, std::uint32_t count) {
  const double* const values = block.array(sums, count);
  const std::uint32_t runs = (count + kRun - 1) / kRun;
  block.each([&](std::uint32_t thread) {
    if (thread == 0) shared.total = 0;
  });
  for (std::uint32_t wave = 0; wave < runs; wave += kThreads) {
    block.each([&](std::uint32_t thread) {
      const std::uint32_t run = wave + thread;
      double sum = 0;
      const std::uint32_t end = (run + 1) * kRun < count ? (run + 1) * kRun : count;
      for (std::uint32_t i = run * kRun; i < end; ++i) sum += values[i];
      shared.run[thread] = sum;
    });
    block.each([&](std::uint32_t thread) {
      if (thread != 0) return;
      for (std::uint32_t i = 0; i < kThreads && wave + i < runs; ++i) shared.total += shared.run[i];
    });
  }
}

}  // namespace oxytorch::kernels::device
