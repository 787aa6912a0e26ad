// The kernels of operators.h, activation.h, attention.h, channel_norm.h, cross_entropy.h, embedding.h, gru.h,
// lstm.h, rotary.h and row_norm.h: one source, compiled for each instruction set by Highway.
#include "kernels/operators_table.h"
#include "kernels/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/operators_kernels.cpp"
#include <hwy/foreach_target.h>
//
#include <hwy/highway.h>

#include "kernels/activation-inl.h"
#include "kernels/attention-inl.h"
#include "kernels/batch_norm-inl.h"
#include "kernels/bernoulli-inl.h"
#include "kernels/channel_norm-inl.h"
#include "kernels/cross_entropy-inl.h"
#include "kernels/embedding-inl.h"
#include "kernels/gru-inl.h"
#include "kernels/lstm-inl.h"
#include "kernels/optimizer_loop-inl.h"
#include "kernels/pool-inl.h"
#include "kernels/rotary-inl.h"
#include "kernels/row_norm-inl.h"

HWY_BEFORE_NAMESPACE();
namespace oxytorch::kernels::HWY_NAMESPACE {

const OperatorTable& operators() {
  static constexpr OperatorTable kTable{max_pool2d,
                                        max_pool2d_backward,
                                        batch_norm_forward,
                                        batch_norm_backward,
                                        bernoulli,
                                        adam_averages,
                                        adam_parameters,
                                        sgd_step,
                                        load_tile,
                                        make_operand,
                                        pack_operand,
                                        pack_panels,
                                        apply_rule,
                                        dropout_tile,
                                        softmax_tile,
                                        scale_columns,
                                        softmax_gradient,
                                        cross_entropy_gradient,
                                        cross_entropy_rows,
                                        dot_rows,
                                        store_rows,
                                        add_rows,
                                        sum_columns,
                                        transpose_words,
                                        channel_moments,
                                        normalize_rows,
                                        normalize_windows,
                                        channel_gradient_sums,
                                        window_gradient_sums,
                                        channel_gradient,
                                        window_gradient,
                                        activate,
                                        activate_backward,
                                        relu_backward,
                                        normalize_sums,
                                        row_norm_gradient,
                                        lstm_forward,
                                        lstm_backward,
                                        gru_forward,
                                        gru_backward,
                                        rotate_rows,
                                        sum_rows};
  return kTable;
}

}  // namespace oxytorch::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace oxytorch::kernels {

const OperatorTable& operator_table(Isa isa) {
  switch (isa) {
#if HWY_TARGETS & HWY_AVX3
    case Isa::Avx512: return N_AVX3::operators();
#endif
#if HWY_TARGETS & HWY_AVX2
    case Isa::Avx2: return N_AVX2::operators();
#endif
#if HWY_TARGETS & HWY_EMU128
    default: return N_EMU128::operators();
#else
    default: return N_SCALAR::operators();
#endif
  }
}

}  // namespace oxytorch::kernels
#endif  // HWY_ONCE
