#include "data/coefficients.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "oxytorch/error.h"

namespace oxytorch::data {
namespace {

constexpr char kStrippedMagic[4] = {'O', 'X', 'S', 'J'};
constexpr std::uint32_t kStrippedVersion = 1;
constexpr std::size_t kRowEntryBytes = 8;

static_assert(std::endian::native == std::endian::little, "the packed form is little-endian");

template <class T>
T load_packed(const std::uint8_t* from) noexcept {
  T value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

}  // namespace

void CoefficientWriter::begin(const McuLayout& layout, std::string jpeg_header) {
  layout_ = layout;
  jpeg_header_ = std::move(jpeg_header);
  pack_ = pack_block();
  column_ = 0;
  entries_.clear();
  body_.clear();
  const std::size_t blocks = std::size_t{layout.mcus_per_row} * layout.blocks_in_mcu;
  sizes_.resize(std::max(sizes_.size(), blocks));
  frames_.resize(std::max(frames_.size(), blocks * kMaxFrameBytes + kBlockSlack));
  values_.resize(std::max(values_.size(), blocks * kMaxValueBytes + kBlockSlack));
  size_ = sizes_.data();
  frame_ = frames_.data();
  value_ = values_.data();
}

void CoefficientWriter::add_mcu(const std::int16_t* blocks) {
  for (std::uint32_t i = 0; i < layout_.blocks_in_mcu; ++i) *size_++ = pack_(blocks + i * 64, frame_, value_);
  if (++column_ == layout_.mcus_per_row) end_row();
}

void CoefficientWriter::end_row() {
  const std::size_t start = body_.size();
  body_.insert(body_.end(), sizes_.data(), size_);
  body_.insert(body_.end(), frames_.data(), frame_);
  entries_.push_back({static_cast<std::uint32_t>(start), static_cast<std::uint32_t>(body_.size())});
  body_.insert(body_.end(), values_.data(), value_);
  column_ = 0;
  size_ = sizes_.data();
  frame_ = frames_.data();
  value_ = values_.data();
}

std::string CoefficientWriter::finish() {
  OXY_ASSERT(entries_.size() == layout_.mcu_rows, "rows of MCUs: ", entries_.size(), ", expected ", layout_.mcu_rows);
  entries_.push_back({static_cast<std::uint32_t>(body_.size()), static_cast<std::uint32_t>(body_.size())});
  const std::size_t start = sizeof(StrippedHead) + jpeg_header_.size() + entries_.size() * kRowEntryBytes;
  const std::size_t total = start + body_.size() + kStrippedPadding;
  for (RowEntry& entry : entries_) {
    entry.row += static_cast<std::uint32_t>(start);
    entry.values += static_cast<std::uint32_t>(start);
  }
  StrippedHead head{};
  std::memcpy(head.magic, kStrippedMagic, sizeof(head.magic));
  head.version = kStrippedVersion;
  head.header_bytes = static_cast<std::uint32_t>(jpeg_header_.size());
  head.layout = layout_;
  head.total_bytes = total;
  std::string packed;
  packed.reserve(total);
  packed.append(reinterpret_cast<const char*>(&head), sizeof(head));
  packed.append(jpeg_header_);
  packed.append(reinterpret_cast<const char*>(entries_.data()), entries_.size() * kRowEntryBytes);
  packed.append(reinterpret_cast<const char*>(body_.data()), body_.size());
  packed.append(kStrippedPadding, '\0');
  return packed;
}

CoefficientReader::CoefficientReader(std::span<const std::byte> stripped)
    : data_(reinterpret_cast<const std::uint8_t*>(stripped.data())), size_(stripped.size()), unpack_(unpack_blocks()) {
  const auto check = [&](bool holds, const char* what) {
    OXY_CHECK(holds, Io, "the stripped JPEG of ", size_, " bytes is damaged: ", what,
              ". Delete it and strip the original again.");
  };
  check(size_ >= sizeof(StrippedHead) + kStrippedPadding, "it is too short");
  const auto head = load_packed<StrippedHead>(data_);
  check(std::memcmp(head.magic, kStrippedMagic, sizeof(head.magic)) == 0, "it does not begin with 'OXSJ'");
  check(head.version == kStrippedVersion, "it is of another version");
  check(head.total_bytes == size_, "it says that it has another size");
  layout_ = head.layout;
  check(layout_.mcus_per_row > 0 && layout_.mcu_rows > 0 && layout_.blocks_in_mcu > 0 &&
            layout_.blocks_in_mcu <= kMaxBlocksInMcu,
        "its numbers of blocks are out of range");
  const std::uint64_t end = size_ - kStrippedPadding;
  const std::uint64_t body =
      sizeof(StrippedHead) + std::uint64_t{head.header_bytes} + (std::uint64_t{layout_.mcu_rows} + 1) * kRowEntryBytes;
  check(body <= end, "its header is longer than it");
  jpeg_header_ = stripped.subspan(sizeof(StrippedHead), head.header_bytes);
  entries_ = sizeof(StrippedHead) + head.header_bytes;
  const std::uint64_t blocks = std::uint64_t{layout_.mcus_per_row} * layout_.blocks_in_mcu;
  std::uint64_t before = body;
  for (std::uint32_t row = 0; row <= layout_.mcu_rows; ++row) {
    const std::uint8_t* entry = data_ + entries_ + row * kRowEntryBytes;
    const std::uint64_t start = load_packed<std::uint32_t>(entry), values = load_packed<std::uint32_t>(entry + 4);
    const std::uint64_t least = row < layout_.mcu_rows ? blocks : 0;
    check(start >= before && values >= start && values - start >= least && values <= end, "its row offsets are wrong");
    before = values;
  }
  last_ = layout_.mcus_per_row - 1;
}

void CoefficientReader::select(std::uint32_t first, std::uint32_t last, std::uint32_t needed) noexcept {
  first_ = first;
  last_ = last;
  needed_ = needed;
}

void CoefficientReader::skip_mcu() noexcept {
  if (++column_ == layout_.mcus_per_row) {
    column_ = 0;
    ++row_;
  }
}

void CoefficientReader::open_row(std::uint32_t row) noexcept {
  const std::uint8_t* entry = data_ + entries_ + row * kRowEntryBytes;
  cursor_.size = data_ + load_packed<std::uint32_t>(entry);
  cursor_.frame = cursor_.size + std::size_t{layout_.mcus_per_row} * layout_.blocks_in_mcu;
  cursor_.frame_end = cursor_.value = data_ + load_packed<std::uint32_t>(entry + 4);
  cursor_.value_end = data_ + load_packed<std::uint32_t>(entry + kRowEntryBytes);
  cursor_row_ = row;
  cursor_column_ = 0;
}

bool CoefficientReader::next_mcu(std::int16_t* const* blocks) noexcept {
  const std::uint32_t row = row_, column = column_;
  skip_mcu();
  if (column < first_ || column > last_) return true;
  if (row >= layout_.mcu_rows) return false;
  if (cursor_row_ != row) open_row(row);
  for (; cursor_column_ < column; ++cursor_column_) {
    if (!unpack_(cursor_, blocks, layout_.blocks_in_mcu, 0)) return false;
  }
  ++cursor_column_;
  return unpack_(cursor_, blocks, layout_.blocks_in_mcu, needed_);
}

}  // namespace oxytorch::data
