#include "data/sample_entry.h"

#include <cstring>

#include "data/byte_reader.h"

namespace oxytorch::data {
namespace {

/// What stands before each value. Dimensions follow it, then the bytes.
struct EntryHeader {
  std::uint8_t dtype = 0, dimensions = 0, stripped = 0, zero = 0;
  std::uint32_t magic = 0x3153584F;  // "OXS1"
  std::uint64_t bytes = 0;
};

void append_raw(std::string& text, const void* data, std::size_t size) {
  text.append(static_cast<const char*>(data), size);
}

/// Reads from the front of bytes, and says whether there was enough.
bool take_front(std::span<const std::byte>& from, void* to, std::size_t size) {
  if (from.size() < size) return false;
  if (size > 0) std::memcpy(to, from.data(), size);
  from = from.subspan(size);
  return true;
}

}  // namespace

std::string pack_sample(const Sample& sample, std::int64_t image, const std::string& stripped) {
  std::string entry;
  std::size_t size = stripped.size();
  for (const auto& value : sample) size += sizeof(EntryHeader) + 8 * value.shape.size() + value.data.bytes.size();
  entry.reserve(size);
  for (std::size_t i = 0; i < sample.size(); ++i) {
    const auto& value = sample[i];
    const bool replaced = !stripped.empty() && static_cast<std::int64_t>(i) == image;
    const std::span<const std::byte> bytes = replaced ? std::as_bytes(std::span(stripped)) : value.data.bytes;
    const EntryHeader header{.dtype = static_cast<std::uint8_t>(value.dtype),
                             .dimensions = static_cast<std::uint8_t>(value.shape.size()),
                             .stripped = replaced,
                             .bytes = bytes.size()};
    append_raw(entry, &header, sizeof(header));
    append_raw(entry, value.shape.data(), 8 * value.shape.size());
    append_raw(entry, bytes.data(), bytes.size());
  }
  return entry;
}

std::optional<CachedSample> unpack_sample(const View& entry, std::size_t fields) {
  CachedSample found;
  auto rest = entry.bytes;
  for (std::size_t i = 0; i < fields; ++i) {
    EntryHeader header;
    if (!take_front(rest, &header, sizeof(header)) || header.magic != EntryHeader{}.magic ||
        header.dtype > static_cast<std::uint8_t>(DType::Bool) || header.bytes > rest.size()) {
      return std::nullopt;
    }
    Value value{static_cast<DType>(header.dtype), std::vector<std::int64_t>(header.dimensions), {}};
    if (!take_front(rest, value.shape.data(), 8 * value.shape.size()) || header.bytes > rest.size())
      return std::nullopt;
    const View bytes{rest.first(header.bytes), entry.owner};
    rest = rest.subspan(header.bytes);
    (header.stripped != 0 ? found.stripped : value.data) = bytes;
    if (header.stripped == 0 && array_bytes(value.dtype, value.shape) != header.bytes) return std::nullopt;
    found.sample.push_back(std::move(value));
  }
  if (!rest.empty()) return std::nullopt;
  return found;
}

}  // namespace oxytorch::data
