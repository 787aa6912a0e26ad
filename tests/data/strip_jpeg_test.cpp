#include <gtest/gtest.h>

#include <thread>

#include "data/coefficients.h"
#include "image_cases.h"
#include "oxytorch/data/image.h"
#include "oxytorch/error.h"
#include "oxytorch/isa.h"

namespace {

using namespace oxytorch::data;
using namespace image_cases;
using oxytorch::Error;
using oxytorch::ErrorCode;

std::vector<JpegCase> baseline_cases() {
  std::vector<JpegCase> cases;
  unsigned seed = 0;
  for (const auto& [width, height] : kSides) {
    for (const auto& [horizontal, vertical] : kSamplings) {
      for (const int quality : {30, 75, 90, 100}) {
        JpegCase image{
            .width = width, .height = height, .quality = quality, .horizontal = horizontal, .vertical = vertical};
        image.seed = ++seed;
        image.step = seed % 3 == 0 ? 3 : seed % 3 == 1 ? 24 : 120;
        image.optimized = seed % 2 == 0;
        image.restart = seed % 5 == 0 ? 3 : 0;
        cases.push_back(image);
      }
    }
    cases.push_back({.width = width, .height = height, .components = 1, .horizontal = 1, .vertical = 1});
    cases.push_back({.width = width, .height = height, .components = 1, .horizontal = 2, .vertical = 2});
    cases.push_back({.width = width, .height = height, .horizontal = 1, .vertical = 1, .rgb = true});
  }
  return cases;
}

TEST(StripJpeg, ThisLibjpegTakesCoefficients) { EXPECT_TRUE(can_strip_jpeg()); }

TEST(StripJpeg, PixelsAreThoseOfTheOriginal) {
  std::mt19937 random(1);
  for (const JpegCase& image : baseline_cases()) {
    const std::string jpeg = make_jpeg(image), stripped = strip_jpeg(bytes_of(jpeg));
    ASSERT_FALSE(stripped.empty());
    for (const auto isa : oxytorch::supported_isas()) {
      const oxytorch::ScopedIsa scoped(isa);
      EXPECT_EQ(strip_jpeg(bytes_of(jpeg)), stripped) << name(isa);
      for (const int channels : {3, 1}) {
        const Pixels whole = decode_image(bytes_of(jpeg), channels);
        ASSERT_EQ(values(decode_stripped(bytes_of(stripped), channels)), values(whole)) << name(isa);
        for (int i = 0; i < (image.width < 60 ? 3 : 10); ++i) {
          const Box box = random_crop(random, image.width, image.height);
          ASSERT_EQ(values(decode_stripped(bytes_of(stripped), channels, box)), cut(whole, box))
              << name(isa) << " " << image.width << "x" << image.height << " sampled " << image.horizontal
              << image.vertical << " crop " << box.x << "," << box.y << " " << box.width << "x" << box.height;
        }
      }
    }
  }
}

TEST(StripJpeg, OtherImagesAreLeftAlone) {
  EXPECT_EQ(strip_jpeg(bytes_of(make_jpeg({.progressive = true}))), "");
  EXPECT_EQ(strip_jpeg(bytes_of(make_jpeg({.components = 4, .horizontal = 1, .vertical = 1}))), "");
  EXPECT_EQ(strip_jpeg(bytes_of(make_jpeg({.arithmetic = true}))), "");
  EXPECT_EQ(strip_jpeg(bytes_of(make_jpeg({.separate_scans = true}))), "");
  EXPECT_EQ(strip_jpeg(bytes_of(make_webp(9, 9, false, 24, 1))), "");
  EXPECT_EQ(strip_jpeg({}), "");
  std::string twelve_bits = make_jpeg({});
  twelve_bits[twelve_bits.find("\xFF\xC0") + 4] = 12;
  EXPECT_EQ(strip_jpeg(bytes_of(twelve_bits)), "");
}

TEST(StripJpeg, DamagedImagesAreLeftAlone) {
  const std::string jpeg = make_jpeg({});
  const std::string stripped = strip_jpeg(bytes_of(jpeg));
  for (std::size_t size = 0; size < jpeg.size(); ++size) {
    const std::vector<char> prefix(jpeg.begin(), jpeg.begin() + static_cast<std::ptrdiff_t>(size));
    const std::string got = strip_jpeg(std::as_bytes(std::span(prefix)));
    EXPECT_TRUE(got.empty() || got == stripped) << size;
  }
  std::mt19937 random(2);
  for (int i = 0; i < 2000; ++i) {
    std::string mutated = jpeg;
    for (unsigned n = 1 + random() % 4; n > 0; --n) mutated[random() % mutated.size()] = static_cast<char>(random());
    const std::string got = strip_jpeg(bytes_of(mutated));
    if (got.empty()) continue;
    // What can be stripped can be decoded, to the same pixels.
    EXPECT_EQ(values(decode_stripped(bytes_of(got))), values(decode_image(bytes_of(mutated))));
  }
}

TEST(StripJpeg, WhatIsNoPixelIsDropped) {
  std::string jpeg = make_jpeg({});
  const std::string stripped = strip_jpeg(bytes_of(jpeg));
  jpeg.insert(2, std::string("\xFF\xE1\x13\x88", 4) + std::string(4998, 'x'));
  EXPECT_EQ(strip_jpeg(bytes_of(jpeg)), stripped);
}

TEST(StripJpeg, IsSmall) {
  const std::string jpeg = make_jpeg({.width = 500, .height = 375, .quality = 85, .step = 8});
  EXPECT_LT(strip_jpeg(bytes_of(jpeg)).size(), 2 * jpeg.size());
}

TEST(StripJpeg, DamageThrowsOrGivesPixels) {
  const std::string stripped = strip_jpeg(bytes_of(make_jpeg({})));
  const auto damaged = [](const std::string& text) {
    // An exact copy, so that a sanitizer sees a read behind it.
    const std::vector<char> copy(text.begin(), text.end());
    try {
      const Pixels pixels = decode_stripped(std::as_bytes(std::span(copy)));
      EXPECT_GT(pixels.bytes(), 0U);
      return false;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::Io) << error.what();
      return true;
    }
  };
  for (std::size_t size = 0; size < stripped.size(); ++size) EXPECT_TRUE(damaged(stripped.substr(0, size))) << size;
  EXPECT_TRUE(damaged(stripped + '\0'));
  EXPECT_FALSE(damaged(stripped));
  std::mt19937 random(3);
  for (const auto isa : oxytorch::supported_isas()) {
    const oxytorch::ScopedIsa scoped(isa);
    // Each byte of the header and of the offsets, then any bytes.
    for (std::size_t i = 0; i < std::min<std::size_t>(stripped.size(), 700); ++i) {
      for (const int value : {0, 1, 0x7F, 0x80, 0xFF}) {
        std::string mutated = stripped;
        mutated[i] = static_cast<char>(value);
        damaged(mutated);
      }
    }
    for (int i = 0; i < 4000; ++i) {
      std::string mutated = stripped;
      for (unsigned n = 1 + random() % 8; n > 0; --n) mutated[random() % mutated.size()] = static_cast<char>(random());
      damaged(mutated);
    }
  }
}

TEST(StripJpeg, BadRequestsNameTheValue) {
  const std::string stripped = strip_jpeg(bytes_of(make_jpeg({})));
  EXPECT_THROW(decode_stripped(bytes_of(stripped), 4), Error);
  EXPECT_THROW(decode_stripped(bytes_of(stripped), 3, Box{60, 0, 6, 1}), Error);
}

TEST(StripJpeg, ThreadsStripAndDecodeAtOnce) {
  const std::string jpeg = make_jpeg({}), stripped = strip_jpeg(bytes_of(jpeg));
  const auto pixels = values(decode_image(bytes_of(jpeg)));
  std::vector<std::thread> threads;
  std::vector<int> equal(4);
  for (int& count : equal) {
    threads.emplace_back([&] {
      for (int i = 0; i < 50; ++i) {
        if (strip_jpeg(bytes_of(jpeg)) == stripped && values(decode_stripped(bytes_of(stripped))) == pixels) ++count;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(equal, std::vector<int>(4, 50));
}

// Any coefficients that a JPEG's Huffman codes can say, also such as no encoder writes.
TEST(StripJpeg, CoefficientsOfAnySizeComeBack) {
  std::mt19937 random(4);
  const McuLayout layout{7, 5, 6};
  std::vector<std::int16_t> blocks(7UL * 5 * 6 * 64);
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    const std::size_t block = i / 64;
    if (random() % 8 < block % 9) {
      blocks[i] = static_cast<std::int16_t>(static_cast<std::int16_t>(random()) >> (block % 16));
    }
  }
  for (const auto isa : oxytorch::supported_isas()) {
    const oxytorch::ScopedIsa scoped(isa);
    CoefficientWriter writer;
    writer.begin(layout, "header");
    for (std::size_t i = 0; i < blocks.size(); i += 6UL * 64) writer.add_mcu(blocks.data() + i);
    const std::string packed = writer.finish();
    CoefficientReader reader(bytes_of(packed));
    std::vector<std::int16_t> got(blocks.size());
    for (std::size_t i = 0; i < blocks.size(); i += 6UL * 64) {
      std::int16_t* pointers[6];
      for (std::size_t k = 0; k < 6; ++k) pointers[k] = got.data() + i + k * 64;
      ASSERT_TRUE(reader.next_mcu(pointers));
    }
    EXPECT_EQ(got, blocks) << name(isa);
    std::int16_t* none[6] = {};
    EXPECT_FALSE(reader.next_mcu(none));
  }
}

}  // namespace
