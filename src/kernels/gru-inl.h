// One step of a GRU layer, forward and backward; compiled once for each instruction set.
#if defined(OXYTORCH_KERNELS_GRU_INL) == defined(HWY_TARGET_TOGGLE)
#ifdef OXYTORCH_KERNELS_GRU_INL
#undef OXYTORCH_KERNELS_GRU_INL
#else
#define OXYTORCH_KERNELS_GRU_INL
#endif

#include "kernels/gates-inl.h"
#include "oxytorch/kernels/gru.h"

HWY_BEFORE_NAMESPACE();
namespace oxytorch::kernels::HWY_NAMESPACE {
namespace {

void gru_forward(const GruForward& step) {
  const auto [element, rows, width] = step.sizes;
  with_element(element, [&, rows = rows, width = width](auto kind) {
    using T = decltype(kind);
    for (std::int64_t i = 0; i < rows; ++i) {
      const float* of_input = step.input_sums + i * 3 * width;
      const float* of_state = step.state_sums + i * 3 * width;
      float* state = step.state + i * width;
      T* kept = step.kept == nullptr ? nullptr : static_cast<T*>(step.kept) + i * kGruKept * width;
      for (std::int64_t j = 0; j < width; j += kLanes) {
        const auto bias = [&](std::int64_t part) { return load(step.bias + part * width + j); };
        const auto gate = [&](std::int64_t part) {
          const std::int64_t at = part * width + j;
          return sigmoid(hn::Add(hn::Add(load(of_input + at), load(of_state + at)), bias(part)));
        };
        const V reset = gate(0), update = gate(1);
        const V inner = hn::Add(load(of_state + 2 * width + j), bias(3));
        const V fresh = tanh(fma(reset, inner, hn::Add(load(of_input + 2 * width + j), bias(2))));
        const V before = load(state + j);
        store(fma(update, hn::Sub(before, fresh), fresh), state + j);
        if (kept == nullptr) continue;
        store<false>(reset, kept + j, nullptr);
        store<false>(update, kept + width + j, nullptr);
        store<false>(fresh, kept + 2 * width + j, nullptr);
        store<false>(inner, kept + 3 * width + j, nullptr);
        store<false>(before, kept + 4 * width + j, nullptr);
      }
    }
  });
}

void gru_backward(const GruBackward& step) {
  const auto [element, rows, width] = step.sizes;
  with_element(element, [&, rows = rows, width = width](auto kind) {
    using T = decltype(kind);
    for (std::int64_t i = 0; i < rows; ++i) {
      const T* kept = static_cast<const T*>(step.kept) + i * kGruKept * width;
      T* grad_sums = static_cast<T*>(step.grad_sums) + i * 4 * width;
      float* grad_state = step.grad_state + i * width;
      for (std::int64_t j = 0; j < width; j += kLanes) {
        const V reset = load(kept + j), update = load(kept + width + j), fresh = load(kept + 2 * width + j);
        const V inner = load(kept + 3 * width + j), before = load(kept + 4 * width + j);
        V grad = load(grad_state + j);
        if (step.grad_output != nullptr) grad = hn::Add(grad, load(step.grad_output + i * width + j));
        const V of_fresh = hn::Mul(hn::Mul(grad, hn::Sub(set(1), update)), slope_of_tanh(fresh));
        store<false>(of_fresh, grad_sums + j, nullptr);
        store<false>(hn::Mul(hn::Mul(of_fresh, inner), slope_of_sigmoid(reset)), grad_sums + width + j, nullptr);
        store<false>(hn::Mul(hn::Mul(grad, hn::Sub(before, fresh)), slope_of_sigmoid(update)),
                     grad_sums + 2 * width + j, nullptr);
        store<false>(hn::Mul(of_fresh, reset), grad_sums + 3 * width + j, nullptr);
        store(hn::Mul(grad, update), grad_state + j);
      }
    }
  });
}

}  // namespace
}  // namespace oxytorch::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
