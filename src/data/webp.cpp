#include <webp/decode.h>

#include <algorithm>
#include <array>

#include "data/codecs.h"
#include "data/item.h"
#include "oxytorch/error.h"

namespace oxytorch::data {
namespace {

void check_webp(VP8StatusCode status) {
  constexpr std::array kReasons = {"",
                                   "out of memory",
                                   "invalid parameter",
                                   "damaged data",
                                   "an unsupported feature",
                                   "it was suspended",
                                   "it was aborted",
                                   "it is truncated"};
  const auto i = static_cast<std::size_t>(status);
  OXY_CHECK(status == VP8_STATUS_OK, Io, "the WebP image cannot be decoded: ", i < kReasons.size() ? kReasons[i] : "",
            ".");
}

}  // namespace

Pixels decode_webp(std::span<const std::byte> webp, int channels, std::optional<Box> crop) {
  const auto* data = reinterpret_cast<const std::uint8_t*>(webp.data());
  WebPDecoderConfig config;
  OXY_CHECK(WebPInitDecoderConfig(&config) != 0, InvalidState,
            "the installed libwebp has another interface than the one that this library was built with; install "
            "version 1.x.");
  check_webp(WebPGetFeatures(data, webp.size(), &config.input));
  const int width = config.input.width, height = config.input.height;
  // An image of one colour takes some bytes whatever its size.
  check_size("WebP", width, height, webp.size(), std::int64_t{1} << 28);
  OXY_CHECK(config.input.has_animation == 0, NotSupported,
            "the WebP image is an animation; convert its frames to images.");
  const Box box = resolve_crop(crop, width, height);
  // Chroma is interpolated between neighbours, also over the edges of a crop: two pixels more on each side, at even
  // places.
  const int left = std::max(0, (box.x - 2) & ~1), top = std::max(0, (box.y - 2) & ~1);
  const int right = std::min(width, box.x + box.width + 2), bottom = std::min(height, box.y + box.height + 2);
  config.options.use_cropping = 1;
  config.options.crop_left = left;
  config.options.crop_top = top;
  config.options.crop_width = right - left;
  config.options.crop_height = bottom - top;
  const auto stride = 3 * static_cast<std::size_t>(right - left);
  const std::size_t size = stride * static_cast<std::size_t>(bottom - top);
  Pixels pixels = allocate_pixels(box.width, box.height, channels);
  const bool direct = channels == 3 && size == pixels.bytes();
  std::uint8_t* rows = direct ? pixels.data.get() : row_buffer(size);
  config.output.colorspace = MODE_RGB;
  config.output.is_external_memory = 1;
  config.output.u.RGBA = {rows, static_cast<int>(stride), size};
  const VP8StatusCode status = WebPDecode(data, webp.size(), &config);
  WebPFreeDecBuffer(&config.output);
  check_webp(status);
  if (direct) return pixels;
  for (int y = 0; y < box.height; ++y) {
    const std::uint8_t* row = rows + static_cast<std::size_t>(box.y - top + y) * stride;
    write_rgb(row + 3 * static_cast<std::size_t>(box.x - left), static_cast<std::size_t>(box.width), channels,
              pixels.data.get() + static_cast<std::size_t>(y) * static_cast<std::size_t>(box.width * channels));
  }
  return pixels;
}

}  // namespace oxytorch::data
