// One step of an LSTM layer, forward and backward; compiled once for each instruction set.
#if defined(OXYTORCH_KERNELS_LSTM_INL) == defined(HWY_TARGET_TOGGLE)
#ifdef OXYTORCH_KERNELS_LSTM_INL
#undef OXYTORCH_KERNELS_LSTM_INL
#else
#define OXYTORCH_KERNELS_LSTM_INL
#endif

#include "kernels/gates-inl.h"
#include "oxytorch/kernels/lstm.h"

HWY_BEFORE_NAMESPACE();
namespace oxytorch::kernels::HWY_NAMESPACE {
namespace {

// The first `count` lanes, of at most a vector.
template <class T>
HWY_INLINE V load_part(const T* from, std::int64_t count) {
  if (count >= kLanes) return load(from);
  T part[kLanes] = {};
  std::copy_n(from, std::max<std::int64_t>(count, 0), part);
  return load(part);
}
template <class T>
HWY_INLINE void store_part(V value, T* to, std::int64_t count) {
  if (count >= kLanes) return store<false>(value, to, nullptr);
  T part[kLanes];
  store<false>(value, part, nullptr);
  std::copy_n(part, std::max<std::int64_t>(count, 0), to);
}

template <class T>
HWY_INLINE Gates gate_values(V in, V forget, V fresh, V out) {
  if constexpr (std::is_same_v<T, Bf16>) return narrow_gates(in, forget, fresh, out);
  return {sigmoid(in), sigmoid(forget), tanh(fresh), sigmoid(out)};
}
// Of a cell.
template <class T>
HWY_INLINE V shown_by(V cell) {
  if constexpr (std::is_same_v<T, Bf16>) return narrow_tanh(cell);
  return tanh(cell);
}

void lstm_forward(const LstmForward& step) {
  const auto [element, rows, used, hidden, width] = step.sizes;
  with_element(element, [&, rows = rows, used = used, hidden = hidden, width = width](auto kind) {
    using T = decltype(kind);
    for (std::int64_t i = 0; i < rows; ++i) {
      const float* sums = step.sums + i * 4 * width;
      float* cell = step.cell + i * width;
      T* gates = step.gates == nullptr ? nullptr : static_cast<T*>(step.gates) + i * 4 * width;
      T* output = static_cast<T*>(step.output) + i * step.output_stride;
      for (std::int64_t j = 0; j < width; j += kLanes) {
        const auto sum = [&](std::int64_t gate) {
          return hn::Add(load(sums + gate * width + j), load(step.bias + gate * width + j));
        };
        const auto [in, forget, fresh, out] = gate_values<T>(sum(0), sum(1), sum(2), sum(3));
        const V now = fma(forget, load(cell + j), hn::Mul(in, fresh));
        store(now, cell + j);
        if (gates != nullptr) {
          store<false>(in, gates + j, nullptr);
          store<false>(forget, gates + width + j, nullptr);
          store<false>(fresh, gates + 2 * width + j, nullptr);
          store<false>(out, gates + 3 * width + j, nullptr);
          store(now, step.cells + i * width + j);
        }
        if (i < used) store_part(hn::Mul(out, shown_by<T>(now)), output + j, hidden - j);
      }
    }
  });
}

void lstm_backward(const LstmBackward& step) {
  const auto [element, rows, used, hidden, width] = step.sizes;
  with_element(element, [&, rows = rows, used = used, hidden = hidden, width = width](auto kind) {
    using T = decltype(kind);
    for (std::int64_t i = 0; i < rows; ++i) {
      const T* gates = static_cast<const T*>(step.gates) + i * 4 * width;
      T* grad_sums = static_cast<T*>(step.grad_sums) + i * 4 * width;
      const bool has_output = step.grad_output != nullptr && i < used;
      const T* grad_output =
          has_output ? static_cast<const T*>(step.grad_output) + i * step.grad_output_stride : nullptr;
      float* grad_cell = step.grad_cell + i * width;
      for (std::int64_t j = 0; j < width; j += kLanes) {
        const V in = load(gates + j), forget = load(gates + width + j);
        const V fresh = load(gates + 2 * width + j), out = load(gates + 3 * width + j);
        const V shown = shown_by<T>(load(step.cells + i * width + j));
        V grad = load(step.grad_hidden + i * width + j);
        if (has_output) grad = hn::Add(grad, load_part(grad_output + j, hidden - j));
        const V of_cell = fma(hn::Mul(grad, out), slope_of_tanh(shown), load(grad_cell + j));
        const V before = load(step.before + i * width + j);
        store<false>(hn::Mul(hn::Mul(of_cell, fresh), slope_of_sigmoid(in)), grad_sums + j, nullptr);
        store<false>(hn::Mul(hn::Mul(of_cell, before), slope_of_sigmoid(forget)), grad_sums + width + j, nullptr);
        store<false>(hn::Mul(hn::Mul(of_cell, in), slope_of_tanh(fresh)), grad_sums + 2 * width + j, nullptr);
        store<false>(hn::Mul(hn::Mul(grad, shown), slope_of_sigmoid(out)), grad_sums + 3 * width + j, nullptr);
        store(hn::Mul(of_cell, forget), grad_cell + j);
      }
    }
  });
}

}  // namespace
}  // namespace oxytorch::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
