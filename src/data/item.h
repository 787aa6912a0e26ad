/// What the stages share: pixels, and an image together with the masks and boxes that belong to it.
#pragma once

#include <array>

#include "oxytorch/data/stage.h"

namespace oxytorch::data {

/// Pixels of any value.
/// Errors: `InvalidArgument` for a size that is not positive or above 2^28 pixels.
Pixels allocate_pixels(int width, int height, int channels);
/// Errors: `InvalidArgument` where there are no pixels; `what` needs them.
void check_pixels(const Pixels& pixels, const char* what);
/// A copy of `box`, which must be inside.
Pixels copy_box(const Pixels& pixels, const Box& box);
/// The image's pixels, to be written in place: a copy where something else holds them too.
Pixels& writable_pixels(LazyImage& image);
/// Bytes of a row.
inline std::size_t row_bytes(const Pixels& pixels) {
  return static_cast<std::size_t>(pixels.width) * static_cast<std::size_t>(pixels.channels);
}

/// Each point of the output and the point of the input that is shown there: x' = m[0] x + m[1] y + m[2],
/// y' = m[3] x + m[4] y + m[5]. The centre of the first pixel is (0.5, 0.5), as PIL has it.
using AffineMap = std::array<double, 6>;

// Each moves the image and with it masks (nearest pixel) and boxes (bounding boxes of their moved corners, cut off at
// the image's border). A box without area is dropped.
void crop_item(Item& item, const Box& box);
/// Puts the image at (x, y) of a black one of another size.
void pad_item(Item& item, int width, int height, int x, int y);
void resize_item(Item& item, int width, int height);
void flip_item(Item& item);
/// Black outside of the image.
void warp_item(Item& item, const AffineMap& map);

}  // namespace oxytorch::data
