#include <array>

#include "data/file.h"
#include "data/formats.h"
#include "oxytorch/error.h"

namespace oxytorch::data {
namespace {

// Those with an index.json come first: a folder behind http cannot be listed, as the others would. Then a format with a
// signature of its own comes before those that are known by names alone.
constexpr std::array<OpenFormat, 10> kFormats = {open_mds,         open_litdata,     open_npy,        open_megatron,
                                                 open_safetensors, open_beton,       open_webdataset, open_tfrecord,
                                                 open_jsonl,       open_image_folder};

}  // namespace

Dataset::~Dataset() = default;

void Dataset::will_read(std::int64_t) const {}
void Dataset::read_into(std::int64_t, const std::vector<std::byte*>&) const {
  detail::raise(ErrorCode::NotSupported, "samples of ", format(), " are read by themselves alone.");
}

std::shared_ptr<const Dataset> open(const std::string& location) {
  OXY_CHECK(!location.empty(), InvalidArgument, "the location of a dataset is empty; give a path or a URL.");
  const auto first = expand_braces(location).front();
  const bool found = exists(first);
  // Megatron's pair of files goes by the name that both share.
  if (!found && exists(first + ".idx")) {
    if (auto dataset = open_megatron(location)) return dataset;
  }
  OXY_CHECK(found, NotFound, first, " does not exist.");
  for (const auto open_format : kFormats) {
    if (auto dataset = open_format(location)) return dataset;
  }
  OXY_CHECK(
      false, InvalidArgument, location,
      " is no dataset that is known: it is neither a folder of class folders with images, WebDataset (.tar), MDS, "
      ".npy, Megatron (.idx and .bin), JSONL, safetensors, .beton, TFRecord nor LitData. A file without a header is "
      "opened by open_raw, which takes dtype and shape.");
}

}  // namespace oxytorch::data
