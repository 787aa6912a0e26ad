// The per-chunk kernels of the step tail: one source, compiled for each instruction set by Highway.
//
// Only sets with a fused multiply-add are built, plus a scalar one that uses std::fma, so that all give the same bits.
// A chunk goes through in sections that stay in the first cache level. The rules work on fp32 alone: in the caller's
// memory where it is fp32, else in a section of scratch that is decoded before and encoded after.
#include "kernels/device/rules.h"
#include "kernels/step_tail_table.h"
#include "kernels/targets.h"
#include "oxytorch/error.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/step_tail_kernels.cpp"
#include <hwy/foreach_target.h>
//
#include <hwy/highway.h>

#include "kernels/formats-inl.h"

HWY_BEFORE_NAMESPACE();
namespace oxytorch::kernels::HWY_NAMESPACE {
namespace {

// Elements of a section: whole groups of state and blocks of random bits.
constexpr std::int64_t kSection = 512;
constexpr std::int64_t kRandomBlock = 128;

using HalfBlock = hn::Rebind<float, hn::CappedTag<double, kBlock / 2>>;
using F64 = hn::CappedTag<double, kBlock / 2>;
constexpr int kDoubleLanes = static_cast<int>(hn::MaxLanes(F64()));
constexpr int kDoubleVectors = kBlock / kDoubleLanes;
using VD = hn::Vec<F64>;

struct Lanes {
  VD sum[kDoubleVectors];
  HWY_INLINE Lanes() {
    for (int i = 0; i < kDoubleVectors; ++i) sum[i] = hn::Zero(F64());
  }
  // Adds the squares of one block held in memory as fp32.
  HWY_INLINE void add_squares(const float* block) {
    for (int i = 0; i < kDoubleVectors; ++i) {
      const VD x = hn::PromoteTo(F64(), hn::LoadU(HalfBlock(), block + i * kDoubleLanes));
      sum[i] = fma(F64(), x, x, sum[i]);
    }
  }
  HWY_INLINE void add(const float* block) {
    for (int i = 0; i < kDoubleVectors; ++i) {
      sum[i] = hn::Add(sum[i], hn::PromoteTo(F64(), hn::LoadU(HalfBlock(), block + i * kDoubleLanes)));
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

// Elements by which a sum asks for memory ahead.
constexpr std::int64_t kAhead = 1024;
// By integers, since the address may be past the array, or of none.
template <class T>
HWY_INLINE void prefetch(const T* array, std::int64_t index) {
  __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<std::uintptr_t>(array) +
                                                   static_cast<std::uintptr_t>(index) * sizeof(T)));
}

// An array that can be read as fp32: `count` elements from `at`.
template <class T>
struct Plain {
  const T* data;
  HWY_INLINE void read(std::int64_t at, std::int64_t count, float* to) const { decode(data + at, count, to); }
  HWY_INLINE void prefetch(std::int64_t at) const {
    kernels::HWY_NAMESPACE::prefetch(data, at);
    if constexpr (sizeof(T) == 4) kernels::HWY_NAMESPACE::prefetch(data, at + kBlock);
  }
  HWY_INLINE void add_block(Lanes& lanes, std::int64_t at) const {
    if constexpr (std::is_same_v<T, float>) {
      lanes.add_squares(data + at);
    } else {
      float wide[kBlock];
      for (int i = 0; i < kBlock; i += kLanes) store(load(data + at + i), wide + i);
      lanes.add_squares(wide);
    }
  }
};
struct Split {
  const Bf16* high;
  const std::int8_t* low;
  HWY_INLINE void read(std::int64_t at, std::int64_t count, float* to) const { join(high + at, low + at, count, to); }
  HWY_INLINE void prefetch(std::int64_t at) const { kernels::HWY_NAMESPACE::prefetch(high, at); }
  HWY_INLINE void add_block(Lanes& lanes, std::int64_t at) const {
    float wide[kBlock];
    for (int i = 0; i < kBlock; i += kLanes) store(load(high + at + i, low + at + i), wide + i);
    lanes.add_squares(wide);
  }
};

// Two blocks a turn in two sets of lanes hide the latency of the additions.
template <class Array>
double sum_squares_of(const Array& array, std::int64_t begin, std::int64_t end) {
  Lanes even, odd;
  std::int64_t i = begin;
  for (; i + 2 * kBlock <= end; i += 2 * kBlock) {
    if (i + kAhead < end) array.prefetch(i + kAhead);
    array.add_block(even, i);
    array.add_block(odd, i + kBlock);
  }
  if (i + kBlock <= end) {
    array.add_block(even, i);
    i += kBlock;
  }
  if (i < end) {
    float rest[kBlock] = {};
    array.read(i, end - i, rest);
    odd.add_squares(rest);
  }
  return even.total() + odd.total();
}

template <class F>
auto with_array(const void* data, ElementType type, F&& f) {
  switch (type) {
    case ElementType::BF16: return f(Plain<Bf16>{static_cast<const Bf16*>(data)});
    case ElementType::F16: return f(Plain<Half>{static_cast<const Half*>(data)});
    default: return f(Plain<float>{static_cast<const float*>(data)});
  }
}
// The weights at their best precision.
template <class F>
auto with_weights(const TailTensor& tensor, F&& f) {
  if (tensor.master != nullptr) return f(Plain<float>{tensor.master});
  if (tensor.low_bits != nullptr) return f(Split{static_cast<const Bf16*>(tensor.param), tensor.low_bits});
  return with_array(tensor.param, tensor.type, f);
}

double sum_squares(const void* data, ElementType type, std::int64_t count) {
  return with_array(data, type, [&](const auto& array) { return sum_squares_of(array, 0, count); });
}

// The rows that cross a chunk, as runs of its elements.
template <class F>
void for_rows(const TailTensor& tensor, std::int64_t offset, std::int64_t count, F&& f) {
  const std::int64_t length = tensor.numel / tensor.rows;
  const std::int64_t end = offset + count;
  for (std::int64_t row = offset / length, at = offset; at < end; ++row) {
    const std::int64_t stop = std::min(end, (row + 1) * length);
    f(row, at, stop);
    at = stop;
  }
}

void row_sums(const TailTensor& tensor, std::int64_t offset, std::int64_t count, double* grad, double* weight) {
  with_array(tensor.grad, tensor.grad_type, [&](const auto& array) {
    for_rows(tensor, offset, count,
             [&](std::int64_t, std::int64_t from, std::int64_t to) { *grad++ = sum_squares_of(array, from, to); });
  });
  with_weights(tensor, [&](const auto& array) {
    for_rows(tensor, offset, count,
             [&](std::int64_t, std::int64_t from, std::int64_t to) { *weight++ = sum_squares_of(array, from, to); });
  });
}

// What a rule sees of one section: fp32 arrays of whole vectors.
struct RuleSection {
  float* weight;
  float* before;  // receives the weights that were there; null: not wanted
  // Receive the sums of squares of weights and of changes, a lane for each place in a block; null: not wanted.
  float* param_sums;
  float* update_sums;
  const float* grad;
  float* state[3];
  std::int64_t count;
  bool more;  // whether the chunk goes on for another section after this one
  // Where the state is Int8: what `state` is decoded from.
  const std::uint8_t* codes[3];
  const float* scales[3];
};

// State `kIndex` as the rules read it; what they write goes to `state` in either case.
template <Rule kRule, bool kInt8, int kIndex>
HWY_INLINE V load_state(const RuleSection& s, std::int64_t i) {
  if constexpr (kInt8) {
    return decode_vector<state_code(kRule, kIndex)>(s.codes[kIndex] + i, set(s.scales[kIndex][i / kStateGroup]));
  } else {
    return load(s.state[kIndex] + i);
  }
}

// NaN in either place is not a limit.
HWY_INLINE V limit(V value, float bound) {
  const V top = set(bound);
  value = hn::IfThenElse(hn::Gt(value, top), top, value);
  return hn::IfThenElse(hn::Lt(value, hn::Neg(top)), hn::Neg(top), value);
}
HWY_INLINE V not_below(V value, V least) { return hn::IfThenElse(hn::Lt(value, least), least, value); }
HWY_INLINE V zero_below(V value, V least) { return hn::IfThenZeroElse(hn::Lt(hn::Abs(value), least), value); }
// 0 of 0 and of NaN, as torch.sign.
HWY_INLINE V sign(V value) {
  return hn::IfThenElseZero(hn::Gt(hn::Abs(value), hn::Zero(F32())), hn::CopySign(set(1), value));
}
HWY_INLINE V lerp(V from, V to, float weight) { return fma(set(weight), hn::Sub(to, from), from); }

using Number = V;
HWY_INLINE V add(V a, V b) { return hn::Add(a, b); }
HWY_INLINE V multiply(V a, V b) { return hn::Mul(a, b); }
HWY_INLINE V divide(V a, V b) { return hn::Div(a, b); }
HWY_INLINE V negate(V value) { return hn::Neg(value); }
HWY_INLINE V root(V value) { return hn::Sqrt(value); }

#define OXY_UPDATE_RULE HWY_INLINE
#include "kernels/update_rule-inl.h"
#undef OXY_UPDATE_RULE

constexpr device::Family family_of(Rule rule) {
  switch (rule) {
    case Rule::Sgd: return device::Family::Sgd;
    case Rule::Lion: return device::Family::Lion;
    case Rule::Adagrad: return device::Family::Adagrad;
    case Rule::RmsProp: return device::Family::RmsProp;
    default: return device::Family::Adam;
  }
}

// The state of one vector of a section.
template <Rule kRule, bool kInt8>
struct VectorState {
  const RuleSection& section;
  float* const (&to)[3];
  std::int64_t at;

  template <int kIndex>
  HWY_INLINE bool has() const {
    return to[kIndex] != nullptr;
  }
  template <int kIndex>
  HWY_INLINE V get() const {
    return load_state<kRule, kInt8, kIndex>(section, at);
  }
  template <int kIndex>
  HWY_INLINE void put(V value) const {
    store(value, to[kIndex] + at);
  }
};

template <Rule kRule, bool kInt8, bool kSums>
void apply_rule(const RuleSection& s, const Coefficients& coefficients, bool nesterov, bool first) {
  // A copy: the compiler then knows that stores cannot change the coefficients.
  const Coefficients c = coefficients;
  const bool keeps = s.before != nullptr;
  constexpr int kVectors = kBlock / kLanes;
  V params[kVectors], updates[kVectors];
  for (int j = 0; j < kVectors; ++j) params[j] = updates[j] = hn::Zero(F32());
  float* const to[3] = {s.state[0], s.state[1], s.state[2]};
  for (std::int64_t i = 0; i < s.count; i += kLanes) {
    // Prefetches the next section while this one is computed.
    if (s.more) {
      prefetch(s.weight, i + kSection);
      prefetch(s.grad, i + kSection);
      for (int k = 0; k < 2; ++k) kInt8 ? prefetch(s.codes[k], i + kSection) : prefetch(s.state[k], i + kSection);
    }
    V weight = load(s.weight + i);
    const V old = weight;
    if (keeps) store(weight, s.before + i);
    V grad = hn::Mul(load(s.grad + i), set(c.grad_multiplier));
    const VectorState<kRule, kInt8> state{s, to, i};
    weight = updated<family_of(kRule)>(c, weight, grad, state, first, nesterov);
    store(weight, s.weight + i);
    if constexpr (kSums) {
      const int j = static_cast<int>(i / kLanes) % kVectors;
      const V change = hn::Sub(weight, old);
      params[j] = fma(weight, weight, params[j]);
      updates[j] = fma(change, change, updates[j]);
    }
  }
  for (int j = 0; kSums && j < kVectors; ++j) {
    store(params[j], s.param_sums + j * kLanes);
    store(updates[j], s.update_sums + j * kLanes);
  }
}

template <bool kInt8, bool kSums>
void apply_rule(const RuleSection& s, const Coefficients& c, const ChunkUpdate& chunk) {
  switch (chunk.rule) {
    case Rule::AdamW: return apply_rule<Rule::AdamW, kInt8, kSums>(s, c, false, false);
    case Rule::Adam: return apply_rule<Rule::Adam, kInt8, kSums>(s, c, false, false);
    case Rule::Sgd: return apply_rule<Rule::Sgd, kInt8, kSums>(s, c, chunk.nesterov, chunk.tensor.first);
    case Rule::Lion: return apply_rule<Rule::Lion, kInt8, kSums>(s, c, false, false);
    case Rule::Adagrad: return apply_rule<Rule::Adagrad, kInt8, kSums>(s, c, false, false);
    case Rule::RmsProp: return apply_rule<Rule::RmsProp, kInt8, kSums>(s, c, false, false);
  }
}

void apply_rule(const RuleSection& s, const Coefficients& c, const ChunkUpdate& chunk) {
  const bool coded = s.codes[0] != nullptr || s.codes[1] != nullptr;
  if (s.param_sums != nullptr) {
    coded ? apply_rule<true, true>(s, c, chunk) : apply_rule<false, true>(s, c, chunk);
  } else {
    coded ? apply_rule<true, false>(s, c, chunk) : apply_rule<false, false>(s, c, chunk);
  }
}

void average_weights(const float* weight, float* ema, std::int64_t count, float ema_weight, bool more) {
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    if (more) prefetch(ema, i + kSection);
    store(lerp(load(ema + i), load(weight + i), ema_weight), ema + i);
  }
  for (; i < count; ++i) ema[i] = std::fma(ema_weight, weight[i] - ema[i], ema[i]);
}

struct Statistics {
  Lanes param;
  Lanes update;
  // Written out: an implicit one would lack the instruction set of this region.
  HWY_INLINE Statistics() {}  // NOLINT(modernize-use-equals-default)
  float param_sums[kBlock];
  float update_sums[kBlock];
  // What the rule left in param_sums and update_sums.
  HWY_INLINE void add_sums() {
    param.add(param_sums);
    update.add(update_sums);
  }
  // In fp32 within a section, 32 squares a lane: half the work of fp64, and exact to 2e-6.
  void add(const float* before, const float* after, std::int64_t count) {
    constexpr int kVectors = kBlock / kLanes;
    V params[kVectors], updates[kVectors];
    for (int j = 0; j < kVectors; ++j) params[j] = updates[j] = hn::Zero(F32());
    for (std::int64_t i = 0; i < count; i += kBlock) {
      for (int j = 0; j < kVectors; ++j) {
        const V weight = load(after + i + j * kLanes);
        const V change = hn::Sub(weight, load(before + i + j * kLanes));
        params[j] = fma(weight, weight, params[j]);
        updates[j] = fma(change, change, updates[j]);
      }
    }
    for (int j = 0; j < kVectors; ++j) {
      store(params[j], param_sums + j * kLanes);
      store(updates[j], update_sums + j * kLanes);
    }
    add_sums();
  }
};

struct Scratch {
  alignas(64) float weight[kSection];
  alignas(64) float before[kSection];
  alignas(64) float grad[kSection];
  alignas(64) float state[3][kSection];
  alignas(64) float scales[3][kSection / kStateGroup];
  alignas(64) std::uint8_t codes[3][kSection];
  alignas(64) std::uint16_t random[kSection];
};

// One chunk. A section that ends in the midst of a block goes through scratch, whatever its types.
class ChunkRun {
 public:
  explicit ChunkRun(const ChunkUpdate& chunk)
      : chunk_(chunk),
        tensor_(chunk.tensor),
        coefficients_(chunk.coefficients),
        random_{chunk.seed, chunk.tensor.stream, chunk.coefficients.step},
        transforms_gradient_(coefficients_.clip_value != 0 || chunk.row_multipliers != nullptr),
        collects_(chunk.param_sum_squares != nullptr) {
    if (transforms_gradient_) coefficients_.grad_multiplier = 1;
  }

  void run() {
    for (std::int64_t done = 0; done < chunk_.count; done += count_) {
      at_ = chunk_.offset + done;
      count_ = section_length(chunk_.count - done);
      padded_ = (count_ + kBlock - 1) / kBlock * kBlock;
      run_section();
    }
    if (collects_) {
      *chunk_.param_sum_squares = statistics_.param.total();
      *chunk_.update_sum_squares = statistics_.update.total();
    }
  }

 private:
  // What is left of a chunk goes in its direct part first, up to where random bits or groups allow a cut.
  [[nodiscard]] std::int64_t section_length(std::int64_t left) const {
    if (left >= kSection) return kSection;
    const std::int64_t unit = chunk_.stochastic                         ? kRandomBlock
                              : tensor_.state_type == ElementType::Int8 ? kStateGroup
                                                                        : kBlock;
    const std::int64_t whole = left / unit * unit;
    return left % kBlock == 0 || whole == 0 ? left : whole;
  }

  void run_section() {
    float* const home = fp32_weights();
    const bool direct = home != nullptr && is_whole();
    RuleSection s{};
    s.count = padded_;
    s.more = chunk_.offset + chunk_.count - at_ >= 2 * kSection;
    s.weight = direct ? home : read_weights();
    // Weights that are stored as the rule leaves them are summed by the rule itself.
    const bool sums = collects_ && direct;
    s.before = collects_ && !sums ? scratch_.before : nullptr;
    s.param_sums = sums ? statistics_.param_sums : nullptr;
    s.update_sums = statistics_.update_sums;
    s.grad = read_gradient();
    for (int k = 0; k < 3; ++k) s.state[k] = read_state(k, s);
    apply_rule(s, coefficients_, chunk_);
    for (int k = 0; k < 3; ++k) write_state(k, s.state[k]);
    home == nullptr ? write_narrow_weights(s.weight) : write_weights(s.weight, home);
    if (tensor_.copy != nullptr) write<false>(s.weight, tensor_.copy, tensor_.copy_type);
    if (tensor_.ema != nullptr) average_weights(s.weight, tensor_.ema + at_, count_, coefficients_.ema_weight, s.more);
    if (sums) {
      statistics_.add_sums();
    } else if (collects_) {
      pad(s.weight);
      statistics_.add(s.before, s.weight, padded_);
    }
    if (chunk_.zero_grad) zero_gradient();
  }

  [[nodiscard]] bool is_whole() const { return padded_ == count_; }

  // For the sums: the rule may have made a NaN of the padding (0 / 0).
  void pad(float* section) const { std::fill(section + count_, section + padded_, 0.0F); }

  [[nodiscard]] float* fp32_weights() const {
    if (tensor_.master != nullptr) return tensor_.master + at_;
    return tensor_.type == ElementType::F32 ? static_cast<float*>(tensor_.param) + at_ : nullptr;
  }

  float* read_weights() {
    with_weights(tensor_, [&](const auto& array) { array.read(at_, count_, scratch_.weight); });
    pad(scratch_.weight);
    return scratch_.weight;
  }

  void write_weights(const float* weight, float* home) const {
    if (weight != home) std::copy_n(weight, count_, home);
    if (tensor_.master != nullptr) write<false>(weight, tensor_.param, tensor_.type);
  }

  // Leaves in `weight` the weights as they were stored.
  void write_narrow_weights(float* weight) {
    const bool stochastic = is_random(tensor_.type, RoundingOperand::Param);
    if (tensor_.low_bits != nullptr) {
      Bf16* const high = static_cast<Bf16*>(tensor_.param) + at_;
      stochastic ? split<true>(weight, count_, high, tensor_.low_bits + at_, scratch_.random)
                 : split<false>(weight, count_, high, tensor_.low_bits + at_, nullptr);
    } else {
      stochastic ? write<true>(weight, tensor_.param, tensor_.type) : write<false>(weight, tensor_.param, tensor_.type);
    }
    if (tensor_.copy != nullptr || tensor_.ema != nullptr || collects_) {
      with_weights(tensor_, [&](const auto& array) { array.read(at_, count_, weight); });
    }
  }

  const float* read_gradient() {
    if (tensor_.grad_type == ElementType::F32 && is_whole() && !transforms_gradient_) {
      return static_cast<const float*>(tensor_.grad) + at_;
    }
    with_array(tensor_.grad, tensor_.grad_type, [&](const auto& array) { array.read(at_, count_, scratch_.grad); });
    pad(scratch_.grad);
    if (transforms_gradient_) transform_gradient();
    return scratch_.grad;
  }

  void transform_gradient() {
    const Coefficients& c = chunk_.coefficients;
    const auto multiply = [&](std::int64_t from, std::int64_t to, float factor) {
      for (std::int64_t i = from - at_; i < to - at_; ++i) scratch_.grad[i] *= factor;
    };
    multiply(at_, at_ + count_, c.grad_multiplier);
    if (chunk_.row_multipliers != nullptr) {
      for_rows(tensor_, at_, count_, [&](std::int64_t row, std::int64_t from, std::int64_t to) {
        multiply(from, to, chunk_.row_multipliers[row]);
      });
    }
    if (c.clip_value == 0) return;
    for (std::int64_t i = 0; i < padded_; i += kLanes) {
      store(limit(load(scratch_.grad + i), c.clip_value), scratch_.grad + i);
    }
  }

  void zero_gradient() const {
    const std::int64_t size = tensor_.grad_type == ElementType::F32 ? 4 : 2;
    std::memset(static_cast<unsigned char*>(tensor_.grad) + at_ * size, 0, static_cast<std::size_t>(count_ * size));
  }

  float* read_state(int k, RuleSection& s) {
    void* const data = tensor_.state[k].data;
    if (data == nullptr) return nullptr;
    if (tensor_.state_type == ElementType::F32 && is_whole()) return static_cast<float*>(data) + at_;
    float* const wide = scratch_.state[k];
    if (tensor_.state_type != ElementType::Int8) {
      with_array(data, tensor_.state_type, [&](const auto& array) { array.read(at_, count_, wide); });
      pad(wide);
      return wide;
    }
    const auto* const scales = reinterpret_cast<const Bf16*>(tensor_.state[k].scale) + at_ / kStateGroup;
    decode(scales, state_groups(count_), scratch_.scales[k]);
    s.scales[k] = scratch_.scales[k];
    s.codes[k] = static_cast<const std::uint8_t*>(data) + at_;
    if (!is_whole()) {
      std::copy_n(s.codes[k], count_, scratch_.codes[k]);
      std::fill(scratch_.codes[k] + count_, scratch_.codes[k] + padded_, std::uint8_t{0});
      s.codes[k] = scratch_.codes[k];
    }
    return wide;
  }

  void write_state(int k, const float* wide) {
    void* const data = tensor_.state[k].data;
    if (wide != scratch_.state[k]) return;
    const bool stochastic = is_random(tensor_.state_type, static_cast<RoundingOperand>(k + 1));
    if (tensor_.state_type == ElementType::Int8) {
      auto* const codes = static_cast<std::uint8_t*>(data) + at_;
      std::uint16_t* const scales = tensor_.state[k].scale + at_ / kStateGroup;
      if (state_code(chunk_.rule, k) == StateCode::Signed) {
        stochastic ? encode_state<StateCode::Signed, true>(wide, count_, codes, scales, scratch_.random)
                   : encode_state<StateCode::Signed, false>(wide, count_, codes, scales, nullptr);
      } else {
        stochastic ? encode_state<StateCode::Unsigned, true>(wide, count_, codes, scales, scratch_.random)
                   : encode_state<StateCode::Unsigned, false>(wide, count_, codes, scales, nullptr);
      }
    } else {
      stochastic ? write<true>(wide, data, tensor_.state_type) : write<false>(wide, data, tensor_.state_type);
    }
  }

  // Whether `type` is rounded stochastically; if so the bits for `operand` are in scratch.
  bool is_random(ElementType type, RoundingOperand operand) {
    if (!chunk_.stochastic || type == ElementType::F32 || type == ElementType::F16) return false;
    random_.fill(operand, at_, count_, scratch_.random);
    return true;
  }

  template <bool kStochastic>
  void write(const float* from, void* array, ElementType type) const {
    switch (type) {
      case ElementType::BF16:
        return encode<kStochastic>(from, count_, static_cast<Bf16*>(array) + at_, scratch_.random);
      case ElementType::F16: return encode<false>(from, count_, static_cast<Half*>(array) + at_, nullptr);
      default: std::copy_n(from, count_, static_cast<float*>(array) + at_);
    }
  }

  const ChunkUpdate& chunk_;
  const TailTensor& tensor_;
  Coefficients coefficients_;
  RandomSource random_;
  bool transforms_gradient_;
  bool collects_;
  std::int64_t at_ = 0;      // first element of the section, counted in the tensor
  std::int64_t count_ = 0;   // elements of the section
  std::int64_t padded_ = 0;  // the same in whole blocks
  Statistics statistics_;
  Scratch scratch_;
};

void update(const ChunkUpdate& chunk) { ChunkRun(chunk).run(); }

void encode_array(StateCode code, const float* values, std::int64_t count, void* codes, std::uint16_t* scales) {
  auto* const bytes = static_cast<std::uint8_t*>(codes);
  code == StateCode::Signed ? encode_state<StateCode::Signed, false>(values, count, bytes, scales, nullptr)
                            : encode_state<StateCode::Unsigned, false>(values, count, bytes, scales, nullptr);
}

void decode_array(StateCode code, const void* codes, const std::uint16_t* scales, std::int64_t count, float* values) {
  const auto* const bytes = static_cast<const std::uint8_t*>(codes);
  code == StateCode::Signed ? decode_state<StateCode::Signed>(bytes, scales, count, values)
                            : decode_state<StateCode::Unsigned>(bytes, scales, count, values);
}

void split_array(const float* values, std::int64_t count, std::uint16_t* bf16, std::int8_t* low_bits) {
  split<false>(values, count, reinterpret_cast<Bf16*>(bf16), low_bits, nullptr);
}

void join_array(const std::uint16_t* bf16, const std::int8_t* low_bits, std::int64_t count, float* values) {
  join(reinterpret_cast<const Bf16*>(bf16), low_bits, count, values);
}

}  // namespace

const KernelTable& table() {
  static constexpr KernelTable kTable{sum_squares,  row_sums,    update,    encode_array,
                                      decode_array, split_array, join_array};
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
