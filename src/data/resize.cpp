#include <algorithm>
#include <cmath>
#include <memory>

#include "data/item.h"
#include "data/pixel_kernels.h"

namespace oxytorch::data {
namespace {

// As PIL rounds: a negative one up.
int round_up_half(double value) {
  const double raised = value + 0.5;
  return static_cast<int>(raised);
}

// PIL's weights of its bilinear filter, a triangle, stretched by the scale where the image becomes smaller.
ResizeAxis resize_axis(int input, int output) {
  const double scale = static_cast<double>(input) / output;
  const double stretch = std::max(scale, 1.0);
  ResizeAxis axis;
  axis.stride = static_cast<int>(std::ceil(stretch)) * 2 + 1;
  const auto outputs = static_cast<std::size_t>(output);
  axis.first.resize(outputs);
  axis.taps.resize(outputs);
  axis.weights.resize(outputs * static_cast<std::size_t>(axis.stride));
  std::vector<double> triangle(static_cast<std::size_t>(axis.stride));
  std::int32_t* weights = axis.weights.data();
  for (std::size_t i = 0; i < outputs; ++i, weights += axis.stride) {
    const double center = (static_cast<double>(i) + 0.5) * scale;
    const int first = std::max(round_up_half(center - stretch), 0);
    const int taps = std::min(round_up_half(center + stretch), input) - first;
    double sum = 0;
    for (int k = 0; k < taps; ++k) {
      const double distance = std::abs((k + first - center + 0.5) * (1.0 / stretch));
      sum += triangle[static_cast<std::size_t>(k)] = distance < 1 ? 1 - distance : 0;
    }
    for (int k = 0; k < taps; ++k) {
      const double share = triangle[static_cast<std::size_t>(k)] / sum;
      weights[k] = round_up_half(share * (1 << kWeightBits));
    }
    axis.first[i] = first;
    axis.taps[i] = taps;
  }
  return axis;
}

// Columns of kRowsAside rows lie side by side while their width changes, so that both passes weigh long rows.
void resize_width(const Pixels& from, Pixels& to) {
  const PixelKernels& kernels = pixel_kernels();
  const auto channels = static_cast<std::size_t>(from.channels);
  const std::size_t from_row = static_cast<std::size_t>(from.width) * channels;
  const std::size_t to_row = static_cast<std::size_t>(to.width) * channels;
  const auto buffer = std::make_unique_for_overwrite<std::uint8_t[]>((from_row + to_row) * kRowsAside);
  std::uint8_t* const columns = buffer.get();
  std::uint8_t* const resized = columns + from_row * kRowsAside;
  const ResizeAxis axis = resize_axis(from.width, to.width);
  const auto height = static_cast<std::size_t>(from.height);
  for (std::size_t y = 0; y < height; y += kRowsAside) {
    const std::size_t rows = std::min(kRowsAside, height - y);
    kernels.gather_rows(from.data.get() + y * from_row, from_row, rows, from_row, columns);
    kernels.resample(axis, columns, channels * kRowsAside, resized, channels * kRowsAside);
    kernels.scatter_rows(resized, rows, to_row, to.data.get() + y * to_row, to_row);
  }
}

void resize_height(const Pixels& from, Pixels& to) {
  const std::size_t row = static_cast<std::size_t>(from.width) * static_cast<std::size_t>(from.channels);
  pixel_kernels().resample(resize_axis(from.height, to.height), from.data.get(), row, to.data.get(), row);
}

Pixels resize_axis_of(const Pixels& pixels, int width, int height) {
  if (width == pixels.width && height == pixels.height) return pixels;
  Pixels resized = allocate_pixels(width, height, pixels.channels);
  width == pixels.width ? resize_height(pixels, resized) : resize_width(pixels, resized);
  return resized;
}

}  // namespace

Pixels resize_pixels(const Pixels& pixels, int width, int height) {
  check_pixels(pixels, "resize_pixels()");
  // The order decides how values are rounded in between; this is the rule of Pillow 13. Before, the width came first
  // always.
  const bool height_first = height < pixels.height && pixels.height - height > 2 * (pixels.width - width);
  const Pixels between =
      height_first ? resize_axis_of(pixels, pixels.width, height) : resize_axis_of(pixels, width, pixels.height);
  return resize_axis_of(between, width, height);
}

}  // namespace oxytorch::data
