#include <array>
#include <cmath>
#include <numbers>

#include "data/color.h"
#include "data/item.h"
#include "oxytorch/error.h"

namespace oxytorch::data {
namespace {

constexpr int kMagnitudes = 31;

// Element `index` of torch.linspace(start, end, 31), in fused float operations as there.
double magnitude_between(double start, double end, int index) {
  const auto first = static_cast<float>(start), last = static_cast<float>(end);
  const float step = (last - first) / (kMagnitudes - 1);
  if (index < kMagnitudes / 2) return std::fma(step, static_cast<float>(index), first);
  return std::fma(-step, static_cast<float>(kMagnitudes - 1 - index), last);
}

double round_to_15(double value) { return std::nearbyint(value * 1e15) / 1e15; }

// PIL's Image.rotate() about the centre; counter-clockwise.
AffineMap rotation(double degrees, int width, int height) {
  const double angle = -degrees * (std::numbers::pi / 180);
  const double cosine = round_to_15(std::cos(angle));
  const double sine = round_to_15(std::sin(angle));
  const double x = width / 2.0, y = height / 2.0;
  return {cosine, sine, cosine * -x + sine * -y + x, -sine, cosine, -sine * -x + cosine * -y + y};
}

// What torchvision's affine() makes of a shear of atan(magnitude) about the corner.
double shear_of(double magnitude) {
  const double degrees = std::atan(magnitude) * (180 / std::numbers::pi);
  return std::tan(degrees * (std::numbers::pi / 180));
}

class RandAugment final : public Stage {
 public:
  RandAugment(int count, int magnitude) : count_(count), magnitude_(magnitude) {
    OXY_CHECK(count >= 0, InvalidArgument, "rand_augment() was given a count of ", count,
              " operations; expected at least 0.");
    OXY_CHECK(magnitude >= 0 && magnitude < kMagnitudes, InvalidArgument, "rand_augment() was given the magnitude ",
              magnitude, "; expected 0 to ", kMagnitudes - 1, ".");
  }

  [[nodiscard]] std::string name() const override { return "RandAugment"; }

  void apply(Item& item, PhiloxStream& random) const override {
    // In torchvision's order. The magnitudes of translations are for the size at the beginning, which none changes.
    using Apply = void (RandAugment::*)(Item&, double) const;
    struct Operation {
      Apply apply;
      double start, end;
      bool is_signed;
    };
    const double right = 150.0 / 331.0 * item.image.width();
    const double down = 150.0 / 331.0 * item.image.height();
    const Operation operations[] = {
        {nullptr, 0, 0, false},
        {&RandAugment::shear_x, 0, 0.3, true},
        {&RandAugment::shear_y, 0, 0.3, true},
        {&RandAugment::translate_x, 0, right, true},
        {&RandAugment::translate_y, 0, down, true},
        {&RandAugment::rotate, 0, 30, true},
        {&RandAugment::color<adjust_brightness>, 0, 0.9, true},
        {&RandAugment::color<adjust_saturation>, 0, 0.9, true},
        {&RandAugment::color<adjust_contrast>, 0, 0.9, true},
        {&RandAugment::color<adjust_sharpness>, 0, 0.9, true},
        {&RandAugment::posterize_to, 8, 4, false},
        {&RandAugment::solarize_from, 1, 0, false},
        {&RandAugment::stretch<auto_contrast>, 0, 0, false},
        {&RandAugment::stretch<equalize>, 0, 0, false},
    };
    for (int i = 0; i < count_; ++i) {
      const Operation& operation = operations[random.below(std::size(operations))];
      double magnitude = magnitude_between(operation.start, operation.end, magnitude_);
      if (operation.is_signed && random.uniform_double() <= 0.5) magnitude = -magnitude;
      if (operation.apply != nullptr) (this->*operation.apply)(item, magnitude);
    }
  }

 private:
  void shear_x(Item& item, double magnitude) const { warp_item(item, {1, shear_of(magnitude), 0, 0, 1, 0}); }
  void shear_y(Item& item, double magnitude) const { warp_item(item, {1, 0, 0, shear_of(magnitude), 1, 0}); }
  void translate_x(Item& item, double pixels) const { warp_item(item, {1, 0, -std::trunc(pixels), 0, 1, 0}); }
  void translate_y(Item& item, double pixels) const { warp_item(item, {1, 0, 0, 0, 1, -std::trunc(pixels)}); }
  void rotate(Item& item, double degrees) const {
    warp_item(item, rotation(degrees, item.image.width(), item.image.height()));
  }
  template <void (*kAdjust)(Pixels&, double)>
  void color(Item& item, double magnitude) const {
    kAdjust(writable_pixels(item.image), 1 + magnitude);
  }
  template <void (*kStretch)(Pixels&)>
  void stretch(Item& item, double) const {
    kStretch(writable_pixels(item.image));
  }
  void posterize_to(Item& item, double) const {
    posterize(writable_pixels(item.image), static_cast<int>(std::nearbyint(8 - magnitude_ / 7.5F)));
  }
  void solarize_from(Item& item, double magnitude) const { solarize(writable_pixels(item.image), 255 * magnitude); }

  int count_, magnitude_;
};

}  // namespace

StagePtr rand_augment(int count, int magnitude) { return std::make_shared<RandAugment>(count, magnitude); }

}  // namespace oxytorch::data
