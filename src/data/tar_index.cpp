#include "data/tar_index.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <optional>

#include "base/whole_file.h"
#include "data/byte_reader.h"
#include "oxytorch/error.h"

namespace oxytorch::data {
namespace {

constexpr std::uint64_t kTarBlock = 512;
constexpr std::uint64_t kLongestTarName = 1 << 20;  // of names and PAX headers: longer ones are damage
constexpr std::string_view kTarIndexMagic("OXYTIDX1", 8);

/// A string of a header, which ends at a zero byte or with its field.
std::string_view tar_text(std::span<const std::byte> header, std::size_t at, std::size_t length) {
  const std::string_view text(reinterpret_cast<const char*>(header.data()) + at, length);
  return text.substr(0, text.find('\0'));
}

/// A number: octal digits between spaces, or big-endian behind a byte of 0x80 (GNU, above 8 GiB).
std::optional<std::uint64_t> tar_number(std::span<const std::byte> header, std::size_t at, std::size_t length) {
  const auto field = header.subspan(at, length);
  std::uint64_t value = 0;
  if (field[0] == std::byte{0x80}) {
    for (const auto byte : field.subspan(1)) {
      if (value >> 55 != 0) return std::nullopt;
      value = value << 8 | std::to_integer<std::uint64_t>(byte);
    }
    return value;
  }
  auto text = tar_text(header, at, length);
  text.remove_prefix(std::min(text.find_first_not_of(' '), text.size()));
  text = text.substr(0, text.find(' '));
  if (text.empty()) return 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, 8);
  return error == std::errc() && end == text.data() + text.size() ? std::optional(value) : std::nullopt;
}

/// The sum of a header's bytes, its checksum counted as spaces; some old writers summed signed bytes.
bool has_tar_checksum(std::span<const std::byte> header) {
  const auto written = tar_number(header, 148, 8);
  std::int64_t sum = 0, signed_sum = 0;
  for (std::size_t i = 0; i < header.size(); ++i) {
    const auto byte = i >= 148 && i < 156 ? std::uint8_t{' '} : std::to_integer<std::uint8_t>(header[i]);
    sum += byte;
    signed_sum += static_cast<std::int8_t>(byte);
  }
  return written && (static_cast<std::int64_t>(*written) == sum || static_cast<std::int64_t>(*written) == signed_sum);
}

/// Bytes of a file in order; those of a remote one are fetched in large pieces.
class TarWindow {
 public:
  explicit TarWindow(const File& file) : file_(file), piece_(file.remote() ? std::uint64_t{8} << 20 : 0) {}

  View view(std::uint64_t offset, std::uint64_t length) {
    if (piece_ == 0 || length > piece_) return file_.view(offset, length);
    if (offset < begin_ || offset + length > begin_ + window_.bytes.size()) {
      if (offset >= file_.size()) return file_.view(offset, length);
      begin_ = offset;
      window_ = file_.view(offset, std::min(piece_, file_.size() - offset));
    }
    if (length > begin_ + window_.bytes.size() - offset) return file_.view(offset, length);
    return {window_.bytes.subspan(offset - begin_, length), window_.owner};
  }

 private:
  const File& file_;
  std::uint64_t piece_, begin_ = 0;
  View window_;
};

/// What a PAX header says of the next file.
struct TarPax {
  std::optional<std::string> path;
  std::optional<std::uint64_t> size;
  bool sparse = false;
};

/// Records "<length> <key>=<value>\n".
bool read_tar_pax(std::string_view text, TarPax& pax) {
  while (!text.empty() && text.front() != '\0') {
    std::size_t length = 0;
    const auto [digits, error] = std::from_chars(text.data(), text.data() + text.size(), length);
    const auto head = static_cast<std::size_t>(digits - text.data()) + 1;
    if (error != std::errc() || length > text.size() || length < head + 2 || *digits != ' ') return false;
    const auto record = text.substr(head, length - head - 1);
    text.remove_prefix(length);
    const auto equals = record.find('=');
    if (equals == std::string_view::npos) return false;
    const auto key = record.substr(0, equals), value = record.substr(equals + 1);
    if (key == "path") {
      pax.path = std::string(value);
    } else if (key == "size") {
      std::uint64_t size = 0;
      const auto [end, wrong] = std::from_chars(value.data(), value.data() + value.size(), size);
      if (wrong != std::errc() || end != value.data() + value.size()) return false;
      pax.size = size;
    } else if (key.starts_with("GNU.sparse.")) {
      pax.sparse = true;
    }
  }
  return true;
}

struct TarFile {
  std::string path;
  std::uint64_t header, offset, size;
};

/// Goes through the regular files of a tar: ustar, with GNU's long names and PAX headers.
class TarScanner {
 public:
  explicit TarScanner(const File& file) : file_(file), window_(file) {}

  /// The next file; empty at the end.
  std::optional<TarFile> next() {
    TarPax pax;
    while (true) {
      const auto at = at_;
      OXY_CHECK(at < file_.size(), Io, file_.location(), " is truncated: it ends at offset ", file_.size(),
                " without the block of zeros that ends a tar. Fetch or write it again.");
      const auto header = window_.view(at, kTarBlock);
      if (is_zero(header.bytes)) return std::nullopt;
      OXY_CHECK(has_tar_checksum(header.bytes), Io, file_.location(), " is damaged: the tar header at offset ", at,
                " has a wrong checksum.");
      const auto written = tar_number(header.bytes, 124, 12);
      OXY_CHECK(written, Io, file_.location(), " is damaged: the tar header at offset ", at,
                " has a size that is no number.");
      const char type = static_cast<char>(header.bytes[156]);
      OXY_CHECK(type != 'S' && !pax.sparse, NotSupported, file_.location(), ": the sparse file at offset ", at,
                " is not read here; write the tar without --sparse.");
      const bool extension = type == 'L' || type == 'K' || type == 'x' || type == 'g' || type == 'X';
      // Links, devices and folders have no content, whatever their size says.
      const bool bodiless = type >= '1' && type <= '6';
      const auto size = bodiless ? 0 : extension ? *written : pax.size.value_or(*written);
      at_ += kTarBlock;
      OXY_CHECK(size <= file_.size() - at_, Io, file_.location(), " is truncated or damaged: the file at offset ", at,
                " has ", size, " bytes, and the tar ends at ", file_.size(), ".");
      if (extension) {
        read_extension(type, at, size, pax);
      } else if (type == '0' || type == '\0' || type == '7') {
        TarFile found{pax.path ? std::move(*pax.path) : header_path(header.bytes), at, at_, size};
        skip(size);
        if (!found.path.ends_with('/')) return found;  // before ustar, a folder was a file of such a name
        pax = {};
        continue;
      }
      skip(size);
      if (!extension) pax = {};
    }
  }

 private:
  static bool is_zero(std::span<const std::byte> bytes) {
    return std::all_of(bytes.begin(), bytes.end(), [](std::byte b) { return b == std::byte{}; });
  }

  static std::string header_path(std::span<const std::byte> header) {
    std::string path(tar_text(header, 0, 100));
    const auto magic = std::string_view(reinterpret_cast<const char*>(header.data()) + 257, 6);
    const auto prefix = tar_text(header, 345, 155);
    return magic == std::string_view("ustar\0", 6) && !prefix.empty() ? std::string(prefix) + "/" + path : path;
  }

  void read_extension(char type, std::uint64_t at, std::uint64_t size, TarPax& pax) {
    OXY_CHECK(size <= kLongestTarName, Io, file_.location(), " is damaged: the name at offset ", at, " has ", size,
              " bytes.");
    const auto body = window_.view(at_, size);
    if (type == 'L') {
      const auto name = body.text();
      pax.path = std::string(name.substr(0, name.find('\0')));
    } else if (type == 'x' || type == 'X') {
      OXY_CHECK(read_tar_pax(body.text(), pax), Io, file_.location(), " is damaged: the PAX header at offset ", at,
                " is no list of records.");
    }
  }

  /// To the block behind a file's content; the last block may be short, which shows at the next header.
  void skip(std::uint64_t size) { at_ += (size + kTarBlock - 1) / kTarBlock * kTarBlock; }

  const File& file_;
  TarWindow window_;
  std::uint64_t at_ = 0;
};

template <class T>
void append_number(std::string& text, T value) {
  text.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

void append_string(std::string& text, std::string_view value) {
  append_number<std::uint64_t>(text, value.size());
  text.append(value);
}

template <class T>
void append_array(std::string& text, const std::vector<T>& values) {
  append_string(text, {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)});
}

template <class T>
std::vector<T> take_array(ByteReader& reader) {
  const auto bytes = reader.take_bytes(reader.take<std::uint64_t>());
  OXY_CHECK(bytes.size() % sizeof(T) == 0, Io, reader.location(), " is damaged.");
  std::vector<T> values(bytes.size() / sizeof(T));
  if (!bytes.empty()) std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

void refuse_compressed(const File& file) {
  if (file.size() < 4) return;
  const auto head = file.view(0, 4);
  const auto magic = load_number<std::uint32_t>(head.bytes.data());
  const char* by = (magic & 0xFFFF) == 0x8B1F ? "gzip" : magic == 0xFD2FB528 ? "zstd" : nullptr;
  OXY_CHECK(by == nullptr, NotSupported, file.location(), " is a tar compressed by ", by ? by : "",
            ", in which samples cannot be found without unpacking all; unpack it (its images are compressed already).");
}

}  // namespace

/// Groups the files of a tar into samples.
class TarIndexBuilder {
 public:
  explicit TarIndexBuilder(const File& shard) : shard_(shard) {}

  TarIndex build() {
    TarScanner scanner(shard_);
    while (const auto file = scanner.next()) add(*file);
    finish_sample();
    return std::move(index_);
  }

 private:
  /// As webdataset groups them: metadata ("__name__") and files without a key or an extension belong to no sample.
  void add(const TarFile& file) {
    const std::string_view path = file.path;
    const auto base = path.rfind('/') == std::string_view::npos ? 0 : path.rfind('/') + 1;
    const auto dot = path.find('.', base);
    if (dot == std::string_view::npos || dot == base || is_metadata(path)) return;
    const auto key = path.substr(0, dot);
    if (!open_ || key != key_) {
      finish_sample();
      key_ = key;
      open_ = true;
      header_ = file.header;
      row_.assign(index_.fields_.size(), std::nullopt);
    }
    std::string field(path.substr(dot + 1));
    std::transform(field.begin(), field.end(), field.begin(),
                   [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; });
    auto& fields = index_.fields_;
    auto at = static_cast<std::size_t>(std::find(fields.begin(), fields.end(), field) - fields.begin());
    if (at == fields.size()) {
      OXY_CHECK(index_.size() == 0, InvalidArgument, shard_.location(), ", offset ", file.header, ": sample '", key_,
                "' has a '.", field, "', which the first sample lacks; all samples must have the same fields.");
      fields.push_back(std::move(field));
      row_.emplace_back();
    }
    OXY_CHECK(!row_[at], InvalidArgument, shard_.location(), ", offset ", file.header, ": sample '", key_,
              "' has two '.", fields[at], "'.");
    row_[at] = {file.offset, file.size};
  }

  /// "__" at the beginning, and again at the end or before a slash.
  static bool is_metadata(std::string_view path) {
    const auto first = path.substr(0, path.find('/'));
    return first.size() >= 4 && first.starts_with("__") && first.ends_with("__");
  }

  void finish_sample() {
    if (!open_) return;
    for (std::size_t i = 0; i < row_.size(); ++i) {
      OXY_CHECK(row_[i], InvalidArgument, shard_.location(), ", offset ", header_, ": sample '", key_, "' lacks a '.",
                index_.fields_[i], "', which the first sample has; all samples must have the same fields.");
      index_.members_.push_back(*row_[i]);
    }
    index_.keys_ += key_;
    index_.key_ends_.push_back(index_.keys_.size());
    open_ = false;
  }

  const File& shard_;
  TarIndex index_;
  std::string key_;
  bool open_ = false;
  std::uint64_t header_ = 0;  // of the sample's first file
  std::vector<std::optional<TarIndex::Member>> row_;
};

std::string_view TarIndex::key(std::size_t sample) const {
  const auto begin = sample == 0 ? 0 : key_ends_[sample - 1];
  return std::string_view(keys_).substr(begin, key_ends_[sample] - begin);
}

// The magic, which names the format's version, XXH3 of the rest, and the rest: the shard's version, fields, members and
// keys.
std::string TarIndex::packed(const std::string& version) const {
  std::string rest;
  append_string(rest, version);
  append_number<std::uint64_t>(rest, fields_.size());
  for (const auto& field : fields_) append_string(rest, field);
  append_array(rest, members_);
  append_string(rest, keys_);
  append_array(rest, key_ends_);
  std::string text(kTarIndexMagic);
  append_number<std::uint64_t>(text, XXH3_64bits(rest.data(), rest.size()));
  return text + rest;
}

bool TarIndex::unpack(const View& text, const std::string& version, std::uint64_t shard_size) {
  const std::string location = "the index";
  ByteReader reader(text.bytes, location);
  if (reader.left() < 16 || reader.take_text(8) != kTarIndexMagic) return false;
  const auto hash = reader.take<std::uint64_t>();
  if (XXH3_64bits(text.bytes.data() + 16, reader.left()) != hash) return false;
  if (reader.take_text(reader.take<std::uint64_t>()) != version) return false;
  for (auto fields = reader.take<std::uint64_t>(); fields > 0; --fields) {
    fields_.emplace_back(reader.take_text(reader.take<std::uint64_t>()));
  }
  members_ = take_array<Member>(reader);
  keys_ = reader.take_text(reader.take<std::uint64_t>());
  key_ends_ = take_array<std::uint64_t>(reader);
  const bool ordered =
      std::is_sorted(key_ends_.begin(), key_ends_.end()) && (key_ends_.empty() || key_ends_.back() == keys_.size());
  const bool inside = std::all_of(members_.begin(), members_.end(), [&](const Member& m) {
    return m.offset <= shard_size && m.size <= shard_size - m.offset;
  });
  return ordered && inside && (key_ends_.empty() || !fields_.empty()) &&
         members_.size() == key_ends_.size() * fields_.size() && reader.left() == 0;
}

TarIndex TarIndex::of(const File& shard) {
  refuse_compressed(shard);
  const auto path = shard.location() + ".oxidx";
  try {
    if (exists(path)) {
      TarIndex kept;
      if (kept.unpack(read_whole_file(path), shard.version(), shard.size())) return kept;
    }
  } catch (const Error&) {  // NOLINT(bugprone-empty-catch): what cannot be read is made again
  }
  auto made = TarIndexBuilder(shard).build();
  if (shard.remote()) return made;
  try {
    write_whole_file(path, {made.packed(shard.version())}, Flush::No);
  } catch (const Error&) {  // NOLINT(bugprone-empty-catch): in a folder that cannot be written it is made each time
  }
  return made;
}

bool is_tar(const File& file) {
  if (file.size() < kTarBlock) return false;
  const auto header = file.view(0, kTarBlock);
  return tar_text(header.bytes, 257, 5) == "ustar" && has_tar_checksum(header.bytes);
}

}  // namespace oxytorch::data
