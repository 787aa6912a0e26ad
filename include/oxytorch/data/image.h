/// Images: decoded where and as far as they are needed.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "oxytorch/data/value.h"

namespace oxytorch::data {

struct Box {
  int x = 0, y = 0, width = 0, height = 0;
  bool operator==(const Box&) const = default;
};

/// Pixels: height x width x channels of U8, rows one after the other.
struct Pixels {
  int width = 0, height = 0, channels = 0;
  std::shared_ptr<std::uint8_t[]> data;
  [[nodiscard]] std::size_t bytes() const noexcept {
    return static_cast<std::size_t>(width) * static_cast<std::size_t>(height) * static_cast<std::size_t>(channels);
  }
};

enum class ImageFormat : std::uint8_t { Unknown, Jpeg, Png, WebP };
struct ImageHeader {
  ImageFormat format = ImageFormat::Unknown;
  int width = 0, height = 0;
};

/// Reads the first bytes of an encoded image. `Unknown` where it is none of the three.
OXY_API ImageHeader image_header(std::span<const std::byte> encoded) noexcept;

/// Decodes into `channels` 1 (gray) or 3 (RGB; CMYK is converted, alpha is dropped) only what is in `crop`. The pixels
/// are those that libjpeg-turbo, libspng or libwebp give for the whole image, bit for bit.
/// Errors: `Io` where the image is damaged, with what the codec says; `InvalidArgument` for a crop that is not
/// inside.
OXY_API Pixels decode_image(std::span<const std::byte> encoded, int channels = 3,
                            std::optional<Box> crop = std::nullopt);

/// Undoes the Huffman coding of a baseline JPEG: its quantised coefficients, packed, from which later epochs decode
/// without entropy decoding. Empty where it is no such image (progressive, CMYK, 12 bits, arithmetic coding, damaged):
/// that one takes the ordinary path.
OXY_API std::string strip_jpeg(std::span<const std::byte> encoded);
/// Decodes what strip_jpeg() gave: the same pixels as decode_image() of the original, bit for bit.
OXY_API Pixels decode_stripped(std::span<const std::byte> stripped, int channels = 3,
                               std::optional<Box> crop = std::nullopt);
/// Size of the image that was stripped; `Unknown` where it is damaged.
OXY_API ImageHeader stripped_header(std::span<const std::byte> stripped) noexcept;
/// Whether this build's libjpeg takes coefficients in the place of entropy decoding; tried once, on an image of its
/// own.
OXY_API bool can_strip_jpeg() noexcept;

}  // namespace oxytorch::data
