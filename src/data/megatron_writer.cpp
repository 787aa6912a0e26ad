// Megatron-LM's IndexedDataset, megatron/core/datasets/indexed_dataset.py: a header, the length of each sequence, its
// place in the .bin file, and the first sequence of each document.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <limits>
#include <numeric>
#include <system_error>
#include <utility>

#include "base/whole_file.h"
#include "data/remote_file.h"
#include "oxytorch/data/convert.h"
#include "oxytorch/error.h"

namespace oxytorch::data {
namespace {

/// The format's number of a dtype; 0 where it has none.
std::uint8_t megatron_code(DType dtype) {
  constexpr std::array kCodes{DType::U8,  DType::I8,  DType::I16, DType::I32,
                              DType::I64, DType::F64, DType::F32, DType::U16};
  const auto* found = std::find(kCodes.begin(), kCodes.end(), dtype);
  return found == kCodes.end() ? 0 : static_cast<std::uint8_t>(found - kCodes.begin() + 1);
}

template <class Number>
std::string_view raw_text(const std::vector<Number>& numbers) {
  return {reinterpret_cast<const char*>(numbers.data()), sizeof(Number) * numbers.size()};
}

}  // namespace

MegatronWriter::MegatronWriter(std::string prefix, DType dtype) : prefix_(std::move(prefix)), dtype_(dtype) {
  OXY_CHECK(megatron_code(dtype) != 0, InvalidArgument, "Megatron's format holds no tokens of ", name(dtype),
            "; uint16 serves up to 65,535 tokens, int32 more.");
  OXY_CHECK(!is_remote(prefix_), NotSupported, prefix_,
            " is a URL, and Megatron's files grow while they are written: give a local path, and upload them then.");
  const auto path = prefix_ + ".bin";
  file_ = ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  const int error = errno;
  OXY_CHECK(file_ >= 0 || error != EEXIST, InvalidArgument, path, " exists; remove it, or give another name.");
  OXY_CHECK(file_ >= 0, Io, path, " cannot be made: ", std::generic_category().message(error), ".");
}

MegatronWriter::~MegatronWriter() {
  if (file_ < 0) return;
  ::close(file_);
  ::unlink((prefix_ + ".bin").c_str());
}

void MegatronWriter::add(std::span<const std::byte> tokens) {
  OXY_CHECK(file_ >= 0, InvalidState, "the writer of ", prefix_, " is finished.");
  const auto count = tokens.size() / size_of(dtype_);
  OXY_CHECK(count * size_of(dtype_) == tokens.size() && count <= std::numeric_limits<std::int32_t>::max(),
            InvalidArgument, "a document has ", tokens.size(), " bytes, which are no whole number of ", name(dtype_),
            " below 2^31.");
  const int error = write_all(file_, tokens.data(), tokens.size());
  OXY_CHECK(error == 0, Io, prefix_, ".bin cannot be written: ", std::generic_category().message(error), ".");
  lengths_.push_back(static_cast<std::int32_t>(count));
  bytes_ += static_cast<std::int64_t>(tokens.size());
}

std::int64_t MegatronWriter::finish() {
  OXY_CHECK(file_ >= 0, InvalidState, "the writer of ", prefix_, " is finished.");
  OXY_CHECK(::fsync(file_) == 0, Io, prefix_, ".bin cannot be written: ", std::generic_category().message(errno), ".");
  std::vector<std::int64_t> places, documents(lengths_.size() + 1);
  std::int64_t place = 0;
  for (const auto length : lengths_) {
    places.push_back(place);
    place += length * static_cast<std::int64_t>(size_of(dtype_));
  }
  std::iota(documents.begin(), documents.end(), 0);
  std::string header("MMIDIDX\0\0", 9);
  const auto append = [&header](auto number) { header.append(reinterpret_cast<const char*>(&number), sizeof(number)); };
  append(std::uint64_t{1});  // version
  append(megatron_code(dtype_));
  append(static_cast<std::uint64_t>(lengths_.size()));
  append(static_cast<std::uint64_t>(documents.size()));
  write_whole_file(prefix_ + ".idx", {header, raw_text(lengths_), raw_text(places), raw_text(documents)});
  ::close(std::exchange(file_, -1));
  const auto index = header.size() + raw_text(lengths_).size() + raw_text(places).size() + raw_text(documents).size();
  return bytes_ + static_cast<std::int64_t>(index);
}

}  // namespace oxytorch::data
