#include "oxytorch/data/mix.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numbers>
#include <vector>

#include "data/pixel_kernels.h"
#include "oxytorch/error.h"

namespace oxytorch::data {

BatchStage::~BatchStage() = default;

namespace {

// Above 0.
double uniform_above_zero(PhiloxStream& random) { return 1 - random.uniform_double(); }

double normal_draw(PhiloxStream& random) {
  const double radius = std::sqrt(-2 * std::log(uniform_above_zero(random)));
  return radius * std::cos(2 * std::numbers::pi * random.uniform_double());
}

// The logarithm of a draw from Gamma(shape, 1): of a small shape most draws are too small for a double.
// G. Marsaglia, W. W. Tsang, "A simple method for generating gamma variables", 2000.
double log_gamma_draw(double shape, PhiloxStream& random) {
  if (shape < 1) return log_gamma_draw(shape + 1, random) + std::log(uniform_above_zero(random)) / shape;
  const double d = shape - 1.0 / 3;
  const double c = 1 / std::sqrt(9 * d);
  for (;;) {
    const double x = normal_draw(random);
    const double root = 1 + c * x;
    if (root <= 0) continue;
    const double v = root * root * root;
    if (std::log(uniform_above_zero(random)) < 0.5 * x * x + d - d * v + d * std::log(v)) return std::log(d * v);
  }
}

double beta_draw(double alpha, PhiloxStream& random) {
  const double a = log_gamma_draw(alpha, random);
  const double b = log_gamma_draw(alpha, random);
  return 1 / (1 + std::exp(b - a));
}

// Images of a batch, side by side.
struct ImageBatch {
  DType dtype;
  std::byte* data;
  std::size_t batch, image_bytes;
  std::size_t planes, height, width, pixel_bytes;  // one plane of whole pixels where the channels come last

  // Calls use(image i, image i - 1 as it was before) for each; the first follows the last.
  template <class Use>
  void for_pairs(Use use) const {
    const std::vector<std::byte> last(data + (batch - 1) * image_bytes, data + batch * image_bytes);
    for (std::size_t i = batch; i-- > 0;)
      use(data + i * image_bytes, i == 0 ? last.data() : data + (i - 1) * image_bytes);
  }
};

class Mix : public BatchStage {
 public:
  Mix(const char* name, double alpha, std::int64_t classes, MixColumns columns)
      : name_(name), alpha_(alpha), classes_(classes), columns_(std::move(columns)) {
    OXY_CHECK(alpha >= 1e-6 && alpha <= 1e6, InvalidArgument, name, "() was given the alpha ", alpha,
              "; expected a number from 1e-6 to 1e6.");
    OXY_CHECK(classes > 0 && classes <= std::int64_t{1} << 31, InvalidArgument, name, "() was given ", classes,
              " classes; expected a positive number.");
  }

  [[nodiscard]] std::string name() const override { return name_; }

  void apply(Batch& batch, PhiloxStream& random) const override {
    Value& labels = column(batch, columns_.label);
    const ImageBatch images = images_of(batch);
    Value soft = soft_labels(labels, images.batch);
    const double share = mix_images(images, beta_draw(alpha_, random), random);
    const auto row = static_cast<std::size_t>(classes_) * sizeof(float);
    const ImageBatch rows{DType::F32, bytes_of(soft), images.batch, row, 1, 1, 1, row};
    mix_pairs(rows, share);
    labels = std::move(soft);
  }

 protected:
  /// Gives the share of its own that an image keeps.
  virtual double mix_images(const ImageBatch& images, double lambda, PhiloxStream& random) const = 0;

  static void mix_pairs(const ImageBatch& images, double lambda) {
    images.for_pairs([&](std::byte* image, const std::byte* other) {
      pixel_kernels().mix(images.dtype, image, other, images.image_bytes / size_of(images.dtype),
                          static_cast<float>(lambda), static_cast<float>(1 - lambda));
    });
  }

 private:
  // A column's memory belongs to its batch; only the type says that it is to be read.
  static std::byte* bytes_of(const Value& value) { return const_cast<std::byte*>(value.data.bytes.data()); }

  Value& column(Batch& batch, const std::string& wanted) const {
    const auto found = std::find_if(batch.columns.begin(), batch.columns.end(), [&](const Column& column) {
      return column.name == wanted && !(column.kind == Kind::Text || column.kind == Kind::Bytes);
    });
    OXY_CHECK(found != batch.columns.end(), InvalidArgument, name_, "() mixes the column '", wanted,
              "', which is not among the arrays of the batch; name another in MixColumns.");
    return found->array;
  }

  ImageBatch images_of(Batch& batch) const {
    Value& value = column(batch, columns_.image);
    const auto& shape = value.shape;
    const auto has_channels = [&](std::size_t dimension) {
      return shape.size() == 4 && (shape[dimension] == 1 || shape[dimension] == 3);
    };
    const bool channels_first = has_channels(1);
    OXY_CHECK((channels_first || has_channels(3)) &&
                  std::all_of(shape.begin(), shape.end(), [](std::int64_t size) { return size > 0; }),
              InvalidArgument, name_, "() mixes images, but '", columns_.image, "' has ", shape.size(),
              " dimensions and ", value.elements(),
              " elements; expected four dimensions, with 1 or 3 channels in the second or the last.");
    OXY_CHECK(value.dtype == DType::U8 || value.dtype == DType::F32 || value.dtype == DType::BF16 ||
                  value.dtype == DType::F16,
              InvalidType, name_, "() cannot mix images of ", oxytorch::data::name(value.dtype),
              "; expected uint8, float32, bfloat16 or float16.");
    const auto size = [&](std::size_t dimension) { return static_cast<std::size_t>(shape[dimension]); };
    const std::size_t element = size_of(value.dtype);
    OXY_CHECK(value.data.bytes.size() == static_cast<std::size_t>(value.elements()) * element, InvalidArgument, name_,
              "() was given ", value.data.bytes.size(), " bytes for ", value.elements(), " elements of '",
              columns_.image, "'.");
    const std::size_t image = size(1) * size(2) * size(3) * element;
    if (channels_first) return {value.dtype, bytes_of(value), size(0), image, size(1), size(2), size(3), element};
    return {value.dtype, bytes_of(value), size(0), image, 1, size(1), size(2), size(3) * element};
  }

  Value soft_labels(const Value& labels, std::size_t batch) const {
    const auto rows = static_cast<std::int64_t>(batch);
    if (labels.dtype == DType::F32 && labels.shape == std::vector<std::int64_t>{rows, classes_}) {
      return own(DType::F32, labels.shape, labels.data.bytes);
    }
    OXY_CHECK(labels.shape == std::vector<std::int64_t>{rows}, InvalidArgument, name_, "() was given labels of ",
              labels.shape.size(), " dimensions and ", labels.elements(), " elements for ", batch,
              " images; expected one integer for each.");
    std::vector<float> soft(batch * static_cast<std::size_t>(classes_));
    for (std::size_t i = 0; i < batch; ++i) {
      const std::int64_t label = integer_at(labels, i);
      OXY_CHECK(label >= 0 && label < classes_, OutOfRange, name_, "() was given the label ", label, " for ", classes_,
                " classes; labels are 0 to ", classes_ - 1, ".");
      soft[i * static_cast<std::size_t>(classes_) + static_cast<std::size_t>(label)] = 1;
    }
    return own(DType::F32, {rows, classes_}, std::as_bytes(std::span(soft)));
  }

  template <class T>
  static std::int64_t read_as(const Value& value, std::size_t index) {
    T element;
    std::memcpy(&element, value.data.bytes.data() + index * sizeof(T), sizeof(T));
    return static_cast<std::int64_t>(element);
  }

  std::int64_t integer_at(const Value& value, std::size_t index) const {
    OXY_CHECK(value.data.bytes.size() >= (index + 1) * size_of(value.dtype), InvalidArgument, name_, "() was given ",
              value.data.bytes.size(), " bytes of labels, too few.");
    switch (value.dtype) {
      case DType::U8: return read_as<std::uint8_t>(value, index);
      case DType::I8: return read_as<std::int8_t>(value, index);
      case DType::U16: return read_as<std::uint16_t>(value, index);
      case DType::I16: return read_as<std::int16_t>(value, index);
      case DType::U32: return read_as<std::uint32_t>(value, index);
      case DType::I32: return read_as<std::int32_t>(value, index);
      case DType::U64:
      case DType::I64: return read_as<std::int64_t>(value, index);
      default: break;
    }
    detail::raise(ErrorCode::InvalidType, name_, "() was given labels of ", oxytorch::data::name(value.dtype),
                  "; expected integers, or float32 of [batch, classes].");
  }

  const char* name_;
  double alpha_;
  std::int64_t classes_;
  MixColumns columns_;
};

class MixUp final : public Mix {
 public:
  MixUp(double alpha, std::int64_t classes, MixColumns columns) : Mix("MixUp", alpha, classes, std::move(columns)) {}

 private:
  double mix_images(const ImageBatch& images, double lambda, PhiloxStream& random) const override {
    mix_pairs(images, lambda);
    return lambda;
  }
};

class CutMix final : public Mix {
 public:
  CutMix(double alpha, std::int64_t classes, MixColumns columns) : Mix("CutMix", alpha, classes, std::move(columns)) {}

 private:
  double mix_images(const ImageBatch& images, double lambda, PhiloxStream& random) const override {
    const double half = 0.5 * std::sqrt(1 - lambda);
    const std::size_t x = random.below(images.width), y = random.below(images.height);
    const auto half_width = static_cast<std::size_t>(half * static_cast<double>(images.width));
    const auto half_height = static_cast<std::size_t>(half * static_cast<double>(images.height));
    const std::size_t left = x - std::min(x, half_width), right = std::min(x + half_width, images.width);
    const std::size_t top = y - std::min(y, half_height), bottom = std::min(y + half_height, images.height);
    images.for_pairs([&](std::byte* image, const std::byte* other) {
      for (std::size_t plane = 0; plane < images.planes; ++plane) {
        for (std::size_t row = top; row < bottom; ++row) {
          const std::size_t at = ((plane * images.height + row) * images.width + left) * images.pixel_bytes;
          std::memcpy(image + at, other + at, (right - left) * images.pixel_bytes);
        }
      }
    });
    return 1 - static_cast<double>((right - left) * (bottom - top)) / static_cast<double>(images.width * images.height);
  }
};

}  // namespace

BatchStagePtr mix_up(double alpha, std::int64_t classes, MixColumns columns) {
  return std::make_shared<MixUp>(alpha, classes, std::move(columns));
}
BatchStagePtr cut_mix(double alpha, std::int64_t classes, MixColumns columns) {
  return std::make_shared<CutMix>(alpha, classes, std::move(columns));
}

}  // namespace oxytorch::data
