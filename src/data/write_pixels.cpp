#include <cmath>
#include <cstring>
#include <limits>

#include "data/item.h"
#include "data/pixel_kernels.h"
#include "oxytorch/error.h"

namespace oxytorch::data {
namespace {

// The line of each value that is normalized at once, where the channel of value i is channel_of(i).
template <class ChannelOf>
NormalizeLines normalize_lines(const ImageOutput& output, ChannelOf channel_of) {
  NormalizeLines lines;
  for (std::size_t i = 0; i < kNormalized; ++i) {
    const std::size_t channel = channel_of(i);
    const double deviation = output.deviation[channel];
    const double mean = output.mean[channel];
    lines.scale[i] = 1 / (255 * deviation);
    lines.bias[i] = -mean / deviation;
    OXY_CHECK(deviation > 0 && std::abs(lines.bias[i]) + 255 * lines.scale[i] < std::numeric_limits<float>::max(),
              InvalidArgument, "images cannot be normalized by the mean ", mean, " and the deviation ", deviation,
              "; the deviation must be above 0, and both finite.");
  }
  return lines;
}

void write_normalized(const Pixels& pixels, const ImageOutput& output, std::byte* out) {
  OXY_CHECK(output.dtype == DType::F32 || output.dtype == DType::BF16 || output.dtype == DType::F16, InvalidType,
            "images are normalized to float32, bfloat16 or float16, not to ", name(output.dtype), ".");
  OXY_CHECK(pixels.channels == 1 || pixels.channels == 3, InvalidArgument, "an image of ", pixels.channels,
            " channels cannot be normalized; expected 1 or 3.");
  const PixelKernels& kernels = pixel_kernels();
  if (pixels.channels == 1 || output.channels_last) {
    const auto channels = static_cast<std::size_t>(pixels.channels);
    const NormalizeLines lines = normalize_lines(output, [&](std::size_t i) { return i % channels; });
    kernels.normalize(pixels.data.get(), pixels.bytes(), lines, output.dtype, out);
  } else {
    const NormalizeLines lines = normalize_lines(output, [](std::size_t i) { return i / (kNormalized / 3); });
    kernels.planes(pixels.data.get(), pixels.bytes() / 3, lines, output.dtype, out);
  }
}

}  // namespace

void write_pixels(const Pixels& pixels, const ImageOutput& output, std::byte* out) {
  check_pixels(pixels, "write_pixels()");
  if (output.normalize) return write_normalized(pixels, output, out);
  if (pixels.channels == 1 || output.channels_last) {
    std::memcpy(out, pixels.data.get(), pixels.bytes());
    return;
  }
  if (pixels.channels == 3) return pixel_kernels().planes(pixels.data.get(), pixels.bytes() / 3, {}, DType::U8, out);
  const auto channels = static_cast<std::size_t>(pixels.channels);
  for (std::size_t i = 0, count = pixels.bytes() / channels; i < count; ++i) {
    for (std::size_t c = 0; c < channels; ++c)
      out[c * count + i] = std::byte{pixels.data[static_cast<std::ptrdiff_t>(i * channels + c)]};
  }
}

}  // namespace oxytorch::data
