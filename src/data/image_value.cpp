#include <algorithm>
#include <cstring>

#include "data/coefficients.h"
#include "oxytorch/data/stage.h"
#include "oxytorch/error.h"

namespace oxytorch::data {

ImageHeader stripped_header(std::span<const std::byte> stripped) noexcept {
  try {
    return image_header(CoefficientReader(stripped).jpeg_header());
  } catch (const Error&) {
    return {};
  }
}

LazyImage image_of(const Value& value, const View& stripped) {
  if (value.shape.size() != 3) return LazyImage(value.data, stripped);
  Pixels pixels{static_cast<int>(value.shape[1]), static_cast<int>(value.shape[0]), static_cast<int>(value.shape[2]),
                nullptr};
  const auto& bytes = value.data.bytes;
  OXY_CHECK(value.dtype == DType::U8 && pixels.bytes() == bytes.size(), InvalidArgument,
            "an image that is no encoded one must be uint8 of [height, width, channels].");
  pixels.data = std::make_shared<std::uint8_t[]>(std::max<std::size_t>(bytes.size(), 1));
  if (!bytes.empty()) std::memcpy(pixels.data.get(), bytes.data(), bytes.size());
  return LazyImage(std::move(pixels));
}

}  // namespace oxytorch::data
