#include "oxytorch/kernels/channel_norm.h"

#include "kernels/operators_table.h"

namespace oxytorch::kernels {

void channel_moments(const Rows& input, float* mean, float* squares, float* rest) {
  operator_table(active_isa()).channel_moments(input, mean, squares, rest);
}

void normalize_rows(const ChannelRule& rule, const Rows& input, const Rows& added, void* to) {
  operator_table(active_isa()).normalize_rows(rule, input, added, to);
}

void normalize_windows(const ChannelRule& rule, const WindowRow& windows, const Rows& input, void* to,
                       std::uint8_t* taps) {
  operator_table(active_isa()).normalize_windows(rule, windows, input, to, taps);
}

void channel_gradient_sums(const ChannelGradient& args, float* sum, float* dot) {
  operator_table(active_isa()).channel_gradient_sums(args, sum, dot);
}

void window_gradient_sums(const ChannelGradient& args, const WindowRow& windows, const std::uint8_t* taps, float* sum,
                          float* dot) {
  operator_table(active_isa()).window_gradient_sums(args, windows, taps, sum, dot);
}

void channel_gradient(const ChannelGradient& args, const ChannelSlope& slope, void* to, void* added) {
  operator_table(active_isa()).channel_gradient(args, slope, to, added);
}

void window_gradient(const ChannelGradient& args, const ChannelSlope& slope, const WindowRow& windows,
                     const std::uint8_t* taps, void* to) {
  operator_table(active_isa()).window_gradient(args, slope, windows, taps, to);
}

}  // namespace oxytorch::kernels
