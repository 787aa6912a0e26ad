// Batch normalization in training over contiguous planes; compiled once for each instruction set.
//
// torch sums a channel's elements one after another in fp64 (forward), and each plane in eight fp32 lanes (backward).
// Those chains are kept; what is new is that several of them run side by side.
#if defined(OXYTORCH_KERNELS_BATCH_NORM_INL) == defined(HWY_TARGET_TOGGLE)
#ifdef OXYTORCH_KERNELS_BATCH_NORM_INL
#undef OXYTORCH_KERNELS_BATCH_NORM_INL
#else
#define OXYTORCH_KERNELS_BATCH_NORM_INL
#endif

#include "kernels/formats-inl.h"
#include "oxytorch/kernels/operators.h"

HWY_BEFORE_NAMESPACE();
namespace oxytorch::kernels::HWY_NAMESPACE {
namespace {

template <bool kFused, class D, class W = hn::Vec<D>>
HWY_INLINE W multiply_add(D d, W a, W b, W c) {
  if constexpr (kFused) return fma(d, a, b, c);
  return hn::Add(hn::Mul(a, b), c);
}
HWY_INLINE float multiply_add(bool fused, float a, float b, float c) { return fused ? std::fma(a, b, c) : a * b + c; }

// Channels whose sums run side by side.
constexpr int kTogether = 8;

#if !OXYTORCH_KERNELS_SCALAR

using Row8 = hn::FixedTag<float, 8>;
using Sum4 = hn::FixedTag<double, 4>;

// Adds eight elements of each of four channels to a sum for each channel, in order.
HWY_INLINE void add_rows(hn::Vec<Row8> a, hn::Vec<Row8> b, hn::Vec<Row8> c, hn::Vec<Row8> e, hn::Vec<Sum4>& sum) {
  constexpr Row8 d;
  constexpr hn::FixedTag<double, 4> pairs;
  const auto ab_low = hn::BitCast(pairs, hn::InterleaveLower(d, a, b));
  const auto ab_high = hn::BitCast(pairs, hn::InterleaveUpper(d, a, b));
  const auto ce_low = hn::BitCast(pairs, hn::InterleaveLower(d, c, e));
  const auto ce_high = hn::BitCast(pairs, hn::InterleaveUpper(d, c, e));
  // Elements 0 to 3 in the lower halves, 4 to 7 in the upper.
  const hn::Vec<Row8> at[4] = {
      hn::BitCast(d, hn::InterleaveLower(pairs, ab_low, ce_low)),
      hn::BitCast(d, hn::InterleaveUpper(pairs, ab_low, ce_low)),
      hn::BitCast(d, hn::InterleaveLower(pairs, ab_high, ce_high)),
      hn::BitCast(d, hn::InterleaveUpper(pairs, ab_high, ce_high)),
  };
  constexpr hn::Half<Row8> half;
  for (const auto& four : at) sum = hn::Add(sum, hn::PromoteTo(Sum4(), hn::LowerHalf(half, four)));
  for (const auto& four : at) sum = hn::Add(sum, hn::PromoteTo(Sum4(), hn::UpperHalf(half, four)));
}

#endif

// For each of kTogether channels, the fp64 sum over the batch of its elements, or of their squared distance from
// `mean`. A channel's plane of image n is at channel[i] + n * image.
template <bool kCentered>
void sum_channels(const BatchNorm& args, const float* const (&channel)[kTogether], const float* mean, double* sum) {
  const std::int64_t image = args.channels * args.plane;
  std::fill_n(sum, kTogether, 0.0);
  for (std::int64_t n = 0; n < args.batch; ++n) {
    std::int64_t i = 0;
#if !OXYTORCH_KERNELS_SCALAR
    constexpr Row8 d;
    hn::Vec<Sum4> low = hn::LoadU(Sum4(), sum), high = hn::LoadU(Sum4(), sum + 4);
    const auto row = [&](int c) {
      const auto x = hn::LoadU(d, channel[c] + n * image + i);
      if constexpr (!kCentered) return x;
      const auto distance = hn::Sub(x, hn::Set(d, mean[c]));
      return hn::Mul(distance, distance);
    };
    for (; i + 8 <= args.plane; i += 8) {
      add_rows(row(0), row(1), row(2), row(3), low);
      add_rows(row(4), row(5), row(6), row(7), high);
    }
    hn::StoreU(low, Sum4(), sum);
    hn::StoreU(high, Sum4(), sum + 4);
#endif
    for (int c = 0; c < kTogether; ++c) {
      const float* plane = channel[c] + n * image;
      double total = sum[c];
      for (std::int64_t k = i; k < args.plane; ++k) {
        const float distance = kCentered ? plane[k] - mean[c] : plane[k];
        total += kCentered ? distance * distance : distance;
      }
      sum[c] = total;
    }
  }
}

template <bool kFused>
void scale_plane(const float* input, float alpha, float beta, std::int64_t count, float* output) {
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    store(multiply_add<kFused>(F32(), load(input + i), set(alpha), set(beta)), output + i);
  }
  for (; i < count; ++i) output[i] = multiply_add(kFused, input[i], alpha, beta);
}

// What torch does with the sums of one channel; counts are converted as there.
inline void finish_channel(const BatchNormForward& args, std::int64_t c, float mean, float squares) {
  const std::int64_t count = args.batch * args.plane;
  const double variance = squares / static_cast<float>(count);
  args.save_mean[c] = mean;
  args.save_invstd[c] = variance == 0 && args.eps == 0 ? 0.0F : static_cast<float>(1 / std::sqrt(variance + args.eps));
  const auto momentum = static_cast<float>(args.momentum);
  if (args.running_mean != nullptr) {
    args.running_mean[c] = momentum * mean + (1 - momentum) * args.running_mean[c];
  }
  if (args.running_var != nullptr) {
    const double unbiased = squares / static_cast<float>(count - 1);
    args.running_var[c] = static_cast<float>(momentum * unbiased + (1 - momentum) * args.running_var[c]);
  }
}

void batch_norm_forward(const BatchNormForward& args, std::int64_t begin, std::int64_t end) {
  const std::int64_t image = args.channels * args.plane;
  const auto scale = args.fusion.affine ? scale_plane<true> : scale_plane<false>;
  for (std::int64_t first = begin; first < end; first += kTogether) {
    const int live = static_cast<int>(std::min<std::int64_t>(kTogether, end - first));
    const float* channel[kTogether];
    // The last channel stands in for those that are not there.
    for (int c = 0; c < kTogether; ++c) channel[c] = args.input + (first + std::min(c, live - 1)) * args.plane;
    double sum[kTogether];
    float mean[kTogether];
    sum_channels<false>(args, channel, nullptr, sum);
    for (int c = 0; c < kTogether; ++c) {
      mean[c] = static_cast<float>(sum[c] / static_cast<double>(args.batch * args.plane));
    }
    sum_channels<true>(args, channel, mean, sum);
    float alpha[kTogether], beta[kTogether];
    for (int i = 0; i < live; ++i) {
      const std::int64_t c = first + i;
      finish_channel(args, c, mean[i], static_cast<float>(sum[i]));
      alpha[i] = args.save_invstd[c] * (args.weight == nullptr ? 1.0F : args.weight[c]);
      beta[i] = multiply_add(args.fusion.affine, -mean[i], alpha[i], args.bias == nullptr ? 0.0F : args.bias[c]);
    }
    for (std::int64_t n = 0; n < args.batch; ++n) {
      for (int i = 0; i < live; ++i) {
        const std::int64_t offset = n * image + (first + i) * args.plane;
        scale(args.input + offset, alpha[i], beta[i], args.plane, args.output + offset);
      }
    }
  }
}

// torch's eight lanes, in as many vectors as they take.
using Lane = hn::CappedTag<float, 8>;
constexpr int kLaneVectors = 8 / static_cast<int>(hn::MaxLanes(Lane()));
constexpr int kLaneStep = static_cast<int>(hn::MaxLanes(Lane()));

struct PlaneSums {
  float grad, dot;
};

// The lanes fold in halves: i takes i + 4, then i + 2, then i + 1.
inline float fold(float (&lane)[8]) {
  for (int width = 4; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) lane[i] += lane[i + width];
  }
  return lane[0];
}

// Sums of grad and of (input - mean) * grad over kPlanes planes that lie `image` apart.
template <bool kFused, int kPlanes>
void sum_planes(const BatchNorm& args, const float* input, const float* grad, std::int64_t image, float mean,
                PlaneSums* sums) {
  const std::int64_t count = args.plane;
  if (count < 8) {
    for (int p = 0; p < kPlanes; ++p, input += image, grad += image) {
      sums[p] = {grad[0], (input[0] - mean) * grad[0]};
      for (std::int64_t i = 1; i < count; ++i) {
        sums[p].grad += grad[i];
        sums[p].dot += (input[i] - mean) * grad[i];
      }
    }
    return;
  }
  constexpr Lane d;
  using VL = hn::Vec<Lane>;
  const VL center = hn::Set(d, mean);
  VL grads[kPlanes][kLaneVectors], dots[kPlanes][kLaneVectors];
  for (int p = 0; p < kPlanes; ++p) {
    for (int v = 0; v < kLaneVectors; ++v) {
      grads[p][v] = hn::LoadU(d, grad + p * image + v * kLaneStep);
      dots[p][v] = hn::Mul(hn::Sub(hn::LoadU(d, input + p * image + v * kLaneStep), center), grads[p][v]);
    }
  }
  const std::int64_t whole = count - count % 8;
  for (std::int64_t i = 8; i < whole; i += 8) {
    for (int p = 0; p < kPlanes; ++p) {
      for (int v = 0; v < kLaneVectors; ++v) {
        const std::int64_t at = p * image + i + v * kLaneStep;
        const VL g = hn::LoadU(d, grad + at);
        grads[p][v] = hn::Add(grads[p][v], g);
        dots[p][v] = multiply_add<kFused>(d, hn::Sub(hn::LoadU(d, input + at), center), g, dots[p][v]);
      }
    }
  }
  for (int p = 0; p < kPlanes; ++p) {
    float grad_lane[8], dot_lane[8];
    for (int v = 0; v < kLaneVectors; ++v) {
      hn::StoreU(grads[p][v], d, grad_lane + v * kLaneStep);
      hn::StoreU(dots[p][v], d, dot_lane + v * kLaneStep);
    }
    for (std::int64_t i = whole; i < count; ++i) {
      const float g = grad[p * image + i];
      grad_lane[i - whole] += g;
      dot_lane[i - whole] = multiply_add(args.fusion.dot_rest, input[p * image + i] - mean, g, dot_lane[i - whole]);
    }
    sums[p] = {fold(grad_lane), fold(dot_lane)};
  }
}

struct GradientTerms {
  float mean, k, grad_mean, invstd, weight;
};

template <bool kFused>
void grad_plane(const float* input, const float* grad, const GradientTerms& t, std::int64_t count, float* to) {
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const V distance = hn::Sub(load(input + i), set(t.mean));
    const V rest = multiply_add<kFused>(F32(), distance, set(-t.k), hn::Sub(load(grad + i), set(t.grad_mean)));
    store(hn::Mul(hn::Mul(rest, set(t.invstd)), set(t.weight)), to + i);
  }
  for (; i < count; ++i) {
    const float rest = multiply_add(kFused, input[i] - t.mean, -t.k, grad[i] - t.grad_mean);
    to[i] = rest * t.invstd * t.weight;
  }
}

void batch_norm_backward(const BatchNormBackward& args, std::int64_t begin, std::int64_t end) {
  constexpr int kPlanes = 4;
  const std::int64_t image = args.channels * args.plane;
  const auto count = args.batch * args.plane;
  const auto sum_four = args.fusion.dot ? sum_planes<true, kPlanes> : sum_planes<false, kPlanes>;
  const auto sum_one = args.fusion.dot ? sum_planes<true, 1> : sum_planes<false, 1>;
  const auto gradient = args.fusion.gradient ? grad_plane<true> : grad_plane<false>;
  for (std::int64_t c = begin; c < end; ++c) {
    const float* input = args.input + c * args.plane;
    const float* grad = args.grad_output + c * args.plane;
    const float mean = args.save_mean[c];
    const float invstd = args.save_invstd[c];
    double sum = 0, dot = 0;
    for (std::int64_t n = 0; n < args.batch;) {
      const int planes = args.batch - n >= kPlanes ? kPlanes : 1;
      PlaneSums sums[kPlanes];
      (planes == 1 ? sum_one : sum_four)(args, input + n * image, grad + n * image, image, mean, sums);
      for (int p = 0; p < planes; ++p) {
        sum += sums[p].grad;
        dot += sums[p].dot;
      }
      n += planes;
    }
    if (args.grad_weight != nullptr) args.grad_weight[c] = static_cast<float>(dot * invstd);
    if (args.grad_bias != nullptr) args.grad_bias[c] = static_cast<float>(sum);
    if (args.grad_input == nullptr) continue;
    const GradientTerms terms{mean, static_cast<float>(dot) * invstd * invstd / static_cast<float>(count),
                              static_cast<float>(sum / static_cast<double>(count)), invstd,
                              args.weight == nullptr ? 1.0F : args.weight[c]};
    // From the end: what was read last is still in the cache.
    for (std::int64_t n = args.batch; n-- > 0;) {
      gradient(input + n * image, grad + n * image, terms, args.plane, args.grad_input + n * image + c * args.plane);
    }
  }
}

}  // namespace
}  // namespace oxytorch::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
