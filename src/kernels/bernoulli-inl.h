// Bernoulli draws of the Mersenne Twister; compiled once for each instruction set.
#if defined(OXYTORCH_KERNELS_BERNOULLI_INL) == defined(HWY_TARGET_TOGGLE)
#ifdef OXYTORCH_KERNELS_BERNOULLI_INL
#undef OXYTORCH_KERNELS_BERNOULLI_INL
#else
#define OXYTORCH_KERNELS_BERNOULLI_INL
#endif

#include "kernels/attention-inl.h"
#include "oxytorch/kernels/operators.h"

HWY_BEFORE_NAMESPACE();
namespace oxytorch::kernels::HWY_NAMESPACE {
namespace {

constexpr int kWords = MersenneTwister::kWords;
constexpr int kAheadWords = 397;
constexpr std::uint32_t kTwist = 0x9908B0DF;

inline std::uint32_t twist(std::uint32_t here, std::uint32_t next, std::uint32_t ahead) {
  const std::uint32_t mixed = (here & 0x80000000U) | (next & 0x7FFFFFFFU);
  return ahead ^ mixed >> 1 ^ ((next & 1U) != 0 ? kTwist : 0U);
}

// Words [begin, end), each from its successor and the word `ahead` places on. No vector writes what it yet reads:
// the nearest word that was written before is 227 places behind.
inline void twist_words(std::uint32_t* word, int begin, int end, int ahead) {
  int i = begin;
#if !OXYTORCH_KERNELS_SCALAR
  for (; i + kLanes <= end; i += kLanes) {
    const VU next = hn::LoadU(U32(), word + i + 1);
    const VU mixed =
        hn::Or(hn::And(hn::LoadU(U32(), word + i), set_bits(0x80000000U)), hn::And(next, set_bits(0x7FFFFFFFU)));
    const VU odd = hn::And(hn::Sub(hn::Zero(U32()), hn::And(next, set_bits(1))), set_bits(kTwist));
    hn::StoreU(hn::Xor(hn::Xor(hn::LoadU(U32(), word + i + ahead), hn::ShiftRight<1>(mixed)), odd), U32(), word + i);
  }
#endif
  for (; i < end; ++i) word[i] = twist(word[i], word[i + 1], word[i + ahead]);
}

inline void next_words(std::uint32_t* word) {
  twist_words(word, 0, kWords - kAheadWords, kAheadWords);
  twist_words(word, kWords - kAheadWords, kWords - 1, kAheadWords - kWords);
  word[kWords - 1] = twist(word[kWords - 1], word[0], word[kAheadWords - 1]);
}

// The outputs that the words [begin, kWords) give.
inline void temper_words(const std::uint32_t* word, int begin, std::uint32_t* output) {
  int i = begin;
#if !OXYTORCH_KERNELS_SCALAR
  for (; i + kLanes <= kWords; i += kLanes) {
    VU y = hn::LoadU(U32(), word + i);
    y = hn::Xor(y, hn::ShiftRight<11>(y));
    y = hn::Xor(y, hn::And(hn::ShiftLeft<7>(y), set_bits(0x9D2C5680U)));
    y = hn::Xor(y, hn::And(hn::ShiftLeft<15>(y), set_bits(0xEFC60000U)));
    hn::StoreU(hn::Xor(y, hn::ShiftRight<18>(y)), U32(), output + i);
  }
#endif
  for (; i < kWords; ++i) {
    std::uint32_t y = word[i];
    y ^= y >> 11;
    y ^= y << 7 & 0x9D2C5680U;
    y ^= y << 15 & 0xEFC60000U;
    output[i] = y ^ y >> 18;
  }
}

// One in each format.
inline float one_of(float) { return 1; }
inline Bf16 one_of(Bf16) { return {0x3F80}; }
inline Half one_of(Half) { return {0x3C00}; }
inline std::uint8_t one_of(std::uint8_t) { return 1; }

// A draw is (high & 0x1FFFFF) * 2^32 + low, and hits where it is less than `bound`.
template <class T>
HWY_INLINE void draw_pairs(const std::uint32_t* pairs, std::int64_t count, std::uint64_t bound, T* to) {
  std::int64_t i = 0;
#if !OXYTORCH_KERNELS_SCALAR
  const VU bound_high = set_bits(static_cast<std::uint32_t>(bound >> 32));
  const VU bound_low = set_bits(static_cast<std::uint32_t>(bound));
  for (; i + kLanes <= count; i += kLanes) {
    VU high, low;
    hn::LoadInterleaved2(U32(), pairs + 2 * i, high, low);
    high = hn::And(high, set_bits(0x1FFFFFU));
    const auto less = hn::Or(hn::Lt(high, bound_high), hn::And(hn::Eq(high, bound_high), hn::Lt(low, bound_low)));
    if constexpr (sizeof(T) == sizeof(float)) {
      store(hn::IfThenElseZero(hn::RebindMask(F32(), less), set(1)), to + i);
    } else if constexpr (sizeof(T) == 1) {
      hn::StoreU(hn::U8FromU32(hn::IfThenElseZero(less, set_bits(1))), hn::Rebind<std::uint8_t, U32>(), to + i);
    } else {
      store_low16(hn::IfThenElseZero(less, set_bits(one_of(T()).bits)), reinterpret_cast<std::uint16_t*>(to + i));
    }
  }
#endif
  for (; i < count; ++i) {
    const std::uint64_t draw = std::uint64_t{pairs[2 * i] & 0x1FFFFFU} << 32 | pairs[2 * i + 1];
    to[i] = draw < bound ? one_of(T()) : T();
  }
}

template <class T>
HWY_INLINE void draw(MersenneTwister& generator, double p, std::int64_t count, T* to) {
  // draw * 2^-53 < p for a whole number `draw`.
  const auto bound = static_cast<std::uint64_t>(std::ceil(p * 0x1p53));
  std::uint32_t output[kWords];
  temper_words(generator.word, generator.next, output);
  const auto refill = [&] {
    next_words(generator.word);
    temper_words(generator.word, 0, output);
    generator.next = 0;
  };
  while (count > 0) {
    if (generator.next == kWords) refill();
    if (generator.next == kWords - 1) {
      // A pair across two fillings.
      std::uint32_t pair[2] = {output[kWords - 1], 0};
      refill();
      pair[1] = output[generator.next++];
      draw_pairs(pair, 1, bound, to++);
      --count;
      continue;
    }
    const std::int64_t pairs = std::min<std::int64_t>(count, (kWords - generator.next) / 2);
    draw_pairs(output + generator.next, pairs, bound, to);
    generator.next += static_cast<int>(2 * pairs);
    to += pairs;
    count -= pairs;
  }
}

void bernoulli(MersenneTwister& generator, double p, std::int64_t count, ElementType element, void* to) {
  if (element == ElementType::Int8) return draw(generator, p, count, static_cast<std::uint8_t*>(to));
  with_element(element, [&](auto kind) { draw(generator, p, count, static_cast<decltype(kind)*>(to)); });
}

}  // namespace
}  // namespace oxytorch::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
