#include "base/cache_folder.h"
#include "data/file.h"
#include "data/formats.h"
#include "data/image_listing.h"
#include "data/remote_file.h"
#include "oxytorch/error.h"

namespace oxytorch::data {
namespace {

ImageListing::Keeping keeping() {
  const auto kept = cache_folder();
  return {.folder = kept.empty() ? "" : kept + "/listings"};
}

class ImageFolder final : public Dataset {
 public:
  explicit ImageFolder(std::string root) : root_(std::move(root)), listing_(ImageListing::of(root_, keeping())) {
    schema_.fields.push_back({"image", Kind::Image, DType::U8, {-1}});
    if (!listing_.classes().empty()) schema_.fields.push_back({"label", Kind::Array, DType::I64, {}});
  }

  [[nodiscard]] const Schema& schema() const noexcept override { return schema_; }
  [[nodiscard]] std::int64_t size() const noexcept override { return static_cast<std::int64_t>(listing_.size()); }
  [[nodiscard]] std::vector<std::string> classes() const override { return listing_.classes(); }
  [[nodiscard]] bool remote() const noexcept override { return is_remote(root_); }
  [[nodiscard]] std::string format() const override { return "image_folder"; }

  [[nodiscard]] std::string place(std::int64_t index) const override {
    OXY_CHECK(index >= 0 && index < size(), OutOfRange, "sample ", index, " does not exist: ", root_, " has ", size(),
              ".");
    return join(root_, std::string(listing_.path(static_cast<std::size_t>(index))));
  }

  /// From names and their number: asking for the sizes and times of a million files takes too long. An image that was
  /// replaced under its name goes unnoticed.
  [[nodiscard]] std::string fingerprint() const override { return listing_.fingerprint(); }

  [[nodiscard]] Sample read(std::int64_t index) const override {
    auto image = read_whole_file(place(index));
    const auto size = static_cast<std::int64_t>(image.bytes.size());
    Sample sample{{DType::U8, {size}, std::move(image)}};
    if (!listing_.classes().empty()) {
      const auto label = static_cast<std::int64_t>(listing_.class_of(static_cast<std::size_t>(index)));
      sample.push_back(own(DType::I64, {}, std::as_bytes(std::span(&label, 1))));
    }
    return sample;
  }

 private:
  std::string root_;
  ImageListing listing_;
  Schema schema_;
};

}  // namespace

std::shared_ptr<const Dataset> open_image_folder(const std::string& location) {
  if (!is_folder(location)) return nullptr;
  auto folder = std::make_shared<ImageFolder>(local_path(location));
  return folder->size() > 0 ? folder : nullptr;
}

}  // namespace oxytorch::data
