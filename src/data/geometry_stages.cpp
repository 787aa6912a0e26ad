#include <algorithm>
#include <cmath>

#include "data/item.h"
#include "oxytorch/error.h"

namespace oxytorch::data {
namespace {

// Half to even, as Python's round().
int round_to_int(double value) { return static_cast<int>(std::nearbyint(value)); }

void check_output_size(const char* stage, int width, int height) {
  OXY_CHECK(width > 0 && height > 0, InvalidArgument, stage, "() was given the size ", width, " x ", height,
            "; expected positive numbers of pixels.");
}

class RandomResizedCrop final : public Stage {
 public:
  RandomResizedCrop(int width, int height, double min_scale, double max_scale, double min_ratio, double max_ratio)
      : width_(width),
        height_(height),
        min_scale_(min_scale),
        max_scale_(max_scale),
        min_ratio_(min_ratio),
        max_ratio_(max_ratio) {
    check_output_size("random_resized_crop", width, height);
    OXY_CHECK(0 < min_scale && min_scale <= max_scale && max_scale < HUGE_VAL, InvalidArgument,
              "random_resized_crop() was given scales from ", min_scale, " to ", max_scale,
              "; expected positive ones, the smaller first.");
    OXY_CHECK(0 < min_ratio && min_ratio <= max_ratio && max_ratio < HUGE_VAL, InvalidArgument,
              "random_resized_crop() was given aspect ratios from ", min_ratio, " to ", max_ratio,
              "; expected positive ones, the smaller first.");
  }

  [[nodiscard]] std::string name() const override { return "RandomResizedCrop"; }

  void apply(Item& item, PhiloxStream& random) const override {
    crop_item(item, draw(item.image.width(), item.image.height(), random));
    resize_item(item, width_, height_);
  }

 private:
  [[nodiscard]] Box draw(int width, int height, PhiloxStream& random) const {
    constexpr int kAttempts = 10;
    const double area = static_cast<double>(width) * height;
    const double low = std::log(min_ratio_);
    const double high = std::log(max_ratio_);
    for (int attempt = 0; attempt < kAttempts; ++attempt) {
      const double target = area * (min_scale_ + (max_scale_ - min_scale_) * random.uniform_double());
      const double ratio = std::exp(low + (high - low) * random.uniform_double());
      const double wide = std::nearbyint(std::sqrt(target * ratio));
      const double tall = std::nearbyint(std::sqrt(target / ratio));
      if (0 < wide && wide <= width && 0 < tall && tall <= height) {
        Box box{0, 0, static_cast<int>(wide), static_cast<int>(tall)};
        box.y = static_cast<int>(random.below(static_cast<std::uint64_t>(height - box.height) + 1));
        box.x = static_cast<int>(random.below(static_cast<std::uint64_t>(width - box.width) + 1));
        return box;
      }
    }
    return middle(width, height);
  }

  // The largest crop of an allowed ratio.
  [[nodiscard]] Box middle(int width, int height) const {
    Box box{0, 0, width, height};
    const double ratio = static_cast<double>(width) / height;
    if (ratio < min_ratio_) box.height = std::clamp(round_to_int(width / min_ratio_), 1, height);
    if (ratio > max_ratio_) box.width = std::clamp(round_to_int(height * max_ratio_), 1, width);
    box.x = (width - box.width) / 2;
    box.y = (height - box.height) / 2;
    return box;
  }

  int width_, height_;
  double min_scale_, max_scale_, min_ratio_, max_ratio_;
};

class Resize final : public Stage {
 public:
  Resize(int width, int height) : width_(width), height_(height) { check_output_size("resize", width, height); }
  explicit Resize(int shorter_side) : Resize(shorter_side, shorter_side) { keep_ratio_ = true; }

  [[nodiscard]] std::string name() const override { return "Resize"; }

  void apply(Item& item, PhiloxStream& random) const override {
    if (!keep_ratio_) return resize_item(item, width_, height_);
    const int width = item.image.width();
    const int height = item.image.height();
    const auto longer = [&](int side, int shorter) {
      return static_cast<int>(std::min(static_cast<double>(width_) * side / shorter, 0x1p30));
    };
    if (width <= height) return resize_item(item, width_, longer(height, width));
    resize_item(item, longer(width, height), width_);
  }

 private:
  int width_, height_;
  bool keep_ratio_ = false;
};

class CenterCrop final : public Stage {
 public:
  CenterCrop(int width, int height) : width_(width), height_(height) {
    check_output_size("center_crop", width, height);
  }

  [[nodiscard]] std::string name() const override { return "CenterCrop"; }

  void apply(Item& item, PhiloxStream& random) const override {
    const int width = item.image.width();
    const int height = item.image.height();
    Box box{0, 0, std::min(width, width_), std::min(height, height_)};
    box.x = round_to_int((width - box.width) / 2.0);
    box.y = round_to_int((height - box.height) / 2.0);
    crop_item(item, box);
    if (box.width < width_ || box.height < height_) {
      pad_item(item, width_, height_, (width_ - box.width) / 2, (height_ - box.height) / 2);
    }
  }

 private:
  int width_, height_;
};

class HorizontalFlip final : public Stage {
 public:
  explicit HorizontalFlip(double probability) : probability_(probability) {
    OXY_CHECK(probability >= 0 && probability <= 1, InvalidArgument, "horizontal_flip() was given the probability ",
              probability, "; expected one from 0 to 1.");
  }

  [[nodiscard]] std::string name() const override { return "HorizontalFlip"; }

  void apply(Item& item, PhiloxStream& random) const override {
    if (random.uniform_double() < probability_) flip_item(item);
  }

 private:
  double probability_;
};

}  // namespace

StagePtr random_resized_crop(int width, int height, double min_scale, double max_scale, double min_ratio,
                             double max_ratio) {
  return std::make_shared<RandomResizedCrop>(width, height, min_scale, max_scale, min_ratio, max_ratio);
}
StagePtr resize(int shorter_side) { return std::make_shared<Resize>(shorter_side); }
StagePtr resize(int width, int height) { return std::make_shared<Resize>(width, height); }
StagePtr center_crop(int width, int height) { return std::make_shared<CenterCrop>(width, height); }
StagePtr horizontal_flip(double probability) { return std::make_shared<HorizontalFlip>(probability); }

}  // namespace oxytorch::data
