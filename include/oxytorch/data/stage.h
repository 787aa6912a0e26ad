/// Stages: what is done to a sample, and to a batch, between the dataset and the model.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "oxytorch/data/image.h"
#include "oxytorch/data/value.h"
#include "oxytorch/random.h"

namespace oxytorch::data {

/// An image on its way: encoded until a stage asks for pixels, so that a crop decodes only what it keeps.
class OXY_API LazyImage {
 public:
  LazyImage() = default;
  /// `stripped`: what strip_jpeg() gave for it, where that is at hand.
  explicit LazyImage(View encoded, View stripped = {});
  explicit LazyImage(Pixels pixels) : pixels_(std::move(pixels)) {}
  /// Without decoding.
  [[nodiscard]] int width() const;
  [[nodiscard]] int height() const;
  /// Cuts; an encoded image is not decoded yet.
  void crop(const Box& wanted);
  /// Decodes what is left, once; pixels that are there stay as they are, whatever `channels`.
  Pixels& pixels(int channels = 3);
  [[nodiscard]] bool encoded() const noexcept { return !pixels_; }

 private:
  [[nodiscard]] Box box() const;
  void check_present() const;

  View encoded_, stripped_;
  mutable std::optional<ImageHeader> header_;
  std::optional<Box> crop_;
  std::optional<Pixels> pixels_;
};

/// The image of a value of kind Image: encoded, or a copy of its pixels, which stages may write to.
/// Errors: `InvalidArgument` for pixels that are not U8 of [height, width, channels].
OXY_API LazyImage image_of(const Value& value, const View& stripped);

/// A sample on its way through the stages. What is an image is in `image`, everything else in `sample`.
struct Item {
  std::int64_t index = 0;  ///< of the dataset
  const Schema* schema = nullptr;
  Sample sample;
  LazyImage image;            ///< of the first field of kind Image
  std::vector<Pixels> masks;  ///< fields that the stages move with the image: one channel, the image's size
  std::vector<std::array<float, 4>> boxes;  ///< x0, y0, x1, y1 in pixels; those that leave the image are dropped
  std::vector<std::int64_t> box_ids;        ///< which boxes are left: their indices as read
};

/// One step for one sample. Called by several threads at once; randomness only from `random`, which belongs to seed,
/// epoch and sample.
class OXY_API Stage {
 public:
  Stage() = default;
  Stage(const Stage&) = delete;
  Stage& operator=(const Stage&) = delete;
  virtual ~Stage();
  [[nodiscard]] virtual std::string name() const = 0;
  virtual void apply(Item& item, PhiloxStream& random) const = 0;
};
using StagePtr = std::shared_ptr<const Stage>;

/// A function of the user's own as a stage; what it throws is reported with its name and the sample.
OXY_API StagePtr stage(std::string name, std::function<void(Item&, PhiloxStream&)> function);

// Stages of images, named and defined as torchvision's v2 transforms are; bilinear with antialiasing, uint8 in and out,
// at most one grey level from PIL's result of the same name.
OXY_API StagePtr random_resized_crop(int width, int height, double min_scale = 0.08, double max_scale = 1.0,
                                     double min_ratio = 3.0 / 4, double max_ratio = 4.0 / 3);
OXY_API StagePtr resize(int shorter_side);
OXY_API StagePtr resize(int width, int height);
OXY_API StagePtr center_crop(int width, int height);
OXY_API StagePtr horizontal_flip(double probability = 0.5);
/// Each factor is drawn from [max(0, 1 - x), 1 + x], hue from [-hue, hue]; in an order drawn for each sample.
OXY_API StagePtr color_jitter(double brightness, double contrast, double saturation, double hue);
/// E. Cubuk et al., "RandAugment", 2020: `count` operations of torchvision's list at `magnitude` of 31.
OXY_API StagePtr rand_augment(int count = 2, int magnitude = 9);

/// How images leave the pipeline.
struct ImageOutput {
  bool normalize = false;                                  ///< else uint8
  std::array<float, 3> mean{0, 0, 0}, deviation{1, 1, 1};  ///< of values in [0, 1]
  bool channels_last = false;  ///< height x width x channels instead of channels x height x width
  DType dtype = DType::F32;    ///< F32, BF16 or F16 where normalized
};
/// Writes (value / 255 - mean) / deviation into `out`, or the bytes, in the layout that is asked for.
OXY_API void write_pixels(const Pixels& pixels, const ImageOutput& output, std::byte* out);

/// Bilinear, antialiased resize to another size, as PIL's Image.resize(BILINEAR).
OXY_API Pixels resize_pixels(const Pixels& pixels, int width, int height);

}  // namespace oxytorch::data
