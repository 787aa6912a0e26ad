// Resizing beside the definition, weight by weight, on every instruction set.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "oxytorch/data/stage.h"
#include "oxytorch/error.h"
#include "oxytorch/isa.h"

namespace oxytorch::data {
namespace {

Pixels noise_to_resize(int width, int height, int channels, unsigned seed) {
  Pixels pixels{width, height, channels, nullptr};
  pixels.data = std::make_shared<std::uint8_t[]>(pixels.bytes());
  std::mt19937 random(seed);
  std::generate_n(pixels.data.get(), pixels.bytes(), [&] { return static_cast<std::uint8_t>(random() >> 11); });
  return pixels;
}

std::vector<std::uint8_t> resized_bytes(const Pixels& pixels) {
  return {pixels.data.get(), pixels.data.get() + pixels.bytes()};
}

// PIL's sum for one output: `at(i)` is input i.
template <class At>
std::uint8_t weighed(int input, int output, int index, At at) {
  const double scale = static_cast<double>(input) / output, support = std::max(scale, 1.0);
  const double center = (index + 0.5) * scale;
  const double begin = center - support + 0.5, end = center + support + 0.5;
  const int first = std::max(static_cast<int>(begin), 0), last = std::min(static_cast<int>(end), input);
  std::vector<double> weights;
  double total = 0;
  for (int i = first; i < last; ++i) {
    weights.push_back(std::max(0.0, 1 - std::abs((i - center + 0.5) * (1 / support))));
    total += weights.back();
  }
  std::int64_t sum = 1 << 21;
  for (int i = first; i < last; ++i) {
    const double weight = weights[static_cast<std::size_t>(i - first)] / total * (1 << 22);
    sum += at(i) * static_cast<std::int64_t>(std::floor(weight + 0.5));
  }
  return static_cast<std::uint8_t>(std::min<std::int64_t>(sum >> 22, 255));
}

Pixels resized_by_definition(const Pixels& from, int width, int height, bool width_changes) {
  Pixels to{width, height, from.channels, nullptr};
  to.data = std::make_shared<std::uint8_t[]>(to.bytes());
  for (int y = 0; y < height; ++y) {
    for (int i = 0; i < width * from.channels; ++i) {
      const int x = i / from.channels, channel = i % from.channels;
      const auto value = [&](int column, int row) {
        return static_cast<int>(from.data[(row * from.width + column) * from.channels + channel]);
      };
      to.data[y * width * from.channels + i] =
          width_changes ? weighed(from.width, width, x, [&](int column) { return value(column, y); })
                        : weighed(from.height, height, y, [&](int row) { return value(x, row); });
    }
  }
  return to;
}

TEST(Resize, HandComputed) {
  Pixels pixels{2, 1, 1, std::make_shared<std::uint8_t[]>(2)};
  pixels.data[1] = 255;
  // Centres at 1/4, 3/4, 5/4 and 7/4 of pixels with the middle at 1/2 and 3/2.
  EXPECT_EQ(resized_bytes(resize_pixels(pixels, 4, 1)), (std::vector<std::uint8_t>{0, 64, 191, 255}));
  EXPECT_EQ(resized_bytes(resize_pixels(pixels, 1, 1)), (std::vector<std::uint8_t>{128}));
  EXPECT_EQ(resized_bytes(resize_pixels(pixels, 2, 2)), (std::vector<std::uint8_t>{0, 255, 0, 255}));
}

TEST(Resize, EqualsTheDefinitionOnEveryInstructionSet) {
  const int sides[] = {1, 2, 3, 7, 15, 16, 17, 33, 50, 64};
  std::mt19937 random(1);
  const auto side = [&] { return sides[random() % std::size(sides)]; };
  for (unsigned i = 0; i < 150; ++i) {
    const Pixels from = noise_to_resize(side(), side(), 1 + static_cast<int>(random() % 4), i);
    const int width = side(), height = side();
    const bool height_first = height < from.height && from.height - height > 2 * (from.width - width);
    const Pixels between = height_first ? resized_by_definition(from, from.width, height, false)
                                        : resized_by_definition(from, width, from.height, true);
    const auto expected = resized_bytes(resized_by_definition(between, width, height, height_first));
    for (const Isa isa : supported_isas()) {
      const ScopedIsa scope(isa);
      ASSERT_EQ(resized_bytes(resize_pixels(from, width, height)), expected)
          << name(isa) << ": " << from.width << " x " << from.height << " x " << from.channels << " to " << width
          << " x " << height;
    }
  }
}

TEST(Resize, KeepsOneColourAndEqualSize) {
  Pixels white{37, 21, 3, std::make_shared<std::uint8_t[]>(37 * 21 * 3)};
  std::memset(white.data.get(), 255, white.bytes());
  for (const auto& [width, height] : {std::pair{1, 1}, {5, 200}, {200, 5}, {36, 22}}) {
    for (const std::uint8_t value : resized_bytes(resize_pixels(white, width, height))) ASSERT_EQ(value, 255);
  }
  const Pixels noise = noise_to_resize(19, 23, 3, 1);
  EXPECT_EQ(resized_bytes(resize_pixels(noise, 19, 23)), resized_bytes(noise));
}

TEST(Resize, OfALongRow) {
  const Pixels noise = noise_to_resize(20000, 1, 1, 3);
  EXPECT_EQ(resized_bytes(resize_pixels(noise, 3, 1)), resized_bytes(resized_by_definition(noise, 3, 1, true)));
}

TEST(Resize, RefusesSizesThatAreNone) {
  const Pixels noise = noise_to_resize(4, 4, 3, 1);
  for (const auto& [width, height] : {std::pair{0, 4}, {4, 0}, {-1, 5}, {1 << 30, 4}, {1 << 20, 1 << 20}}) {
    EXPECT_THROW(static_cast<void>(resize_pixels(noise, width, height)), Error) << width << " x " << height;
  }
  EXPECT_THROW(static_cast<void>(resize_pixels({}, 4, 4)), Error);
}

}  // namespace
}  // namespace oxytorch::data
