// Max pooling over contiguous planes; compiled once for each instruction set.
#if defined(OXYTORCH_KERNELS_POOL_INL) == defined(HWY_TARGET_TOGGLE)
#ifdef OXYTORCH_KERNELS_POOL_INL
#undef OXYTORCH_KERNELS_POOL_INL
#else
#define OXYTORCH_KERNELS_POOL_INL
#endif

#include <limits>

#include "kernels/formats-inl.h"
#include "oxytorch/kernels/operators.h"

HWY_BEFORE_NAMESPACE();
namespace oxytorch::kernels::HWY_NAMESPACE {
namespace {

// What a window covers along one axis: every `dilation`-th place in [begin, end). It may be empty.
struct Extent {
  std::int64_t begin, end;
};

inline Extent extent_of(const PoolShape& shape, int axis, std::int64_t output) {
  std::int64_t begin = output * shape.stride[axis] - shape.padding[axis];
  const std::int64_t end = std::min(begin + (shape.kernel[axis] - 1) * shape.dilation[axis] + 1, shape.input[axis]);
  while (begin < 0) begin += shape.dilation[axis];
  return {begin, end};
}

inline void pool_window(const PoolShape& shape, const float* plane, Extent rows, Extent columns, float* output,
                        std::int64_t* index) {
  float best = -std::numeric_limits<float>::infinity();
  std::int64_t best_at = rows.begin * shape.input[1] + columns.begin;
  for (std::int64_t row = rows.begin; row < rows.end; row += shape.dilation[0]) {
    for (std::int64_t column = columns.begin; column < columns.end; column += shape.dilation[1]) {
      const std::int64_t at = row * shape.input[1] + column;
      if (plane[at] > best || std::isnan(plane[at])) {
        best = plane[at];
        best_at = at;
      }
    }
  }
  *output = best;
  *index = best_at;
}

#if !OXYTORCH_KERNELS_SCALAR

// The outputs of a row whose windows a vector may read: whole, and the loads of a stride of 2 fetch pairs.
inline Extent whole_windows(const PoolShape& shape) {
  const std::int64_t stride = shape.stride[1];
  const std::int64_t paired = stride == 2 && shape.kernel[1] % 2 == 1 ? 1 : 0;
  const std::int64_t last = shape.input[1] - 1 - paired - (shape.kernel[1] - 1) * shape.dilation[1] + shape.padding[1];
  const std::int64_t begin = (shape.padding[1] + stride - 1) / stride;
  return {begin, last < 0 ? 0 : std::min(last / stride + 1, shape.output[1])};
}

// As many windows of one row side by side as a vector has lanes. The first element needs no comparison: -inf loses.
template <class D>
struct PoolLanes {
  using Index = hn::RebindToSigned<D>;
  static constexpr std::int64_t kCount = hn::MaxLanes(D());
  hn::Vec<D> best;
  hn::Vec<Index> best_at, base;
  bool first = true;

  HWY_INLINE explicit PoolLanes(std::int64_t stride)
      : base(hn::Mul(hn::Iota(Index(), 0), hn::Set(Index(), static_cast<std::int32_t>(stride)))) {}

  HWY_INLINE void take(hn::Vec<D> value, std::int64_t at) {
    const auto here = hn::Add(base, hn::Set(Index(), static_cast<std::int32_t>(at)));
    if (first) {
      best = value;
      best_at = here;
      first = false;
      return;
    }
    const auto wins = hn::Or(hn::Gt(value, best), hn::IsNaN(value));
    best = hn::IfThenElse(wins, value, best);
    best_at = hn::IfThenElse(hn::RebindMask(Index(), wins), here, best_at);
  }
  HWY_INLINE void store(float* output, std::int64_t* index) const {
    using Half = hn::Half<Index>;
    using Wide = hn::Rebind<std::int64_t, Half>;
    hn::StoreU(best, D(), output);
    hn::StoreU(hn::PromoteTo(Wide(), hn::LowerHalf(Half(), best_at)), Wide(), index);
    hn::StoreU(hn::PromoteTo(Wide(), hn::UpperHalf(Half(), best_at)), Wide(), index + kCount / 2);
  }
};

enum class Columns { Adjacent, Pairs, Apart };

template <Columns kColumns, class D>
std::int64_t pool_columns(D d, const PoolShape& shape, const float* plane, Extent rows, Extent outputs, float* output,
                          std::int64_t* index) {
  using Lanes = PoolLanes<D>;
  std::int64_t o = outputs.begin;
  for (; o + Lanes::kCount <= outputs.end; o += Lanes::kCount) {
    const std::int64_t left = o * shape.stride[1] - shape.padding[1];
    Lanes lanes(shape.stride[1]);
    for (std::int64_t row = rows.begin; row < rows.end; row += shape.dilation[0]) {
      const std::int64_t start = row * shape.input[1] + left;
      for (std::int64_t k = 0; k < shape.kernel[1]; ++k) {
        const std::int64_t at = start + k * shape.dilation[1];
        if constexpr (kColumns == Columns::Adjacent) {
          lanes.take(hn::LoadU(d, plane + at), at);
        } else if constexpr (kColumns == Columns::Pairs) {
          hn::Vec<D> even, odd;
          hn::LoadInterleaved2(d, plane + at, even, odd);
          lanes.take(even, at);
          if (++k < shape.kernel[1]) lanes.take(odd, at + 1);
        } else {
          lanes.take(hn::GatherIndex(d, plane + at, lanes.base), at);
        }
      }
    }
    lanes.store(output + o, index + o);
  }
  return o;
}

template <Columns kColumns>
std::int64_t pool_row(const PoolShape& shape, const float* plane, Extent rows, Extent outputs, float* output,
                      std::int64_t* index) {
  outputs.begin = pool_columns<kColumns>(hn::CappedTag<float, 16>(), shape, plane, rows, outputs, output, index);
  if (kLanes > 8) {
    outputs.begin = pool_columns<kColumns>(hn::CappedTag<float, 8>(), shape, plane, rows, outputs, output, index);
  }
  return pool_columns<kColumns>(hn::CappedTag<float, 4>(), shape, plane, rows, outputs, output, index);
}

#endif

void max_pool2d(const PoolShape& shape, std::int64_t planes, const float* input, float* output, std::int64_t* indices) {
#if !OXYTORCH_KERNELS_SCALAR
  const Extent whole = whole_windows(shape);
  const auto row_kernel = shape.stride[1] == 1                             ? pool_row<Columns::Adjacent>
                          : shape.stride[1] == 2 && shape.dilation[1] == 1 ? pool_row<Columns::Pairs>
                                                                           : pool_row<Columns::Apart>;
#endif
  for (std::int64_t p = 0; p < planes; ++p, input += shape.input[0] * shape.input[1]) {
    for (std::int64_t y = 0; y < shape.output[0]; ++y, output += shape.output[1], indices += shape.output[1]) {
      const Extent rows = extent_of(shape, 0, y);
      std::int64_t x = 0;
      const auto windows_to = [&](std::int64_t end) {
        for (; x < end; ++x) pool_window(shape, input, rows, extent_of(shape, 1, x), output + x, indices + x);
      };
#if !OXYTORCH_KERNELS_SCALAR
      if (rows.begin < rows.end && whole.begin < whole.end) {
        windows_to(whole.begin);
        x = row_kernel(shape, input, rows, whole, output, indices);
      }
#endif
      windows_to(shape.output[1]);
    }
  }
}

// Each gradient to its place, in order.
inline bool scatter_plane(const PoolShape& shape, const float* grad_output, const std::int64_t* indices,
                          float* grad_input) {
  const std::int64_t size = shape.input[0] * shape.input[1];
  const std::int64_t outputs = shape.output[0] * shape.output[1];
  std::fill_n(grad_input, size, 0.0F);
  for (std::int64_t i = 0; i < outputs; ++i) {
    if (static_cast<std::uint64_t>(indices[i]) >= static_cast<std::uint64_t>(size)) return false;
    grad_input[indices[i]] += grad_output[i];
  }
  return true;
}

#if !OXYTORCH_KERNELS_SCALAR

// Windows of 2 by 2 that touch without overlap: each input has one output, and a plane is written once from end to
// end. False where an index is not in its window.
inline bool spread_plane(const PoolShape& shape, const float* grad_output, const std::int64_t* indices,
                         float* grad_input) {
  using Wide = hn::Repartition<std::int64_t, I32>;
  const std::int64_t width = shape.input[1];
  const VI twice = hn::Mul(hn::Iota(I32(), 0), hn::Set(I32(), 2));
  VI far = hn::Zero(I32());  // nonzero where an index is not within 32 bits
  std::int64_t found = 0;
  for (std::int64_t y = 0; y < shape.output[0]; ++y) {
    float* upper = grad_input + 2 * y * width;
    float* lower = upper + width;
    std::int64_t x = 0;
    for (; x + kLanes <= shape.output[1]; x += kLanes) {
      // To add 0 makes 0 of -0, as the sum that begins with 0 does.
      const V grad = hn::Add(load(grad_output + x), hn::Zero(F32()));
      const VI first = hn::BitCast(I32(), hn::LoadU(Wide(), indices + x));
      const VI second = hn::BitCast(I32(), hn::LoadU(Wide(), indices + x + kLanes / 2));
      const VI at = hn::ConcatEven(I32(), second, first);
      far = hn::Or(far, hn::ConcatOdd(I32(), second, first));
      const VI corner = hn::Add(twice, hn::Set(I32(), static_cast<std::int32_t>(2 * y * width + 2 * x)));
      const auto part = [&](std::int64_t offset) {
        const auto here = hn::Eq(at, hn::Add(corner, hn::Set(I32(), static_cast<std::int32_t>(offset))));
        found += static_cast<std::int64_t>(hn::CountTrue(I32(), here));
        return hn::IfThenElseZero(hn::RebindMask(F32(), here), grad);
      };
      hn::StoreInterleaved2(part(0), part(1), F32(), upper + 2 * x);
      hn::StoreInterleaved2(part(width), part(width + 1), F32(), lower + 2 * x);
    }
    for (; x < shape.output[1]; ++x) {
      const std::int64_t corner = 2 * y * width + 2 * x;
      for (const std::int64_t offset : {std::int64_t{0}, std::int64_t{1}, width, width + 1}) {
        const bool here = indices[x] == corner + offset;
        found += here ? 1 : 0;
        grad_input[corner + offset] = here ? grad_output[x] + 0.0F : 0.0F;
      }
    }
    std::fill(upper + 2 * shape.output[1], upper + width, 0.0F);
    std::fill(lower + 2 * shape.output[1], lower + width, 0.0F);
    grad_output += shape.output[1];
    indices += shape.output[1];
  }
  std::fill(grad_input + 2 * shape.output[0] * width, grad_input + shape.input[0] * width, 0.0F);
  return found == shape.output[0] * shape.output[1] && hn::AllTrue(I32(), hn::Eq(far, hn::Zero(I32())));
}

#endif

bool max_pool2d_backward(const PoolShape& shape, std::int64_t planes, const float* grad_output,
                         const std::int64_t* indices, float* grad_input) {
  bool touching = !OXYTORCH_KERNELS_SCALAR;
  for (const int axis : {0, 1}) {
    touching = touching && shape.kernel[axis] == 2 && shape.stride[axis] == 2 && shape.padding[axis] == 0 &&
               shape.dilation[axis] == 1 && 2 * shape.output[axis] <= shape.input[axis];
  }
  const std::int64_t outputs = shape.output[0] * shape.output[1];
  for (std::int64_t p = 0; p < planes; ++p) {
    bool done = false;
#if !OXYTORCH_KERNELS_SCALAR
    done = touching && spread_plane(shape, grad_output, indices, grad_input);
#endif
    if (!done && !scatter_plane(shape, grad_output, indices, grad_input)) return false;
    grad_output += outputs;
    indices += outputs;
    grad_input += shape.input[0] * shape.input[1];
  }
  return true;
}

}  // namespace
}  // namespace oxytorch::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
