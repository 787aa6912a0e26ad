#include "data/item.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "oxytorch/error.h"

namespace oxytorch::data {
namespace {

void check_masks(const Item& item) {
  for (const Pixels& mask : item.masks) {
    OXY_CHECK(mask.data != nullptr && mask.width == item.image.width() && mask.height == item.image.height(),
              InvalidArgument, "a mask of ", mask.width, " x ", mask.height, " belongs to an image of ",
              item.image.width(), " x ", item.image.height(), "; their sizes must be equal.");
  }
}

// Moves the boxes by move(box), cuts them off at the border and drops what is left without area.
template <class Move>
void move_boxes(Item& item, int width, int height, Move move) {
  if (item.box_ids.size() != item.boxes.size()) {
    item.box_ids.resize(item.boxes.size());
    std::iota(item.box_ids.begin(), item.box_ids.end(), std::int64_t{0});
  }
  const auto right = static_cast<float>(width);
  const auto bottom = static_cast<float>(height);
  std::size_t kept = 0;
  for (std::size_t i = 0; i < item.boxes.size(); ++i) {
    const std::array<double, 4> moved = move(item.boxes[i]);
    const std::array<float, 4> box{
        std::clamp(static_cast<float>(moved[0]), 0.0F, right), std::clamp(static_cast<float>(moved[1]), 0.0F, bottom),
        std::clamp(static_cast<float>(moved[2]), 0.0F, right), std::clamp(static_cast<float>(moved[3]), 0.0F, bottom)};
    if (!(box[2] > box[0] && box[3] > box[1])) continue;
    item.boxes[kept] = box;
    item.box_ids[kept] = item.box_ids[i];
    ++kept;
  }
  item.boxes.resize(kept);
  item.box_ids.resize(kept);
}

template <class Move>
void move_boxes_by_axis(Item& item, int width, int height, Move move) {
  move_boxes(item, width, height, [&](const std::array<float, 4>& box) {
    return std::array<double, 4>{move(box[0], 0), move(box[1], 1), move(box[2], 0), move(box[3], 1)};
  });
}

Pixels pad_pixels(const Pixels& pixels, int width, int height, int x, int y) {
  Pixels padded = allocate_pixels(width, height, pixels.channels);
  std::memset(padded.data.get(), 0, padded.bytes());
  std::uint8_t* to = padded.data.get() + static_cast<std::size_t>(y) * row_bytes(padded) +
                     static_cast<std::size_t>(x) * static_cast<std::size_t>(pixels.channels);
  for (std::size_t row = 0; row < static_cast<std::size_t>(pixels.height); ++row) {
    std::memcpy(to + row * row_bytes(padded), pixels.data.get() + row * row_bytes(pixels), row_bytes(pixels));
  }
  return padded;
}

// The input pixel below the centre of each output pixel.
std::vector<std::size_t> nearest_of(int input, int output) {
  std::vector<std::size_t> nearest(static_cast<std::size_t>(output));
  for (std::size_t i = 0; i < nearest.size(); ++i) {
    nearest[i] = (2 * i + 1) * static_cast<std::size_t>(input) / (2 * nearest.size());
  }
  return nearest;
}

Pixels resize_mask(const Pixels& mask, int width, int height) {
  Pixels resized = allocate_pixels(width, height, mask.channels);
  const auto channels = static_cast<std::size_t>(mask.channels);
  const auto columns = nearest_of(mask.width, width);
  std::uint8_t* to = resized.data.get();
  for (const std::size_t row : nearest_of(mask.height, height)) {
    const std::uint8_t* from = mask.data.get() + row * row_bytes(mask);
    for (const std::size_t column : columns) to = std::copy_n(from + column * channels, channels, to);
  }
  return resized;
}

template <std::size_t kChannels>
void flip_rows(const Pixels& from, Pixels& to) {
  struct Pixel {
    std::uint8_t value[kChannels];
  };
  const auto* in = reinterpret_cast<const Pixel*>(from.data.get());
  auto* out = reinterpret_cast<Pixel*>(to.data.get());
  const auto width = static_cast<std::size_t>(from.width);
  for (int y = 0; y < from.height; ++y, in += width, out += width) std::reverse_copy(in, in + width, out);
}

Pixels flip_pixels(const Pixels& pixels) {
  Pixels flipped = allocate_pixels(pixels.width, pixels.height, pixels.channels);
  switch (pixels.channels) {
    case 1: flip_rows<1>(pixels, flipped); break;
    case 2: flip_rows<2>(pixels, flipped); break;
    case 3: flip_rows<3>(pixels, flipped); break;
    default: flip_rows<4>(pixels, flipped); break;
  }
  return flipped;
}

std::int64_t warp_coordinate(double value) { return static_cast<std::int64_t>(std::floor(value * 65536 + 0.5)); }

// PIL's: coordinates with 16 bits behind the point.
template <std::size_t kChannels>
void warp_rows(const Pixels& from, const AffineMap& map, Pixels& to) {
  const std::int64_t dx = warp_coordinate(map[0]), dy = warp_coordinate(map[3]);
  std::int64_t row_x = warp_coordinate(map[2] + map[0] * 0.5 + map[1] * 0.5);
  std::int64_t row_y = warp_coordinate(map[5] + map[3] * 0.5 + map[4] * 0.5);
  const auto width = static_cast<std::uint64_t>(from.width), height = static_cast<std::uint64_t>(from.height);
  std::uint8_t* out = to.data.get();
  for (int i = 0; i < to.height; ++i) {
    std::int64_t x = row_x, y = row_y;
    for (int j = 0; j < to.width; ++j, x += dx, y += dy, out += kChannels) {
      // A negative coordinate becomes a large unsigned one.
      const auto column = static_cast<std::uint64_t>(x >> 16), row = static_cast<std::uint64_t>(y >> 16);
      if (column < width && row < height) {
        std::copy_n(from.data.get() + (row * width + column) * kChannels, kChannels, out);
      } else {
        std::fill_n(out, kChannels, std::uint8_t{0});
      }
    }
    row_x += warp_coordinate(map[1]);
    row_y += warp_coordinate(map[4]);
  }
}

Pixels warp_pixels(const Pixels& pixels, const AffineMap& map) {
  Pixels warped = allocate_pixels(pixels.width, pixels.height, pixels.channels);
  switch (pixels.channels) {
    case 1: warp_rows<1>(pixels, map, warped); break;
    case 2: warp_rows<2>(pixels, map, warped); break;
    case 3: warp_rows<3>(pixels, map, warped); break;
    default: warp_rows<4>(pixels, map, warped); break;
  }
  return warped;
}

}  // namespace

void crop_item(Item& item, const Box& box) {
  check_masks(item);
  item.image.crop(box);
  for (Pixels& mask : item.masks) mask = copy_box(mask, box);
  move_boxes_by_axis(item, box.width, box.height,
                     [&](double at, int axis) { return at - (axis == 0 ? box.x : box.y); });
}

void pad_item(Item& item, int width, int height, int x, int y) {
  check_masks(item);
  Pixels& pixels = item.image.pixels();
  pixels = pad_pixels(pixels, width, height, x, y);
  for (Pixels& mask : item.masks) mask = pad_pixels(mask, width, height, x, y);
  move_boxes_by_axis(item, width, height, [&](double at, int axis) { return at + (axis == 0 ? x : y); });
}

void resize_item(Item& item, int width, int height) {
  check_masks(item);
  Pixels& pixels = item.image.pixels();
  const double scale[2] = {static_cast<double>(width) / pixels.width, static_cast<double>(height) / pixels.height};
  pixels = resize_pixels(pixels, width, height);
  for (Pixels& mask : item.masks) mask = resize_mask(mask, width, height);
  move_boxes_by_axis(item, width, height, [&](double at, int axis) { return at * scale[axis]; });
}

void flip_item(Item& item) {
  check_masks(item);
  Pixels& pixels = item.image.pixels();
  pixels = flip_pixels(pixels);
  for (Pixels& mask : item.masks) mask = flip_pixels(mask);
  const double width = pixels.width;
  move_boxes(item, pixels.width, pixels.height, [&](const std::array<float, 4>& box) {
    return std::array<double, 4>{width - box[2], box[1], width - box[0], box[3]};
  });
}

void warp_item(Item& item, const AffineMap& map) {
  check_masks(item);
  Pixels& pixels = item.image.pixels();
  pixels = warp_pixels(pixels, map);
  for (Pixels& mask : item.masks) mask = warp_pixels(mask, map);
  const double determinant = map[0] * map[4] - map[1] * map[3];
  move_boxes(item, pixels.width, pixels.height, [&](const std::array<float, 4>& box) {
    std::array<double, 4> moved{HUGE_VAL, HUGE_VAL, -HUGE_VAL, -HUGE_VAL};
    for (int corner = 0; corner < 4; ++corner) {
      const double x = box[corner % 2 == 0 ? 0 : 2] - map[2];
      const double y = box[corner < 2 ? 1 : 3] - map[5];
      const double out_x = (map[4] * x - map[1] * y) / determinant;
      const double out_y = (map[0] * y - map[3] * x) / determinant;
      moved = {std::min(moved[0], out_x), std::min(moved[1], out_y), std::max(moved[2], out_x),
               std::max(moved[3], out_y)};
    }
    return moved;
  });
}

}  // namespace oxytorch::data
