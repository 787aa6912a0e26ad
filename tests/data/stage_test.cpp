// Stages: what they make of pixels, and that boxes and masks stay where the pixels are.
#include "oxytorch/data/stage.h"

#include <gtest/gtest.h>
#include <spng.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "oxytorch/error.h"
#include "oxytorch/isa.h"

namespace oxytorch::data {
namespace {

using Bytes = std::vector<std::uint8_t>;

Pixels blank_image(int width, int height, int channels) {
  Pixels pixels{width, height, channels, nullptr};
  pixels.data = std::make_shared<std::uint8_t[]>(pixels.bytes());
  return pixels;
}

// Values from 20 to 219, so that stretching them changes something.
Pixels noisy_image(int width, int height, int channels = 3, unsigned seed = 1) {
  Pixels pixels = blank_image(width, height, channels);
  std::mt19937 random(seed);
  std::generate_n(pixels.data.get(), pixels.bytes(), [&] { return static_cast<std::uint8_t>(20 + random() % 200); });
  return pixels;
}

Bytes pixel_bytes(const Pixels& pixels) { return {pixels.data.get(), pixels.data.get() + pixels.bytes()}; }

Item item_of(Pixels pixels) {
  Item item;
  item.image = LazyImage(std::move(pixels));
  return item;
}

Pixels staged(const StagePtr& stage, const Pixels& pixels, std::uint64_t seed) {
  Item item = item_of(pixels);
  PhiloxStream random(seed);
  stage->apply(item, random);
  return item.image.pixels();
}

using Rectangle = std::array<float, 4>;

void paint(Pixels& pixels, const Rectangle& box) {
  for (int y = static_cast<int>(box[1]); y < static_cast<int>(box[3]); ++y) {
    for (int x = static_cast<int>(box[0]); x < static_cast<int>(box[2]); ++x) {
      for (int c = 0; c < pixels.channels; ++c) pixels.data[(y * pixels.width + x) * pixels.channels + c] = 255;
    }
  }
}

// Where values are above half; nothing where none is.
std::optional<Rectangle> painted(const Pixels& pixels) {
  Rectangle found{1e9F, 1e9F, -1, -1};
  for (int y = 0; y < pixels.height; ++y) {
    for (int x = 0; x < pixels.width; ++x) {
      if (pixels.data[(y * pixels.width + x) * pixels.channels] < 128) continue;
      const auto left = static_cast<float>(x), top = static_cast<float>(y);
      found = {std::min(found[0], left), std::min(found[1], top), std::max(found[2], left + 1),
               std::max(found[3], top + 1)};
    }
  }
  return found[2] < 0 ? std::nullopt : std::optional(found);
}

// An image, its mask and its one box, all of one white rectangle.
Item painted_item(int width, int height, const Rectangle& box) {
  Pixels image = blank_image(width, height, 3), mask = blank_image(width, height, 1);
  paint(image, box);
  paint(mask, box);
  Item item = item_of(std::move(image));
  item.masks.push_back(std::move(mask));
  item.boxes.push_back(box);
  item.box_ids.push_back(7);
  return item;
}

// Image, mask and box agree up to `tolerance` pixels.
void expect_together(Item& item, float tolerance) {
  Pixels& image = item.image.pixels();
  const Pixels& mask = item.masks.at(0);
  ASSERT_EQ(mask.width, image.width);
  ASSERT_EQ(mask.height, image.height);
  for (const std::uint8_t value : pixel_bytes(mask)) ASSERT_TRUE(value == 0 || value == 255);
  if (item.boxes.empty()) {
    EXPECT_FALSE(painted(mask));
    EXPECT_TRUE(item.box_ids.empty());
    return;
  }
  ASSERT_EQ(item.box_ids, std::vector<std::int64_t>{7});
  const Rectangle& box = item.boxes[0];
  if (std::min(box[2] - box[0], box[3] - box[1]) < 3) return;
  for (const auto& found : {painted(image), painted(mask)}) {
    ASSERT_TRUE(found);
    for (std::size_t i = 0; i < 4; ++i) EXPECT_NEAR((*found)[i], box[i], tolerance);
  }
}

TEST(LazyImage, CropsPixels) {
  LazyImage image(noisy_image(10, 8));
  const Pixels whole = image.pixels();
  image.crop({2, 1, 6, 5});
  image.crop({1, 3, 4, 2});
  EXPECT_EQ(image.width(), 4);
  EXPECT_EQ(image.height(), 2);
  for (int y = 0; y < 2; ++y) {
    EXPECT_EQ(std::memcmp(&image.pixels().data[y * 12], &whole.data[((y + 4) * 10 + 3) * 3], 12), 0);
  }
  for (const Box& box :
       {Box{0, 0, 5, 2}, Box{-1, 0, 2, 2}, Box{0, 1, 2, 2}, Box{0, 0, 0, 1}, Box{1 << 30, 0, 1 << 30, 1}}) {
    EXPECT_THROW(image.crop(box), Error);
  }
}

View png_of(const Pixels& pixels) {
  spng_ctx* context = spng_ctx_new(SPNG_CTX_ENCODER);
  spng_set_option(context, SPNG_ENCODE_TO_BUFFER, 1);
  spng_ihdr header{};
  header.width = static_cast<std::uint32_t>(pixels.width);
  header.height = static_cast<std::uint32_t>(pixels.height);
  header.color_type = SPNG_COLOR_TYPE_TRUECOLOR;
  header.bit_depth = 8;
  spng_set_ihdr(context, &header);
  EXPECT_EQ(spng_encode_image(context, pixels.data.get(), pixels.bytes(), SPNG_FMT_PNG, SPNG_ENCODE_FINALIZE), 0);
  std::size_t size = 0;
  int error = 0;
  void* const png = spng_get_png_buffer(context, &size, &error);
  spng_ctx_free(context);
  const std::shared_ptr<const void> owner(png, std::free);
  return {{static_cast<const std::byte*>(png), size}, owner};
}

TEST(LazyImage, CropsBeforeItDecodes) {
  const Pixels whole = noisy_image(20, 15);
  LazyImage image(png_of(whole)), plain(whole);
  EXPECT_EQ(image.width(), 20);
  EXPECT_EQ(image.height(), 15);
  for (const Box& box : {Box{0, 0, 20, 15}, Box{3, 2, 15, 12}, Box{4, 5, 8, 6}}) {
    image.crop(box);
    plain.crop(box);
    EXPECT_TRUE(image.encoded());
    EXPECT_EQ(image.width(), box.width);
    EXPECT_EQ(image.height(), box.height);
  }
  EXPECT_THROW(image.crop({0, 0, 9, 6}), Error);
  EXPECT_EQ(pixel_bytes(image.pixels()), pixel_bytes(plain.pixels()));
  EXPECT_FALSE(image.encoded());
}

TEST(LazyImage, SaysThatThereIsNone) {
  LazyImage image;
  EXPECT_THROW(static_cast<void>(image.width()), Error);
  EXPECT_THROW(image.pixels(), Error);
  const Value text = own("this is no image");
  LazyImage broken(text.data);
  EXPECT_THROW(static_cast<void>(broken.height()), Error);
  EXPECT_THROW(broken.pixels(), Error);
}

TEST(Stage, IsAFunction) {
  const auto own_stage = stage("mine", [](Item& item, PhiloxStream& random) { item.index = random.next(); });
  EXPECT_EQ(own_stage->name(), "mine");
  Item item;
  PhiloxStream random(3), same(3);
  own_stage->apply(item, random);
  EXPECT_EQ(item.index, same.next());
  EXPECT_THROW(stage("none", nullptr), Error);
}

TEST(Stage, ImageMaskAndBoxesMoveTogether) {
  const StagePtr stages[] = {random_resized_crop(90, 70),
                             random_resized_crop(200, 210, 0.1, 0.4),
                             resize(40),
                             resize(33, 140),
                             center_crop(60, 50),
                             center_crop(150, 60),
                             center_crop(201, 151),
                             horizontal_flip(1)};
  for (const auto& stage : stages) {
    for (std::uint64_t seed = 0; seed < 25; ++seed) {
      std::mt19937 random(static_cast<unsigned>(seed));
      const auto x = static_cast<float>(random() % 80), y = static_cast<float>(random() % 60);
      Item item = painted_item(
          120, 100, {x, y, x + 5 + static_cast<float>(random() % 35), y + 5 + static_cast<float>(random() % 35)});
      PhiloxStream stream(seed);
      stage->apply(item, stream);
      expect_together(item, 1.5F);
      if (HasFailure()) FAIL() << stage->name() << ", seed " << seed;
    }
  }
}

TEST(Stage, TurnedBoxesSurroundTheirPixels) {
  std::set<std::vector<float>> places;
  const auto stage = rand_augment(1, 20);
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    Item item = painted_item(120, 100, {50, 40, 72, 61});
    // The image's colours may change, its mask tells where it is.
    PhiloxStream random(seed);
    stage->apply(item, random);
    ASSERT_EQ(item.boxes.size(), 1U);
    const auto found = painted(item.masks[0]);
    ASSERT_TRUE(found);
    for (std::size_t i = 0; i < 4; ++i) EXPECT_NEAR((*found)[i], item.boxes[0][i], 1.5F) << seed;
    places.insert({item.boxes[0].begin(), item.boxes[0].end()});
  }
  EXPECT_EQ(places.size(), 11U);  // where it was, and five ways to move it to two sides
}

TEST(Stage, DropsBoxesThatLeaveTheImage) {
  Item item = item_of(noisy_image(100, 100));
  item.boxes = {{30, 30, 60, 60}, {0, 0, 25, 25}, {70, 70, 90, 90}, {50, 50, 50, 60}, {std::nanf(""), 40, 60, 60}};
  PhiloxStream random(1);
  center_crop(50, 50)->apply(item, random);
  EXPECT_EQ(item.box_ids, (std::vector<std::int64_t>{0, 2}));
  EXPECT_EQ(item.boxes, (std::vector<Rectangle>{{5, 5, 35, 35}, {45, 45, 50, 50}}));
}

TEST(Stage, RefusesMasksOfAnotherSize) {
  for (const auto& stage : {resize(10), center_crop(4, 4), horizontal_flip(1), random_resized_crop(3, 3)}) {
    Item item = item_of(noisy_image(20, 20));
    item.masks.push_back(blank_image(20, 19, 1));
    PhiloxStream random(1);
    EXPECT_THROW(stage->apply(item, random), Error) << stage->name();
  }
}

TEST(Stage, LeavesSharedPixelsAlone) {
  const Pixels shared = noisy_image(30, 20);
  const Bytes before = pixel_bytes(shared);
  for (const auto& stage :
       {color_jitter(0.5, 0.5, 0.5, 0.2), rand_augment(4, 20), horizontal_flip(1), resize(30, 20)}) {
    for (std::uint64_t seed = 0; seed < 10; ++seed) staged(stage, shared, seed);
    EXPECT_EQ(pixel_bytes(shared), before) << stage->name();
  }
}

TEST(Stage, SameBitsOnEveryInstructionSetAndThread) {
  const StagePtr stages[] = {random_resized_crop(53, 41), resize(17), color_jitter(0.4, 0.4, 0.4, 0.2),
                             rand_augment(3, 15)};
  for (const int channels : {1, 3}) {
    const Pixels image = noisy_image(67, 45, channels);
    for (const auto& stage : stages) {
      for (std::uint64_t seed = 0; seed < 40; ++seed) {
        const Bytes expected = pixel_bytes(staged(stage, image, seed));
        for (const Isa isa : supported_isas()) {
          const ScopedIsa scope(isa);
          ASSERT_EQ(pixel_bytes(staged(stage, image, seed)), expected) << stage->name() << " on " << name(isa);
        }
      }
    }
  }
  const Pixels image = noisy_image(67, 45);
  const Bytes expected = pixel_bytes(staged(stages[0], image, 5));
  std::vector<Bytes> found(4);
  std::vector<std::thread> threads;
  for (auto& bytes : found) threads.emplace_back([&] { bytes = pixel_bytes(staged(stages[0], image, 5)); });
  for (auto& thread : threads) thread.join();
  for (const auto& bytes : found) EXPECT_EQ(bytes, expected);
}

// Which part was cut is told by boxes of one column or row each.
TEST(RandomResizedCrop, DrawsPartsOfTheAllowedAreaAndRatio) {
  std::set<std::vector<float>> parts;
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    Item item = item_of(blank_image(150, 100, 1));
    item.boxes = {{0, 0, 150, 100}};
    for (float x = 0; x < 150; ++x) item.boxes.push_back({x, 0, x + 1, 100});
    for (float y = 0; y < 100; ++y) item.boxes.push_back({0, y, 150, y + 1});
    PhiloxStream random(seed);
    random_resized_crop(64, 64, 0.2, 0.5, 0.5, 2)->apply(item, random);
    const auto columns =
        std::count_if(item.box_ids.begin(), item.box_ids.end(), [](auto id) { return id > 0 && id <= 150; });
    const auto rows = std::count_if(item.box_ids.begin(), item.box_ids.end(), [](auto id) { return id > 150; });
    const double area = static_cast<double>(columns * rows) / (150 * 100);
    const double ratio = static_cast<double>(columns) / static_cast<double>(rows);
    EXPECT_TRUE(area > 0.19 && area < 0.51) << area;
    EXPECT_TRUE(ratio > 0.49 && ratio < 2.05) << ratio;
    parts.insert({static_cast<float>(item.box_ids[1]), static_cast<float>(columns), static_cast<float>(rows)});
  }
  EXPECT_GT(parts.size(), 190U);
}

TEST(RandomResizedCrop, TakesTheMiddleWhereNothingFits) {
  // All of the area at a ratio of at most 2 does not fit into 400 x 100: the middle 200 columns do.
  Pixels image = blank_image(400, 100, 1);
  paint(image, {100, 0, 300, 100});
  for (const std::uint8_t value : pixel_bytes(staged(random_resized_crop(50, 50, 1, 1, 0.5, 2), image, 1))) {
    ASSERT_EQ(value, 255);
  }
  const Pixels square = noisy_image(60, 60);
  EXPECT_EQ(pixel_bytes(staged(random_resized_crop(60, 60, 1, 1, 1, 1), square, 4)), pixel_bytes(square));
}

TEST(ResizeStage, FollowsTorchvisionsSizes) {
  const auto size = [](int side, int width, int height) {
    const Pixels resized = staged(resize(side), blank_image(width, height, 1), 0);
    return std::pair(resized.width, resized.height);
  };
  EXPECT_EQ(size(256, 500, 375), std::pair(341, 256));
  EXPECT_EQ(size(256, 375, 500), std::pair(256, 341));
  EXPECT_EQ(size(7, 3, 5), std::pair(7, 11));
  EXPECT_EQ(size(64, 64, 64), std::pair(64, 64));
  EXPECT_THROW(staged(resize(1 << 15), blank_image(1, 20000, 1), 0), Error);
}

TEST(CenterCrop, CutsAndPads) {
  Pixels image = blank_image(3, 2, 1);
  std::iota(image.data.get(), image.data.get() + 6, std::uint8_t{1});
  const auto cropped = [&](int width, int height) { return pixel_bytes(staged(center_crop(width, height), image, 0)); };
  EXPECT_EQ(cropped(1, 2), (Bytes{2, 5}));
  EXPECT_EQ(cropped(3, 1), (Bytes{1, 2, 3}));  // half a row from the top, rounded to even
  EXPECT_EQ(cropped(4, 4), (Bytes{0, 0, 0, 0, 1, 2, 3, 0, 4, 5, 6, 0, 0, 0, 0, 0}));
  EXPECT_EQ(cropped(1, 3), (Bytes{2, 5, 0}));
}

TEST(HorizontalFlip, MirrorsWithItsProbability) {
  for (const int channels : {1, 2, 3, 4}) {
    const Pixels image = noisy_image(7, 3, channels);
    const Pixels flipped = staged(horizontal_flip(1), image, 0);
    for (int i = 0; i < 21; ++i) {
      const int mirrored = i - i % 7 + 6 - i % 7;
      EXPECT_EQ(std::memcmp(&flipped.data[i * channels], &image.data[mirrored * channels],
                            static_cast<std::size_t>(channels)),
                0);
    }
    EXPECT_EQ(pixel_bytes(staged(horizontal_flip(0), image, 0)), pixel_bytes(image));
  }
  const Pixels image = noisy_image(7, 3);
  int flips = 0;
  for (std::uint64_t seed = 0; seed < 2000; ++seed) {
    flips += pixel_bytes(staged(horizontal_flip(0.3), image, seed)) != pixel_bytes(image) ? 1 : 0;
  }
  EXPECT_NEAR(flips, 600, 80);
}

// The stream's draws of color_jitter(): an order, then a factor.
double drawn_factor(std::uint64_t seed, double least, double most) {
  PhiloxStream random(seed);
  for (const std::uint64_t bound : {4, 3, 2}) random.below(bound);
  return least + (most - least) * random.uniform_double();
}

TEST(ColorJitter, BlendsAsDefined) {
  const Pixels image = noisy_image(31, 17);
  double mean = 0;
  std::vector<int> grays;
  for (int i = 0; i < 31 * 17; ++i) {
    const std::uint8_t* rgb = &image.data[3 * i];
    grays.push_back((rgb[0] * 19595 + rgb[1] * 38470 + rgb[2] * 7471 + 0x8000) >> 16);
    mean += grays.back();
  }
  const auto middle = static_cast<int>(std::lround(mean / (31 * 17)));
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    const auto factor = static_cast<float>(drawn_factor(seed, 0.2, 1.8));
    const auto brighter = pixel_bytes(staged(color_jitter(0.8, 0, 0, 0), image, seed));
    const auto contrasted = pixel_bytes(staged(color_jitter(0, 0.8, 0, 0), image, seed));
    const auto saturated = pixel_bytes(staged(color_jitter(0, 0, 0.8, 0), image, seed));
    for (std::size_t i = 0; i < brighter.size(); ++i) {
      const int value = image.data[static_cast<std::ptrdiff_t>(i)];
      const auto blend = [&](int from) {
        return static_cast<int>(
            std::clamp(static_cast<float>(from) + factor * static_cast<float>(value - from), 0.0F, 255.0F));
      };
      ASSERT_EQ(brighter[i], blend(0));
      ASSERT_EQ(contrasted[i], blend(middle));
      ASSERT_EQ(saturated[i], blend(grays[i / 3]));
    }
  }
}

TEST(ColorJitter, TurnsTheHue) {
  Pixels red = blank_image(1, 1, 3);
  red.data[0] = 200;
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    const double turn = drawn_factor(seed, -0.5, 0.5);
    const auto turned = pixel_bytes(staged(color_jitter(0, 0, 0, 0.5), red, seed));
    // Full saturation stays: one channel is full, one is empty.
    EXPECT_EQ(*std::max_element(turned.begin(), turned.end()), 200);
    EXPECT_EQ(*std::min_element(turned.begin(), turned.end()), 0);
    const double sixths = (turn < 0 ? turn + 1 : turn) * 6;
    const double channels[] = {std::clamp(std::abs(sixths - 3) - 1, 0.0, 1.0),
                               std::clamp(2 - std::abs(sixths - 2), 0.0, 1.0),
                               std::clamp(2 - std::abs(sixths - 4), 0.0, 1.0)};
    for (std::size_t c = 0; c < 3; ++c) EXPECT_NEAR(turned[c], 200 * channels[c], 10) << turn;
  }
  const Pixels gray = noisy_image(9, 9, 1);
  EXPECT_EQ(pixel_bytes(staged(color_jitter(0, 0, 0.9, 0.5), gray, 1)), pixel_bytes(gray));
  const Pixels color = noisy_image(9, 9);
  EXPECT_EQ(pixel_bytes(staged(color_jitter(0, 0, 0, 0), color, 1)), pixel_bytes(color));
}

TEST(RandAugment, AppliesEachOfItsOperations) {
  const Pixels image = noisy_image(60, 50);
  std::set<Bytes> results;
  for (std::uint64_t seed = 0; seed < 400; ++seed) {
    const Pixels augmented = staged(rand_augment(1, 15), image, seed);
    ASSERT_EQ(augmented.width, 60);
    ASSERT_EQ(augmented.height, 50);
    results.insert(pixel_bytes(augmented));
  }
  // Identity, nine operations of two signs, and posterize, solarize, autocontrast and equalize.
  EXPECT_EQ(results.size(), 1U + 9 * 2 + 4);
  EXPECT_TRUE(results.contains(pixel_bytes(image)));
  EXPECT_EQ(pixel_bytes(staged(rand_augment(0, 15), image, 1)), pixel_bytes(image));
}

TEST(RandAugment, TakesTheSmallestImages) {
  for (const auto& [width, height] : {std::pair{1, 1}, {2, 3}, {3, 2}, {1, 40}}) {
    for (std::uint64_t seed = 0; seed < 60; ++seed) staged(rand_augment(3, 30), noisy_image(width, height), seed);
  }
}

TEST(Stage, RefusesArgumentsThatMakeNoSense) {
  const double nan = std::nan("");
  EXPECT_THROW(random_resized_crop(0, 5), Error);
  EXPECT_THROW(random_resized_crop(5, 5, 0.5, 0.1), Error);
  EXPECT_THROW(random_resized_crop(5, 5, nan, 0.1), Error);
  EXPECT_THROW(random_resized_crop(5, 5, 0.1, 1, 0, 1), Error);
  EXPECT_THROW(random_resized_crop(5, 5, 0.1, 1, 2, 1), Error);
  EXPECT_THROW(resize(-1), Error);
  EXPECT_THROW(resize(5, 0), Error);
  EXPECT_THROW(center_crop(0, 1), Error);
  EXPECT_THROW(horizontal_flip(1.5), Error);
  EXPECT_THROW(horizontal_flip(nan), Error);
  EXPECT_THROW(color_jitter(-0.1, 0, 0, 0), Error);
  EXPECT_THROW(color_jitter(0, 0, 0, 0.6), Error);
  EXPECT_THROW(color_jitter(0, nan, 0, 0), Error);
  EXPECT_THROW(rand_augment(-1, 5), Error);
  EXPECT_THROW(rand_augment(1, 31), Error);
  for (const auto& stage : {resize(4), color_jitter(1, 1, 1, 0), rand_augment(), horizontal_flip(1)}) {
    Item item;
    PhiloxStream random(1);
    EXPECT_THROW(for (int i = 0; i < 30; ++i) stage->apply(item, random), Error) << stage->name();
  }
}

}  // namespace
}  // namespace oxytorch::data
