#include <cstring>

#include "data/codecs.h"
#include "data/coefficients.h"
#include "data/item.h"
#include "oxytorch/data/convert.h"
#include "oxytorch/data/image.h"
#include "oxytorch/error.h"

namespace oxytorch::data {
namespace {

/// A thread's buffers fit an image after the other, but for one that is larger than this.
constexpr std::size_t kKeptJpegBytes = std::size_t{4} << 20;

std::string strip_unchecked(std::span<const std::byte> encoded) {
  thread_local CoefficientWriter kept;
  CoefficientWriter once;
  CoefficientWriter& writer = encoded.size() > kKeptJpegBytes ? once : kept;
  return read_jpeg_coefficients(encoded, writer) ? writer.finish() : std::string();
}

Pixels decode_unchecked(std::span<const std::byte> stripped, int channels, const std::optional<Box>& crop) {
  CoefficientReader coefficients(stripped);
  return decode_jpeg(coefficients.jpeg_header(), channels, crop, &coefficients);
}

/// A small JPEG with 4:2:0 subsampling and sides that are no multiples of its MCUs.
std::string make_trial_jpeg() {
  const Pixels pixels = allocate_pixels(75, 53, 3);
  std::uint32_t random = 1;
  for (std::size_t i = 0; i < pixels.bytes(); ++i) {
    random = random * 1664525U + 1013904223U;
    pixels.data[i] = static_cast<std::uint8_t>(i % 225 + 2 * (i / 225) + (random >> 27));
  }
  return encode_jpeg(pixels, 92);
}

bool try_stripping() noexcept {
  try {
    const auto trial = make_trial_jpeg();
    const auto jpeg = std::as_bytes(std::span(trial));
    const std::string stripped = strip_unchecked(jpeg);
    const auto bytes = std::as_bytes(std::span(stripped));
    for (const int channels : {1, 3}) {
      for (const std::optional<Box>& crop : {std::optional<Box>(), std::optional<Box>({35, 19, 20, 30})}) {
        const Pixels expected = decode_jpeg(jpeg, channels, crop), pixels = decode_unchecked(bytes, channels, crop);
        if (pixels.bytes() != expected.bytes()) return false;
        if (std::memcmp(pixels.data.get(), expected.data.get(), pixels.bytes()) != 0) return false;
      }
    }
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

}  // namespace

bool can_strip_jpeg() noexcept {
  static const bool can = try_stripping();
  return can;
}

std::string strip_jpeg(std::span<const std::byte> encoded) {
  const bool jpeg = image_header(encoded).format == ImageFormat::Jpeg;
  return jpeg && can_strip_jpeg() ? strip_unchecked(encoded) : std::string();
}

Pixels decode_stripped(std::span<const std::byte> stripped, int channels, std::optional<Box> crop) {
  OXY_CHECK(channels == 1 || channels == 3, InvalidArgument, "images are decoded into 1 or 3 channels, not ", channels,
            ".");
  OXY_CHECK(can_strip_jpeg(), NotSupported,
            "the installed libjpeg does not take coefficients; decode the original image.");
  return decode_unchecked(stripped, channels, crop);
}

}  // namespace oxytorch::data
