// The per-chunk kernels of the step tail: one source, compiled for each instruction set by Highway.
//
// Only sets with a fused multiply-add are built, plus a scalar one that uses std::fma, so that all give the same bits.
#include <cmath>
#include <cstring>

#include "kernels/step_tail_table.h"
#include "oxytorch/error.h"

#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4)
#define HWY_COMPILE_ALL_ATTAINABLE
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/step_tail_kernels.cpp"
#include <hwy/foreach_target.h>
//
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace oxytorch::kernels::HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

// A block is 16 fp32 elements on every set: sums then have the same lanes everywhere.
constexpr int kBlock = 16;
using F32 = hn::CappedTag<float, kBlock>;
constexpr int kLanes = static_cast<int>(hn::MaxLanes(F32()));
constexpr int kVectors = kBlock / kLanes;
using Half = hn::Rebind<float, hn::CappedTag<double, kBlock / 2>>;
using F64 = hn::CappedTag<double, kBlock / 2>;
constexpr int kDoubleLanes = static_cast<int>(hn::MaxLanes(F64()));
constexpr int kDoubleVectors = kBlock / kDoubleLanes;
using I32 = hn::RebindToSigned<F32>;
using U32 = hn::RebindToUnsigned<F32>;
using U16 = hn::Rebind<std::uint16_t, F32>;
using V = hn::Vec<F32>;
using VD = hn::Vec<F64>;
using bf16_bits = std::uint16_t;

// a * b + c with one rounding. Highway's emulated target rounds twice, hence the lane loop there.
template <class D, class W = hn::Vec<D>>
HWY_INLINE W fma(D d, W a, W b, W c) {
#if HWY_TARGET == HWY_EMU128 || HWY_TARGET == HWY_SCALAR
  constexpr int lanes = static_cast<int>(hn::MaxLanes(D()));
  hn::TFromD<D> x[lanes], y[lanes], z[lanes];
  hn::StoreU(a, d, x);
  hn::StoreU(b, d, y);
  hn::StoreU(c, d, z);
  for (int i = 0; i < lanes; ++i) z[i] = std::fma(x[i], y[i], z[i]);
  return hn::LoadU(d, z);
#else
  (void)d;
  return hn::MulAdd(a, b, c);
#endif
}

HWY_INLINE V load(const float* from) { return hn::LoadU(F32(), from); }
HWY_INLINE V load(const bf16_bits* from) {
  return hn::BitCast(F32(), hn::ShiftLeft<16>(hn::PromoteTo(U32(), hn::LoadU(U16(), from))));
}

HWY_INLINE void store(V value, float* to) { hn::StoreU(value, F32(), to); }
// Round to nearest even; NaN keeps its top bits and stays a NaN.
HWY_INLINE void store(V value, bf16_bits* to) {
  const U32 u32;
  const auto bits = hn::BitCast(u32, value);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(u32, 1u));
  const auto rounded = hn::ShiftRight<16>(hn::Add(hn::Add(bits, hn::Set(u32, 0x7FFFu)), odd));
  const auto quiet = hn::Or(hn::ShiftRight<16>(bits), hn::Set(u32, 0x40u));
  const auto is_number = hn::RebindMask(u32, hn::Eq(value, value));
  const auto result = hn::IfThenElse(is_number, rounded, quiet);
  hn::StoreU(hn::DemoteTo(U16(), hn::BitCast(I32(), result)), U16(), to);
}

// What a store followed by a load gives: the value that the next step will see.
HWY_INLINE V as_stored(V value, const float*) { return value; }
HWY_INLINE V as_stored(V value, const bf16_bits*) {
  bf16_bits stored[kLanes];
  store(value, stored);
  return load(stored);
}

struct Lanes {
  VD sum[kDoubleVectors];
  HWY_INLINE void clear() {
    for (int i = 0; i < kDoubleVectors; ++i) sum[i] = hn::Zero(F64());
  }
  // Adds the squares of one block held in memory as fp32.
  HWY_INLINE void add_squares(const float* block) {
    for (int i = 0; i < kDoubleVectors; ++i) {
      const VD x = hn::PromoteTo(F64(), hn::LoadU(Half(), block + i * kDoubleLanes));
      sum[i] = fma(F64(), x, x, sum[i]);
    }
  }
  HWY_INLINE double total() const {
    double lane[kBlock];
    for (int i = 0; i < kDoubleVectors; ++i) hn::StoreU(sum[i], F64(), lane + i * kDoubleLanes);
    for (int width = kBlock / 2; width > 0; width /= 2) {
      for (int i = 0; i < width; ++i) lane[i] += lane[i + width];
    }
    return lane[0];
  }
};

HWY_INLINE void widen(const float* from, float* to) { std::memcpy(to, from, kBlock * sizeof(float)); }
HWY_INLINE void widen(const bf16_bits* from, float* to) {
  for (int i = 0; i < kVectors; ++i) store(load(from + i * kLanes), to + i * kLanes);
}

HWY_INLINE void add_block(Lanes& lanes, const float* block) { lanes.add_squares(block); }
HWY_INLINE void add_block(Lanes& lanes, const bf16_bits* block) {
  float wide[kBlock];
  widen(block, wide);
  lanes.add_squares(wide);
}

// Two blocks a turn in two sets of lanes hide the latency of the additions.
template <class T>
double sum_squares_of(const T* data, std::int64_t count) {
  Lanes even, odd;
  even.clear();
  odd.clear();
  std::int64_t i = 0;
  for (; i + 2 * kBlock <= count; i += 2 * kBlock) {
    add_block(even, data + i);
    add_block(odd, data + i + kBlock);
  }
  if (i + kBlock <= count) {
    add_block(even, data + i);
    i += kBlock;
  }
  if (i < count) {
    T rest[kBlock] = {};
    std::memcpy(rest, data + i, static_cast<std::size_t>(count - i) * sizeof(T));
    add_block(odd, rest);
  }
  return even.total() + odd.total();
}

double sum_squares(const void* data, ElementType type, std::int64_t count) {
  return type == ElementType::F32 ? sum_squares_of(static_cast<const float*>(data), count)
                                  : sum_squares_of(static_cast<const bf16_bits*>(data), count);
}

template <class P, class S>
struct Pointers {
  P* param;
  P* grad;
  S* state0;
  S* state1;
  S* state2;
  float* ema;
};

struct Statistics {
  Lanes param;
  Lanes update;
};

// One block of 16 elements.
template <Rule kRule, class P, class S, bool kStatistics>
HWY_INLINE void update_block(const Pointers<P, S>& at, const Coefficients& c, const ChunkUpdate& chunk,
                             Statistics& statistics) {
  const F32 d;
  float before[kBlock];
  float after[kBlock];
  for (int i = 0; i < kBlock; i += kLanes) {
    V param = load(at.param + i);
    V grad = hn::Mul(load(at.grad + i), hn::Set(d, c.grad_multiplier));
    if (kStatistics) store(param, before + i);
    if constexpr (kRule == Rule::Sgd) {
      if (c.weight_decay != 0) grad = fma(d, hn::Set(d, c.weight_decay), param, grad);
      if (at.state0 != nullptr) {
        const V moved = hn::Mul(hn::Set(d, c.momentum), load(at.state0 + i));
        const V buffer = fma(d, hn::Set(d, c.one_minus_dampening), grad, moved);
        store(buffer, at.state0 + i);
        grad = chunk.nesterov ? fma(d, hn::Set(d, c.momentum), buffer, grad) : buffer;
      }
      param = fma(d, hn::Set(d, -c.step_size), grad, param);
    } else {
      if (kRule == Rule::Adam && c.weight_decay != 0) grad = fma(d, hn::Set(d, c.weight_decay), param, grad);
      if (kRule == Rule::AdamW) param = fma(d, hn::Set(d, -c.decay), param, param);
      const V old1 = load(at.state0 + i);
      const V average = fma(d, hn::Set(d, c.one_minus_beta1), hn::Sub(grad, old1), old1);
      const V kept = hn::Mul(hn::Set(d, c.beta2), load(at.state1 + i));
      V square = fma(d, hn::Mul(hn::Set(d, c.one_minus_beta2), grad), grad, kept);
      store(average, at.state0 + i);
      store(square, at.state1 + i);
      if (at.state2 != nullptr) {
        square = hn::Max(square, load(at.state2 + i));
        store(square, at.state2 + i);
      }
      const V denominator = fma(d, hn::Sqrt(square), hn::Set(d, c.inv_sqrt_correction2), hn::Set(d, c.eps));
      param = fma(d, hn::Set(d, -c.step_size), hn::Div(average, denominator), param);
    }
    store(param, at.param + i);
    const V stored = as_stored(param, at.param);
    if (kStatistics) store(stored, after + i);
    if (at.ema != nullptr) {
      const V old = load(at.ema + i);
      store(fma(d, hn::Set(d, c.ema_weight), hn::Sub(stored, old), old), at.ema + i);
    }
    if (chunk.zero_grad) store(hn::Zero(d), at.grad + i);
  }
  if constexpr (kStatistics) {
    statistics.param.add_squares(after);
    for (int i = 0; i < kBlock; i += kLanes) store(hn::Sub(load(after + i), load(before + i)), before + i);
    statistics.update.add_squares(before);
  }
}

template <class T>
T* offset(T* pointer, std::int64_t count) {
  return pointer == nullptr ? nullptr : pointer + count;
}

template <Rule kRule, class P, class S, bool kStatistics>
void update_chunk(const ChunkUpdate& chunk) {
  // A copy: the compiler then knows that stores cannot change the coefficients.
  const Coefficients c = *chunk.coefficients;
  const Pointers<P, S> start{static_cast<P*>(chunk.param),  static_cast<P*>(chunk.grad),
                             static_cast<S*>(chunk.state0), static_cast<S*>(chunk.state1),
                             static_cast<S*>(chunk.state2), chunk.ema};
  Statistics statistics;
  if (kStatistics) {
    statistics.param.clear();
    statistics.update.clear();
  }
  Pointers<P, S> at = start;
  std::int64_t i = 0;
  for (; i + kBlock <= chunk.count; i += kBlock) {
    update_block<kRule, P, S, kStatistics>(at, c, chunk, statistics);
    at = {at.param + kBlock,         at.grad + kBlock,          offset(at.state0, kBlock),
          offset(at.state1, kBlock), offset(at.state2, kBlock), offset(at.ema, kBlock)};
  }
  if (const std::int64_t rest = chunk.count - i; rest > 0) {
    // The last elements go through a padded copy; the padding is zero, so it adds nothing to the sums.
    P param[kBlock] = {}, grad[kBlock] = {};
    S state0[kBlock] = {}, state1[kBlock] = {}, state2[kBlock] = {};
    float ema[kBlock] = {};
    const auto in = [rest](auto* to, const auto* from) {
      if (from != nullptr) std::memcpy(to, from, static_cast<std::size_t>(rest) * sizeof(*to));
    };
    const auto out = [rest](auto* to, const auto* from) {
      if (to != nullptr) std::memcpy(to, from, static_cast<std::size_t>(rest) * sizeof(*to));
    };
    in(param, at.param);
    in(grad, at.grad);
    in(state0, at.state0);
    in(state1, at.state1);
    in(state2, at.state2);
    in(ema, at.ema);
    const Pointers<P, S> padded{param,
                                grad,
                                at.state0 == nullptr ? nullptr : state0,
                                at.state1 == nullptr ? nullptr : state1,
                                at.state2 == nullptr ? nullptr : state2,
                                at.ema == nullptr ? nullptr : ema};
    update_block<kRule, P, S, kStatistics>(padded, c, chunk, statistics);
    out(at.param, param);
    if (chunk.zero_grad) out(at.grad, grad);
    out(at.state0, state0);
    out(at.state1, state1);
    out(at.state2, state2);
    out(at.ema, ema);
  }
  if (kStatistics) {
    *chunk.param_sum_squares = statistics.param.total();
    *chunk.update_sum_squares = statistics.update.total();
  }
}

template <Rule kRule, class P, class S>
void update_with_statistics(const ChunkUpdate& chunk) {
  return chunk.param_sum_squares != nullptr ? update_chunk<kRule, P, S, true>(chunk)
                                            : update_chunk<kRule, P, S, false>(chunk);
}

template <Rule kRule>
void update_of_type(const ChunkUpdate& chunk) {
  if (chunk.type == ElementType::F32) return update_with_statistics<kRule, float, float>(chunk);
  if (chunk.state_type == ElementType::F32) return update_with_statistics<kRule, bf16_bits, float>(chunk);
  return update_with_statistics<kRule, bf16_bits, bf16_bits>(chunk);
}

void update(const ChunkUpdate& chunk) {
  switch (chunk.rule) {
    case Rule::AdamW: return update_of_type<Rule::AdamW>(chunk);
    case Rule::Adam: return update_of_type<Rule::Adam>(chunk);
    case Rule::Sgd: return update_of_type<Rule::Sgd>(chunk);
  }
}

}  // namespace

const KernelTable& table() {
  static constexpr KernelTable kTable{sum_squares, update};
  return kTable;
}

}  // namespace oxytorch::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace oxytorch::kernels {

const KernelTable& kernel_table(Isa isa) {
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

}  // namespace oxytorch::kernels
#endif  // HWY_ONCE
