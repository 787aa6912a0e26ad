#include <algorithm>
#include <array>
#include <charconv>
#include <optional>

#include "data/file.h"
#include "data/for_each_index.h"
#include "data/formats.h"
#include "data/tar_index.h"
#include "oxytorch/error.h"

namespace oxytorch::data {
namespace {

constexpr std::string_view kKeyField = "__key__";

struct TarShard {
  std::shared_ptr<const File> file;
  TarIndex index;
};

/// Opens all shards by a few threads: an index made on first sight waits for the disk or the network.
std::vector<TarShard> open_tar_shards(const std::vector<std::string>& locations) {
  std::vector<TarShard> shards(locations.size());
  for_each_index(locations.size(), 8, [&](std::size_t i) {
    shards[i].file = open_file(locations[i]);
    shards[i].index = TarIndex::of(*shards[i].file);
  });
  return shards;
}

Field webdataset_field(const std::string& name) {
  const auto word = std::string_view(name).substr(name.rfind('.') + 1);  // of "seg.png" the last part says what it is
  Field field{name, Kind::Bytes, DType::U8, {-1}};
  if (word == "jpg" || word == "jpeg" || word == "png" || word == "webp") field.kind = Kind::Image;
  if (word == "txt" || word == "text" || word == "json") field.kind = Kind::Text;
  if (word == "cls") field = {name, Kind::Array, DType::I64, {}};
  return field;
}

class WebDataset final : public Dataset {
 public:
  explicit WebDataset(std::vector<TarShard> shards) : shards_(std::move(shards)) {
    for (const auto& shard : shards_) {
      if (shard.index.size() > 0 && schema_.fields.empty()) {
        for (const auto& name : shard.index.fields()) schema_.fields.push_back(webdataset_field(name));
      }
      fields_.push_back(order_of(shard));
      first_.push_back(first_.back() + static_cast<std::int64_t>(shard.index.size()));
    }
    schema_.fields.push_back({std::string(kKeyField), Kind::Text, DType::U8, {-1}});
  }

  [[nodiscard]] const Schema& schema() const noexcept override { return schema_; }
  [[nodiscard]] std::int64_t size() const noexcept override { return first_.back(); }
  [[nodiscard]] bool remote() const noexcept override { return shards_.front().file->remote(); }
  [[nodiscard]] std::string format() const override { return "webdataset"; }

  [[nodiscard]] std::string place(std::int64_t index) const override {
    const auto [shard, sample] = find(index);
    const auto& tar = shards_[shard];
    return tar.file->location() + ", offset " + std::to_string(span_of(tar, sample).offset) + ", key '" +
           std::string(tar.index.key(sample)) + "'";
  }

  [[nodiscard]] std::string fingerprint() const override {
    std::vector<std::string> parts;
    for (const auto& shard : shards_) parts.push_back(base_name(shard.file->location()) + " " + shard.file->version());
    return fingerprint_of(parts);
  }

  void will_read(std::int64_t index) const override {
    const auto [shard, sample] = find(index);
    const auto span = span_of(shards_[shard], sample);
    shards_[shard].file->will_view(span.offset, span.size);
  }

  [[nodiscard]] Sample read(std::int64_t index) const override {
    const auto [shard, sample] = find(index);
    const auto& tar = shards_[shard];
    // The files of a sample lie side by side: a remote one takes one request.
    const auto span = span_of(tar, sample);
    const auto bytes = tar.file->view(span.offset, span.size);
    Sample values;
    values.reserve(schema_.fields.size());
    for (std::size_t i = 0; i < fields_[shard].size(); ++i) {
      const auto& member = tar.index.member(sample, fields_[shard][i]);
      View content{bytes.bytes.subspan(member.offset - span.offset, member.size), bytes.owner};
      if (schema_.fields[i].kind == Kind::Array) {
        values.push_back(parse_class(content.text(), tar, member));
      } else {
        values.push_back({DType::U8, {static_cast<std::int64_t>(member.size)}, std::move(content)});
      }
    }
    values.push_back(own(tar.index.key(sample)));
    return values;
  }

 private:
  struct Found {
    std::size_t shard, sample;
  };

  [[nodiscard]] Found find(std::int64_t index) const {
    OXY_CHECK(index >= 0 && index < size(), OutOfRange, "sample ", index, " does not exist: there are ", size(), ".");
    const auto shard =
        static_cast<std::size_t>(std::upper_bound(first_.begin(), first_.end(), index) - first_.begin()) - 1;
    return {shard, static_cast<std::size_t>(index - first_[shard])};
  }

  /// Where the schema's fields are in a shard, whose first sample may have them in another order.
  [[nodiscard]] std::vector<std::size_t> order_of(const TarShard& shard) const {
    std::vector<std::size_t> order;
    if (shard.index.size() == 0) return order;
    const auto& names = shard.index.fields();
    for (const auto& field : schema_.fields) {
      const auto found = std::find(names.begin(), names.end(), field.name);
      OXY_CHECK(found != names.end(), InvalidArgument, shard.file->location(), ": sample '", shard.index.key(0),
                "' lacks a '.", field.name,
                "', which the first shard's samples have; all samples must have the same fields.");
      order.push_back(static_cast<std::size_t>(found - names.begin()));
    }
    for (const auto& name : names) {
      OXY_CHECK(schema_.find(name) >= 0, InvalidArgument, shard.file->location(), ": sample '", shard.index.key(0),
                "' has a '.", name, "', which the first shard's samples lack; all samples must have the same fields.");
    }
    return order;
  }

  static TarIndex::Member span_of(const TarShard& shard, std::size_t sample) {
    std::uint64_t begin = UINT64_MAX, end = 0;
    for (std::size_t i = 0; i < shard.index.fields().size(); ++i) {
      const auto& member = shard.index.member(sample, i);
      begin = std::min(begin, member.offset);
      end = std::max(end, member.offset + member.size);
    }
    return {begin, end - begin};
  }

  static Value parse_class(std::string_view text, const TarShard& shard, const TarIndex::Member& member) {
    constexpr std::string_view kSpace = " \t\r\n";
    const auto begin = std::min(text.find_first_not_of(kSpace), text.size());
    const auto word = text.substr(begin, text.find_last_not_of(kSpace) + 1 - begin);
    std::int64_t label = 0;
    const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), label);
    OXY_CHECK(error == std::errc() && end == word.data() + word.size(), Io, shard.file->location(), ", offset ",
              member.offset, ": a .cls file must hold an integer, and this one holds '", text.substr(0, 32), "'.");
    return own(DType::I64, {}, std::as_bytes(std::span(&label, 1)));
  }

  std::vector<TarShard> shards_;
  std::vector<std::int64_t> first_{0};            // of each shard, and the number of all
  std::vector<std::vector<std::size_t>> fields_;  // of each shard, where the schema's fields are
  Schema schema_;
};

bool is_compressed_tar_name(const std::string& name) {
  constexpr std::array<std::string_view, 5> kNames = {".tar.gz", ".tgz", ".tar.zst", ".tar.zstd", ".tar.bz2"};
  return std::any_of(kNames.begin(), kNames.end(), [&](std::string_view ending) { return name.ends_with(ending); });
}

/// The shards that a location stands for; none where it is no WebDataset.
std::vector<std::string> tar_locations(const std::string& location) {
  if (!is_folder(location)) {
    auto locations = expand_braces(location);
    const auto& first = locations.front();
    OXY_CHECK(!is_compressed_tar_name(first), NotSupported, first,
              " is a compressed tar, in which samples cannot be found without "
              "unpacking all; unpack it (its images are compressed already).");
    if (!first.ends_with(".tar") && !is_tar(*open_file(first))) locations.clear();
    return locations;
  }
  std::vector<std::string> locations;
  bool other = false, compressed = false;
  for (const auto& name : list_folder(location)) {
    if (name.ends_with(".tar")) locations.push_back(join(location, name));
    compressed = compressed || is_compressed_tar_name(name);
    other = other || name.ends_with('/');
  }
  OXY_CHECK(!compressed || other || !locations.empty(), NotSupported, location,
            " holds compressed tars, in which samples cannot be "
            "found without unpacking all; unpack them (their images are compressed already).");
  return locations;
}

}  // namespace

std::shared_ptr<const Dataset> open_webdataset(const std::string& location) {
  const auto locations = tar_locations(location);
  if (locations.empty()) return nullptr;
  return std::make_shared<WebDataset>(open_tar_shards(locations));
}

}  // namespace oxytorch::data
