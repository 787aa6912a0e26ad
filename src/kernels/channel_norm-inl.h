// Batch normalization of rows of channels; compiled once for each instruction set.
#if defined(OXYTORCH_KERNELS_CHANNEL_NORM_INL) == defined(HWY_TARGET_TOGGLE)
#ifdef OXYTORCH_KERNELS_CHANNEL_NORM_INL
#undef OXYTORCH_KERNELS_CHANNEL_NORM_INL
#else
#define OXYTORCH_KERNELS_CHANNEL_NORM_INL
#endif

#include "kernels/attention-inl.h"
#include "oxytorch/kernels/channel_norm.h"

HWY_BEFORE_NAMESPACE();
namespace oxytorch::kernels::HWY_NAMESPACE {
namespace {

// Vectors of channels side by side: a row of 64 channels is read at once, and their sums hide each other's latency.
constexpr std::int64_t kAbreast = 64 / kLanes;
using Abreast = V[kAbreast];

template <class T>
HWY_INLINE V rounded_to(V value) {
  if constexpr (std::is_same_v<T, float>) {
    return value;
  } else if constexpr (std::is_same_v<T, Bf16>) {  // as store() does
    return float_of(hn::And(as_bf16(value), set_bits(0xFFFF0000)));
  } else {
    T rounded[kLanes];
    store<false>(value, rounded, nullptr);
    return load(rounded);
  }
}

// `act(first, count)` for each vector of `columns` channels.
template <class Act>
HWY_INLINE void each_of_row(std::int64_t columns, Act&& act) {
  for (std::int64_t j = 0; j < columns; j += kLanes) act(j, std::min<std::int64_t>(kLanes, columns - j));
}

// Sums of kSums kinds over all rows: `act(row, first, count, sums)` adds to those of one vector. Rows are added in
// groups, and the groups' sums to each other: a number goes through few additions.
constexpr std::int64_t kGroupRows = 16;
template <int kSums, class Act>
HWY_INLINE void sum_rows(std::int64_t rows, std::int64_t columns, float* const (&to)[kSums], Act&& act) {
  for (std::int64_t first = 0; first < columns; first += kAbreast * kLanes) {
    const std::int64_t left = columns - first;
    const std::int64_t abreast = std::min<std::int64_t>(kAbreast, (left + kLanes - 1) / kLanes);
    V totals[kAbreast][kSums], sums[kAbreast][kSums];
    const auto clear = [](auto& all) {
      for (auto& of_vector : all) {
        for (V& one : of_vector) one = hn::Zero(F32());
      }
    };
    clear(totals);
    for (std::int64_t group = 0; group < rows; group += kGroupRows) {
      clear(sums);
      for (std::int64_t i = group; i < std::min(rows, group + kGroupRows); ++i) {
        if (left >= kAbreast * kLanes) {
          for (std::int64_t k = 0; k < kAbreast; ++k) act(i, first + k * kLanes, std::int64_t{kLanes}, sums[k]);
        } else {
          for (std::int64_t k = 0; k < abreast; ++k) {
            act(i, first + k * kLanes, std::min<std::int64_t>(kLanes, left - k * kLanes), sums[k]);
          }
        }
      }
      for (std::int64_t k = 0; k < kAbreast; ++k) {
        for (int s = 0; s < kSums; ++s) totals[k][s] = hn::Add(totals[k][s], sums[k][s]);
      }
    }
    for (std::int64_t k = 0; k < abreast; ++k) {
      for (int s = 0; s < kSums; ++s) store_some(totals[k][s], to[s] + first + k * kLanes, left - k * kLanes);
    }
  }
}

template <class T>
HWY_INLINE const T* row_of(const Rows& rows, std::int64_t row) {
  return static_cast<const T*>(rows.data) + row * rows.stride;
}

void channel_moments(const Rows& input, float* mean, float* squares, float* rest) {
  with_element(input.element, [&](auto kind) {
    using T = decltype(kind);
    sum_rows<1>(input.rows, input.columns, {mean}, [&](auto i, auto j, auto count, V* sums) {
      sums[0] = hn::Add(sums[0], load_some(row_of<T>(input, i) + j, count));
    });
    const V share = set(1.0F / static_cast<float>(input.rows));
    each_of_row(input.columns,
                [&](auto j, auto count) { store_some(hn::Mul(load_some(mean + j, count), share), mean + j, count); });
    sum_rows<2>(input.rows, input.columns, {squares, rest}, [&](auto i, auto j, auto count, V* sums) {
      const V apart = hn::Sub(load_some(row_of<T>(input, i) + j, count), load_some(mean + j, count));
      sums[0] = fma(apart, apart, sums[0]);
      sums[1] = hn::Add(sums[1], apart);
    });
  });
}

HWY_INLINE V zero_if_negative(V value) { return hn::IfThenZeroElse(hn::Lt(value, hn::Zero(F32())), value); }

// The rule for one vector of channels.
struct VectorRule {
  HWY_INLINE VectorRule(const ChannelRule& rule, std::int64_t j, std::int64_t count)
      : mean(load_some(rule.mean + j, count)),
        scale(load_some(rule.scale + j, count)),
        bias(load_some(rule.bias + j, count)) {}
  HWY_INLINE V operator()(V input) const { return fma(hn::Sub(input, mean), scale, bias); }
  V mean, scale, bias;
};

void normalize_rows(const ChannelRule& rule, const Rows& input, const Rows& added, void* to) {
  with_element(input.element, [&](auto kind) {
    using T = decltype(kind);
    for (std::int64_t i = 0; i < input.rows; ++i) {
      const T* row = row_of<T>(input, i);
      const T* plus = added.data == nullptr ? nullptr : row_of<T>(added, i);
      T* out = static_cast<T*>(to) + i * input.columns;
      each_of_row(input.columns, [&](auto j, auto count) {
        V value = VectorRule(rule, j, count)(load_some(row + j, count));
        // What follows a normalization of its own sees its result rounded.
        if (plus != nullptr) value = hn::Add(rounded_to<T>(value), load_some(plus + j, count));
        store_some(rule.relu ? zero_if_negative(value) : value, out + j, count);
      });
    }
  });
}

HWY_INLINE void store_taps(VU taps, std::uint8_t* to, std::int64_t count) {
  std::uint8_t rest[kLanes];
  hn::StoreU(hn::DemoteTo(U8(), hn::BitCast(I32(), taps)), U8(), count >= kLanes ? to : rest);
  if (count < kLanes) std::copy_n(rest, count, to);
}
HWY_INLINE VU load_taps(const std::uint8_t* from, std::int64_t count) {
  std::uint8_t rest[kLanes] = {};
  if (count < kLanes) std::copy_n(from, count, rest);
  return hn::PromoteTo(U32(), hn::LoadU(U8(), count >= kLanes ? from : rest));
}

void normalize_windows(const ChannelRule& rule, const WindowRow& windows, const Rows& input, void* to,
                       std::uint8_t* taps) {
  with_element(input.element, [&](auto kind) {
    using T = decltype(kind);
    const std::int64_t columns = input.columns;
    for (std::int64_t w = 0; w < windows.count; ++w) {
      const T* window = row_of<T>(input, w * windows.width);
      each_of_row(columns, [&](auto j, auto count) {
        const VectorRule by(rule, j, count);
        V most = set(-kInfinity);
        VU place = hn::Zero(U32());
        std::uint32_t tap = 0;
        for (std::int64_t y = 0; y < windows.height; ++y) {
          for (std::int64_t x = 0; x < windows.width; ++x, ++tap) {
            const T* at = window + y * windows.line + x * input.stride + j;
            const V value = rounded_to<T>(by(load_some(at, count)));
            const auto takes = hn::Or(hn::Gt(value, most), hn::IsNaN(value));
            most = hn::IfThenElse(takes, value, most);
            place = hn::IfThenElse(hn::RebindMask(U32(), takes), set_bits(tap), place);
          }
        }
        if (rule.relu) {
          const auto is_none = hn::Le(most, hn::Zero(F32()));
          place = hn::IfThenElse(hn::RebindMask(U32(), is_none), set_bits(kNoTap), place);
          most = hn::IfThenZeroElse(is_none, most);
        }
        store_some(most, static_cast<T*>(to) + w * columns + j, count);
        store_taps(place, taps + w * columns + j, count);
      });
    }
  });
}

// The gradient of one vector behind ReLU.
template <class T>
HWY_INLINE V behind_relu(const ChannelGradient& args, std::int64_t i, std::int64_t j, std::int64_t count, V input) {
  const V grad = load_some(row_of<T>(args.grad, i) + j, count);
  if (!args.rule.relu) return grad;
  const V output = args.output.data != nullptr ? load_some(row_of<T>(args.output, i) + j, count)
                                               : VectorRule(args.rule, j, count)(input);
  return hn::IfThenZeroElse(hn::Le(output, hn::Zero(F32())), grad);
}

void channel_gradient_sums(const ChannelGradient& args, float* sum, float* dot) {
  with_element(args.grad.element, [&](auto kind) {
    using T = decltype(kind);
    sum_rows<2>(args.input.rows, args.input.columns, {sum, dot}, [&](auto i, auto j, auto count, V* sums) {
      const V input = load_some(row_of<T>(args.input, i) + j, count);
      const V grad = behind_relu<T>(args, i, j, count, input);
      sums[0] = hn::Add(sums[0], grad);
      sums[1] = fma(grad, hn::Sub(input, load_some(args.rule.mean + j, count)), sums[1]);
    });
  });
}

void window_gradient_sums(const ChannelGradient& args, const WindowRow& windows, const std::uint8_t* taps, float* sum,
                          float* dot) {
  with_element(args.grad.element, [&](auto kind) {
    using T = decltype(kind);
    const std::int64_t columns = args.input.columns;
    sum_rows<2>(windows.count, columns, {sum, dot}, [&](auto w, auto j, auto count, V* sums) {
      const VU place = load_taps(taps + w * columns + j, count);
      const V grad = hn::IfThenZeroElse(hn::RebindMask(F32(), hn::Eq(place, set_bits(kNoTap))),
                                        load_some(row_of<T>(args.grad, w) + j, count));
      const T* window = row_of<T>(args.input, w * windows.width) + j;
      V input = load_some(args.rule.mean + j, count);
      std::uint32_t tap = 0;
      for (std::int64_t y = 0; y < windows.height; ++y) {
        for (std::int64_t x = 0; x < windows.width; ++x, ++tap) {
          const auto is_here = hn::RebindMask(F32(), hn::Eq(place, set_bits(tap)));
          input = hn::IfThenElse(is_here, load_some(window + y * windows.line + x * args.input.stride, count), input);
        }
      }
      sums[0] = hn::Add(sums[0], grad);
      sums[1] = fma(grad, hn::Sub(input, load_some(args.rule.mean + j, count)), sums[1]);
    });
  });
}

void channel_gradient(const ChannelGradient& args, const ChannelSlope& slope, void* to, void* added) {
  with_element(args.grad.element, [&](auto kind) {
    using T = decltype(kind);
    const std::int64_t columns = args.input.columns;
    for (std::int64_t i = 0; i < args.input.rows; ++i) {
      T* out = static_cast<T*>(to) + i * columns;
      T* plus = added == nullptr ? nullptr : static_cast<T*>(added) + i * columns;
      each_of_row(columns, [&](auto j, auto count) {
        const V input = load_some(row_of<T>(args.input, i) + j, count);
        const V grad = behind_relu<T>(args, i, j, count, input);
        if (plus != nullptr) store_some(grad, plus + j, count);
        const V line = fma(hn::Sub(input, load_some(args.rule.mean + j, count)), load_some(slope.slope + j, count),
                           load_some(slope.constant + j, count));
        store_some(fma(grad, load_some(args.rule.scale + j, count), line), out + j, count);
      });
    }
  });
}

void window_gradient(const ChannelGradient& args, const ChannelSlope& slope, const WindowRow& windows,
                     const std::uint8_t* taps, void* to) {
  with_element(args.grad.element, [&](auto kind) {
    using T = decltype(kind);
    const std::int64_t columns = args.input.columns;
    for (std::int64_t w = 0; w < windows.count; ++w) {
      const std::int64_t first = w * windows.width * args.input.stride;
      each_of_row(columns, [&](auto j, auto count) {
        const VU place = load_taps(taps + w * columns + j, count);
        const V grad = hn::Mul(load_some(row_of<T>(args.grad, w) + j, count), load_some(args.rule.scale + j, count));
        const V mean = load_some(args.rule.mean + j, count), rise = load_some(slope.slope + j, count);
        const V constant = load_some(slope.constant + j, count);
        std::uint32_t tap = 0;
        for (std::int64_t y = 0; y < windows.height; ++y) {
          for (std::int64_t x = 0; x < windows.width; ++x, ++tap) {
            const std::int64_t at = first + y * windows.line + x * args.input.stride + j;
            const V input = load_some(static_cast<const T*>(args.input.data) + at, count);
            const V line = fma(hn::Sub(input, mean), rise, constant);
            const auto is_here = hn::RebindMask(F32(), hn::Eq(place, set_bits(tap)));
            store_some(hn::IfThenElse(is_here, hn::Add(line, grad), line), static_cast<T*>(to) + at, count);
          }
        }
      });
    }
  });
}

}  // namespace
}  // namespace oxytorch::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
