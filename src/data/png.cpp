#include <spng.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <string>

#include "data/codecs.h"
#include "data/item.h"
#include "oxytorch/error.h"

namespace oxytorch::data {
namespace {

/// Deflate codes at most 1,032 bytes a byte, of which each has at most eight pixels.
constexpr std::int64_t kPngPixelsPerByte = 8 * 1032;
/// What chunks other than the pixels may take.
constexpr std::size_t kPngChunkBytes = std::size_t{64} << 20;

struct FreeSpng {
  void operator()(spng_ctx* context) const { spng_ctx_free(context); }
};

void check_spng(int result) {
  OXY_CHECK(result == SPNG_OK, Io, "the PNG image cannot be decoded: ", spng_strerror(result), ".");
}

std::unique_ptr<spng_ctx, FreeSpng> make_spng(int flags) {
  std::unique_ptr<spng_ctx, FreeSpng> context(spng_ctx_new(flags));
  OXY_CHECK(context, OutOfMemory, "there is no memory left for a PNG image.");
  return context;
}

}  // namespace

Pixels decode_png(std::span<const std::byte> png, int channels, std::optional<Box> crop) {
  const auto context = make_spng(0);
  check_spng(spng_set_png_buffer(context.get(), png.data(), png.size()));
  check_spng(spng_set_chunk_limits(context.get(), std::max(png.size(), kPngChunkBytes), kPngChunkBytes));
  spng_ihdr header{};
  check_spng(spng_get_ihdr(context.get(), &header));
  check_size("PNG", header.width, header.height, png.size(), kPngPixelsPerByte);
  const int width = static_cast<int>(header.width), height = static_cast<int>(header.height);
  const Box box = resolve_crop(crop, width, height);
  const std::size_t row_bytes = std::size_t{header.width} * 3;
  Pixels pixels = allocate_pixels(box.width, box.height, channels);
  const auto cut = [&](const std::uint8_t* row, int y) {
    if (y < box.y) return;
    std::uint8_t* out = pixels.data.get() +
                        static_cast<std::size_t>(y - box.y) * (pixels.bytes() / static_cast<std::size_t>(box.height));
    write_rgb(row + 3 * static_cast<std::size_t>(box.x), static_cast<std::size_t>(box.width), channels, out);
  };
  if (header.interlace_method != SPNG_INTERLACE_NONE) {
    const Pixels whole = allocate_pixels(width, height, 3);
    check_spng(spng_decode_image(context.get(), whole.data.get(), whole.bytes(), SPNG_FMT_RGB8, 0));
    for (int y = box.y; y < box.y + box.height; ++y) cut(whole.data.get() + static_cast<std::size_t>(y) * row_bytes, y);
    return pixels;
  }
  check_spng(spng_decode_image(context.get(), nullptr, 0, SPNG_FMT_RGB8, SPNG_DECODE_PROGRESSIVE));
  std::uint8_t* row = row_buffer(row_bytes);
  for (int y = 0; y < box.y + box.height; ++y) {
    const int result = spng_decode_row(context.get(), row, row_bytes);
    if (result != SPNG_EOI || y != height - 1) check_spng(result);
    cut(row, y);
  }
  return pixels;
}

std::string encode_png(const Pixels& pixels) {
  check_pixels(pixels, "encoding a PNG image");
  OXY_CHECK(pixels.channels == 1 || pixels.channels == 3, InvalidArgument, "an image with ", pixels.channels,
            " channels becomes no PNG; give 1 or 3.");
  const auto context = make_spng(SPNG_CTX_ENCODER);
  const auto check = [](int result) {
    OXY_CHECK(result == SPNG_OK, InvalidArgument, "the image becomes no PNG: ", spng_strerror(result), ".");
  };
  spng_ihdr header{};
  header.width = static_cast<std::uint32_t>(pixels.width);
  header.height = static_cast<std::uint32_t>(pixels.height);
  header.bit_depth = 8;
  header.color_type = pixels.channels == 1 ? SPNG_COLOR_TYPE_GRAYSCALE : SPNG_COLOR_TYPE_TRUECOLOR;
  check(spng_set_option(context.get(), SPNG_ENCODE_TO_BUFFER, 1));
  check(spng_set_ihdr(context.get(), &header));
  check(spng_encode_image(context.get(), pixels.data.get(), pixels.bytes(), SPNG_FMT_PNG, SPNG_ENCODE_FINALIZE));
  std::size_t size = 0;
  int failed = 0;
  const std::unique_ptr<void, void (*)(void*)> bytes(spng_get_png_buffer(context.get(), &size, &failed), std::free);
  check(failed);
  return {static_cast<const char*>(bytes.get()), size};
}

}  // namespace oxytorch::data
