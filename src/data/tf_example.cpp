#include "data/tf_example.h"

#include <cstring>

#include "data/byte_reader.h"

namespace oxytorch::data {
namespace {

enum class WireType : std::uint8_t { Varint = 0, Chunk = 2, Fixed32 = 5 };

/// Reads the fields of a protobuf message. Every method returns whether there was what it reads.
class WireReader {
 public:
  explicit WireReader(std::span<const std::byte> bytes) : bytes_(bytes) {}
  [[nodiscard]] bool done() const noexcept { return bytes_.empty(); }

  bool varint(std::uint64_t& value) {
    value = 0;
    for (std::size_t i = 0; i < bytes_.size() && i < 10; ++i) {
      const auto byte = static_cast<std::uint64_t>(bytes_[i]);
      if (i == 9 && byte > 1) return false;  // more than 64 bits
      value |= (byte & 127) << (7 * i);
      if (byte < 128) {
        bytes_ = bytes_.subspan(i + 1);
        return true;
      }
    }
    return false;
  }
  bool tag(std::uint64_t& field, WireType& type) {
    std::uint64_t value = 0;
    if (!varint(value)) return false;
    field = value >> 3;
    type = static_cast<WireType>(value & 7);
    return true;
  }
  bool take(std::uint64_t length, std::span<const std::byte>& bytes) {
    if (length > bytes_.size()) return false;
    bytes = bytes_.first(length);
    bytes_ = bytes_.subspan(length);
    return true;
  }
  bool chunk(std::span<const std::byte>& bytes) {
    std::uint64_t length = 0;
    return varint(length) && take(length, bytes);
  }

 private:
  std::span<const std::byte> bytes_;
};

/// Calls `use(field, bytes)` for each field of a message that has chunks alone, until it returns false.
template <class Use>
bool for_each_chunk(std::span<const std::byte> message, const Use& use) {
  WireReader reader(message);
  while (!reader.done()) {
    std::uint64_t field = 0;
    WireType type{};
    std::span<const std::byte> bytes;
    if (!reader.tag(field, type) || type != WireType::Chunk || !reader.chunk(bytes) || !use(field, bytes)) return false;
  }
  return true;
}

bool parse_tf_feature(std::span<const std::byte> message, TfFeature& feature) {
  return for_each_chunk(message, [&](std::uint64_t field, std::span<const std::byte> list) {
    if (field < 1 || field > 3 || feature.type != TfList::None) return false;
    feature = {static_cast<TfList>(field), list};
    return true;
  });
}

}  // namespace

std::optional<std::map<std::string_view, TfFeature>> parse_tf_example(std::span<const std::byte> record) {
  std::map<std::string_view, TfFeature> features;
  const auto entry = [&](std::uint64_t field, std::span<const std::byte> pair) {
    if (field != 1) return false;
    std::string_view key;
    TfFeature feature;
    const bool whole = for_each_chunk(pair, [&](std::uint64_t part, std::span<const std::byte> bytes) {
      if (part == 2) return parse_tf_feature(bytes, feature);
      key = {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
      return part == 1;
    });
    features[key] = feature;
    return whole;
  };
  const bool example = for_each_chunk(record, [&](std::uint64_t field, std::span<const std::byte> map) {
    return field == 1 && for_each_chunk(map, entry);
  });
  if (!example) return std::nullopt;
  return features;
}

std::optional<std::vector<std::span<const std::byte>>> tf_bytes(std::span<const std::byte> list) {
  std::vector<std::span<const std::byte>> found;
  const bool whole = for_each_chunk(list, [&](std::uint64_t field, std::span<const std::byte> bytes) {
    found.push_back(bytes);
    return field == 1;
  });
  return whole ? std::optional(std::move(found)) : std::nullopt;
}

std::optional<std::vector<float>> tf_floats(std::span<const std::byte> list) {
  std::vector<float> found;
  WireReader reader(list);
  while (!reader.done()) {
    std::uint64_t field = 0;
    WireType type{};
    std::span<const std::byte> bytes;
    if (!reader.tag(field, type) || field != 1) return std::nullopt;
    const bool taken =
        type == WireType::Chunk ? reader.chunk(bytes) : type == WireType::Fixed32 && reader.take(4, bytes);
    if (!taken || bytes.size() % 4 != 0) return std::nullopt;
    const auto before = found.size();
    found.resize(before + bytes.size() / 4);
    if (!bytes.empty()) std::memcpy(found.data() + before, bytes.data(), bytes.size());
  }
  return found;
}

std::optional<std::vector<std::int64_t>> tf_integers(std::span<const std::byte> list) {
  std::vector<std::int64_t> found;
  WireReader reader(list);
  while (!reader.done()) {
    std::uint64_t field = 0, value = 0;
    WireType type{};
    if (!reader.tag(field, type) || field != 1) return std::nullopt;
    if (type == WireType::Varint) {
      if (!reader.varint(value)) return std::nullopt;
      found.push_back(static_cast<std::int64_t>(value));
      continue;
    }
    std::span<const std::byte> bytes;
    if (type != WireType::Chunk || !reader.chunk(bytes)) return std::nullopt;
    for (WireReader packed(bytes); !packed.done();) {
      if (!packed.varint(value)) return std::nullopt;
      found.push_back(static_cast<std::int64_t>(value));
    }
  }
  return found;
}

}  // namespace oxytorch::data
