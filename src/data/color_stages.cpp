#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "data/color.h"
#include "data/item.h"
#include "oxytorch/error.h"

namespace oxytorch::data {
namespace {

class ColorJitter final : public Stage {
 public:
  ColorJitter(double brightness, double contrast, double saturation, double hue)
      : extents_{brightness, contrast, saturation, hue} {
    static constexpr const char* kNames[] = {"brightness", "contrast", "saturation", "hue"};
    for (std::size_t i = 0; i < extents_.size(); ++i) {
      const bool is_hue = i == kHue;
      OXY_CHECK(extents_[i] >= 0 && extents_[i] <= (is_hue ? 0.5 : 1e6), InvalidArgument,
                "color_jitter() was given the ", kNames[i], " ", extents_[i], "; expected ",
                is_hue ? "a turn from 0 to 0.5." : "a number of at least 0, mostly below 1.");
    }
  }

  [[nodiscard]] std::string name() const override { return "ColorJitter"; }

  void apply(Item& item, PhiloxStream& random) const override {
    std::array<std::size_t, 4> order{0, 1, 2, 3};
    for (std::size_t i = order.size() - 1; i > 0; --i) std::swap(order[i], order[random.below(i + 1)]);
    std::array<double, 4> drawn{};
    for (std::size_t i = 0; i < drawn.size(); ++i) {
      if (extents_[i] == 0) continue;
      const double least = i == kHue ? -extents_[i] : std::max(0.0, 1 - extents_[i]);
      const double most = i == kHue ? extents_[i] : 1 + extents_[i];
      drawn[i] = least + (most - least) * random.uniform_double();
    }
    Pixels& pixels = writable_pixels(item.image);
    static constexpr void (*kAdjust[])(Pixels&, double) = {adjust_brightness, adjust_contrast, adjust_saturation,
                                                           adjust_hue};
    for (const std::size_t i : order) {
      if (extents_[i] > 0) kAdjust[i](pixels, drawn[i]);
    }
  }

 private:
  static constexpr std::size_t kHue = 3;
  std::array<double, 4> extents_;
};

}  // namespace

StagePtr color_jitter(double brightness, double contrast, double saturation, double hue) {
  return std::make_shared<ColorJitter>(brightness, contrast, saturation, hue);
}

}  // namespace oxytorch::data
