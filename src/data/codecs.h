/// The codecs of images, and what they share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "oxytorch/data/image.h"

namespace oxytorch::data {

class CoefficientReader;
class CoefficientWriter;

Pixels decode_png(std::span<const std::byte> png, int channels, std::optional<Box> crop);
/// Without loss. Errors: `InvalidArgument` for other than 1 or 3 channels, or no pixels.
std::string encode_png(const Pixels& pixels);
Pixels decode_webp(std::span<const std::byte> webp, int channels, std::optional<Box> crop);
/// With `coefficients`, `jpeg` is their jpeg_header() and the blocks come from them.
Pixels decode_jpeg(std::span<const std::byte> jpeg, int channels, std::optional<Box> crop,
                   CoefficientReader* coefficients = nullptr);
/// Decodes the Huffman coding alone and gives all blocks to `writer`, begun with a JPEG header for decode_jpeg(). False
/// where `jpeg` is not a baseline JPEG in one scan of 8-bit gray, YCbCr or RGB, or is damaged.
bool read_jpeg_coefficients(std::span<const std::byte> jpeg, CoefficientWriter& writer);

/// Whether an image may have that size: at most 2^28 pixels, and at most as many a byte as its format can code.
bool plausible_size(std::int64_t width, std::int64_t height, std::size_t bytes, std::int64_t pixels_per_byte) noexcept;
/// Errors: `Io` where it may not.
void check_size(const char* format, std::int64_t width, std::int64_t height, std::size_t bytes,
                std::int64_t pixels_per_byte);

/// `crop`, or the whole image where there is none.
/// Errors: `InvalidArgument` where it is empty or not inside of the image.
Box resolve_crop(const std::optional<Box>& crop, int width, int height);

/// Copies `count` RGB pixels, or makes them gray where `channels` is 1: 0.299 R + 0.587 G + 0.114 B.
void write_rgb(const std::uint8_t* rgb, std::size_t count, int channels, std::uint8_t* out) noexcept;
/// At least `bytes` of memory that the calling thread's next call gives again.
std::uint8_t* row_buffer(std::size_t bytes);

}  // namespace oxytorch::data
