#include "data/shard_set.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <thread>

#include "data/byte_reader.h"
#include "data/remote_file.h"
#include "data/zstd.h"
#include "oxytorch/error.h"

namespace oxytorch::data {
namespace {

constexpr std::string_view kFramesMagic("LDFZ01\0\0", 8);
constexpr std::uint64_t kFrameRow =
    24;  // u32 first item, u32 items, u64 offset, u32 compressed, u32 uncompressed bytes

std::string xxh3_digits(std::span<const std::byte> bytes) {
  std::array<char, 17> text{};
  std::snprintf(text.data(), text.size(), "%016llx",
                static_cast<unsigned long long>(XXH3_64bits(bytes.data(), bytes.size())));
  return text.data();
}

/// The bytes of the count and the offsets.
std::uint64_t table_bytes(const ShardInfo& shard) { return 4 * (shard.items + 2); }

/// Checks that a shard begins with the count that its index says.
void check_count(const ShardInfo& shard, const View& count) {
  const auto items = load_number<std::uint32_t>(count.bytes.data());
  OXY_CHECK(items == shard.items, Io, shard.location, " is damaged: it says at offset 0 that it has ", items,
            " samples, and its index says ", shard.items, ".");
}

void check_size(const ShardInfo& shard, std::uint64_t size) {
  OXY_CHECK(size == shard.bytes || (shard.bytes_of_items && size == shard.bytes + table_bytes(shard)), Io,
            shard.location, " is truncated or damaged: it has ", size, " bytes, and its index says ", shard.bytes, ".");
}

struct ItemRange {
  std::uint64_t begin, end;
};

/// Where item `at` lies in `size` bytes, of which the first `head` are taken by the table.
ItemRange item_range(const ShardInfo& shard, std::span<const std::byte> offsets, std::uint64_t at, std::uint64_t head,
                     std::uint64_t size) {
  const ItemRange range{load_number<std::uint32_t>(offsets.data() + 4 * at),
                        load_number<std::uint32_t>(offsets.data() + 4 * (at + 1))};
  OXY_CHECK(head <= range.begin && range.begin <= range.end && range.end <= size, Io, shard.location,
            " is damaged: its table says that sample ", at, " is at bytes ", range.begin, " to ", range.end,
            ", and samples lie in bytes ", head, " to ", size, ".");
  return range;
}

View part_of(const View& view, std::uint64_t begin, std::uint64_t end) {
  return {view.bytes.subspan(begin, end - begin), view.owner};
}

std::size_t unpacked_shards() { return 2 * std::max<std::size_t>(1, std::thread::hardware_concurrency()); }

}  // namespace

ShardSet::ShardSet(std::vector<ShardInfo> shards, std::string index)
    : shards_(std::move(shards)), index_(std::move(index)), open_(shards_.size()), unpacked_(unpacked_shards()) {
  first_.push_back(0);
  for (const auto& shard : shards_) {
    OXY_CHECK(shard.items < UINT32_MAX, Io, shard.location, ": the index says that it has ", shard.items,
              " samples, which its 32-bit count cannot hold.");
    first_.push_back(first_.back() + static_cast<std::int64_t>(shard.items));
  }
}

std::size_t ShardSet::shard_of(std::int64_t index) const {
  OXY_CHECK(index >= 0 && index < size(), OutOfRange, "sample ", index, " does not exist: there are ", size(), ".");
  return static_cast<std::size_t>(std::upper_bound(first_.begin(), first_.end(), index) - first_.begin()) - 1;
}

const ShardSet::Open& ShardSet::opened(std::size_t shard) const {
  return open_.at(shard, [this](std::size_t i) { return open(shards_[i]); });
}

std::unique_ptr<ShardSet::Open> ShardSet::open(const ShardInfo& shard) const {
  auto open = std::make_unique<Open>();
  open->file = open_file(shard.location);
  if (shard.packing == Packing::Whole) return open;
  check_size(shard, open->file->size());
  if (shard.packing == Packing::Frames) {
    open_frames(shard, *open);
  } else {
    const auto head = open->file->view(0, table_bytes(shard));
    check_count(shard, head);
    open->offsets = part_of(head, 4, head.bytes.size());
  }
  return open;
}

void ShardSet::open_frames(const ShardInfo& shard, Open& open) {
  const auto head = open.file->view(0, 24);
  ByteReader reader(head.bytes, shard.location);
  const auto magic = reader.take_text(8);
  const auto version = reader.take<std::uint16_t>();
  reader.skip(2);
  OXY_CHECK(magic == kFramesMagic && version == 1, Io, shard.location,
            " does not begin with 'LDFZ01' and version 1, as shards compressed in batches do.");
  check_count(shard, part_of(head, 12, 16));
  reader.skip(4);
  open.frame_items = reader.take<std::uint32_t>();
  const std::uint64_t frames = reader.take<std::uint32_t>();
  OXY_CHECK(open.frame_items > 0 && frames == (shard.items + open.frame_items - 1) / open.frame_items, Io,
            shard.location, " is damaged: it says at offset 16 that it has ", frames, " batches of ", open.frame_items,
            " samples.");
  open.offsets = open.file->view(24, 4 * (shard.items + 1));
  open.frames = open.file->view(24 + open.offsets.bytes.size(), kFrameRow * frames);
}

View ShardSet::whole(std::size_t shard) const {
  return unpacked_.get(std::uint64_t{shard} << 32, [&] {
    const auto& info = shards_[shard];
    const auto& file = *opened(shard).file;
    const auto packed = file.view(0, file.size());
    OXY_CHECK(info.xxh3.empty() || info.xxh3 == xxh3_digits(packed.bytes), Io, info.location,
              " is damaged: its content has another XXH3 hash than its index says. Fetch or write it again.");
    auto content = unzstd(packed.bytes, info.bytes + table_bytes(info), info.location);
    check_size(info, content.bytes.size());
    OXY_CHECK(content.bytes.size() >= table_bytes(info), Io, info.location, " is damaged: its ", content.bytes.size(),
              " bytes cannot hold the table of ", info.items, " samples.");
    check_count(info, content);
    return content;
  });
}

View ShardSet::framed_item(std::size_t shard, std::uint64_t at) const {
  const auto& info = shards_[shard];
  const auto& open = opened(shard);
  const auto frame = at / open.frame_items;
  ByteReader row(open.frames.bytes.subspan(kFrameRow * frame, kFrameRow), info.location);
  const std::uint64_t first = row.take<std::uint32_t>(), items = row.take<std::uint32_t>(),
                      offset = row.take<std::uint64_t>(), packed = row.take<std::uint32_t>(),
                      bytes = row.take<std::uint32_t>();
  OXY_CHECK(first == frame * open.frame_items && first <= at && at < first + items && first + items <= info.items, Io,
            info.location, " is damaged: its batch ", frame, " says that it has samples ", first, " to ", first + items,
            ".");
  const auto content = unpacked_.get((std::uint64_t{shard} << 32) + frame, [&] {
    auto unpacked = unzstd(open.file->view(offset, packed).bytes, bytes, info.location);
    OXY_CHECK(unpacked.bytes.size() == bytes, Io, info.location, " is damaged: its batch ", frame, " decompresses to ",
              unpacked.bytes.size(), " bytes, and its table says ", bytes, ".");
    return unpacked;
  });
  const std::uint64_t base = load_number<std::uint32_t>(open.offsets.bytes.data() + 4 * first);
  const auto range = item_range(info, open.offsets.bytes, at, base, base + bytes);
  return part_of(content, range.begin - base, range.end - base);
}

View ShardSet::item(std::int64_t index) const {
  const auto shard = shard_of(index);
  const auto& info = shards_[shard];
  const auto at = static_cast<std::uint64_t>(index - first_[shard]);
  if (info.packing == Packing::Frames) return framed_item(shard, at);
  if (info.packing == Packing::Whole) {
    const auto content = whole(shard);
    const auto range = item_range(info, content.bytes.subspan(4), at, table_bytes(info), content.bytes.size());
    return part_of(content, range.begin, range.end);
  }
  const auto& open = opened(shard);
  const auto range = item_range(info, open.offsets.bytes, at, table_bytes(info), open.file->size());
  auto bytes = open.file->view(range.begin, range.end - range.begin);
  return info.packing == Packing::Items ? unzstd(bytes.bytes, UINT32_MAX, info.location) : bytes;
}

std::uint64_t ShardSet::offset(std::int64_t index) const noexcept {
  if (index < 0 || index >= size()) return 0;
  const auto shard = shard_of(index);
  const auto* open = open_.peek(shard);
  const auto at = 4 * static_cast<std::uint64_t>(index - first_[shard]);
  return open == nullptr || open->offsets.bytes.empty() ? 0
                                                        : load_number<std::uint32_t>(open->offsets.bytes.data() + at);
}

void ShardSet::check_arrays(const Schema& schema, const Sample& sample, std::int64_t index) const {
  for (std::size_t i = 0; i < sample.size(); ++i) {
    const auto& field = schema.fields[i];
    OXY_CHECK(sample[i].dtype == field.dtype && sample[i].shape.size() == field.shape.size(), NotSupported,
              place(index), ": field '", field.name, "' is ", name(sample[i].dtype), " with ", sample[i].shape.size(),
              " dimensions, and the first sample's is ", name(field.dtype), " with ", field.shape.size(),
              "; all must agree.");
  }
}

std::string ShardSet::place(std::int64_t index) const {
  const auto shard = shard_of(index);
  auto text = shards_[shard].location + ", sample " + std::to_string(index - first_[shard]);
  if (const auto at = offset(index); at > 0) text += ", offset " + std::to_string(at);
  return text;
}

void ShardSet::will_read(std::int64_t index) const {
  const auto shard = shard_of(index);
  const auto* open = open_.peek(shard);
  if (open == nullptr) return;
  if (shards_[shard].packing == Packing::Whole) {
    if (!unpacked_.contains(std::uint64_t{shard} << 32)) open->file->will_view(0, open->file->size());
  } else if (shards_[shard].packing != Packing::Frames) {
    const auto begin = offset(index);
    const auto end = load_number<std::uint32_t>(open->offsets.bytes.data() + 4 * (index - first_[shard] + 1));
    if (begin < end) open->file->will_view(begin, end - begin);
  }
}

std::string ShardSet::fingerprint() const {
  std::vector<std::string> parts{index_};
  if (!remote()) {
    for (std::size_t i = 0; i < shards_.size(); ++i)
      parts.push_back(base_name(shards_[i].location) + " " + opened(i).file->version());
  }
  return fingerprint_of(parts);
}

bool ShardSet::remote() const noexcept { return !shards_.empty() && is_remote(shards_.front().location); }

}  // namespace oxytorch::data
