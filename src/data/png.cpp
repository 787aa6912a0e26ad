#include <spng.h>

#include <algorithm>
#include <memory>

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

}  // namespace

Pixels decode_png(std::span<const std::byte> png, int channels, std::optional<Box> crop) {
  const std::unique_ptr<spng_ctx, FreeSpng> context(spng_ctx_new(0));
  OXY_CHECK(context, OutOfMemory, "there is no memory left to decode a PNG image.");
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

}  // namespace oxytorch::data
