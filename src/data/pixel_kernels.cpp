// The wide loops over pixels: one source, compiled for each instruction set by Highway.
//
// Whole numbers are exact on every set; floats go through the same correctly rounded operations, so that all sets give
// the same bits. The last group of a row is worked on in a padded copy.
#include "data/pixel_kernels.h"

#include "kernels/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "data/pixel_kernels.cpp"
#include <hwy/foreach_target.h>
//
#include <hwy/highway.h>

#include "kernels/formats-inl.h"

HWY_BEFORE_NAMESPACE();
namespace oxytorch::data::HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;
using namespace oxytorch::kernels::HWY_NAMESPACE;  // NOLINT: vectors of formats, of the same target

// Pixels of three channels that are worked on at once.
constexpr std::size_t kGroup = 16;

// Three channels of kGroup pixels, apart.
struct Planes {
  alignas(64) std::uint8_t channel[3][kGroup];
};

#if OXYTORCH_KERNELS_SCALAR
HWY_INLINE void split(const std::uint8_t* rgb, Planes& planes) {
  for (std::size_t i = 0; i < kGroup; ++i) {
    for (std::size_t c = 0; c < 3; ++c) planes.channel[c][i] = rgb[3 * i + c];
  }
}
HWY_INLINE void join(const Planes& planes, std::uint8_t* rgb) {
  for (std::size_t i = 0; i < kGroup; ++i) {
    for (std::size_t c = 0; c < 3; ++c) rgb[3 * i + c] = planes.channel[c][i];
  }
}
// Sixteen rows of sixteen bytes from `from`, transposed.
HWY_INLINE void transpose(const std::uint8_t* const (&from)[kRowsAside], std::uint8_t* to, std::size_t stride) {
  for (std::size_t row = 0; row < kRowsAside; ++row) {
    for (std::size_t column = 0; column < kRowsAside; ++column) to[column * stride + row] = from[row][column];
  }
}
#else
using Bytes = hn::FixedTag<std::uint8_t, 16>;
HWY_INLINE void split(const std::uint8_t* rgb, Planes& planes) {
  hn::Vec<Bytes> r, g, b;
  hn::LoadInterleaved3(Bytes(), rgb, r, g, b);
  hn::Store(r, Bytes(), planes.channel[0]);
  hn::Store(g, Bytes(), planes.channel[1]);
  hn::Store(b, Bytes(), planes.channel[2]);
}
HWY_INLINE void join(const Planes& planes, std::uint8_t* rgb) {
  hn::StoreInterleaved3(hn::Load(Bytes(), planes.channel[0]), hn::Load(Bytes(), planes.channel[1]),
                        hn::Load(Bytes(), planes.channel[2]), Bytes(), rgb);
}
// Row i and row i + 8 interleaved, four times over: each time the index of a byte is rotated by one bit.
HWY_INLINE void transpose(const std::uint8_t* const (&from)[kRowsAside], std::uint8_t* to, std::size_t stride) {
  hn::Vec<Bytes> a[kRowsAside], b[kRowsAside];
  for (std::size_t i = 0; i < kRowsAside; ++i) a[i] = hn::LoadU(Bytes(), from[i]);
  for (int round = 0; round < 2; ++round) {
    for (std::size_t i = 0; i < kRowsAside / 2; ++i) {
      b[2 * i] = hn::InterleaveLower(Bytes(), a[i], a[i + 8]);
      b[2 * i + 1] = hn::InterleaveUpper(Bytes(), a[i], a[i + 8]);
    }
    for (std::size_t i = 0; i < kRowsAside / 2; ++i) {
      a[2 * i] = hn::InterleaveLower(Bytes(), b[i], b[i + 8]);
      a[2 * i + 1] = hn::InterleaveUpper(Bytes(), b[i], b[i + 8]);
    }
  }
  for (std::size_t i = 0; i < kRowsAside; ++i) hn::StoreU(a[i], Bytes(), to + i * stride);
}
#endif

using F64 = hn::CappedTag<double, kBlock / 2>;
using VD = hn::Vec<F64>;

HWY_INLINE VI widen(const std::uint8_t* from) { return hn::PromoteTo(I32(), hn::LoadU(U8(), from)); }
HWY_INLINE void narrow(VI value, std::uint8_t* to) { hn::StoreU(hn::DemoteTo(U8(), value), U8(), to); }

template <int kVectors>
HWY_INLINE void weigh(const std::uint8_t* from, std::size_t stride, const std::int32_t* weights, int taps,
                      std::uint8_t* to) {
  VI sum[kVectors];
  for (int i = 0; i < kVectors; ++i) sum[i] = hn::Set(I32(), 1 << (kWeightBits - 1));
  for (int tap = 0; tap < taps; ++tap, from += stride) {
    const VI weight = hn::Set(I32(), weights[tap]);
    for (int i = 0; i < kVectors; ++i) sum[i] = hn::Add(sum[i], hn::Mul(widen(from + i * kLanes), weight));
  }
  for (int i = 0; i < kVectors; ++i) narrow(hn::ShiftRight<kWeightBits>(sum[i]), to + i * kLanes);
}

// One output element: whole blocks, whole vectors, and a last vector that overlaps the one before.
HWY_INLINE void weigh_element(const std::uint8_t* from, std::size_t stride, const std::int32_t* weights, int taps,
                              std::uint8_t* to, std::size_t count) {
  constexpr int kVectors = 4 * kBlock / kLanes < 8 ? 4 * kBlock / kLanes : 8;
  constexpr std::size_t kMany = static_cast<std::size_t>(kVectors) * kLanes;
  constexpr std::size_t kOne = static_cast<std::size_t>(kLanes);
  std::size_t at = 0;
  for (; at + kMany <= count; at += kMany) weigh<kVectors>(from + at, stride, weights, taps, to + at);
  if (at + 3 * kOne <= count) {
    weigh<3>(from + at, stride, weights, taps, to + at);
    at += 3 * kOne;
  }
  for (; at + kOne <= count; at += kOne) weigh<1>(from + at, stride, weights, taps, to + at);
  if (at == count) return;
  if (count >= kOne) {
    at = count - kOne;
    weigh<1>(from + at, stride, weights, taps, to + at);
    return;
  }
  for (; at < count; ++at) {
    std::int32_t sum = 1 << (kWeightBits - 1);
    for (int tap = 0; tap < taps; ++tap) sum += from[at + static_cast<std::size_t>(tap) * stride] * weights[tap];
    to[at] = static_cast<std::uint8_t>(std::min(sum >> kWeightBits, 255));
  }
}

void resample(const ResizeAxis& axis, const std::uint8_t* from, std::size_t stride, std::uint8_t* to,
              std::size_t count) {
  const std::int32_t* weights = axis.weights.data();
  for (std::size_t i = 0; i < axis.first.size(); ++i, weights += axis.stride, to += count) {
    weigh_element(from + static_cast<std::size_t>(axis.first[i]) * stride, stride, weights, axis.taps[i], to, count);
  }
}

void gather_rows(const std::uint8_t* from, std::size_t stride, std::size_t rows, std::size_t columns,
                 std::uint8_t* to) {
  const std::uint8_t* row[kRowsAside];
  std::size_t column = 0;
  for (std::size_t i = 0; i < kRowsAside; ++i) row[i] = from + std::min(i, rows - 1) * stride;
  for (; column + kRowsAside <= columns; column += kRowsAside) {
    transpose(row, to + column * kRowsAside, kRowsAside);
    for (auto& begin : row) begin += kRowsAside;
  }
  for (; column < columns; ++column) {
    for (std::size_t i = 0; i < kRowsAside; ++i) to[column * kRowsAside + i] = *row[i]++;
  }
}

void scatter_rows(const std::uint8_t* from, std::size_t rows, std::size_t columns, std::uint8_t* to,
                  std::size_t stride) {
  std::size_t column = 0;
  for (; rows == kRowsAside && column + kRowsAside <= columns; column += kRowsAside) {
    const std::uint8_t* part[kRowsAside];
    for (std::size_t i = 0; i < kRowsAside; ++i) part[i] = from + (column + i) * kRowsAside;
    transpose(part, to + column, stride);
  }
  for (; column < columns; ++column) {
    for (std::size_t i = 0; i < rows; ++i) to[i * stride + column] = from[column * kRowsAside + i];
  }
}

// As many values as a vector of doubles holds, by their lines.
using FewFloats = hn::Rebind<float, F64>;
HWY_INLINE hn::Vec<FewFloats> few_normalized(const std::uint8_t* from, const double* scale, const double* bias) {
  const auto bytes = hn::LoadU(hn::Rebind<std::uint8_t, F64>(), from);
  const VD value = hn::PromoteTo(F64(), hn::PromoteTo(hn::Rebind<std::int32_t, F64>(), bytes));
  return hn::DemoteTo(FewFloats(), fma(F64(), value, hn::LoadU(F64(), scale), hn::LoadU(F64(), bias)));
}

// `kCount` values by their lines, as T.
template <std::size_t kCount, class T>
HWY_INLINE void normalize_values(const std::uint8_t* from, const double* scale, const double* bias, T* to) {
  for (std::size_t i = 0; i < kCount; i += kLanes) {
    const auto low = few_normalized(from + i, scale + i, bias + i);
#if HWY_TARGET == HWY_SCALAR
    const V value = low;
#else
    constexpr std::size_t kHalf = kLanes / 2;
    const V value = hn::Combine(F32(), few_normalized(from + i + kHalf, scale + i + kHalf, bias + i + kHalf), low);
#endif
    store<false>(value, to + i, nullptr);
  }
}

template <class T>
void normalize_as(const std::uint8_t* from, std::size_t count, const NormalizeLines& lines, std::byte* to) {
  T group[kNormalized];
  for (std::size_t at = 0; at < count; at += kNormalized) {
    const std::size_t left = std::min(count - at, kNormalized);
    std::uint8_t padded[kNormalized] = {};
    const std::uint8_t* values = from + at;
    if (left < kNormalized) values = static_cast<const std::uint8_t*>(std::memcpy(padded, values, left));
    normalize_values<kNormalized>(values, lines.scale.data(), lines.bias.data(), group);
    std::memcpy(to + at * sizeof(T), group, left * sizeof(T));
  }
}

void normalize(const std::uint8_t* from, std::size_t count, const NormalizeLines& lines, DType dtype, std::byte* to) {
  if (dtype == DType::BF16) return normalize_as<Bf16>(from, count, lines, to);
  if (dtype == DType::F16) return normalize_as<Half>(from, count, lines, to);
  normalize_as<float>(from, count, lines, to);
}

// Calls use(planes, first pixel, how many) for each group of RGB pixels; behind the last there is black.
template <class Use>
HWY_INLINE void for_groups(const std::uint8_t* rgb, std::size_t pixels, Use use) {
  Planes planes;
  std::size_t at = 0;
  for (; at + kGroup <= pixels; at += kGroup) {
    split(rgb + 3 * at, planes);
    use(planes, at, kGroup);
  }
  if (at == pixels) return;
  std::uint8_t padded[3 * kGroup] = {};
  std::memcpy(padded, rgb + 3 * at, 3 * (pixels - at));
  split(padded, planes);
  use(planes, at, pixels - at);
}

template <class T>
void planes_as(const std::uint8_t* from, std::size_t pixels, const NormalizeLines& lines, std::byte* to) {
  for_groups(from, pixels, [&](const Planes& planes, std::size_t at, std::size_t count) {
    T group[kGroup];
    for (std::size_t c = 0; c < 3; ++c) {
      if constexpr (sizeof(T) == 1) {
        std::memcpy(group, planes.channel[c], sizeof(group));
      } else {
        normalize_values<kGroup>(planes.channel[c], &lines.scale[c * kGroup], &lines.bias[c * kGroup], group);
      }
      std::byte* const plane = to + (c * pixels + at) * sizeof(T);
      if (count == kGroup) {
        std::memcpy(plane, group, sizeof(group));  // a size that the compiler knows
      } else {
        std::memcpy(plane, group, count * sizeof(T));
      }
    }
  });
}

void planes(const std::uint8_t* from, std::size_t pixels, const NormalizeLines& lines, DType dtype, std::byte* to) {
  if (dtype == DType::U8) return planes_as<std::uint8_t>(from, pixels, lines, to);
  if (dtype == DType::BF16) return planes_as<Bf16>(from, pixels, lines, to);
  if (dtype == DType::F16) return planes_as<Half>(from, pixels, lines, to);
  planes_as<float>(from, pixels, lines, to);
}

// PIL's gray: 0.299 r + 0.587 g + 0.114 b in 16 bits behind the point.
HWY_INLINE VI gray(const Planes& planes, std::size_t at) {
  const auto part = [&](int channel, int weight) {
    return hn::Mul(widen(planes.channel[channel] + at), hn::Set(I32(), weight));
  };
  return hn::ShiftRight<16>(
      hn::Add(hn::Add(part(0, 19595), part(1, 38470)), hn::Add(part(2, 7471), hn::Set(I32(), 0x8000))));
}

std::uint64_t gray_sum(const std::uint8_t* rgb, std::size_t pixels) {
  constexpr std::size_t kChunk = std::size_t{1} << 16;  // lanes hold its sum
  std::uint64_t total = 0;
  for (std::size_t begin = 0; begin < pixels; begin += kChunk) {
    VI sum = hn::Zero(I32());
    for_groups(rgb + 3 * begin, std::min(kChunk, pixels - begin), [&](const Planes& planes, std::size_t, std::size_t) {
      for (std::size_t i = 0; i < kGroup; i += kLanes) sum = hn::Add(sum, gray(planes, i));
    });
    alignas(64) std::int32_t lanes[kLanes];
    hn::Store(sum, I32(), lanes);
    for (const std::int32_t lane : lanes) total += static_cast<std::uint64_t>(lane);
  }
  return total;
}

// PIL's blend: cut off, not rounded.
HWY_INLINE VI blend(VI from, VI to, V factor) {
  const V value = hn::Add(hn::ConvertTo(F32(), from), hn::Mul(factor, hn::ConvertTo(F32(), hn::Sub(to, from))));
  return hn::ConvertTo(I32(), hn::Min(hn::Max(value, set(0)), set(255)));
}

void blend_gray(std::uint8_t* rgb, std::size_t pixels, float factor) {
  for_groups(rgb, pixels, [&](Planes& planes, std::size_t at, std::size_t count) {
    for (std::size_t i = 0; i < kGroup; i += kLanes) {
      const VI from = gray(planes, i);
      for (auto& channel : planes.channel) narrow(blend(from, widen(channel + i), set(factor)), channel + i);
    }
    std::uint8_t joined[3 * kGroup];
    join(planes, joined);
    std::memcpy(rgb + 3 * at, joined, 3 * count);
  });
}

// The sum of 3 x 3 pixels with the middle one five times, a thirteenth of it, rounded: (2 sum + 13) / 26.
constexpr int kOverTwentySix = 40330;  // 2^20 / 26, rounded up; exact for what a sum can be
constexpr bool divides_all_sums() {
  for (int n = 0; n <= 2 * 13 * 255 + 13; ++n) {
    if (n * kOverTwentySix >> 20 != n / 26) return false;
  }
  return true;
}
static_assert(divides_all_sums());

HWY_INLINE VI smooth(const std::uint8_t* above, const std::uint8_t* row, const std::uint8_t* below,
                     std::size_t channels) {
  VI sum = hn::ShiftLeft<2>(widen(row));
  for (const std::uint8_t* line : {above, row, below}) {
    sum = hn::Add(sum, hn::Add(widen(line), hn::Add(widen(line - channels), widen(line + channels))));
  }
  const VI doubled = hn::Add(hn::Add(sum, sum), hn::Set(I32(), 13));
  return hn::ShiftRight<20>(hn::Mul(doubled, hn::Set(I32(), kOverTwentySix)));
}

void blend_smooth(const std::uint8_t* above, const std::uint8_t* row, const std::uint8_t* below, std::size_t count,
                  std::size_t channels, float factor, std::uint8_t* to) {
  constexpr std::size_t kOne = kLanes;
  const auto work = [&](const std::uint8_t* upper, const std::uint8_t* middle, const std::uint8_t* lower,
                        std::uint8_t* out) {
    narrow(blend(smooth(upper, middle, lower, channels), widen(middle), set(factor)), out);
  };
  std::size_t at = 0;
  for (; at + kOne <= count; at += kOne) work(above + at, row + at, below + at, to + at);
  if (at == count) return;
  // The rest from copies that are padded at the end: at most a vector with both neighbours.
  std::uint8_t lines[3][kBlock + 2 * 4] = {};
  std::uint8_t out[kBlock];
  const std::uint8_t* const from[3] = {above, row, below};
  for (int i = 0; i < 3; ++i) std::memcpy(lines[i], from[i] + at - channels, count - at + 2 * channels);
  work(lines[0] + channels, lines[1] + channels, lines[2] + channels, out);
  std::memcpy(to + at, out, count - at);
}

template <class T>
HWY_INLINE void mix_block(T* to, const T* from, V own, V others) {
  for (int i = 0; i < kBlock; i += kLanes) {
    if constexpr (sizeof(T) == 1) {
      const V sum = hn::Add(hn::Mul(hn::ConvertTo(F32(), widen(from + i)), others),
                            hn::Mul(hn::ConvertTo(F32(), widen(to + i)), own));
      narrow(hn::ConvertTo(I32(), hn::Add(sum, set(0.5F))), to + i);
    } else {
      store<false>(hn::Add(hn::Mul(load(from + i), others), hn::Mul(load(to + i), own)), to + i, nullptr);
    }
  }
}

template <class T>
void mix_as(std::byte* to, const std::byte* from, std::size_t count, float own, float others) {
  for (std::size_t at = 0; at < count; at += kBlock) {
    T blocks[2][kBlock] = {};
    const std::size_t bytes = std::min<std::size_t>(count - at, kBlock) * sizeof(T);
    std::memcpy(blocks[0], to + at * sizeof(T), bytes);
    std::memcpy(blocks[1], from + at * sizeof(T), bytes);
    mix_block(blocks[0], blocks[1], set(own), set(others));
    std::memcpy(to + at * sizeof(T), blocks[0], bytes);
  }
}

void mix(DType dtype, std::byte* to, const std::byte* from, std::size_t count, float own, float others) {
  if (dtype == DType::U8) return mix_as<std::uint8_t>(to, from, count, own, others);
  if (dtype == DType::BF16) return mix_as<Bf16>(to, from, count, own, others);
  if (dtype == DType::F16) return mix_as<Half>(to, from, count, own, others);
  mix_as<float>(to, from, count, own, others);
}

}  // namespace

const PixelKernels& table() {
  static constexpr PixelKernels kTable{resample, gather_rows, scatter_rows, normalize, planes,
                                       gray_sum, blend_gray,  blend_smooth, mix};
  return kTable;
}

}  // namespace oxytorch::data::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace oxytorch::data {

const PixelKernels& pixel_kernels(Isa isa) {
  switch (isa) {
#if HWY_TARGETS & HWY_AVX3
    case Isa::Avx512: return N_AVX3::table();
#endif
#if HWY_TARGETS & HWY_AVX2
    case Isa::Avx2: return N_AVX2::table();
#endif
#if HWY_TARGETS & HWY_EMU128
    default: return N_EMU128::table();
#else
    default: return N_SCALAR::table();
#endif
  }
}

}  // namespace oxytorch::data
#endif  // HWY_ONCE
