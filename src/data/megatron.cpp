#include <algorithm>
#include <array>

#include "data/byte_reader.h"
#include "data/formats.h"
#include "data/record_files.h"
#include "data/token_source.h"
#include "oxytorch/error.h"

namespace oxytorch::data {
namespace {

constexpr std::string_view kMegatronMagic("MMIDIDX\0\0", 9);
constexpr std::uint64_t kMegatronHeader = 34;  // magic, u64 version, u8 dtype, u64 sequences, u64 document borders
constexpr std::array<DType, 8> kMegatronDTypes = {DType::U8,  DType::I8,  DType::I16, DType::I32,
                                                  DType::I64, DType::F64, DType::F32, DType::U16};

/// The index: i32 length of each sequence, i64 offset of each in the .bin file, i64 borders of documents in sequences.
class MegatronIndex {
 public:
  explicit MegatronIndex(const File& file) : location_(file.location()) {
    ByteReader header(file.view(0, kMegatronHeader).bytes, location_);
    header.skip(kMegatronMagic.size());
    const auto version = header.take<std::uint64_t>();
    OXY_CHECK(version == 1, NotSupported, location_, " is of version ", version, "; 1 is known.");
    const auto code = header.take<std::uint8_t>();
    OXY_CHECK(code >= 1 && code <= kMegatronDTypes.size(), NotSupported, location_, " has tokens of dtype code ",
              int{code}, "; 1 to 8 are known.");
    dtype_ = kMegatronDTypes[code - 1U];
    const auto sequences = header.take<std::uint64_t>(), borders = header.take<std::uint64_t>();
    const auto left = file.size() - kMegatronHeader;
    const bool inside = sequences <= left / 12 && borders <= (left - 12 * sequences) / 8;
    // Sets of text and images have one more byte for each sequence, its modality.
    const auto rest = inside ? left - 12 * sequences - 8 * borders : 0;
    OXY_CHECK(inside && (rest == 0 || rest == sequences), Io, location_, " is truncated or damaged: it has ",
              file.size(), " bytes, and its header says ", sequences, " sequences and ", borders, " document borders.");
    sequences_ = static_cast<std::int64_t>(sequences);
    documents_ = std::max<std::int64_t>(static_cast<std::int64_t>(borders) - 1, 0);
    tables_ = file.view(kMegatronHeader, 12 * sequences + 8 * borders);
  }

  struct Extent {
    std::uint64_t offset = 0;
    std::int64_t tokens = 0;
  };

  [[nodiscard]] DType dtype() const noexcept { return dtype_; }
  [[nodiscard]] std::int64_t documents() const noexcept { return documents_; }
  /// Where a document lies in the .bin file of `bin_size` bytes.
  [[nodiscard]] Extent document(std::int64_t index, std::uint64_t bin_size) const {
    const auto first = border(index), last = border(index + 1);
    OXY_CHECK(first >= 0 && first <= last && last <= sequences_, Io, location_, " is damaged: document ", index,
              " has sequences ", first, " to ", last, ", and there are ", sequences_, ".");
    Extent found;
    for (auto i = first; i < last; ++i) {
      const auto offset = static_cast<std::uint64_t>(number<std::int64_t>(sequences_ * 4 + i * 8));
      const std::int64_t tokens = number<std::int32_t>(i * 4);
      if (i == first) found.offset = offset;
      const auto expected = found.offset + static_cast<std::uint64_t>(found.tokens) * size_of(dtype_);
      OXY_CHECK(tokens >= 0 && offset == expected && offset <= bin_size &&
                    static_cast<std::uint64_t>(tokens) <= (bin_size - offset) / size_of(dtype_),
                Io, location_, " is truncated or damaged: sequence ", i, " of document ", index, " has ", tokens,
                " tokens at offset ", static_cast<std::int64_t>(offset), " of a .bin file of ", bin_size, " bytes.");
      found.tokens += tokens;
    }
    return found;
  }

 private:
  template <class T>
  [[nodiscard]] T number(std::int64_t at) const noexcept {
    return load_number<T>(tables_.bytes.data() + at);
  }
  [[nodiscard]] std::int64_t border(std::int64_t i) const noexcept {
    return number<std::int64_t>(sequences_ * 12 + i * 8);
  }

  std::string location_;
  DType dtype_ = DType::U8;
  std::int64_t sequences_ = 0, documents_ = 0;
  View tables_;
};

class MegatronDataset final : public Dataset, public TokenSource {
 public:
  MegatronDataset(const std::shared_ptr<const File>& index, const std::shared_ptr<const File>& bin)
      : index_(*index), bin_(bin), schema_{{{"tokens", Kind::Array, index_.dtype(), {-1}}}} {
    files_.add(bin, index_.documents());
    files_.add(index, 0);
  }

  [[nodiscard]] const Schema& schema() const noexcept override { return schema_; }
  [[nodiscard]] std::int64_t size() const noexcept override { return files_.size(); }
  [[nodiscard]] Sample read(std::int64_t index) const override {
    const auto extent = document(index);
    return {{index_.dtype(), {extent.tokens}, view(extent.offset, extent.tokens)}};
  }
  [[nodiscard]] std::string place(std::int64_t index) const override {
    return bin_->location() + ", document " + std::to_string(files_.find(index).index);
  }
  [[nodiscard]] std::string fingerprint() const override { return files_.fingerprint(); }
  void will_read(std::int64_t index) const override {
    const auto extent = document(index);
    bin_->will_view(extent.offset, bytes(extent.tokens));
  }
  [[nodiscard]] bool remote() const noexcept override { return files_.remote(); }
  [[nodiscard]] std::string format() const override { return "megatron"; }

  // As preprocessing writes them, documents lie in order, from the file's start.
  [[nodiscard]] std::int64_t tokens() const override {
    if (!is_integer(index_.dtype())) return -1;
    std::int64_t count = 0;
    for (std::int64_t i = 0; i < size(); ++i) {
      const auto extent = document(i);
      if (extent.tokens > 0 && extent.offset != bytes(count)) return -1;
      count += extent.tokens;
    }
    return count;
  }
  [[nodiscard]] DType token_dtype() const override { return index_.dtype(); }
  [[nodiscard]] View view_tokens(std::int64_t first, std::int64_t count) const override {
    return view(bytes(first), count);
  }
  void will_view_tokens(std::int64_t first, std::int64_t count) const override {
    bin_->will_view(bytes(first), bytes(count));
  }
  [[nodiscard]] std::string token_place(std::int64_t token) const override {
    return bin_->location() + ", offset " + std::to_string(bytes(token));
  }

 private:
  [[nodiscard]] std::uint64_t bytes(std::int64_t tokens) const noexcept {
    return static_cast<std::uint64_t>(tokens) * size_of(index_.dtype());
  }
  [[nodiscard]] View view(std::uint64_t offset, std::int64_t tokens) const { return bin_->view(offset, bytes(tokens)); }
  [[nodiscard]] MegatronIndex::Extent document(std::int64_t index) const {
    return index_.document(files_.find(index).index, bin_->size());
  }

  MegatronIndex index_;
  std::shared_ptr<const File> bin_;
  Schema schema_;
  RecordFiles files_;  // the .bin file, which has all samples, and the .idx file
};

}  // namespace

std::shared_ptr<const Dataset> open_megatron(const std::string& location) {
  const bool of_pair = location.ends_with(".idx") || location.ends_with(".bin");
  const auto prefix = of_pair ? location.substr(0, location.size() - 4) : location;
  if (is_folder(location) || !exists(prefix + ".idx")) return nullptr;
  const auto index = open_file(prefix + ".idx");
  const auto magic = std::min<std::uint64_t>(index->size(), kMegatronMagic.size());
  if (magic == 0 || index->view(0, magic).text() != kMegatronMagic.substr(0, magic)) return nullptr;
  OXY_CHECK(exists(prefix + ".bin"), NotFound, prefix, ".bin does not exist; Megatron's ", prefix,
            ".idx is the index of that file.");
  return std::make_shared<MegatronDataset>(index, open_file(prefix + ".bin"));
}

}  // namespace oxytorch::data
