#include "oxytorch/data/image.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "data/codecs.h"
#include "oxytorch/error.h"

namespace oxytorch::data {
namespace {

constexpr std::int64_t kMaxPixels = std::int64_t{1} << 28;
/// A thread keeps no more than this between two images.
constexpr std::size_t kKeptRowBytes = std::size_t{4} << 20;

/// Numbers of a header; zero where it is too short.
class HeaderBytes {
 public:
  explicit HeaderBytes(std::span<const std::byte> bytes) : bytes_(bytes) {}
  [[nodiscard]] int at(std::size_t i) const noexcept { return i < bytes_.size() ? std::to_integer<int>(bytes_[i]) : 0; }
  [[nodiscard]] int big16(std::size_t i) const noexcept { return at(i) << 8 | at(i + 1); }
  [[nodiscard]] int little16(std::size_t i) const noexcept { return at(i) | at(i + 1) << 8; }
  [[nodiscard]] int little24(std::size_t i) const noexcept { return little16(i) | at(i + 2) << 16; }
  [[nodiscard]] bool text(std::size_t i, std::string_view text) const noexcept {
    return i <= bytes_.size() && text.size() <= bytes_.size() - i &&
           std::memcmp(bytes_.data() + i, text.data(), text.size()) == 0;
  }
  [[nodiscard]] std::size_t size() const noexcept { return bytes_.size(); }

 private:
  std::span<const std::byte> bytes_;
};

ImageHeader jpeg_size(const HeaderBytes& bytes) noexcept {
  ImageHeader header{ImageFormat::Jpeg};
  for (std::size_t i = 2; i + 1 < bytes.size();) {
    if (bytes.at(i) != 0xFF) {
      ++i;
      continue;
    }
    const int marker = bytes.at(i + 1);
    if (marker == 0xFF) {
      ++i;
      continue;
    }
    i += 2;
    if (marker <= 0x01 || (marker >= 0xD0 && marker <= 0xD8)) continue;  // these stand alone
    if (marker == 0xD9 || marker == 0xDA) break;
    const bool frame = marker >= 0xC0 && marker <= 0xCF && marker != 0xC4 && marker != 0xC8 && marker != 0xCC;
    if (frame) {
      if (i + 7 <= bytes.size()) {
        header.height = bytes.big16(i + 3);
        header.width = bytes.big16(i + 5);
      }
      break;
    }
    i += static_cast<std::size_t>(bytes.big16(i));
  }
  return header;
}

ImageHeader png_size(const HeaderBytes& bytes) noexcept {
  ImageHeader header{ImageFormat::Png};
  // A PNG has at most 2^31 - 1 a side.
  if (bytes.size() >= 24 && bytes.text(12, "IHDR") && bytes.at(16) < 0x80 && bytes.at(20) < 0x80) {
    header.width = bytes.big16(16) << 16 | bytes.big16(18);
    header.height = bytes.big16(20) << 16 | bytes.big16(22);
  }
  return header;
}

ImageHeader webp_size(const HeaderBytes& bytes) noexcept {
  ImageHeader header{ImageFormat::WebP};
  if (bytes.size() < 30 && !(bytes.text(12, "VP8L") && bytes.size() >= 25)) return header;
  if (bytes.text(12, "VP8X")) {
    header.width = bytes.little24(24) + 1;
    header.height = bytes.little24(27) + 1;
  } else if (bytes.text(12, "VP8L") && bytes.at(20) == 0x2F) {
    header.width = (bytes.little16(21) & 0x3FFF) + 1;
    header.height = ((bytes.little24(22) >> 6) & 0x3FFF) + 1;
  } else if (bytes.text(12, "VP8 ") && bytes.text(23, "\x9D\x01\x2A")) {
    header.width = bytes.little16(26) & 0x3FFF;
    header.height = bytes.little16(28) & 0x3FFF;
  }
  return header;
}

}  // namespace

ImageHeader image_header(std::span<const std::byte> encoded) noexcept {
  const HeaderBytes bytes(encoded);
  if (bytes.text(0, "\xFF\xD8\xFF")) return jpeg_size(bytes);
  if (bytes.text(0, "\x89PNG\r\n\x1A\n")) return png_size(bytes);
  if (bytes.text(0, "RIFF") && bytes.text(8, "WEBP")) return webp_size(bytes);
  return {};
}

Pixels decode_image(std::span<const std::byte> encoded, int channels, std::optional<Box> crop) {
  OXY_CHECK(channels == 1 || channels == 3, InvalidArgument, "images are decoded into 1 or 3 channels, not ", channels,
            ".");
  switch (image_header(encoded).format) {
    case ImageFormat::Jpeg: return decode_jpeg(encoded, channels, crop);
    case ImageFormat::Png: return decode_png(encoded, channels, crop);
    case ImageFormat::WebP: return decode_webp(encoded, channels, crop);
    case ImageFormat::Unknown: break;
  }
  OXY_CHECK(false, Io, "the ", encoded.size(), " bytes are no JPEG, PNG or WebP image; convert it to one of them.");
}

bool plausible_size(std::int64_t width, std::int64_t height, std::size_t bytes, std::int64_t pixels_per_byte) noexcept {
  // Sides are below 2^32, so that the product of two halves of it cannot overflow.
  if (width <= 0 || height <= 0 || width > kMaxPixels || height > kMaxPixels || width * height > kMaxPixels)
    return false;
  return static_cast<std::uint64_t>(width * height / pixels_per_byte) <= bytes;
}

void check_size(const char* format, std::int64_t width, std::int64_t height, std::size_t bytes,
                std::int64_t pixels_per_byte) {
  OXY_CHECK(plausible_size(width, height, bytes, pixels_per_byte), Io, "the ", format, " image of ", bytes,
            " bytes says that it has ", width, "x", height,
            " pixels; so many bytes cannot hold them, or they are more than ", kMaxPixels, ".");
}

Box resolve_crop(const std::optional<Box>& crop, int width, int height) {
  if (!crop) return {0, 0, width, height};
  const Box& box = *crop;
  OXY_CHECK(box.x >= 0 && box.y >= 0 && box.width > 0 && box.height > 0 && box.x < width && box.y < height &&
                box.width <= width - box.x && box.height <= height - box.y,
            InvalidArgument, "the crop of ", box.width, "x", box.height, " pixels at (", box.x, ", ", box.y,
            ") is not inside of the image of ", width, "x", height, ".");
  return box;
}

void write_rgb(const std::uint8_t* rgb, std::size_t count, int channels, std::uint8_t* out) noexcept {
  if (channels == 3) {
    std::memcpy(out, rgb, 3 * count);
    return;
  }
  for (std::size_t i = 0; i < count; ++i, rgb += 3) {
    // The weights times 2^16, which sum up to it.
    out[i] = static_cast<std::uint8_t>((rgb[0] * 19595U + rgb[1] * 38470U + rgb[2] * 7471U + 0x8000U) >> 16);
  }
}

std::uint8_t* row_buffer(std::size_t bytes) {
  thread_local std::vector<std::uint8_t> kept;
  if (kept.size() < bytes || kept.size() > std::max(bytes, kKeptRowBytes)) std::vector<std::uint8_t>(bytes).swap(kept);
  return kept.data();
}

}  // namespace oxytorch::data
