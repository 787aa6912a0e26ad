// Cross entropy and its gradient; compiled once for each instruction set.
#if defined(OXYTORCH_KERNELS_CROSS_ENTROPY_INL) == defined(HWY_TARGET_TOGGLE)
#ifdef OXYTORCH_KERNELS_CROSS_ENTROPY_INL
#undef OXYTORCH_KERNELS_CROSS_ENTROPY_INL
#else
#define OXYTORCH_KERNELS_CROSS_ENTROPY_INL
#endif

#include "kernels/row_norm-inl.h"
#include "oxytorch/kernels/cross_entropy.h"

HWY_BEFORE_NAMESPACE();
namespace oxytorch::kernels::HWY_NAMESPACE {
namespace {

void cross_entropy_gradient(const CrossEntropyGradient& tile) {
  const V smoothing = set(tile.smoothing);
  for (std::int64_t i = 0; i < tile.rows; i += 2) {
    for (std::int64_t j = 0; j < tile.columns; j += kLanes) {
      const V log_sum = load(tile.log_sum + j);
      const V largest = load(tile.largest + j);
      const V times = load(tile.weight + j);
      V gradient[2];
      for (int k = 0; k < 2; ++k) {
        const V below = hn::Sub(load(tile.logits + (i + k) * kTile + j), largest);
        const V probability = exp(hn::Sub(below, log_sum));
        // A token that does not count has no gradient, whatever its logits are.
        gradient[k] =
            hn::IfThenZeroElse(hn::Eq(times, hn::Zero(F32())), hn::Mul(hn::Sub(probability, smoothing), times));
        if (tile.format == TileFormat::Float32) store(gradient[k], tile.logits + (i + k) * kTile + j);
      }
      if (tile.format == TileFormat::Float32) continue;
      const VU bits[2] = {rounded_bf16(gradient[0]), rounded_bf16(gradient[1])};
      for (int k = 0; k < 2; ++k) {
        store_low16(hn::ShiftRight<16>(bits[k]), tile.left_gradient + (i + k) * tile.left_stride + j);
      }
      store_pair(bits[0], bits[1], tile.right_gradient + i * kTile + 2 * j);
    }
  }
}

HWY_INLINE float largest_of_row(const float* row, std::int64_t columns) {
  float largest = -kInfinity;
  in_groups(columns, [&](auto j, auto count, auto vectors) {
    V value[vectors.value];
    load_group(row + j, count, value);
    for (int k = 1; k < vectors.value; ++k) value[0] = hn::Max(value[0], value[k]);
    if (count < kLanes)
      value[0] = hn::IfThenElse(hn::FirstN(F32(), static_cast<std::size_t>(count)), value[0], set(-kInfinity));
    largest = std::max(largest, hn::GetLane(hn::MaxOfLanes(F32(), value[0])));
  });
  return largest;
}

double cross_entropy_rows(const CrossEntropyRows& of) {
  double losses = 0;
  const double others = of.smoothing / static_cast<double>(of.classes);
  for (std::int64_t i = 0; i < of.rows; ++i) {
    float* row = of.logits + i * of.stride;
    auto* gradient = of.gradient == nullptr ? nullptr : reinterpret_cast<Bf16*>(of.gradient + i * of.gradient_stride);
    if (of.targets[i] == of.ignore_index) {
      if (gradient != nullptr) std::fill_n(gradient, of.classes, Bf16());
      continue;
    }
    const float largest = largest_of_row(row, of.classes), right = row[of.targets[i]];
    const V top = set(largest);
    LaneSums sums, plain;
    in_groups(of.classes, [&](auto j, auto count, auto vectors) {
      constexpr int kVectors = vectors.value;
      V value[kVectors];
      load_group(row + j, count, value);
      if (of.smoothing > 0) {
        for (int k = 0; k < kVectors; ++k) plain.at(j + k * kLanes) = hn::Add(plain.at(j + k * kLanes), value[k]);
      }
      for (int k = 0; k < kVectors; ++k) {
        value[k] = exp(hn::Sub(value[k], top));
        sums.at(j + k * kLanes) = hn::Add(sums.at(j + k * kLanes), below(value[k], count - k * kLanes));
      }
      store_group(value, row + j, count);
    });
    const float sum = sums.total();
    const double log = std::log(static_cast<double>(sum));
    losses += largest + log - (1 - of.smoothing) * right;
    if (of.smoothing > 0) losses -= others * plain.total();
    if (gradient == nullptr) continue;
    // That of its own class is taken from 1 before it is rounded.
    const double probability = std::exp(static_cast<double>(right) - largest - log);
    const double own = (probability - (1 - of.smoothing) - others) * of.weight;
    const V times = set(of.weight / sum), less = set(static_cast<float>(others) * of.weight);
    in_groups(of.classes, [&](auto j, auto count, auto vectors) {
      constexpr int kVectors = vectors.value;
      V value[kVectors];
      load_group(row + j, count, value);
      for (int k = 0; k < kVectors; ++k) value[k] = fms(value[k], times, less);
      store_group(value, gradient + j, count);
    });
    store_some(set(static_cast<float>(own)), gradient + of.targets[i], 1);
  }
  return losses;
}

}  // namespace
}  // namespace oxytorch::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
