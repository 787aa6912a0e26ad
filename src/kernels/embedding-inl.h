// Sums of rows with the same index; compiled once for each instruction set.
#if defined(OXYTORCH_KERNELS_EMBEDDING_INL) == defined(HWY_TARGET_TOGGLE)
#ifdef OXYTORCH_KERNELS_EMBEDDING_INL
#undef OXYTORCH_KERNELS_EMBEDDING_INL
#else
#define OXYTORCH_KERNELS_EMBEDDING_INL
#endif

#include <algorithm>

#include "kernels/attention-inl.h"
#include "oxytorch/kernels/embedding.h"

HWY_BEFORE_NAMESPACE();
namespace oxytorch::kernels::HWY_NAMESPACE {
namespace {

// `kVectors` vectors of columns of `count` rows; of the last one `rest` columns.
template <int kVectors, class T>
HWY_INLINE void sum_strip(const T* from, std::int64_t stride, const std::int32_t* sources, std::int64_t count,
                          std::int64_t rest, bool adds, T* to) {
  V sums[kVectors];
  for (auto& sum : sums) sum = hn::Zero(F32());
  for (std::int64_t i = 0; i < count; ++i) {
    const T* row = from + sources[i] * stride;
    for (int v = 0; v < kVectors; ++v) {
      sums[v] = hn::Add(sums[v], load_some(row + v * kLanes, v + 1 < kVectors ? kLanes : rest));
    }
  }
  for (int v = 0; v < kVectors; ++v) {
    const std::int64_t columns = v + 1 < kVectors ? kLanes : rest;
    if (adds) sums[v] = hn::Add(load_some(to + v * kLanes, columns), sums[v]);
    store_some(sums[v], to + v * kLanes, columns);
  }
}

template <class T>
void sum_rows_of(const RowSums& sums, T* to, std::int64_t to_stride) {
  constexpr int kVectors = 4;
  const auto* from = static_cast<const T*>(sums.from.data);
  const std::int64_t columns = sums.from.columns;
  for (std::int64_t first = 0, next = 0; first < sums.count; first = next) {
    const std::int32_t target = sums.targets[first];
    while (next < sums.count && sums.targets[next] == target) ++next;
    const std::int32_t* sources = sums.sources + first;
    T* row = to + target * to_stride;
    std::int64_t column = 0;
    for (; columns - column >= kVectors * kLanes; column += kVectors * kLanes) {
      sum_strip<kVectors>(from + column, sums.from.stride, sources, next - first, kLanes, sums.adds, row + column);
    }
    for (; column < columns; column += kLanes) {
      const std::int64_t rest = std::min<std::int64_t>(kLanes, columns - column);
      sum_strip<1>(from + column, sums.from.stride, sources, next - first, rest, sums.adds, row + column);
    }
  }
}

void sum_rows(const RowSums& sums, void* to, std::int64_t to_stride) {
  with_element(sums.from.element, [&](auto kind) { sum_rows_of(sums, static_cast<decltype(kind)*>(to), to_stride); });
}

}  // namespace
}  // namespace oxytorch::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
