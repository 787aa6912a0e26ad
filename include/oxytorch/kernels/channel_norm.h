/// Batch normalization in training of rows of channels, with what follows it: an addition, ReLU, the largest of each
/// window of an image; forward and backward.
///
/// Torch-free; `oxytorch::ops::batch_norm` runs these over a tensor. An image in channels_last is rows of channels. A
/// sum is of one channel over a part of the rows, in order: results have the same bits for any instruction set.
///
/// Threads. A function works on the memory it is given and keeps no state.
#pragma once

#include <cstdint>

#include "oxytorch/api.h"
#include "oxytorch/kernels/attention.h"

namespace oxytorch::kernels {

/// Mean of each channel as fp32 has it, the sum of squares of the distances from that, and their sum: what the mean of
/// all rows still lacks.
OXY_API void channel_moments(const Rows& input, float* mean, float* squares, float* rest);

/// (input - mean) * scale + bias of each channel, plus `added`, zero where that is negative.
struct ChannelRule {
  const float* mean = nullptr;
  const float* scale = nullptr;
  const float* bias = nullptr;
  bool relu = false;
};

/// Windows of `height` x `width` that lie side by side, and `count` of them in a row of an image. Rows of the image are
/// `line` elements apart.
struct WindowRow {
  std::int64_t height = 1;
  std::int64_t width = 1;
  std::int64_t count = 0;
  std::int64_t line = 0;

  [[nodiscard]] std::int64_t taps() const { return height * width; }
};
/// Most elements of a window.
inline constexpr std::int64_t kMostTaps = 64;
/// The place of a maximum that ReLU made zero.
inline constexpr std::uint8_t kNoTap = 255;

/// The rows by a rule, into `to` of the element and the size of `input`, contiguous. `added` has its size and element,
/// or no data.
OXY_API void normalize_rows(const ChannelRule& rule, const Rows& input, const Rows& added, void* to);

/// The largest of each window of normalized rows, and its place in the window: the first of equals, the last NaN's
/// first. `input` begins at the first window; `to` and `taps` hold `count` rows.
OXY_API void normalize_windows(const ChannelRule& rule, const WindowRow& windows, const Rows& input, void* to,
                               std::uint8_t* taps);

/// What gradients of normalized rows are made of.
struct ChannelGradient {
  ChannelRule rule;  ///< that of forward
  Rows grad;         ///< of the result; of windows, `count` rows
  Rows input;        ///< of the size of the result; of windows, as for normalize_windows()
  Rows output;       ///< the result, where forward added something and had ReLU; else no data
};

/// Sums over the rows of each channel: of the gradient behind ReLU, and of it times (input - mean).
OXY_API void channel_gradient_sums(const ChannelGradient& args, float* sum, float* dot);
OXY_API void window_gradient_sums(const ChannelGradient& args, const WindowRow& windows, const std::uint8_t* taps,
                                  float* sum, float* dot);

/// The gradient behind ReLU times `scale`, plus `constant` + (input - mean) * `slope`, into `to`: as `input` lies for
/// windows, else contiguous. `added`, where it is not null, takes the gradient behind ReLU itself.
struct ChannelSlope {
  const float* constant = nullptr;
  const float* slope = nullptr;
};
OXY_API void channel_gradient(const ChannelGradient& args, const ChannelSlope& slope, void* to, void* added);
OXY_API void window_gradient(const ChannelGradient& args, const ChannelSlope& slope, const WindowRow& windows,
                             const std::uint8_t* taps, void* to);

}  // namespace oxytorch::kernels
