// How images leave the pipeline: every layout and dtype beside the formula, on every instruction set.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "oxytorch/data/stage.h"
#include "oxytorch/error.h"
#include "oxytorch/isa.h"

namespace oxytorch::data {
namespace {

constexpr std::byte kUntouched{0xA5};

Pixels noise_to_write(int width, int height, int channels) {
  Pixels pixels{width, height, channels, nullptr};
  pixels.data = std::make_shared<std::uint8_t[]>(pixels.bytes());
  std::mt19937 random(7);
  std::generate_n(pixels.data.get(), pixels.bytes(), [&] { return static_cast<std::uint8_t>(random() >> 9); });
  return pixels;
}

// What write_pixels() writes `shift` bytes into memory, of which nothing else may change.
std::vector<std::byte> written(const Pixels& pixels, const ImageOutput& output, std::size_t shift = 0) {
  const std::size_t bytes = pixels.bytes() * (output.normalize ? size_of(output.dtype) : 1);
  std::vector<std::byte> memory(bytes + 128, kUntouched);
  write_pixels(pixels, output, memory.data() + shift);
  for (std::size_t i = 0; i < memory.size(); ++i) {
    if (i < shift || i >= shift + bytes) {
      EXPECT_EQ(memory[i], kUntouched) << "byte " << i << " of " << bytes;
    }
  }
  return {memory.begin() + static_cast<std::ptrdiff_t>(shift),
          memory.begin() + static_cast<std::ptrdiff_t>(shift + bytes)};
}

float value_at(const std::vector<std::byte>& bytes, std::size_t index) {
  float value;
  std::memcpy(&value, bytes.data() + index * sizeof(value), sizeof(value));
  return value;
}

ImageOutput imagenet() {
  ImageOutput output;
  output.normalize = true;
  output.mean = {0.485F, 0.456F, 0.406F};
  output.deviation = {0.229F, 0.224F, 0.225F};
  return output;
}

TEST(WritePixels, FollowsTheFormulaInEveryLayout) {
  const auto output = imagenet();
  for (int width = 1; width <= 53; ++width) {
    const Pixels pixels = noise_to_write(width, 3, 3);
    const std::size_t count = pixels.bytes() / 3;
    for (const bool last : {false, true}) {
      auto layout = output;
      layout.channels_last = last;
      const auto bytes = written(pixels, layout);
      for (std::size_t i = 0; i < pixels.bytes(); ++i) {
        const std::size_t pixel = i / 3, channel = i % 3;
        const double deviation = output.deviation[channel], mean = output.mean[channel];
        const double exact = (pixels.data[static_cast<std::ptrdiff_t>(i)] / 255.0 - mean) / deviation;
        ASSERT_FLOAT_EQ(value_at(bytes, last ? i : channel * count + pixel), static_cast<float>(exact)) << i;
      }
    }
  }
}

TEST(WritePixels, GivesTheSameBitsOnEveryInstructionSetAndAtAnyAddress) {
  for (const int channels : {1, 3}) {
    const Pixels pixels = noise_to_write(37, 11, channels);
    for (const bool normalize : {false, true}) {
      for (const bool last : {false, true}) {
        for (const DType dtype : {DType::F32, DType::BF16, DType::F16}) {
          auto output = imagenet();
          output.normalize = normalize;
          output.channels_last = last;
          output.dtype = dtype;
          const auto expected = written(pixels, output);
          for (const Isa isa : supported_isas()) {
            const ScopedIsa scope(isa);
            for (const std::size_t shift : {std::size_t{0}, std::size_t{1}, std::size_t{6}}) {
              ASSERT_EQ(written(pixels, output, shift), expected) << name(isa) << ", " << name(dtype);
            }
          }
        }
      }
    }
  }
}

TEST(WritePixels, RoundsNarrowTypesToNearestEven) {
  const Pixels pixels = noise_to_write(64, 4, 1);
  auto output = imagenet();
  const auto floats = written(pixels, output);
  output.dtype = DType::BF16;
  const auto narrow = written(pixels, output);
  for (std::size_t i = 0; i < pixels.bytes(); ++i) {
    const auto bits = std::bit_cast<std::uint32_t>(value_at(floats, i));
    std::uint16_t found;
    std::memcpy(&found, narrow.data() + 2 * i, 2);
    EXPECT_EQ(found, (bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
  }
  // 0 and 1 in float16.
  Pixels ends{2, 1, 1, std::make_shared<std::uint8_t[]>(2)};
  ends.data[1] = 255;
  ImageOutput plain;
  plain.normalize = true;
  plain.dtype = DType::F16;
  EXPECT_EQ(written(ends, plain), (std::vector<std::byte>{std::byte{0}, std::byte{0}, std::byte{0}, std::byte{0x3C}}));
}

TEST(WritePixels, CopiesBytes) {
  for (const int channels : {1, 2, 3, 4}) {
    const Pixels pixels = noise_to_write(21, 5, channels);
    ImageOutput output;
    const auto planes = written(pixels, output);
    output.channels_last = true;
    const auto rows = written(pixels, output);
    const auto each = static_cast<std::size_t>(channels);
    for (std::size_t i = 0; i < pixels.bytes(); ++i) {
      const std::byte value{pixels.data[static_cast<std::ptrdiff_t>(i)]};
      ASSERT_EQ(rows[i], value);
      ASSERT_EQ(planes[i % each * (pixels.bytes() / each) + i / each], value);
    }
  }
}

TEST(WritePixels, RefusesWhatCannotBeNormalized) {
  std::vector<std::byte> out(4096);
  const auto refused = [&](const Pixels& pixels, const ImageOutput& output) {
    EXPECT_THROW(write_pixels(pixels, output, out.data()), Error);
  };
  const Pixels pixels = noise_to_write(3, 3, 3);
  auto output = imagenet();
  refused({}, output);
  refused(noise_to_write(3, 3, 2), output);
  output.dtype = DType::I64;
  refused(pixels, output);
  for (const float bad : {0.0F, -1.0F, 1e-39F, std::numeric_limits<float>::quiet_NaN()}) {
    output = imagenet();
    output.deviation[1] = bad;
    refused(pixels, output);
  }
  output = imagenet();
  output.mean[2] = std::numeric_limits<float>::infinity();
  refused(pixels, output);
}

}  // namespace
}  // namespace oxytorch::data
