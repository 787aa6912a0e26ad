#include <cstring>

#include "data/item.h"
#include "oxytorch/error.h"

namespace oxytorch::data {

namespace {
constexpr std::int64_t kMostPixels = std::int64_t{1} << 28;
}  // namespace

Pixels allocate_pixels(int width, int height, int channels) {
  OXY_CHECK(width > 0 && height > 0 && channels > 0, InvalidArgument, "an image of ", width, " x ", height, " with ",
            channels, " channels has no pixels; each must be positive.");
  OXY_CHECK(std::int64_t{width} * height <= kMostPixels && channels <= 4, InvalidArgument, "an image of ", width, " x ",
            height, " with ", channels, " channels is too large: at most 2^28 pixels and 4 channels.");
  Pixels pixels{width, height, channels, nullptr};
  pixels.data = std::make_shared_for_overwrite<std::uint8_t[]>(pixels.bytes());
  return pixels;
}

void check_pixels(const Pixels& pixels, const char* what) {
  OXY_CHECK(pixels.data != nullptr && pixels.width > 0 && pixels.height > 0 && pixels.channels > 0, InvalidArgument,
            what, " needs pixels, but was given an image of ", pixels.width, " x ", pixels.height, " with ",
            pixels.channels, " channels.");
}

Pixels copy_box(const Pixels& pixels, const Box& box) {
  Pixels cut = allocate_pixels(box.width, box.height, pixels.channels);
  const std::size_t from_row = row_bytes(pixels);
  const std::size_t to_row = row_bytes(cut);
  const std::uint8_t* from = pixels.data.get() + static_cast<std::size_t>(box.y) * from_row +
                             static_cast<std::size_t>(box.x) * static_cast<std::size_t>(pixels.channels);
  for (std::size_t y = 0; y < static_cast<std::size_t>(box.height); ++y) {
    std::memcpy(cut.data.get() + y * to_row, from + y * from_row, to_row);
  }
  return cut;
}

Pixels& writable_pixels(LazyImage& image) {
  Pixels& pixels = image.pixels();
  if (pixels.data.use_count() > 1) pixels = copy_box(pixels, {0, 0, pixels.width, pixels.height});
  return pixels;
}

LazyImage::LazyImage(View encoded, View stripped) : encoded_(std::move(encoded)), stripped_(std::move(stripped)) {}

int LazyImage::width() const { return box().width; }
int LazyImage::height() const { return box().height; }

Box LazyImage::box() const {
  if (pixels_) return {0, 0, pixels_->width, pixels_->height};
  if (crop_) return *crop_;
  check_present();
  if (!header_) {
    const bool stripped = !stripped_.bytes.empty();
    const ImageHeader header = stripped ? stripped_header(stripped_.bytes) : image_header(encoded_.bytes);
    OXY_CHECK(header.format != ImageFormat::Unknown && header.width > 0 && header.height > 0, Io, "an image of ",
              encoded_.bytes.size(), " bytes is damaged, or neither JPEG, PNG nor WebP.");
    header_ = header;
  }
  return {0, 0, header_->width, header_->height};
}

void LazyImage::check_present() const {
  OXY_CHECK(!encoded_.bytes.empty() || !stripped_.bytes.empty(), InvalidState,
            "this sample has no image; stages of images need a dataset with a field of kind Image.");
}

void LazyImage::crop(const Box& wanted) {
  const Box whole = box();
  OXY_CHECK(wanted.x >= 0 && wanted.y >= 0 && wanted.width > 0 && wanted.height > 0 && wanted.width <= whole.width &&
                wanted.x <= whole.width - wanted.width && wanted.height <= whole.height &&
                wanted.y <= whole.height - wanted.height,
            InvalidArgument, "a crop of ", wanted.width, " x ", wanted.height, " at (", wanted.x, ", ", wanted.y,
            ") is not inside of the image of ", whole.width, " x ", whole.height, ".");
  if (wanted.width == whole.width && wanted.height == whole.height) return;
  if (pixels_) {
    pixels_ = copy_box(*pixels_, wanted);
  } else {
    crop_ = Box{whole.x + wanted.x, whole.y + wanted.y, wanted.width, wanted.height};
  }
}

Pixels& LazyImage::pixels(int channels) {
  if (!pixels_) {
    check_present();
    pixels_ = stripped_.bytes.empty() ? decode_image(encoded_.bytes, channels, crop_)
                                      : decode_stripped(stripped_.bytes, channels, crop_);
    encoded_ = stripped_ = {};
  }
  return *pixels_;
}

}  // namespace oxytorch::data
