// Images for tests: noise of a smoothness, and the three formats made of it by the formats' own libraries.
#pragma once

#include <spng.h>
#include <webp/decode.h>
#include <webp/encode.h>

#include <cstdio>
// jpeglib.h needs the one before.
#include <jpeglib.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "oxytorch/data/image.h"

namespace image_cases {

using oxytorch::data::Box;
using oxytorch::data::Pixels;

inline std::span<const std::byte> bytes_of(const std::string& text) { return std::as_bytes(std::span(text)); }

// Noise of which neighbours differ by at most `step` before it is folded back into 0..255.
inline std::vector<std::uint8_t> noise(int width, int height, int channels, int step, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<std::uint8_t> pixels;
  std::vector<int> above(static_cast<std::size_t>(width * channels), 128);
  std::vector<int> left(static_cast<std::size_t>(channels));
  for (int y = 0; y < height; ++y) {
    for (int i = 0; i < width * channels; ++i) {
      const auto c = static_cast<std::size_t>(i % channels);
      if (i < channels) left[c] = above[static_cast<std::size_t>(i)];
      const int change = static_cast<int>(random() % static_cast<unsigned>(2 * step + 1)) - step;
      const int value = (left[c] + above[static_cast<std::size_t>(i)] + 1) / 2 + change;
      left[c] = above[static_cast<std::size_t>(i)] = value < 0 ? -value : value > 255 ? 510 - value : value;
      pixels.push_back(static_cast<std::uint8_t>(left[c]));
    }
  }
  return pixels;
}

struct JpegCase {
  int width = 65, height = 33, components = 3, quality = 85, horizontal = 2, vertical = 2, step = 24;
  bool optimized = false, progressive = false, arithmetic = false, separate_scans = false, rgb = false;
  unsigned restart = 0, seed = 1;
};

inline void set_scans(jpeg_compress_struct& info, std::vector<jpeg_scan_info>& scans) {
  for (int c = 0; c < info.num_components; ++c) scans.push_back({1, {c, 0, 0, 0}, 0, 63, 0, 0});
  info.scan_info = scans.data();
  info.num_scans = static_cast<int>(scans.size());
}

inline std::string make_jpeg(const JpegCase& image) {
  jpeg_compress_struct info;
  jpeg_error_mgr errors;
  info.err = jpeg_std_error(&errors);
  jpeg_create_compress(&info);
  unsigned char* bytes = nullptr;
  unsigned long size = 0;
  jpeg_mem_dest(&info, &bytes, &size);
  info.image_width = static_cast<JDIMENSION>(image.width);
  info.image_height = static_cast<JDIMENSION>(image.height);
  info.input_components = image.components;
  info.in_color_space = image.components == 1 ? JCS_GRAYSCALE : image.components == 3 ? JCS_RGB : JCS_CMYK;
  jpeg_set_defaults(&info);
  if (image.rgb) jpeg_set_colorspace(&info, JCS_RGB);
  jpeg_set_quality(&info, image.quality, TRUE);
  info.comp_info[0].h_samp_factor = image.horizontal;
  info.comp_info[0].v_samp_factor = image.vertical;
  info.optimize_coding = image.optimized ? TRUE : FALSE;
  info.arith_code = image.arithmetic ? TRUE : FALSE;
  info.restart_interval = image.restart;
  std::vector<jpeg_scan_info> scans;
  if (image.progressive) jpeg_simple_progression(&info);
  if (image.separate_scans) set_scans(info, scans);
  auto pixels = noise(image.width, image.height, image.components, image.step, image.seed);
  jpeg_start_compress(&info, TRUE);
  while (info.next_scanline < info.image_height) {
    JSAMPROW row = pixels.data() + std::size_t{info.next_scanline} * pixels.size() / info.image_height;
    jpeg_write_scanlines(&info, &row, 1);
  }
  jpeg_finish_compress(&info);
  jpeg_destroy_compress(&info);
  std::string jpeg(reinterpret_cast<const char*>(bytes), size);
  std::free(bytes);
  return jpeg;
}

// What libjpeg itself makes of a whole image.
inline std::vector<std::uint8_t> decode_with_libjpeg(const std::string& jpeg, J_COLOR_SPACE space) {
  jpeg_decompress_struct info;
  jpeg_error_mgr errors;
  info.err = jpeg_std_error(&errors);
  jpeg_create_decompress(&info);
  jpeg_mem_src(&info, reinterpret_cast<const unsigned char*>(jpeg.data()), jpeg.size());
  jpeg_read_header(&info, TRUE);
  info.out_color_space = space;
  jpeg_start_decompress(&info);
  const std::size_t row_bytes = std::size_t{info.output_width} * static_cast<std::size_t>(info.output_components);
  std::vector<std::uint8_t> pixels(row_bytes * info.output_height);
  while (info.output_scanline < info.output_height) {
    JSAMPROW row = pixels.data() + info.output_scanline * row_bytes;
    jpeg_read_scanlines(&info, &row, 1);
  }
  jpeg_destroy_decompress(&info);
  return pixels;
}

inline std::string make_png(int width, int height, spng_color_type type, int depth, bool interlaced,
                            const std::vector<std::uint8_t>& packed) {
  spng_ctx* context = spng_ctx_new(SPNG_CTX_ENCODER);
  spng_set_option(context, SPNG_ENCODE_TO_BUFFER, 1);
  spng_ihdr header{};
  header.width = static_cast<std::uint32_t>(width);
  header.height = static_cast<std::uint32_t>(height);
  header.bit_depth = static_cast<std::uint8_t>(depth);
  header.color_type = static_cast<std::uint8_t>(type);
  header.interlace_method = interlaced ? SPNG_INTERLACE_ADAM7 : SPNG_INTERLACE_NONE;
  spng_set_ihdr(context, &header);
  if (type == SPNG_COLOR_TYPE_INDEXED) {
    spng_plte palette{};
    palette.n_entries = 1U << depth;
    for (std::uint32_t i = 0; i < palette.n_entries; ++i) {
      palette.entries[i] = {static_cast<std::uint8_t>(i * 7), static_cast<std::uint8_t>(255 - i),
                            static_cast<std::uint8_t>(i ^ 90), 0};
    }
    spng_set_plte(context, &palette);
  }
  const int failed = spng_encode_image(context, packed.data(), packed.size(), SPNG_FMT_RAW, SPNG_ENCODE_FINALIZE);
  std::size_t size = 0;
  int error = 0;
  void* bytes = failed != 0 ? nullptr : spng_get_png_buffer(context, &size, &error);
  const std::string reason = spng_strerror(failed);
  std::string png(static_cast<const char*>(bytes), size);
  std::free(bytes);
  spng_ctx_free(context);
  if (failed != 0) throw std::runtime_error(reason);
  return png;
}

inline std::string make_webp(int width, int height, bool lossless, int step, unsigned seed) {
  const auto rgb = noise(width, height, 3, step, seed);
  std::uint8_t* bytes = nullptr;
  const std::size_t size = lossless ? WebPEncodeLosslessRGB(rgb.data(), width, height, 3 * width, &bytes)
                                    : WebPEncodeRGB(rgb.data(), width, height, 3 * width, 80.0F, &bytes);
  std::string webp(reinterpret_cast<const char*>(bytes), size);
  WebPFree(bytes);
  return webp;
}

inline std::vector<std::uint8_t> values(const Pixels& pixels) {
  return {pixels.data.get(), pixels.data.get() + pixels.bytes()};
}

inline std::vector<std::uint8_t> cut(const Pixels& whole, const Box& box) {
  std::vector<std::uint8_t> pixels;
  for (int y = box.y; y < box.y + box.height; ++y) {
    const std::uint8_t* row = whole.data.get() + (y * whole.width + box.x) * whole.channels;
    pixels.insert(pixels.end(), row, row + box.width * whole.channels);
  }
  return pixels;
}

inline Box random_crop(std::mt19937& random, int width, int height) {
  const auto below = [&](int end) { return static_cast<int>(random() % static_cast<unsigned>(end)); };
  Box box;
  box.x = below(width);
  box.y = below(height);
  box.width = 1 + below(width - box.x);
  box.height = 1 + below(height - box.y);
  return box;
}

// Sides from one pixel to several MCUs, not their multiples.
inline constexpr int kSides[][2] = {{1, 1},   {2, 3},   {7, 9},   {16, 16}, {17, 18},
                                    {33, 31}, {65, 33}, {66, 97}, {131, 75}};
// Sampling factors of the luma: 4:4:4, 4:2:2, 4:2:0, 4:4:0, 4:1:1.
inline constexpr int kSamplings[][2] = {{1, 1}, {2, 1}, {2, 2}, {1, 2}, {4, 1}};

}  // namespace image_cases
