/// The kernels of oxytorch/kernels/operators.h, activation.h, attention.h, channel_norm.h, cross_entropy.h,
/// embedding.h, gru.h, lstm.h, rotary.h and row_norm.h, one table for each instruction set.
#pragma once

#include "oxytorch/isa.h"
#include "oxytorch/kernels/activation.h"
#include "oxytorch/kernels/attention.h"
#include "oxytorch/kernels/channel_norm.h"
#include "oxytorch/kernels/cross_entropy.h"
#include "oxytorch/kernels/embedding.h"
#include "oxytorch/kernels/gru.h"
#include "oxytorch/kernels/lstm.h"
#include "oxytorch/kernels/operators.h"
#include "oxytorch/kernels/rotary.h"
#include "oxytorch/kernels/row_norm.h"

namespace oxytorch::kernels {

struct OperatorTable {
  void (*max_pool2d)(const PoolShape& shape, std::int64_t planes, const float* input, float* output,
                     std::int64_t* indices);
  bool (*max_pool2d_backward)(const PoolShape& shape, std::int64_t planes, const float* grad_output,
                              const std::int64_t* indices, float* grad_input);
  void (*batch_norm_forward)(const BatchNormForward& args, std::int64_t begin, std::int64_t end);
  void (*batch_norm_backward)(const BatchNormBackward& args, std::int64_t begin, std::int64_t end);
  void (*bernoulli)(MersenneTwister& generator, double p, std::int64_t count, ElementType element, void* to);
  void (*adam_averages)(const AdamLoop& loop, std::int64_t count, const float* param, const float* grad, float* exp_avg,
                        float* exp_avg_sq, float* max_exp_avg_sq);
  void (*adam_parameters)(const AdamLoop& loop, std::int64_t count, const float* exp_avg, const float* root,
                          float* param);
  void (*sgd_step)(const SgdLoop& loop, std::int64_t count, const float* grad, float* momentum_buffer, float* param);
  void (*load_tile)(TileFormat format, const Rows& from, std::int64_t rows, std::int64_t width, void* tile);
  void (*make_operand)(TileFormat format, Operand operand, const void* tile, std::int64_t rows, std::int64_t width,
                       void* work, void* to, std::int64_t stride);
  void (*pack_operand)(Operand operand, const Rows& from, std::int64_t rows, std::int64_t width, void* to,
                       std::int64_t stride);
  void (*pack_panels)(const Rows& from, std::int64_t terms, void* to, std::int64_t panel);
  void (*apply_rule)(const ScoreRule& rule, std::int64_t rows, std::int64_t columns, float* scores);
  void (*dropout_tile)(const TileDropout& rule, std::int64_t rows, std::uint32_t* keep);
  bool (*softmax_tile)(TileFormat format, float factor, std::int64_t rows, std::int64_t columns, const float* scores,
                       const std::uint32_t* keep, SoftmaxState& state, float* correction, void* weights);
  void (*scale_columns)(std::int64_t rows, const float* factors, float* tile);
  void (*softmax_gradient)(const SoftmaxGradient& tile);
  void (*cross_entropy_gradient)(const CrossEntropyGradient& tile);
  double (*cross_entropy_rows)(const CrossEntropyRows& rows);
  void (*dot_rows)(const Rows& a, const Rows& b, float* to);
  void (*store_rows)(const float* from, std::int64_t stride, std::int64_t rows, std::int64_t columns, float factor,
                     const float* factors, ElementType element, void* to, std::int64_t to_stride, const float* added,
                     bool relu);
  void (*add_rows)(const float* from, std::int64_t stride, std::int64_t rows, std::int64_t columns, float* to,
                   std::int64_t to_stride);
  void (*sum_columns)(const Rows& from, float* to);
  void (*transpose_words)(const void* from, std::int64_t stride, std::int64_t rows, std::int64_t columns, void* to,
                          std::int64_t to_stride);
  void (*channel_moments)(const Rows& input, float* mean, float* squares, float* rest);
  void (*normalize_rows)(const ChannelRule& rule, const Rows& input, const Rows& added, void* to);
  void (*normalize_windows)(const ChannelRule& rule, const WindowRow& windows, const Rows& input, void* to,
                            std::uint8_t* taps);
  void (*channel_gradient_sums)(const ChannelGradient& args, float* sum, float* dot);
  void (*window_gradient_sums)(const ChannelGradient& args, const WindowRow& windows, const std::uint8_t* taps,
                               float* sum, float* dot);
  void (*channel_gradient)(const ChannelGradient& args, const ChannelSlope& slope, void* to, void* added);
  void (*window_gradient)(const ChannelGradient& args, const ChannelSlope& slope, const WindowRow& windows,
                          const std::uint8_t* taps, void* to);
  void (*activate)(const Activated& of, const RowsTo& to);
  void (*activate_backward)(const Activated& of, const Rows& grad, const RowsTo& to_input, const RowsTo& to_times);
  void (*relu_backward)(const Rows& output, const Rows& grad, const RowsTo& to);
  void (*normalize_sums)(const RowSum& sum_of, const RowNorm& norm, const RowsOf& sum, const RowsOf& output,
                         float* mean, float* invstd, float* work);
  void (*row_norm_gradient)(const RowNormGradient& of, const RowsOf& to_input, const RowsOf& to_residual, float* weight,
                            float* bias, float* work);
  void (*lstm_forward)(const LstmForward& step);
  void (*lstm_backward)(const LstmBackward& step);
  void (*gru_forward)(const GruForward& step);
  void (*gru_backward)(const GruBackward& step);
  void (*rotate_rows)(const RotaryRule& rule, const Rows& from, void* to, std::int64_t to_stride);
  void (*sum_rows)(const RowSums& sums, void* to, std::int64_t to_stride);
};

/// The table of `isa`, which must be supported.
const OperatorTable& operator_table(Isa isa);

}  // namespace oxytorch::kernels
