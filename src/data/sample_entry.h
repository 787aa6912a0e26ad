/// A sample as one run of bytes, which a cache keeps.
#pragma once

#include <optional>
#include <string>

#include "oxytorch/data/value.h"

namespace oxytorch::data {

/// A sample, and which of its fields stands stripped in the place of a JPEG.
struct CachedSample {
  Sample sample;
  View stripped;  ///< of the image; its value in `sample` is empty then
};

/// `image`: index of the field whose JPEG is kept as `stripped`, where that is not empty; else -1.
OXY_API std::string pack_sample(const Sample& sample, std::int64_t image, const std::string& stripped);
/// Undoes pack_sample(); the values point into `entry`. Empty where it is damaged or of another schema.
OXY_API std::optional<CachedSample> unpack_sample(const View& entry, std::size_t fields);

}  // namespace oxytorch::data
