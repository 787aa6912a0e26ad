// Tiles of attention: operands, softmax and its gradient; compiled once for each instruction set.
#if defined(OXYTORCH_KERNELS_ATTENTION_INL) == defined(HWY_TARGET_TOGGLE)
#ifdef OXYTORCH_KERNELS_ATTENTION_INL
#undef OXYTORCH_KERNELS_ATTENTION_INL
#else
#define OXYTORCH_KERNELS_ATTENTION_INL
#endif

#include <hwy/cache_control.h>

#include "kernels/formats-inl.h"
#include "oxytorch/kernels/attention.h"

HWY_BEFORE_NAMESPACE();
namespace oxytorch::kernels::HWY_NAMESPACE {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

template <class F>
HWY_INLINE auto with_element(ElementType element, F&& act) {
  switch (element) {
    case ElementType::BF16: return act(Bf16());
    case ElementType::F16: return act(Half());
    default: return act(float());
  }
}

template <class From, class To>
HWY_INLINE void convert(const From* from, std::int64_t count, To* to) {
  std::int64_t i = 0;
  if constexpr (std::is_same_v<From, To> && sizeof(From) == 2) {
    for (; i + kLanes <= count; i += kLanes) hn::StoreU(hn::LoadU(U16(), &from[i].bits), U16(), &to[i].bits);
    std::copy_n(from + i, count - i, to + i);
    return;
  }
  for (; i + 2 * kLanes <= count; i += 2 * kLanes) store_two(load(from + i), load(from + i + kLanes), to + i);
  for (; i + kLanes <= count; i += kLanes) store<false>(load(from + i), to + i, nullptr);
  if (i == count) return;
  From rest[kLanes] = {};
  To out[kLanes];
  std::copy(from + i, from + count, rest);
  store<false>(load(rest), out, nullptr);
  std::copy_n(out, count - i, to + i);
}

// Rows of one head lie apart in memory, where no processor sees them coming.
constexpr std::int64_t kRowsAhead = 12;
template <class T>
HWY_INLINE void fetch_row(const T* row, std::int64_t columns) {
  constexpr std::int64_t kLine = 64 / sizeof(T);
  for (std::int64_t j = 0; j < columns; j += kLine) hwy::Prefetch(row + j);
}

void load_tile(TileFormat format, const Rows& from, std::int64_t rows, std::int64_t width, void* tile) {
  const auto fill = [&](auto* to) {
    with_element(from.element, [&](auto kind) {
      using From = decltype(kind);
      using To = std::remove_pointer_t<decltype(to)>;
      for (std::int64_t i = 0; i < rows; ++i, to += width) {
        const auto* row = static_cast<const From*>(from.data) + i * from.stride;
        const std::int64_t columns = i < from.rows ? from.columns : 0;
        if (i + kRowsAhead < from.rows + from.following) fetch_row(row + kRowsAhead * from.stride, columns);
        convert(row, columns, to);
        if (columns < width) std::fill(to + columns, to + width, To());
      }
    });
  };
  if (format == TileFormat::BFloat16) {
    fill(static_cast<Bf16*>(tile));
  } else {
    fill(static_cast<float*>(tile));
  }
}

// Four by four words at a time.
void transpose_words(const void* from, std::int64_t stride, std::int64_t rows, std::int64_t columns, void* to,
                     std::int64_t to_stride) {
  const auto* source = static_cast<const std::uint32_t*>(from);
  auto* target = static_cast<std::uint32_t*>(to);
#if OXYTORCH_KERNELS_SCALAR
  for (std::int64_t i = 0; i < rows; ++i) {
    for (std::int64_t j = 0; j < columns; ++j) target[j * to_stride + i] = source[i * stride + j];
  }
#else
  // Eight by eight: words, then pairs of them, then halves of a vector.
  constexpr hn::FixedTag<std::uint32_t, 8> d;
  constexpr hn::RepartitionToWide<decltype(d)> wide;
  const auto low = [&](auto a, auto b) { return hn::BitCast(wide, hn::InterleaveLower(d, a, b)); };
  const auto high = [&](auto a, auto b) { return hn::BitCast(wide, hn::InterleaveUpper(d, a, b)); };
  for (std::int64_t i = 0; i < rows; i += 8) {
    for (std::int64_t j = 0; j < columns; j += 8) {
      const std::uint32_t* at = source + i * stride + j;
      std::uint32_t* out = target + j * to_stride + i;
      hn::Vec<decltype(d)> row[8];
      for (int k = 0; k < 8; ++k) row[k] = hn::LoadU(d, at + k * stride);
      hn::Vec<decltype(wide)> pair[8];
      for (int k = 0; k < 4; ++k) {
        pair[k] = low(row[2 * k], row[2 * k + 1]);
        pair[4 + k] = high(row[2 * k], row[2 * k + 1]);
      }
      for (int half = 0; half < 2; ++half) {
        const auto* p = pair + 4 * half;
        const auto a = hn::BitCast(d, hn::InterleaveLower(wide, p[0], p[1]));
        const auto b = hn::BitCast(d, hn::InterleaveUpper(wide, p[0], p[1]));
        const auto e = hn::BitCast(d, hn::InterleaveLower(wide, p[2], p[3]));
        const auto f = hn::BitCast(d, hn::InterleaveUpper(wide, p[2], p[3]));
        const int c = 2 * half;
        hn::StoreU(hn::ConcatLowerLower(d, e, a), d, out + c * to_stride);
        hn::StoreU(hn::ConcatLowerLower(d, f, b), d, out + (c + 1) * to_stride);
        hn::StoreU(hn::ConcatUpperUpper(d, e, a), d, out + (c + 4) * to_stride);
        hn::StoreU(hn::ConcatUpperUpper(d, f, b), d, out + (c + 5) * to_stride);
      }
    }
  }
#endif
}

// Pairs of rows: word j of a pair is element j of the first row and, above it, of the second.
void pair_rows(const std::uint16_t* from, std::int64_t rows, std::int64_t width, std::uint32_t* to) {
  for (std::int64_t i = 0; i < rows; i += 2, to += width) {
    const std::uint16_t* low = from + i * width;
    for (std::int64_t j = 0; j < width; j += kLanes) {
      const VU a = hn::PromoteTo(U32(), hn::LoadU(U16(), low + j));
      const VU b = hn::PromoteTo(U32(), hn::LoadU(U16(), low + width + j));
      hn::StoreU(hn::Or(a, hn::ShiftLeft<16>(b)), U32(), to + j);
    }
  }
}

void make_operand(TileFormat format, Operand operand, const void* tile, std::int64_t rows, std::int64_t width,
                  void* work, void* to, std::int64_t stride) {
  if (format == TileFormat::Float32) {
    if (operand == Operand::Right) {
      std::memcpy(to, tile, static_cast<std::size_t>(rows * width) * sizeof(float));
    } else {
      transpose_words(tile, width, rows, width, to, operand == Operand::LeftTransposed ? stride : kTile);
    }
    return;
  }
  // In words, rows of a tile that lie in pairs and rows of a transposed one are each other's transpose.
  const auto* elements = static_cast<const std::uint16_t*>(tile);
  switch (operand) {
    case Operand::Right: pair_rows(elements, rows, width, static_cast<std::uint32_t*>(to)); break;
    case Operand::RightTransposed: transpose_words(tile, width / 2, rows, width / 2, to, kTile); break;
    case Operand::LeftTransposed:
      pair_rows(elements, rows, width, static_cast<std::uint32_t*>(work));
      transpose_words(work, width, rows / 2, width, to, stride / 2);
      break;
  }
}

// Any value as bf16, in the upper half of each word; the lower half is anything.
template <class T>
HWY_INLINE VU loaded_as_bf16(const T* from) {
  return std::is_same_v<T, Bf16> ? bits_of(load(from)) : as_bf16(load(from));
}

// A row and the one below it, as words.
template <class T>
HWY_INLINE void pack_pair(const T* row, std::int64_t stride, std::int64_t width, std::uint32_t* to) {
  for (std::int64_t j = 0; j < width; j += kLanes) {
    const VU high = hn::And(loaded_as_bf16(row + stride + j), set_bits(0xFFFF0000));
    hn::StoreU(hn::Or(hn::ShiftRight<16>(loaded_as_bf16(row + j)), high), U32(), to + j);
  }
}

void pack_operand(Operand operand, const Rows& given, std::int64_t rows, std::int64_t width, void* to,
                  std::int64_t stride) {
  alignas(64) Bf16 tile[kTile * kTile];
  alignas(64) std::uint32_t paired[kTile / 2 * kTile];
  Rows from = given;
  const bool narrow = from.element == ElementType::BF16;
  const bool ragged = from.rows < rows || from.columns < width;
  if (ragged || (operand == Operand::RightTransposed && (!narrow || from.stride % 2 != 0))) {
    HWY_NAMESPACE::load_tile(TileFormat::BFloat16, from, rows, width, tile);
    from = {ElementType::BF16, tile, width, rows, width};
  }
  if (operand == Operand::RightTransposed) {
    transpose_words(from.data, from.stride / 2, rows, width / 2, to, stride);
    return;
  }
  const bool is_right = operand == Operand::Right;
  auto* words = is_right ? static_cast<std::uint32_t*>(to) : paired;
  const std::int64_t step = is_right ? stride : width;
  with_element(from.element, [&](auto kind) {
    using T = decltype(kind);
    for (std::int64_t i = 0; i < rows; i += 2, words += step) {
      pack_pair(static_cast<const T*>(from.data) + i * from.stride, from.stride, width, words);
    }
  });
  if (!is_right) transpose_words(paired, width, rows / 2, width, to, stride / 2);
}

// Whole rows at a time, as they lie in memory: of tiles of kTile columns, each row would be waited for by itself.
void pack_panels(const Rows& from, std::int64_t terms, void* to, std::int64_t panel) {
  constexpr std::int64_t kAhead = 8;
  const std::int64_t whole_rows = from.rows / kTileStep * kTileStep, whole = from.columns / kTile * kTile;
  auto* words = static_cast<std::uint32_t*>(to);
  with_element(from.element, [&](auto kind) {
    using T = decltype(kind);
    const auto* first = static_cast<const T*>(from.data);
    for (std::int64_t i = 0; i < whole_rows; i += 2) {
      const T* row = first + i * from.stride;
      const bool fetches = i + kAhead + 1 < from.rows + from.following;
      for (std::int64_t j = 0; j < whole; j += kTile, row += kTile) {
        std::uint32_t* out = words + j / kTile * (panel / 2) + i / 2 * kTile;
        if (fetches) {
          fetch_row(row + kAhead * from.stride, kTile);
          fetch_row(row + (kAhead + 1) * from.stride, kTile);
        }
        pack_pair(row, from.stride, kTile, out);
      }
    }
    const auto rest = [&](std::int64_t row, std::int64_t column) {
      const std::int64_t columns = std::min(kTile, from.columns - column);
      const Rows here{from.element, first + row * from.stride + column, from.stride,
                      std::clamp<std::int64_t>(from.rows - row, 0, kTile), columns};
      HWY_NAMESPACE::pack_operand(Operand::Right, here, std::min(kTile, terms - row), kTile,
                                  words + column / kTile * (panel / 2) + row / 2 * kTile, kTile);
    };
    for (std::int64_t i = whole_rows; i < terms; i += kTile) {
      for (std::int64_t j = 0; j < whole; j += kTile) rest(i, j);
    }
    for (std::int64_t i = 0; i < terms && whole < from.columns; i += kTile) rest(i, whole);
  });
}

constexpr float kLog2E = 1.4426950408889634F;
constexpr float kLog2ERest = 1.925963033500012e-8F;

// Above 88.7 infinity, below -87.3 zero; relative error below 2e-7.
HWY_INLINE V exp(V x) {
  const V most = hn::IfThenElse(hn::Gt(x, set(88.8F)), set(88.8F), x);
  const V whole = hn::Round(hn::Mul(most, set(kLog2E)));
  const V rest = fma(most, set(kLog2ERest), fms(most, set(kLog2E), whole));
  V power = fma(set(1.535336188319500e-4F), rest, set(1.339887440266574e-3F));
  power = fma(power, rest, set(9.618437357674640e-3F));
  power = fma(power, rest, set(5.550332471162809e-2F));
  power = fma(power, rest, set(2.402264791363012e-1F));
  power = fma(power, rest, set(6.931472028550421e-1F));
  power = fma(power, rest, set(1));
  const VI exponent = hn::ShiftLeft<23>(hn::Add(hn::ConvertTo(I32(), whole), hn::Set(I32(), 127)));
  const V value = hn::Mul(power, hn::BitCast(F32(), exponent));
  return hn::IfThenZeroElse(hn::Lt(x, set(-87.3F)), value);
}

// exp of x below 1 or NaN, for weights that are rounded to bfloat16: relative error below 3e-6, and 0 below 2^-125. The
// sum with 1.5 * 2^23 + 127 has the nearest whole number in its low bits, as an exponent.
HWY_INLINE V narrow_exp(V by_e) {
  const V x = hn::Mul(by_e, set(kLog2E));
  const V shift = set(12583039.0F);
  const V shifted = hn::Add(x, shift);
  const V rest = hn::Sub(x, hn::Sub(shifted, shift));
  V power = fma(set(9.570101276040077e-3F), rest, set(5.591785907745361e-2F));
  power = fma(power, rest, set(2.40247443318367e-1F));
  power = fma(power, rest, set(6.931217908859253e-1F));
  power = fma(power, rest, set(9.999992847442627e-1F));
  const V value = hn::Mul(power, float_of(hn::ShiftLeft<23>(bits_of(shifted))));
  return hn::IfThenZeroElse(hn::Lt(x, set(-125)), value);
}

HWY_INLINE V tanh(V x) {
  // By e = exp(-2 |x|), which loses digits near zero; there by a polynomial of x^2 (Cephes, tanhf.c).
  const V size = hn::Abs(x);
  const V e = exp(hn::Mul(size, set(-2)));
  const V far = hn::Div(hn::Sub(set(1), e), hn::Add(set(1), e));
  const V square = hn::Mul(x, x);
  V rest = fma(set(-5.70498872745e-3F), square, set(2.06390887954e-2F));
  rest = fma(rest, square, set(-5.37397155531e-2F));
  rest = fma(rest, square, set(1.33314422036e-1F));
  rest = fma(rest, square, set(-3.33332819422e-1F));
  const V near = fma(hn::Mul(size, square), rest, size);
  return hn::CopySign(hn::IfThenElse(hn::Lt(size, set(0.625F)), near, far), x);
}

void apply_rule(const ScoreRule& rule, std::int64_t rows, std::int64_t columns, float* scores) {
  const V hidden = set(-kInfinity);
  const VI lane = hn::Iota(I32(), 0);
  const float cap = rule.cap;
  for (std::int64_t i = 0; i < rows; ++i, scores += kTile) {
    if (i >= rule.keys) {
      for (std::int64_t j = 0; j < columns; j += kLanes) store(hidden, scores + j);
      continue;
    }
    // Visible: -behind <= offset + i - j <= ahead.
    const std::int64_t first = std::clamp<std::int64_t>(rule.offset + i - rule.ahead, 0, columns);
    const std::int64_t end = std::clamp<std::int64_t>(rule.offset + i + rule.behind, -1, columns - 1) + 1;
    for (std::int64_t j = 0; j < columns; j += kLanes) {
      V score = hn::Mul(load(scores + j), set(rule.factor));
      if (cap != 0) score = hn::Mul(set(cap), tanh(hn::Div(score, set(cap))));
      if (rule.mask != nullptr) score = hn::Add(score, load(rule.mask + i * kTile + j));
      const auto before = hn::Lt(lane, hn::Set(I32(), static_cast<std::int32_t>(first - j)));
      const auto after = hn::Gt(lane, hn::Set(I32(), static_cast<std::int32_t>(end - 1 - j)));
      store(hn::IfThenElse(hn::RebindMask(F32(), hn::Or(before, after)), hidden, score), scores + j);
    }
  }
}

// Two rows as a pair.
HWY_INLINE void store_pair(VU low, VU high, std::uint16_t* to) {
  const VU word = hn::OrAnd(hn::ShiftRight<16>(low), high, set_bits(0xFFFF0000));
  hn::StoreU(word, U32(), reinterpret_cast<std::uint32_t*>(to));
}

// Factors of the next product, as bfloat16 in the upper half of each word: to nearest, halves away from zero.
HWY_INLINE VU next_factor(V value) { return hn::Add(bits_of(value), set_bits(0x8000)); }

void dropout_tile(const TileDropout& rule, std::int64_t rows, std::uint32_t* keep) {
  const RandomSource random{rule.seed, rule.head, rule.query_tile};
  const auto last_dropped = hn::Set(I32(), static_cast<std::int32_t>(rule.dropped) - 1);
  std::uint16_t bits[128];
  for (std::int64_t done = 0; done < rows * kTile; done += 128) {
    random.fill(RoundingOperand::AttentionWeight, rule.key_tile * kTile * kTile + done, 128, bits);
    for (std::int64_t i = 0; i < 128; i += kLanes) {
      const auto each = hn::PromoteTo(I32(), hn::LoadU(U16(), bits + i));
      hn::StoreU(hn::BitCast(U32(), hn::VecFromMask(I32(), hn::Gt(each, last_dropped))), U32(), keep + done + i);
    }
  }
}

HWY_INLINE V kept(V value, const std::uint32_t* keep) {
  return hn::BitCast(F32(), hn::And(bits_of(value), hn::LoadU(U32(), keep)));
}

template <bool kNarrow>
HWY_INLINE V weight_of(V score, V factor, V base) {
  const V below = fma(score, factor, hn::Neg(base));
  return kNarrow ? narrow_exp(below) : exp(below);
}

template <bool kNarrow>
HWY_INLINE bool softmax_rows(float factor, std::int64_t rows, std::int64_t columns, const float* scores,
                             const std::uint32_t* keep, SoftmaxState& state, float* correction, void* weights) {
  const V times = set(factor);
  bool corrects = false;
  // Four vectors side by side hide the latency of the chains.
  for (std::int64_t j = 0; j < columns; j += kLanes) {
    const V before = load(state.largest + j);
    V largest[4] = {before, before, before, before};
    for (std::int64_t i = 0; i < rows; i += 4) {
      for (int k = 0; k < 4; ++k) {
        largest[k] = hn::Max(hn::Mul(load(scores + (i + k) * kTile + j), times), largest[k]);
      }
    }
    const V most = hn::Max(hn::Max(largest[0], largest[1]), hn::Max(largest[2], largest[3]));
    // Where all is hidden so far, weights are exp(-inf - 0).
    const V base = hn::IfThenZeroElse(hn::Eq(most, set(-kInfinity)), most);
    const V scale = exp(hn::Sub(before, base));
    store(most, state.largest + j);
    store(scale, correction + j);
    corrects |= !hn::AllTrue(F32(), hn::Eq(scale, set(1)));
    V sum[2] = {hn::Zero(F32()), hn::Zero(F32())};
    for (std::int64_t i = 0; i < rows; i += 2) {
      V weight[2];
      for (int k = 0; k < 2; ++k) {
        weight[k] = weight_of<kNarrow>(load(scores + (i + k) * kTile + j), times, base);
        sum[k] = hn::Add(sum[k], weight[k]);
        if (keep != nullptr) weight[k] = kept(weight[k], keep + (i + k) * kTile + j);
      }
      if (weights == nullptr) continue;
      if constexpr (kNarrow) {
        store_pair(next_factor(weight[0]), next_factor(weight[1]),
                   static_cast<std::uint16_t*>(weights) + i * kTile + 2 * j);
      } else {
        store(weight[0], static_cast<float*>(weights) + i * kTile + j);
        store(weight[1], static_cast<float*>(weights) + (i + 1) * kTile + j);
      }
    }
    store(fma(load(state.sum + j), scale, hn::Add(sum[0], sum[1])), state.sum + j);
  }
  return corrects;
}

bool softmax_tile(TileFormat format, float factor, std::int64_t rows, std::int64_t columns, const float* scores,
                  const std::uint32_t* keep, SoftmaxState& state, float* correction, void* weights) {
  return format == TileFormat::BFloat16
             ? softmax_rows<true>(factor, rows, columns, scores, keep, state, correction, weights)
             : softmax_rows<false>(factor, rows, columns, scores, keep, state, correction, weights);
}

void scale_columns(std::int64_t rows, const float* factors, float* tile) {
  for (std::int64_t i = 0; i < rows; ++i, tile += kTile) {
    for (std::int64_t j = 0; j < kTile; j += kLanes) store(hn::Mul(load(tile + j), load(factors + j)), tile + j);
  }
}

template <bool kNarrow, bool kCapped>
HWY_INLINE void gradient_rows(const SoftmaxGradient& tile) {
  const V times = set(tile.factor);
  const float cap = tile.cap;
  for (std::int64_t i = 0; i < tile.rows; i += 2) {
    for (std::int64_t j = 0; j < tile.columns; j += kLanes) {
      const V log_sum = load(tile.log_sum + j);
      const V delta = load(tile.delta + j);
      V weight[2], gradient[2];
      for (int k = 0; k < 2; ++k) {
        const std::int64_t at = (i + k) * kTile + j;
        const V score = load(tile.scores + at);
        weight[k] = weight_of<kNarrow>(score, times, log_sum);
        V of_weight = load(tile.gradient + at);
        if (tile.keep != nullptr) of_weight = kept(hn::Mul(of_weight, set(tile.kept_factor)), tile.keep + at);
        gradient[k] = hn::Mul(weight[k], hn::Sub(of_weight, delta));
        if (tile.keep != nullptr) weight[k] = kept(weight[k], tile.keep + at);
        if (tile.mask_gradient != nullptr) {
          float* const sum = tile.mask_gradient + (i + k) * tile.mask_stride + j;
          store(hn::Add(load(sum), gradient[k]), sum);
        }
        if constexpr (kCapped) {
          const V capped = tile.mask == nullptr ? score : hn::Sub(score, load(tile.mask + at));
          const V tanh = hn::Div(capped, set(cap));
          const V slope = fma(hn::Neg(tanh), tanh, set(1));
          gradient[k] = hn::IfThenZeroElse(hn::Eq(score, set(-kInfinity)), hn::Mul(gradient[k], slope));
        }
        if constexpr (kNarrow) {
          const std::int64_t left = (i + k) * tile.left_stride + j;
          store_low16(hn::ShiftRight<16>(next_factor(weight[k])), tile.weights + left);
          store_low16(hn::ShiftRight<16>(next_factor(gradient[k])), tile.left_gradient + left);
        } else {
          store(weight[k], tile.scores + at);
          store(gradient[k], tile.gradient + at);
        }
      }
      if constexpr (kNarrow) {
        store_pair(next_factor(gradient[0]), next_factor(gradient[1]), tile.right_gradient + i * kTile + 2 * j);
      }
    }
  }
}

template <bool kNarrow>
HWY_INLINE void gradient_rows(const SoftmaxGradient& tile) {
  if (tile.cap != 0) {
    gradient_rows<kNarrow, true>(tile);
  } else {
    gradient_rows<kNarrow, false>(tile);
  }
}

void softmax_gradient(const SoftmaxGradient& tile) {
  if (tile.format == TileFormat::BFloat16) {
    gradient_rows<true>(tile);
  } else {
    gradient_rows<false>(tile);
  }
}

void dot_rows(const Rows& a, const Rows& b, float* to) {
  with_element(a.element, [&](auto kind) {
    using T = decltype(kind);
    for (std::int64_t i = 0; i < a.rows; ++i) {
      const T* x = static_cast<const T*>(a.data) + i * a.stride;
      const T* y = static_cast<const T*>(b.data) + i * b.stride;
      if (i + kRowsAhead < a.rows) fetch_row(y + kRowsAhead * b.stride, b.columns);
      V sum = hn::Zero(F32());
      std::int64_t j = 0;
      for (; j + kLanes <= a.columns; j += kLanes) sum = fma(load(x + j), load(y + j), sum);
      if (j < a.columns) {
        T rest[2][kLanes] = {};
        std::copy(x + j, x + a.columns, rest[0]);
        std::copy(y + j, y + a.columns, rest[1]);
        sum = fma(load(rest[0]), load(rest[1]), sum);
      }
      to[i] = hn::GetLane(hn::SumOfLanes(F32(), sum));
    }
  });
}

void store_rows(const float* from, std::int64_t stride, std::int64_t rows, std::int64_t columns, float factor,
                const float* factors, ElementType element, void* to, std::int64_t to_stride, const float* added,
                bool relu) {
  with_element(element, [&](auto kind) {
    using T = decltype(kind);
    const std::int64_t whole = columns / kLanes * kLanes;
    float last_added[kLanes] = {};
    if (added != nullptr) std::copy(added + whole, added + columns, last_added);
    for (std::int64_t i = 0; i < rows; ++i, from += stride) {
      T* row = static_cast<T*>(to) + i * to_stride;
      const V times = set(factors == nullptr ? factor : factor * factors[i]);
      const auto result = [&](V value, const float* plus) {
        const V made = added == nullptr ? hn::Mul(value, times) : fma(value, times, load(plus));
        return relu ? hn::IfThenZeroElse(hn::Lt(made, hn::Zero(F32())), made) : made;
      };
      const auto at = [&](std::int64_t j) { return result(load(from + j), added == nullptr ? nullptr : added + j); };
      std::int64_t j = 0;
      for (; j + 2 * kLanes <= whole; j += 2 * kLanes) store_two(at(j), at(j + kLanes), row + j);
      if (j < whole) store<false>(at(j), row + j, nullptr);
      if (whole == columns) continue;
      float rest[kLanes] = {};
      T out[kLanes];
      std::copy(from + whole, from + columns, rest);
      store<false>(result(load(rest), last_added), out, nullptr);
      std::copy_n(out, columns - whole, row + whole);
    }
  });
}

void add_rows(const float* from, std::int64_t stride, std::int64_t rows, std::int64_t columns, float* to,
              std::int64_t to_stride) {
  for (std::int64_t i = 0; i < rows; ++i, from += stride, to += to_stride) {
    std::int64_t j = 0;
    for (; j + kLanes <= columns; j += kLanes) store(hn::Add(load(to + j), load(from + j)), to + j);
    for (; j < columns; ++j) to[j] += from[j];
  }
}

void sum_columns(const Rows& from, float* to) {
  with_element(from.element, [&](auto kind) {
    using T = decltype(kind);
    const auto* first = static_cast<const T*>(from.data);
    constexpr std::int64_t kSide = 4;  // vectors side by side hide the latency of the chains
    std::int64_t j = 0;
    for (; j + kSide * kLanes <= from.columns; j += kSide * kLanes) {
      V sum[kSide];
      for (V& one : sum) one = hn::Zero(F32());
      for (std::int64_t i = 0; i < from.rows; ++i) {
        const T* row = first + i * from.stride + j;
        for (std::int64_t k = 0; k < kSide; ++k) sum[k] = hn::Add(sum[k], load(row + k * kLanes));
      }
      for (std::int64_t k = 0; k < kSide; ++k) store(sum[k], to + j + k * kLanes);
    }
    if (j == from.columns) return;
    float sums[kSide * kLanes] = {};
    for (std::int64_t i = 0; i < from.rows; ++i) {
      float wide[kSide * kLanes];
      convert(first + i * from.stride + j, from.columns - j, wide);
      for (std::int64_t k = 0; k < from.columns - j; ++k) sums[k] += wide[k];
    }
    std::copy_n(sums, from.columns - j, to + j);
  });
}

}  // namespace
}  // namespace oxytorch::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
