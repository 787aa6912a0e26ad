// Layer and RMS normalization of rows; compiled once for each instruction set.
#if defined(OXYTORCH_KERNELS_ROW_NORM_INL) == defined(HWY_TARGET_TOGGLE)
#ifdef OXYTORCH_KERNELS_ROW_NORM_INL
#undef OXYTORCH_KERNELS_ROW_NORM_INL
#else
#define OXYTORCH_KERNELS_ROW_NORM_INL
#endif

#include "kernels/activation-inl.h"
#include "oxytorch/kernels/row_norm.h"

HWY_BEFORE_NAMESPACE();
namespace oxytorch::kernels::HWY_NAMESPACE {
namespace {

// Sums along a row: in 64 lanes on every instruction set, which are added in halves at its end.
class LaneSums {
 public:
  HWY_INLINE LaneSums() {
    for (V& one : lanes_) one = hn::Zero(F32());
  }
  // The lanes of the vector that begins at column `j`.
  HWY_INLINE V& at(std::int64_t j) { return lanes_[j / kLanes % kAbreast]; }
  [[nodiscard]] HWY_INLINE float total() {
    for (int half = kAbreast / 2; half > 0; half /= 2) {
      for (int k = 0; k < half; ++k) lanes_[k] = hn::Add(lanes_[k], lanes_[k + half]);
    }
    float all[kLanes];
    store(lanes_[0], all);
    for (int half = kLanes / 2; half > 0; half /= 2) {
      for (int i = 0; i < half; ++i) all[i] += all[i + half];
    }
    return all[0];
  }

 private:
  V lanes_[kAbreast];
};

// A group of vectors of row `i` from column `j`, of whichever element.
template <int kVectors>
HWY_INLINE void load_of(const Rows& rows, std::int64_t i, std::int64_t j, std::int64_t count, V (&to)[kVectors]) {
  with_element(rows.element, [&](auto kind) { load_group(row_of<decltype(kind)>(rows, i) + j, count, to); });
}
template <int kVectors>
HWY_INLINE void store_of(const V (&from)[kVectors], const RowsOf& to, std::int64_t i, std::int64_t j,
                         std::int64_t count) {
  with_element(to.element, [&](auto kind) { store_group(from, row_to<decltype(kind)>(to.to, i) + j, count); });
}

HWY_INLINE V below(V value, std::int64_t count) {
  return count >= kLanes ? value : hn::IfThenElseZero(hn::FirstN(F32(), static_cast<std::size_t>(count)), value);
}

void normalize_sums(const RowSum& sum_of, const RowNorm& norm, const RowsOf& sum, const RowsOf& output, float* mean,
                    float* invstd, float* work) {
  const std::int64_t columns = sum_of.input.columns;
  const auto share = 1.0F / static_cast<float>(columns);
  const V scale = set(sum_of.scale);
  for (std::int64_t i = 0; i < sum_of.input.rows; ++i) {
    LaneSums sums;
    in_groups(columns, [&](auto j, auto count, auto vectors) {
      constexpr int kVectors = vectors.value;
      V value[kVectors], beside[kVectors];
      load_of(sum_of.input, i, j, count, value);
      if (sum_of.keep.data != nullptr) {
        load_of(sum_of.keep, i, j, count, beside);
        for (int k = 0; k < kVectors; ++k) value[k] = hn::Mul(hn::Mul(value[k], scale), beside[k]);
      }
      if (sum_of.residual.data != nullptr) {
        load_of(sum_of.residual, i, j, count, beside);
        for (int k = 0; k < kVectors; ++k) value[k] = hn::Add(value[k], beside[k]);
      }
      if (sum.to.data != nullptr) {
        // What is normalized is what backward will read.
        with_element(sum.element, [&](auto kind) {
          using T = decltype(kind);
          for (int k = 0; k < kVectors; ++k) value[k] = rounded_to<T>(value[k]);
          store_group(value, row_to<T>(sum.to, i) + j, count);
        });
      }
      store_group(value, work + j, count);
      for (int k = 0; k < kVectors; ++k) sums.at(j + k * kLanes) = hn::Add(sums.at(j + k * kLanes), value[k]);
    });
    const float middle = norm.is_centered ? sums.total() * share : 0;
    const V center = set(middle);
    LaneSums squares;
    in_groups(columns, [&](auto j, auto count, auto vectors) {
      constexpr int kVectors = vectors.value;
      V value[kVectors];
      load_group(work + j, count, value);
      for (int k = 0; k < kVectors; ++k) {
        const V apart = below(hn::Sub(value[k], center), count - k * kLanes);
        squares.at(j + k * kLanes) = fma(apart, apart, squares.at(j + k * kLanes));
      }
    });
    const float root = 1.0F / std::sqrt(squares.total() * share + norm.eps);
    if (norm.is_centered) mean[i] = middle;
    invstd[i] = root;
    in_groups(columns, [&](auto j, auto count, auto vectors) {
      constexpr int kVectors = vectors.value;
      V value[kVectors], beside[kVectors];
      load_group(work + j, count, value);
      for (int k = 0; k < kVectors; ++k) value[k] = hn::Mul(hn::Sub(value[k], center), set(root));
      if (norm.weight != nullptr) {
        load_group(norm.weight + j, count, beside);
        for (int k = 0; k < kVectors; ++k) value[k] = hn::Mul(value[k], beside[k]);
      }
      if (norm.bias != nullptr) {
        load_group(norm.bias + j, count, beside);
        for (int k = 0; k < kVectors; ++k) value[k] = hn::Add(value[k], beside[k]);
      }
      store_of(value, output, i, j, count);
    });
  }
}

// Adds the sums over `count` rows of slope * normed, and of slope, to those of weight and bias.
HWY_INLINE void add_weight_sums(const float* slopes, const float* normed, std::int64_t count, std::int64_t columns,
                                float* weight, float* bias) {
  in_groups(columns, [&](auto j, auto left, auto vectors) {
    constexpr int kVectors = vectors.value;
    V of_weight[kVectors], of_bias[kVectors], slope[kVectors], value[kVectors];
    for (int k = 0; k < kVectors; ++k) of_weight[k] = of_bias[k] = hn::Zero(F32());
    for (std::int64_t i = 0; i < count; ++i) {
      load_group(slopes + i * columns + j, left, slope);
      load_group(normed + i * columns + j, left, value);
      for (int k = 0; k < kVectors; ++k) {
        of_weight[k] = fma(slope[k], value[k], of_weight[k]);
        of_bias[k] = hn::Add(of_bias[k], slope[k]);
      }
    }
    const auto add = [&](const V(&sums)[kVectors], float* to) {
      if (to == nullptr) return;
      V total[kVectors];
      load_group(to + j, left, total);
      for (int k = 0; k < kVectors; ++k) total[k] = hn::Add(total[k], sums[k]);
      store_group(total, to + j, left);
    };
    add(of_weight, weight);
    add(of_bias, bias);
  });
}

void row_norm_gradient(const RowNormGradient& of, const RowsOf& to_input, const RowsOf& to_residual, float* weight,
                       float* bias, float* work) {
  const std::int64_t columns = of.sum.columns;
  const auto share = 1.0F / static_cast<float>(columns);
  const V scale = set(of.scale);
  const bool sums_weights = weight != nullptr || bias != nullptr;
  float *const slopes = work, *const normed_rows = work + kNormGroup * columns;
  for (std::int64_t i = 0; i < of.sum.rows; ++i) {
    const std::int64_t place = i % kNormGroup;
    float *const kept = slopes + place * columns, *const normed = normed_rows + place * columns;
    const V center = set(of.norm.is_centered ? of.mean[i] : 0.0F), root = set(of.invstd[i]);
    LaneSums sums, dots;
    in_groups(columns, [&](auto j, auto count, auto vectors) {
      constexpr int kVectors = vectors.value;
      V slope[kVectors], value[kVectors], factor[kVectors];
      load_of(of.grad, i, j, count, slope);
      load_of(of.sum, i, j, count, value);
      for (int k = 0; k < kVectors; ++k) value[k] = hn::Mul(hn::Sub(value[k], center), root);
      store_group(value, normed + j, count);
      store_group(slope, kept + j, count);
      if (of.norm.weight != nullptr) {
        load_group(of.norm.weight + j, count, factor);
        for (int k = 0; k < kVectors; ++k) slope[k] = hn::Mul(slope[k], factor[k]);
      }
      for (int k = 0; k < kVectors; ++k) {  // a slope is zero beyond the row
        V &sum = sums.at(j + k * kLanes), &dot = dots.at(j + k * kLanes);
        sum = hn::Add(sum, slope[k]);
        dot = fma(slope[k], value[k], dot);
      }
    });
    if (sums_weights && (place + 1 == kNormGroup || i + 1 == of.sum.rows)) {
      add_weight_sums(slopes, normed_rows, place + 1, columns, weight, bias);
    }
    if (to_input.to.data == nullptr && to_residual.to.data == nullptr) continue;
    const V constant = set(of.norm.is_centered ? sums.total() * share : 0.0F), tilt = set(dots.total() * share);
    in_groups(columns, [&](auto j, auto count, auto vectors) {
      constexpr int kVectors = vectors.value;
      V slope[kVectors], value[kVectors], beside[kVectors];
      load_group(kept + j, count, slope);
      load_group(normed + j, count, value);
      if (of.norm.weight != nullptr) {
        load_group(of.norm.weight + j, count, beside);
        for (int k = 0; k < kVectors; ++k) slope[k] = hn::Mul(slope[k], beside[k]);
      }
      for (int k = 0; k < kVectors; ++k) {
        slope[k] = hn::Mul(root, hn::Sub(hn::Sub(slope[k], constant), hn::Mul(value[k], tilt)));
      }
      if (of.grad_sum.data != nullptr) {
        load_of(of.grad_sum, i, j, count, beside);
        for (int k = 0; k < kVectors; ++k) slope[k] = hn::Add(slope[k], beside[k]);
      }
      if (to_residual.to.data != nullptr) store_of(slope, to_residual, i, j, count);
      if (to_input.to.data == nullptr) return;
      if (of.keep.data != nullptr) {
        load_of(of.keep, i, j, count, beside);
        for (int k = 0; k < kVectors; ++k) slope[k] = hn::Mul(hn::Mul(slope[k], scale), beside[k]);
      }
      store_of(slope, to_input, i, j, count);
    });
  }
}

}  // namespace
}  // namespace oxytorch::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // OXYTORCH_KERNELS_ROW_NORM_INL toggle
