#include "oxytorch/data/image.h"

#include <gtest/gtest.h>

#include <thread>

#include "image_cases.h"
#include "oxytorch/error.h"

namespace {

using namespace oxytorch::data;
using namespace image_cases;
using oxytorch::Error;
using oxytorch::ErrorCode;

std::vector<JpegCase> jpeg_cases() {
  std::vector<JpegCase> cases;
  unsigned seed = 0;
  for (const auto& [width, height] : kSides) {
    for (const auto& [horizontal, vertical] : kSamplings) {
      for (const int kind : {0, 1, 2}) {
        JpegCase image{
            .width = width, .height = height, .horizontal = horizontal, .vertical = vertical, .seed = ++seed};
        image.quality = 40 + static_cast<int>(seed * 7 % 60);
        image.progressive = kind == 1;
        image.restart = kind == 2 ? 2 : 0;
        cases.push_back(image);
      }
    }
    cases.push_back({.width = width, .height = height, .components = 1, .horizontal = 1, .vertical = 1});
    cases.push_back({.width = width, .height = height, .components = 1, .horizontal = 2, .vertical = 2});
    cases.push_back({.width = width, .height = height, .separate_scans = true});
    cases.push_back({.width = width, .height = height, .arithmetic = true});
    cases.push_back({.width = width, .height = height, .horizontal = 1, .vertical = 1, .rgb = true});
  }
  return cases;
}

ErrorCode code_of(const std::string& image, int channels = 3, std::optional<Box> crop = std::nullopt) {
  try {
    decode_image(bytes_of(image), channels, crop);
  } catch (const Error& error) {
    EXPECT_FALSE(std::string(error.what()).empty());
    return error.code();
  }
  ADD_FAILURE() << "decoded";
  return ErrorCode::Internal;
}

// Decodes what is damaged: pixels or an Error are right, a crash is not.
void try_decoding(const std::string& image) {
  try {
    const Pixels pixels = decode_image(bytes_of(image));
    EXPECT_GT(pixels.bytes(), 0U);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::Io) << error.what();
  }
}

std::vector<std::string> one_of_each_format() {
  return {make_jpeg({}), make_jpeg({.progressive = true}), make_webp(65, 33, false, 24, 1),
          make_webp(65, 33, true, 24, 1),
          make_png(65, 33, SPNG_COLOR_TYPE_TRUECOLOR, 8, false, noise(65, 33, 3, 24, 1))};
}

TEST(Image, HeadersSayFormatAndSize) {
  const auto images = one_of_each_format();
  for (std::size_t i = 0; i < images.size(); ++i) {
    const ImageHeader header = image_header(bytes_of(images[i]));
    EXPECT_EQ(header.format, i < 2 ? ImageFormat::Jpeg : i < 4 ? ImageFormat::WebP : ImageFormat::Png);
    EXPECT_EQ(header.width, 65);
    EXPECT_EQ(header.height, 33);
    for (std::size_t size = 0; size < images[i].size(); ++size) {
      // An exact copy, so that a sanitizer sees a read behind it.
      const std::vector<char> prefix(images[i].begin(), images[i].begin() + static_cast<std::ptrdiff_t>(size));
      const ImageHeader partial = image_header(std::as_bytes(std::span(prefix)));
      EXPECT_TRUE(partial.width == 0 || partial.width == 65);
    }
  }
  EXPECT_EQ(image_header(bytes_of("GIF89a.............................")).format, ImageFormat::Unknown);
  EXPECT_EQ(image_header({}).format, ImageFormat::Unknown);
  std::string extended = "RIFF....WEBPVP8X" + std::string("\x0A\0\0\0\0\0\0\0\x2B\x01\0\xC7\0\0", 14);
  EXPECT_EQ(image_header(bytes_of(extended)).width, 300);
  EXPECT_EQ(image_header(bytes_of(extended)).height, 200);
}

TEST(Image, WholeJpegsAreLibjpegs) {
  for (const JpegCase& image : jpeg_cases()) {
    const std::string jpeg = make_jpeg(image);
    EXPECT_EQ(values(decode_image(bytes_of(jpeg))), decode_with_libjpeg(jpeg, JCS_RGB));
    EXPECT_EQ(values(decode_image(bytes_of(jpeg), 1)), decode_with_libjpeg(jpeg, JCS_GRAYSCALE));
  }
}

TEST(Image, CropsOfJpegsAreCutsOfTheWhole) {
  std::mt19937 random(7);
  for (const JpegCase& image : jpeg_cases()) {
    const std::string jpeg = make_jpeg(image);
    for (const int channels : {3, 1}) {
      const Pixels whole = decode_image(bytes_of(jpeg), channels);
      for (int i = 0; i < (image.width < 60 ? 10 : 40); ++i) {
        const Box box = random_crop(random, image.width, image.height);
        const Pixels pixels = decode_image(bytes_of(jpeg), channels, box);
        ASSERT_EQ(values(pixels), cut(whole, box))
            << image.width << "x" << image.height << " sampled " << image.horizontal << image.vertical
            << " progressive " << image.progressive << " channels " << channels << " crop " << box.x << "," << box.y
            << " " << box.width << "x" << box.height;
      }
    }
  }
}

// A crop of the last columns, in an MCU of which the image has one or two columns.
TEST(Image, NarrowCropsOfJpegsAreCutsOfTheWhole) {
  for (const auto& [horizontal, vertical] : kSamplings) {
    for (const int width : {17, 18, 19, 33, 34, 35}) {
      const std::string jpeg = make_jpeg({.width = width, .horizontal = horizontal, .vertical = vertical});
      const Pixels whole = decode_image(bytes_of(jpeg));
      for (int x = 0; x < width; ++x) {
        const Box box{x, x % 31, std::min(1 + x % 2, width - x), 2};
        EXPECT_EQ(values(decode_image(bytes_of(jpeg), 3, box)), cut(whole, box)) << width << " " << x;
      }
    }
  }
}

TEST(Image, CropsOfAnIncompleteProgressiveJpegAreCutsOfTheWhole) {
  std::string jpeg = make_jpeg({.width = 131, .height = 75, .progressive = true});
  std::size_t last_scan = jpeg.rfind("\xFF\xDA");
  last_scan = jpeg.rfind("\xFF\xDA", last_scan - 1);
  jpeg = jpeg.substr(0, last_scan) + "\xFF\xD9";
  const Pixels whole = decode_image(bytes_of(jpeg));
  EXPECT_EQ(values(whole), decode_with_libjpeg(jpeg, JCS_RGB));
  std::mt19937 random(8);
  for (int i = 0; i < 100; ++i) {
    const Box box = random_crop(random, 131, 75);
    EXPECT_EQ(values(decode_image(bytes_of(jpeg), 3, box)), cut(whole, box));
  }
}

TEST(Image, CmykIsConvertedAsAdobeWritesIt) {
  const JpegCase image{.components = 4, .horizontal = 1, .vertical = 1};
  const std::string jpeg = make_jpeg(image);
  const auto cmyk = decode_with_libjpeg(jpeg, JCS_CMYK);
  const Pixels rgb = decode_image(bytes_of(jpeg));
  for (std::size_t i = 0; i < cmyk.size() / 4; ++i) {
    for (std::size_t c = 0; c < 3; ++c) {
      EXPECT_NEAR(rgb.data[3 * i + c], cmyk[4 * i + c] * cmyk[4 * i + 3] / 255.0, 1.0);
    }
  }
  const Box box{20, 10, 31, 15};
  EXPECT_EQ(values(decode_image(bytes_of(jpeg), 3, box)), cut(rgb, box));
  EXPECT_EQ(decode_image(bytes_of(jpeg), 1, box).bytes(), 31U * 15U);
}

TEST(Image, PngsOfEveryTypeAndDepth) {
  struct Type {
    spng_color_type type;
    int samples;
    std::vector<int> depths;
  };
  const std::vector<Type> types = {{SPNG_COLOR_TYPE_GRAYSCALE, 1, {1, 2, 4, 8, 16}},
                                   {SPNG_COLOR_TYPE_TRUECOLOR, 3, {8, 16}},
                                   {SPNG_COLOR_TYPE_INDEXED, 1, {1, 2, 4, 8}},
                                   {SPNG_COLOR_TYPE_GRAYSCALE_ALPHA, 2, {8, 16}},
                                   {SPNG_COLOR_TYPE_TRUECOLOR_ALPHA, 4, {8, 16}}};
  constexpr int kWidth = 37, kHeight = 21;
  for (const auto& [type, samples, depths] : types) {
    for (const int depth : depths) {
      // Rows of packed samples are whole bytes; any bits are samples.
      const int row_bytes = (kWidth * samples * depth + 7) / 8;
      const auto packed = noise(row_bytes, kHeight, 1, 90, static_cast<unsigned>(depth));
      const std::string png = make_png(kWidth, kHeight, type, depth, false, packed);
      const Pixels pixels = decode_image(bytes_of(png));
      ASSERT_EQ(pixels.width, kWidth);
      for (int y = 0; y < kHeight; ++y) {
        for (int x = 0; x < kWidth; ++x) {
          const auto sample = [&](int c) {
            const int bit = (x * samples + c) * depth;
            const int byte = packed.at(static_cast<std::size_t>(y) * static_cast<std::size_t>(row_bytes) +
                                       static_cast<std::size_t>(bit / 8));
            return depth >= 8 ? byte : byte >> (8 - depth - bit % 8) & ((1 << depth) - 1);
          };
          for (int c = 0; c < 3; ++c) {
            int expected = sample(samples < 3 ? 0 : c);
            if (type == SPNG_COLOR_TYPE_INDEXED) {
              expected = c == 0 ? expected * 7 & 255 : c == 1 ? 255 - expected : expected ^ 90;
            } else if (depth < 8) {
              expected = expected * 255 / ((1 << depth) - 1);
            }
            ASSERT_EQ(pixels.data[static_cast<std::size_t>((y * kWidth + x) * 3 + c)], expected)
                << type << " " << depth;
          }
        }
      }
      const Box box{5, 3, 20, 11};
      EXPECT_EQ(values(decode_image(bytes_of(png), 3, box)), cut(pixels, box));
      if (samples < 3 && type != SPNG_COLOR_TYPE_INDEXED) {
        const Pixels gray = decode_image(bytes_of(png), 1);
        for (std::size_t i = 0; i < gray.bytes(); ++i) ASSERT_EQ(gray.data[i], pixels.data[3 * i]);
      }
    }
  }
}

TEST(Image, CropsOfWebpsAreCutsOfTheWhole) {
  std::mt19937 random(9);
  for (const auto& [width, height] : kSides) {
    for (const bool lossless : {false, true}) {
      const std::string webp = make_webp(width, height, lossless, 24, 3);
      const Pixels whole = decode_image(bytes_of(webp));
      if (lossless) {
        EXPECT_EQ(values(whole), noise(width, height, 3, 24, 3));
      } else {
        int w = 0, h = 0;
        std::uint8_t* rgb = WebPDecodeRGB(reinterpret_cast<const std::uint8_t*>(webp.data()), webp.size(), &w, &h);
        EXPECT_EQ(values(whole), std::vector<std::uint8_t>(rgb, rgb + whole.bytes()));
        WebPFree(rgb);
      }
      for (int i = 0; i < 60; ++i) {
        const Box box = random_crop(random, width, height);
        ASSERT_EQ(values(decode_image(bytes_of(webp), 3, box)), cut(whole, box))
            << width << "x" << height << " crop " << box.x << "," << box.y << " " << box.width << "x" << box.height;
      }
    }
  }
}

TEST(Image, TruncatedFilesThrowOrAreRight) {
  for (const std::string& image : one_of_each_format()) {
    const auto whole = values(decode_image(bytes_of(image)));
    for (std::size_t size = 0; size < image.size(); ++size) {
      const std::vector<char> prefix(image.begin(), image.begin() + static_cast<std::ptrdiff_t>(size));
      try {
        const Pixels pixels = decode_image(std::as_bytes(std::span(prefix)));
        ASSERT_EQ(values(pixels), whole) << size << " of " << image.size();
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::Io) << error.what();
      }
    }
  }
}

TEST(Image, MutatedFilesDoNotCrash) {
  std::mt19937 random(10);
  for (const std::string& image : one_of_each_format()) {
    for (int i = 0; i < 700; ++i) {
      std::string mutated = image;
      for (unsigned n = 1 + random() % 4; n > 0; --n) mutated[random() % mutated.size()] = static_cast<char>(random());
      try_decoding(mutated);
    }
  }
}

TEST(Image, AbsurdSizesAreRefused) {
  std::string jpeg = make_jpeg({});
  const std::size_t frame = jpeg.find("\xFF\xC0");
  for (std::size_t i = frame + 5; i < frame + 9; ++i) jpeg[i] = static_cast<char>(i % 2 == 0 ? 0xF0 : 0x7F);
  EXPECT_EQ(code_of(jpeg), ErrorCode::Io);
  std::string small = make_jpeg({});
  small[frame + 5] = 0x20;  // 8,225 rows in a file for 33
  EXPECT_EQ(code_of(small), ErrorCode::Io);
  std::string png = make_png(65, 33, SPNG_COLOR_TYPE_TRUECOLOR, 8, false, noise(65, 33, 3, 24, 1));
  png[16] = 0x7F;
  EXPECT_EQ(code_of(png), ErrorCode::Io);
}

TEST(Image, BadRequestsNameTheValue) {
  const std::string jpeg = make_jpeg({});
  for (const Box& box : {Box{0, 0, 66, 1}, Box{64, 0, 2, 1}, Box{-1, 0, 5, 5}, Box{0, 0, 0, 4}, Box{0, 33, 1, 1},
                         Box{1, 1, 2147483647, 2147483647}}) {
    for (const std::string& image : one_of_each_format()) EXPECT_EQ(code_of(image, 3, box), ErrorCode::InvalidArgument);
  }
  EXPECT_EQ(code_of(jpeg, 2), ErrorCode::InvalidArgument);
  EXPECT_EQ(code_of("GIF89a"), ErrorCode::Io);
  EXPECT_EQ(code_of(""), ErrorCode::Io);
}

TEST(Image, TablesOfTheImageBeforeDoNotServe) {
  std::string jpeg = make_jpeg({});
  decode_image(bytes_of(jpeg));
  const std::size_t table = jpeg.find("\xFF\xDB");
  jpeg.erase(table, 2U + static_cast<unsigned char>(jpeg[table + 3]));
  EXPECT_EQ(code_of(jpeg), ErrorCode::Io);
}

TEST(Image, ThreadsDecodeAtOnce) {
  const auto images = one_of_each_format();
  std::vector<std::vector<std::uint8_t>> expected;
  for (const auto& image : images) expected.push_back(values(decode_image(bytes_of(image))));
  std::vector<std::thread> threads;
  std::vector<int> equal(4);
  for (std::size_t t = 0; t < equal.size(); ++t) {
    threads.emplace_back([&, t] {
      for (std::size_t i = 0; i < 100; ++i) {
        const std::size_t k = (i + t) % images.size();
        equal[t] += values(decode_image(bytes_of(images[k]))) == expected[k] ? 1 : 0;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(equal, std::vector<int>(4, 100));
}

}  // namespace
