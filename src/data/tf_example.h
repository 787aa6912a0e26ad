/// tf.train.Example, the protobuf message that TFRecord files mostly hold.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "oxytorch/data/value.h"

namespace oxytorch::data {

enum class TfList : std::uint8_t { None, Bytes, Floats, Integers };

/// One feature: a list whose message is at `list`.
struct TfFeature {
  TfList type = TfList::None;
  std::span<const std::byte> list;
};

/// Features by name; they point into the record. Empty where it is no Example: all fields must be known ones.
std::optional<std::map<std::string_view, TfFeature>> parse_tf_example(std::span<const std::byte> record);

/// The elements of a list; empty where it is damaged.
std::optional<std::vector<std::span<const std::byte>>> tf_bytes(std::span<const std::byte> list);
std::optional<std::vector<float>> tf_floats(std::span<const std::byte> list);
std::optional<std::vector<std::int64_t>> tf_integers(std::span<const std::byte> list);

}  // namespace oxytorch::data
