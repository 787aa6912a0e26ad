#include "data/color.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <numeric>

#include "data/item.h"
#include "data/pixel_kernels.h"

namespace oxytorch::data {
namespace {

using ByteTable = std::array<std::uint8_t, 256>;

template <class Function>
ByteTable byte_table(Function function) {
  ByteTable table;
  for (int value = 0; value < 256; ++value)
    table[static_cast<std::size_t>(value)] = static_cast<std::uint8_t>(function(value));
  return table;
}

// PIL's blend: cut off, not rounded.
ByteTable blend_table(int from, double factor) {
  const auto by = static_cast<float>(factor);
  return byte_table([&](int value) {
    return std::clamp(static_cast<float>(from) + by * static_cast<float>(value - from), 0.0F, 255.0F);
  });
}

void look_up(Pixels& pixels, const ByteTable& table) {
  std::uint8_t* const data = pixels.data.get();
  for (std::size_t i = 0, count = pixels.bytes(); i < count; ++i) data[i] = table[data[i]];
}

using ByteHistogram = std::array<std::int64_t, 256>;

// Looks each channel up in the table that make(its histogram) gives.
template <class Make>
void look_up_by_histogram(Pixels& pixels, Make make) {
  const auto channels = static_cast<std::size_t>(pixels.channels);
  for (std::size_t channel = 0; channel < channels; ++channel) {
    std::uint8_t* const data = pixels.data.get();
    ByteHistogram histogram{};
    for (std::size_t i = channel, end = pixels.bytes(); i < end; i += channels) ++histogram[data[i]];
    const ByteTable table = make(histogram);
    for (std::size_t i = channel, end = pixels.bytes(); i < end; i += channels) data[i] = table[data[i]];
  }
}

struct Hsv {
  int hue, saturation, value;
};

// PIL's conversions, of which each step is a float or a double as it is there.
Hsv hsv_of(const std::uint8_t* rgb) {
  const int most = std::max({rgb[0], rgb[1], rgb[2]});
  const int least = std::min({rgb[0], rgb[1], rgb[2]});
  if (most == least) return {0, 0, most};
  const auto range = static_cast<float>(most - least);
  const auto below = [&](int channel) { return static_cast<float>(most - rgb[channel]) / range; };
  float hue;
  if (rgb[0] == most) {
    hue = below(2) - below(1);
  } else if (rgb[1] == most) {
    hue = static_cast<float>(2.0 + below(0) - below(2));
  } else {
    hue = static_cast<float>(4.0 + below(1) - below(0));
  }
  const double turns = hue / 6.0 + 1.0;
  hue = static_cast<float>(turns >= 1 ? turns - 1 : turns);
  return {static_cast<int>(hue * 255.0), static_cast<int>(range / static_cast<float>(most) * 255.0), most};
}

std::uint8_t rounded_byte(double value) {
  const double raised = value + 0.5;
  return static_cast<std::uint8_t>(raised);
}

void rgb_of(const Hsv& hsv, std::uint8_t* rgb) {
  const double sixths = static_cast<float>(hsv.hue) * 6.0 / 255.0;
  const int sector = static_cast<int>(sixths);
  const auto within = static_cast<float>(sixths - sector);
  const auto saturation = static_cast<float>(static_cast<float>(hsv.saturation) / 255.0);
  const double value = hsv.value;
  const std::uint8_t high = static_cast<std::uint8_t>(hsv.value);
  const std::uint8_t low = rounded_byte(value * (1.0 - saturation));
  const std::uint8_t falling = rounded_byte(value * (1.0 - saturation * within));
  const std::uint8_t rising = rounded_byte(value * (1.0 - saturation * (1.0 - within)));
  static constexpr std::uint8_t kWhich[6][3] = {{0, 3, 1}, {2, 0, 1}, {1, 0, 3}, {1, 2, 0}, {3, 1, 0}, {0, 1, 2}};
  const std::uint8_t choices[4] = {high, low, falling, rising};
  for (int channel = 0; channel < 3; ++channel) rgb[channel] = choices[kWhich[sector % 6][channel]];
}

}  // namespace

void adjust_brightness(Pixels& pixels, double factor) { look_up(pixels, blend_table(0, factor)); }

void adjust_saturation(Pixels& pixels, double factor) {
  if (pixels.channels != 3) return;
  pixel_kernels().blend_gray(pixels.data.get(), pixels.bytes() / 3, static_cast<float>(factor));
}

void adjust_contrast(Pixels& pixels, double factor) {
  const std::uint8_t* const data = pixels.data.get();
  const std::uint64_t sum = pixels.channels == 3 ? pixel_kernels().gray_sum(data, pixels.bytes() / 3)
                                                 : std::accumulate(data, data + pixels.bytes(), std::uint64_t{0});
  const double count = static_cast<double>(pixels.width) * pixels.height;
  look_up(pixels, blend_table(rounded_byte(static_cast<double>(sum) / count), factor));
}

void adjust_sharpness(Pixels& pixels, double factor) {
  if (pixels.width < 3 || pixels.height < 3) return;
  const Pixels before = copy_box(pixels, {0, 0, pixels.width, pixels.height});
  const std::size_t row = row_bytes(pixels);
  const auto channels = static_cast<std::size_t>(pixels.channels);
  const PixelKernels& kernels = pixel_kernels();
  for (std::size_t y = 1; y + 1 < static_cast<std::size_t>(pixels.height); ++y) {
    const std::uint8_t* from = before.data.get() + y * row + channels;
    kernels.blend_smooth(from - row, from, from + row, row - 2 * channels, channels, static_cast<float>(factor),
                         pixels.data.get() + y * row + channels);
  }
}

void adjust_hue(Pixels& pixels, double turn) {
  if (pixels.channels != 3) return;
  const int shift = static_cast<int>(turn * 255);
  std::uint8_t* rgb = pixels.data.get();
  for (std::size_t i = 0, count = pixels.bytes() / 3; i < count; ++i, rgb += 3) {
    Hsv hsv = hsv_of(rgb);
    hsv.hue = (hsv.hue + shift) & 255;
    if (hsv.saturation != 0)
      rgb_of(hsv, rgb);
    else
      rgb[0] = rgb[1] = rgb[2] = static_cast<std::uint8_t>(hsv.value);
  }
}

void posterize(Pixels& pixels, int bits) {
  look_up(pixels, byte_table([&](int value) { return value & ~((1 << (8 - bits)) - 1); }));
}

void solarize(Pixels& pixels, double threshold) {
  look_up(pixels, byte_table([&](int value) { return value < threshold ? value : 255 - value; }));
}

void auto_contrast(Pixels& pixels) {
  look_up_by_histogram(pixels, [](const ByteHistogram& histogram) {
    int low = 0, high = 255;
    while (low < 255 && histogram[static_cast<std::size_t>(low)] == 0) ++low;
    while (high > 0 && histogram[static_cast<std::size_t>(high)] == 0) --high;
    if (high <= low) return byte_table([](int value) { return value; });
    const double scale = 255.0 / (high - low);
    const double offset = -low * scale;
    return byte_table([&](int value) { return std::clamp(static_cast<int>(value * scale + offset), 0, 255); });
  });
}

void equalize(Pixels& pixels) {
  look_up_by_histogram(pixels, [](const ByteHistogram& histogram) {
    const auto last = std::find_if(histogram.rbegin(), histogram.rend(), [](std::int64_t n) { return n != 0; });
    const std::int64_t total = std::accumulate(histogram.begin(), histogram.end(), std::int64_t{0});
    const std::int64_t step = (total - *last) / 255;
    if (step == 0) return byte_table([](int value) { return value; });
    std::int64_t below = step / 2;
    return byte_table([&](int value) {
      const std::int64_t level = std::min<std::int64_t>(below / step, 255);
      below += histogram[static_cast<std::size_t>(value)];
      return level;
    });
  });
}

}  // namespace oxytorch::data
