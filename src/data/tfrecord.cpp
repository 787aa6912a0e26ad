#include <algorithm>

#include "data/byte_reader.h"
#include "data/crc32c.h"
#include "data/formats.h"
#include "data/record_files.h"
#include "data/tf_example.h"
#include "oxytorch/error.h"

namespace oxytorch::data {
namespace {

constexpr std::uint64_t kTfrecordHeader = 12, kTfrecordFooter = 4;  // u64 length and its checksum; the data's checksum
constexpr std::uint64_t kTfrecordWindow = 1 << 20;
constexpr std::int64_t kTfrecordSchemaRecords = 16;

/// Whether `sum` is the checksum of `bytes`, masked as TensorFlow does.
bool tfrecord_sum_fits(std::span<const std::byte> bytes, const std::byte* sum) {
  const auto crc = crc32c(bytes);
  return ((crc >> 15 | crc << 17) + 0xa282ead8U) == load_number<std::uint32_t>(sum);
}

bool is_tfrecord_name(std::string_view name) {
  const auto base = name.substr(name.rfind('/') + 1);
  return base.find(".tfrecord") != std::string_view::npos;  // "x.tfrecords", "x.tfrecord-00000-of-00010"
}

/// Whether a file begins with a length and its checksum.
bool begins_with_tfrecord(const File& file) {
  if (file.size() < kTfrecordHeader + kTfrecordFooter) return false;
  const auto head = file.view(0, kTfrecordHeader);
  return tfrecord_sum_fits(head.bytes.first(8), head.bytes.data() + 8);
}

/// Offsets of the records, and the file's end.
std::vector<std::uint64_t> index_tfrecord(const File& file) {
  const auto& location = file.location();
  std::vector<std::uint64_t> offsets{0};
  View window;
  std::uint64_t window_at = 0;
  while (offsets.back() < file.size()) {
    const auto at = offsets.back(), left = file.size() - at;
    OXY_CHECK(left >= kTfrecordHeader + kTfrecordFooter, Io, location, " is truncated: a record begins at offset ", at,
              ", and the file ends at ", file.size(), ".");
    if (at < window_at || at + kTfrecordHeader > window_at + window.bytes.size()) {
      window = file.view(at, std::min(kTfrecordWindow, left));
      window_at = at;
    }
    const auto head = window.bytes.subspan(at - window_at, kTfrecordHeader);
    OXY_CHECK(tfrecord_sum_fits(head.first(8), head.data() + 8), Io, location, " is damaged or no TFRecord: at offset ",
              at, " the length of a record does not fit its checksum.");
    const auto length = load_number<std::uint64_t>(head.data());
    OXY_CHECK(length <= left - kTfrecordHeader - kTfrecordFooter, Io, location, " is truncated: the record at offset ",
              at, " has ", length, " bytes, and the file ends at ", file.size(), ".");
    offsets.push_back(at + kTfrecordHeader + length + kTfrecordFooter);
  }
  return offsets;
}

bool begins_like_image(std::span<const std::byte> bytes) {
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  return text.starts_with("\xFF\xD8\xFF") || text.starts_with("\x89PNG\r\n\x1A\n") ||
         (text.starts_with("RIFF") &&
          text.substr(4).substr(std::min<std::size_t>(text.size() - 4, 4)).starts_with("WEBP"));
}

class TfrecordDataset final : public Dataset {
 public:
  void add(std::shared_ptr<const File> file) {
    offsets_.push_back(index_tfrecord(*file));
    const auto records = static_cast<std::int64_t>(offsets_.back().size()) - 1;
    files_.add(std::move(file), records);
  }

  /// Takes the schema from the first records. Where one of them is no Example, all are bytes.
  void find_schema() {
    const auto records = std::min(size(), kTfrecordSchemaRecords);
    std::map<std::string, std::int64_t> seen;
    for (std::int64_t i = 0; i < records; ++i) {
      const auto view = record(i);
      const auto features = parse_tf_example(view.bytes);
      if (!features) {
        columns_.clear();
        break;
      }
      for (const auto& [key, feature] : *features) {
        if (feature.type == TfList::None) continue;
        note(key, feature, seen[std::string(key)]++ == 0, view, i);
      }
    }
    if (records > 0 && columns_.empty()) schema_.fields = {{"record", Kind::Bytes, DType::U8, {}}};
    for (auto& column : columns_) {
      // A feature that a record lacks is an empty list there.
      column.optional = seen[column.field.name] < records;
      if (column.optional && column.field.kind == Kind::Array) column.field.shape = {-1};
      schema_.fields.push_back(column.field);
    }
  }

  [[nodiscard]] const Schema& schema() const noexcept override { return schema_; }
  [[nodiscard]] std::int64_t size() const noexcept override { return files_.size(); }

  [[nodiscard]] Sample read(std::int64_t index) const override {
    auto view = record(index);
    if (columns_.empty()) return {bytes_value(std::move(view))};
    const auto features = parse_tf_example(view.bytes);
    OXY_CHECK(features, Io, place(index), ": the record is no tf.train.Example.");
    Sample sample;
    sample.reserve(columns_.size());
    for (const auto& column : columns_) {
      const auto found = features->find(column.field.name);
      const bool missing = found == features->end() || found->second.type == TfList::None;
      OXY_CHECK(!missing || column.optional, Io, place(index), ": the feature '", column.field.name,
                "' is missing, which each of the first records has.");
      sample.push_back(decode(missing ? TfFeature{column.type, {}} : found->second, column, view, index));
    }
    return sample;
  }

  [[nodiscard]] std::string place(std::int64_t index) const override {
    const auto at = files_.find(index);
    return files_.file(at.file).location() + ", offset " + std::to_string(range(at).first);
  }
  [[nodiscard]] std::string fingerprint() const override { return files_.fingerprint(); }
  void will_read(std::int64_t index) const override {
    const auto at = files_.find(index);
    const auto [begin, end] = range(at);
    files_.file(at.file).will_view(begin, end - begin);
  }
  [[nodiscard]] bool remote() const noexcept override { return files_.remote(); }
  [[nodiscard]] std::string format() const override { return "tfrecord"; }

 private:
  struct Column {
    Field field;
    TfList type = TfList::None;
    bool optional = false;
  };

  [[nodiscard]] std::pair<std::uint64_t, std::uint64_t> range(const RecordFiles::Place& at) const {
    const auto& offsets = offsets_[at.file];
    const auto i = static_cast<std::size_t>(at.index);
    return {offsets[i], offsets[i + 1]};
  }
  /// The data of a record, checked.
  [[nodiscard]] View record(std::int64_t index) const {
    const auto at = files_.find(index);
    const auto [begin, end] = range(at);
    auto view = files_.file(at.file).view(begin, end - begin);
    const auto data = view.bytes.subspan(kTfrecordHeader, end - begin - kTfrecordHeader - kTfrecordFooter);
    OXY_CHECK(tfrecord_sum_fits(data, data.data() + data.size()), Io, place(index),
              ": the record is damaged, its data does not fit its checksum.");
    return {data, std::move(view.owner)};
  }
  static Value bytes_value(View view) {
    const auto size = static_cast<std::int64_t>(view.bytes.size());
    return {DType::U8, {size}, std::move(view)};
  }

  /// Adds a feature of one of the first records to the columns, which are in the order of their names.
  void note(std::string_view name, const TfFeature& feature, bool first, const View& view, std::int64_t index) {
    const auto at =
        std::lower_bound(columns_.begin(), columns_.end(), name,
                         [](const Column& column, std::string_view key) { return column.field.name < key; });
    Column column{{std::string(name), Kind::Array, DType::U8, {-1}}, feature.type, false};
    if (feature.type == TfList::Bytes) column.field.kind = Kind::Bytes;
    if (feature.type == TfList::Floats) column.field.dtype = DType::F32;
    if (feature.type == TfList::Integers) column.field.dtype = DType::I64;
    const auto value = decode(feature, column, view, index);
    if (feature.type == TfList::Bytes) {
      column.field.shape.clear();
      if (begins_like_image(value.data.bytes)) column.field.kind = Kind::Image;
    } else {
      column.field.shape = value.shape;
    }
    if (first) {
      columns_.insert(at, std::move(column));
      return;
    }
    OXY_CHECK(at->type == feature.type, Io, place(index), ": the feature '", name, "' is ", tf_word(feature.type),
              ", and ", tf_word(at->type), " in a record before.");
    if (at->field.kind != column.field.kind) at->field.kind = Kind::Bytes;  // not all are images
    if (at->field.shape != column.field.shape) at->field.shape = {-1};
  }

  static const char* tf_word(TfList type) {
    switch (type) {
      case TfList::Bytes: return "bytes";
      case TfList::Floats: return "floats";
      case TfList::Integers: return "integers";
      case TfList::None: break;
    }
    return "nothing";
  }

  template <class T>
  [[nodiscard]] Value numbers(const std::optional<std::vector<T>>& list, const Column& column,
                              std::int64_t index) const {
    OXY_CHECK(list, Io, place(index), ": the feature '", column.field.name, "' is damaged.");
    const auto count = static_cast<std::int64_t>(list->size());
    OXY_CHECK(column.field.shape[0] < 0 || column.field.shape[0] == count, Io, place(index), ": the feature '",
              column.field.name, "' has ", count, " values, and ", column.field.shape[0],
              " in each of the first records.");
    return own(column.field.dtype, {count}, std::as_bytes(std::span(*list)));
  }

  [[nodiscard]] Value decode(const TfFeature& feature, const Column& column, const View& view,
                             std::int64_t index) const {
    OXY_CHECK(feature.type == column.type, Io, place(index), ": the feature '", column.field.name, "' is ",
              tf_word(feature.type), ", and ", tf_word(column.type), " in the first records.");
    if (feature.type == TfList::Floats) return numbers(tf_floats(feature.list), column, index);
    if (feature.type == TfList::Integers) return numbers(tf_integers(feature.list), column, index);
    const auto list = tf_bytes(feature.list);
    OXY_CHECK(list, Io, place(index), ": the feature '", column.field.name, "' is damaged.");
    OXY_CHECK(list->size() <= 1, NotSupported, place(index), ": the feature '", column.field.name, "' has ",
              list->size(), " byte strings, and one is supported.");
    return bytes_value({list->empty() ? std::span<const std::byte>() : list->front(), view.owner});
  }

  RecordFiles files_;
  std::vector<std::vector<std::uint64_t>> offsets_;  // of each file
  Schema schema_;
  std::vector<Column> columns_;  // empty where records are no Examples
};

}  // namespace

std::shared_ptr<const Dataset> open_tfrecord(const std::string& location) {
  auto dataset = std::make_shared<TfrecordDataset>();
  bool any = false;
  for (const auto& name : record_locations(location, is_tfrecord_name)) {
    auto file = open_file(name);
    if (!any && !is_tfrecord_name(name) && !begins_with_tfrecord(*file)) return nullptr;
    OXY_CHECK(file->size() < 2 || file->view(0, 2).text() != "\x1F\x8B", NotSupported, name,
              " is compressed by gzip, which is not supported for TFRecord; decompress it first.");
    dataset->add(std::move(file));
    any = true;
  }
  if (!any) return nullptr;
  dataset->find_schema();
  return dataset;
}

}  // namespace oxytorch::data
